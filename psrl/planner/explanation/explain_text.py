"""The explanation of a plan, for people."""

from collections.abc import Sequence

from psrl.core.plan.plan import Plan

from .cost_terms import ProgramTerms
from .explain import ActivationReport, ProgramReport

_GIB = 2**30
# Ranks listed one by one; of more, only the slowest and the fastest.
_MAX_LISTED = 8


def format_explanation(plan: Plan, reports: list[ProgramReport]) -> str:
    """Text for people."""
    predicted = plan.predicted
    lines = [
        f"policy {plan.policy}: predicted {predicted['makespan_s']:.3f} s, no plan is below "
        f"{predicted['lower_bound_s']:.3f} s (gap {predicted['gap']:.2%}); the most loaded ranks "
        f"have at most {predicted['placement_gap']:.2%} more work than those of any placement"
    ]
    for report in reports:
        lines += ["", *_format_program(plan, report)]
    return "\n".join(lines)


def format_cost_terms(terms: Sequence[ProgramTerms]) -> str:
    """Seconds of each term in all phases together, and what the cuts would be without it."""
    total_s: dict[str, float] = {}
    for program in terms:
        for term, seconds in program.seconds.items():
            total_s[term] = total_s.get(term, 0.0) + len(program.phases) * seconds
    makespan_s = sum(total_s.values())
    cut_again = [program for program in terms if program.without]
    head = "".join(f"{'update' if 'update' in p.phases else 'forward':>12}" for p in cut_again)
    lines = [
        "what the predicted time is made of (on the ranks that end last)",
        f"  {'term':<20}{'seconds':>10}{'share':>8}{head}",
    ]
    for term, seconds in sorted(total_s.items(), key=lambda item: -item[1]):
        if seconds:
            cuts = "".join(f"{p.without.get(term, ''):>12}" for p in cut_again)
            share = seconds / makespan_s if makespan_s else 0.0
            lines.append(f"  {term:<20}{seconds:>10.4f}{share:>8.1%}{cuts}".rstrip())
    lines.append(
        f"  {'all':<20}{makespan_s:>10.4f}{1:>8.1%}"
        + "".join(f"{p.num_micro_batches:>12}" for p in cut_again)
    )
    if cut_again:
        lines.append("  last columns: micro-batches of that rank, and if the term cost nothing")
    return "\n".join(lines)


def _format_program(plan: Plan, report: ProgramReport) -> list[str]:
    ranks = sorted(report.ranks, key=lambda r: (-r.time_s, r.rank))
    slowest, fastest = ranks[0], ranks[-1]
    what = f"mini-batch {report.mini_batch}" if report.mini_batch >= 0 else "whole batch"
    mean_s = sum(r.time_s for r in ranks) / len(ranks)
    duplicated = sum(r.duplicated_tokens for r in ranks)
    limit = plan.cluster.device.memory_bytes * plan.options.memory_fraction
    fullest = max(ranks, key=lambda r: r.peak_bytes)
    critical = report.critical
    shares = {**critical.op_s, "message": critical.message_s}
    where = ", ".join(
        f"{kind} {seconds / critical.time_s:.0%}" for kind, seconds in shares.items() if seconds
    )
    steps, kept = [], []
    if plan.parallel.coupled_ranks > 1:
        steps = [
            f"  steps       {plan.parallel.coupled_ranks} ranks share experts and run in step: "
            f"{report.step_wait_s:.3f} s longer than their most loaded rank's own work"
        ]
    if report.activations is not None:
        kept = [f"  activations {_format_activations(report.activations)}"]
    lines = [
        f"{' + '.join(report.phases)} ({what})",
        f"  bound       {report.bound_source}",
        f"  balance     slowest rank {slowest.time_s:.3f} s, {_ratio(slowest.time_s, mean_s)} x "
        f"the mean, {_ratio(slowest.time_s, fastest.time_s)} x the fastest",
        f"  duplicated  {duplicated:,.0f} tokens beyond one copy, "
        f"{duplicated / max(report.unique_tokens, 1):.2%} of the {report.unique_tokens:,} unique",
        f"  bubbles     {slowest.idle_share:.1%} of the slowest rank's last stage is idle",
        f"  time        {where or 'none'} of the slowest rank's critical path, "
        f"{len(critical.steps)} ops",
        *steps,
        f"  memory      {fullest.peak_bytes / _GIB:.2f} GiB of {limit / _GIB:.2f} GiB on rank "
        f"{fullest.rank}",
        *kept,
        f"  {'rank':>6}{'time':>11}{'samples':>9}{'tokens':>12}{'duplicated':>12}"
        f"{'micro-batches':>15}{'idle':>7}{'peak':>12}",
    ]
    listed = ranks if len(ranks) <= _MAX_LISTED else [*ranks[:4], *ranks[-4:]]
    for r in listed:
        lines.append(
            f"  {r.rank:>6}{r.time_s:>9.3f} s{r.num_samples:>9,}{r.num_tokens:>12,}"
            f"{r.duplicated_tokens:>12,.0f}{r.num_micro_batches:>15,}{r.idle_share:>7.1%}"
            f"{r.peak_bytes / _GIB:>8.2f} GiB"
        )
    if len(ranks) > len(listed):
        lines.append(f"  ({len(ranks) - len(listed)} ranks between the fourth and the last four)")
    return lines


def _format_activations(report: ActivationReport) -> str:
    least = report.least_repeated_s
    proven = "" if least is None else f" (proven least for this order of ops: {least:.3f} s)"
    return (
        f"{report.num_recompute:,} micro-batches recompute their layers, {report.num_drop:,} drop "
        f"all; {report.repeated_s:.3f} s run twice{proven}"
    )


def _ratio(a: float, b: float) -> str:
    return f"{a / b:.3f}" if b else "inf"
