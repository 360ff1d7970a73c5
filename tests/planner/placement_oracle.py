"""Work of ranks and the best placement of few samples, by sets of token prefixes.

Shares no code with the planner or with the check of plans: it knows samples and seconds only.
"""

from psrl.planner.problem import ProgramProblem


class PlacementOracle:
    """A rank's work is the union of what its samples need: each prefix once, each row once."""

    def __init__(self, subproblem: ProgramProblem) -> None:
        samples, self._unit = subproblem.samples, subproblem.unit_costs
        self.num_samples = samples.num_samples
        self._needs: list[set[tuple[str, tuple]]] = []
        self._known: dict[frozenset[int], float] = {}
        for s in range(self.num_samples):
            symbols = samples.sample_symbols(s).tolist()
            lengths = samples.occurrence_tokens[samples.symbol_offsets[s] :].tolist()
            pairs = zip(symbols, lengths, strict=False)
            tokens = tuple((symbol, i) for symbol, count in pairs for i in range(count))
            needs = {("token", tokens[: i + 1]) for i in range(len(tokens))}
            for start, end in samples.sample_loss_spans(s).tolist():
                needs |= {("row", tokens[:t]) for t in range(start, end)}
            self._needs.append(needs)

    def work_s(self, samples: frozenset[int]) -> float:
        """Work of a rank with these samples."""
        if samples not in self._known:
            unit, needs = self._unit, set().union(*(self._needs[s] for s in samples))
            rows = sum(kind == "row" for kind, _ in needs)
            paths = [len(path) for kind, path in needs if kind == "token"]
            tokens_s = sum(unit.token_s + unit.pair_s * length for length in sorted(paths))
            self._known[samples] = tokens_s + unit.head_s * rows
        return self._known[samples]

    def worst_s(self, rank: list[int]) -> float:
        """Work of the most loaded rank, for the rank of every sample."""
        held = (frozenset(s for s, r in enumerate(rank) if r == one) for one in set(rank))
        return max((self.work_s(samples) for samples in held), default=0.0)

    def optimum_s(self, num_ranks: int) -> float:
        """The least work of the most loaded rank: all ways to part the samples are tried."""
        best_s = self.work_s(frozenset(range(self.num_samples)))

        def place(sample: int, parts: tuple[frozenset[int], ...]) -> None:
            nonlocal best_s
            worst_s = max((self.work_s(part) for part in parts), default=0.0)
            if sample == self.num_samples:
                best_s = min(best_s, worst_s)
            elif worst_s < best_s:
                for i, part in enumerate(parts):
                    place(sample + 1, (*parts[:i], part | {sample}, *parts[i + 1 :]))
                if len(parts) < num_ranks:
                    place(sample + 1, (*parts, frozenset({sample})))

        place(0, ())
        return best_s
