"""Speed of prefix trees and statistics, against token-by-token tries in the same run."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from psrl.core.samples.sample import IntArray, SampleBatch, make_batch, ragged_take
from psrl.core.samples.trace import open_trace, write_trace
from psrl.core.tree.prefix_tree import build_prefix_tree
from psrl.traces.synth import load_spec, synthesise

from .measurement import Measurement, fastest_s

TOKENS_PER_TASK = 43_000  # of the webshop preset in mode step
VOCABULARY_SIZE = 151_643
Dictionary = dict[int, "Dictionary"]
GROWTH_TOKENS = (1_000_000, 3_000_000, 10_000_000, 30_000_000, 100_000_000)
CLAUDE_CODE = Path(__file__).resolve().parents[1] / "examples" / "traces" / "claude_code"
LOGICAL_TOKENS = 5_000_000_000
HASHED_BLOCK_TOKENS = 64


@dataclass(frozen=True)
class Usage:
    """What a process took."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def measure() -> list[Measurement]:
    return [*token_level(), *growth(), *degenerate(), *symbol_level()]


def webshop_tokens(num_tokens: int, seed: int = 0) -> SampleBatch:
    """A WebShop step batch of at least about `num_tokens`, with a token id per token."""
    tasks = -(-num_tokens // TOKENS_PER_TASK)
    spec = load_spec("webshop", "step", (f"tasks={tasks}",))
    (blocks,) = synthesise(spec, "step", seed).batches
    return spelled(blocks)


def spelled(blocks: SampleBatch) -> SampleBatch:
    """The token-level batch: every block a run of pseudo-random ids of a real vocabulary."""
    table = blocks.symbol_num_tokens
    assert table is not None
    starts = np.concatenate([[0], np.cumsum(table)]).astype(np.int64)
    vocabulary = np.random.default_rng(1).integers(0, VOCABULARY_SIZE, int(starts[-1]))
    rows, _ = ragged_take(starts, blocks.symbols)
    return replace(
        blocks,
        symbols=vocabulary[rows],
        symbol_offsets=blocks.token_offsets,
        symbol_num_tokens=None,
    )


def dictionary_trie(batch: SampleBatch) -> int:
    """Unique tokens by the least that does it: one dictionary per token, one token at a time."""
    root: Dictionary = {}
    unique = 0
    for sample in range(batch.num_samples):
        node = root
        for token in batch.sample_symbols(sample).tolist():
            if token not in node:
                node[token] = {}
                unique += 1
            node = node[token]
    return unique


class TrieNode:
    """A token of a trie that also knows its readers, as the prefix tree does."""

    def __init__(self) -> None:
        self.children: dict[int, TrieNode] = {}
        self.num_samples = 0


def node_trie(batch: SampleBatch) -> TrieNode:
    """One token after the other, counting the samples through each."""
    root = TrieNode()
    for sample in range(batch.num_samples):
        node = root
        for token in batch.sample_symbols(sample).tolist():
            if token not in node.children:
                node.children[token] = TrieNode()
            node = node.children[token]
            node.num_samples += 1
    return root


def count_nodes(root: TrieNode) -> int:
    count, waiting = 0, [root]
    while waiting:
        children = waiting.pop().children.values()
        count += len(children)
        waiting += children
    return count


def token_level() -> Iterator[Measurement]:
    batch = webshop_tokens(20_500_000)
    tree = build_prefix_tree(batch)
    tree_s = fastest_s(partial(build_prefix_tree, batch), 10)
    started_s = time.process_time()
    root = node_trie(batch)
    node_s = time.process_time() - started_s
    found = {"node trie": count_nodes(root), "tree": tree.unique_tokens}
    del root
    started_s = time.process_time()
    found["dictionary trie"] = dictionary_trie(batch)
    dictionary_s = time.process_time() - started_s
    if len(set(found.values())) > 1:
        raise AssertionError(f"unique tokens differ: {found}")
    tokens = batch.logical_tokens
    yield Measurement("WebShop step batch, logical tokens", tokens, "tokens", 2e7)
    yield Measurement("prefix tree of it, one core", tokens / tree_s / 1e6, "M tokens/s", 20)
    rate = "M tokens/s"
    yield Measurement("trie of nodes, unique tokens and readers", tokens / node_s / 1e6, rate)
    yield Measurement("    tree over it, same figures", node_s / tree_s, "x", 50)
    yield Measurement("trie of dictionaries, unique tokens only", tokens / dictionary_s / 1e6, rate)
    yield Measurement("    tree (readers too) over it", dictionary_s / tree_s, "x", 50)


def growth() -> Iterator[Measurement]:
    """Time per token from small to large batches."""
    per_token_ns = []
    for num_tokens in GROWTH_TOKENS:
        batch = webshop_tokens(num_tokens)
        repeats = max(3, min(30, 30_000_000 // num_tokens))
        taken_s = fastest_s(partial(build_prefix_tree, batch), repeats)
        per_token_ns.append(taken_s / batch.logical_tokens * 1e9)
        what = f"time per token at {num_tokens // 1_000_000} M tokens"
        yield Measurement(what, per_token_ns[-1], "ns")
    spread = max(per_token_ns) / min(per_token_ns)
    yield Measurement("slowest over fastest time per token", spread, "x", 1.3, False)


def degenerate() -> Iterator[Measurement]:
    rng = np.random.default_rng(0)
    same = make_batch([np.arange(200)] * 100_000, [[]] * 100_000)
    long = make_batch([rng.integers(0, VOCABULARY_SIZE, 1_000_000)], [[]])
    wide = replace(webshop_tokens(5_000_000), symbol_num_tokens=None)
    wide = replace(wide, symbols=2**63 - 1 - wide.symbols)
    for what, batch in (
        ("100,000 identical samples of 200 tokens", same),
        ("one sample of 1,000,000 tokens", long),
        ("WebShop, 5 M tokens, ids up to 2^63 - 1", wide),
    ):
        taken_s = fastest_s(partial(build_prefix_tree, batch), 3)
        yield Measurement(what, batch.logical_tokens / taken_s / 1e6, "M tokens/s", 20)


def symbol_level() -> Iterator[Measurement]:
    """`psrl trace stats` on Claude Code sessions, in a process of its own."""
    trace = open_trace(CLAUDE_CODE)
    copies = -(-LOGICAL_TOKENS // trace.header.logical_tokens)
    (sessions,) = trace
    with tempfile.TemporaryDirectory() as folder:
        for what, batch, num_iterations in (
            ("as committed", sessions, 1),
            (f"in {HASHED_BLOCK_TOKENS}-token blocks", in_small_blocks(sessions), 8),
        ):
            path = Path(folder) / what
            write_trace(
                path,
                replicas(batch, copies, num_iterations),
                source=trace.header.source,
                licence=trace.header.licence,
                sampling_mode="step",
            )
            usage = run_stats(path)
            billions = copies * trace.header.logical_tokens / 1e9
            name = f"statistics of {billions:.2f} billion tokens, {what}"
            yield Measurement(name, usage.cpu_s, "CPU s", 20, False)
            yield Measurement(
                "    wall time, other work on the machine included", usage.wall_s, "s"
            )
            peak_gib = usage.peak_bytes / 2**30
            yield Measurement("    peak memory of the process", peak_gib, "GiB", 2, False)


def replicas(batch: SampleBatch, copies: int, num_iterations: int) -> Iterator[SampleBatch]:
    """Copies of a block batch with fresh ids and groups, dealt to iterations."""
    assert batch.symbol_num_tokens is not None
    num_blocks = len(batch.symbol_num_tokens)
    shares = np.array_split(np.arange(copies), num_iterations)
    # Iterations share nothing, so that they can use the same ids.
    table = np.tile(batch.symbol_num_tokens, max(map(len, shares)))
    for share in shares:
        count = len(share)
        everything = batch.select(np.tile(np.arange(batch.num_samples), count))
        copy = np.repeat(np.arange(count), batch.num_samples)
        shift = np.repeat(np.arange(count), len(batch.symbols)) * num_blocks
        names = zip(copy.tolist(), everything.group_id.tolist(), strict=True)
        yield replace(
            everything,
            symbols=everything.symbols + shift,
            symbol_num_tokens=table,
            group_id=np.array([f"{c}/{g}" for c, g in names], np.str_),
        )


def in_small_blocks(batch: SampleBatch) -> SampleBatch:
    """Every block cut into pieces of at most `HASHED_BLOCK_TOKENS`, as recorders hash them."""
    table = batch.symbol_num_tokens
    assert table is not None
    pieces = -(-table // HASHED_BLOCK_TOKENS)
    starts = np.concatenate([[0], np.cumsum(pieces)]).astype(np.int64)
    lengths = np.full(int(starts[-1]), HASHED_BLOCK_TOKENS, np.int64)
    lengths[starts[1:] - 1] = table - (pieces - 1) * HASHED_BLOCK_TOKENS
    rows, offsets = ragged_take(starts, batch.symbols)
    symbol_offsets: IntArray = offsets[batch.symbol_offsets]
    return replace(batch, symbols=rows, symbol_offsets=symbol_offsets, symbol_num_tokens=lengths)


def run_stats(path: Path) -> Usage:
    """Run `psrl trace stats` in a fresh process; start of Python included."""
    started_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _STATS_AND_PEAK, "trace", "stats", str(path), "--json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    wall_s = time.perf_counter() - started_s
    peak_kib, cpu_s = done.stderr.split()[-2:]
    return Usage(wall_s, float(cpu_s), int(peak_kib) * 1024)


# VmHWM, not ru_maxrss: that one is inherited from the parent.
_STATS_AND_PEAK = """
import sys, time
from psrl.cli import main
status = main()
lines = open("/proc/self/status").read().splitlines()
peak = next(line.split()[1] for line in lines if line.startswith("VmHWM"))
print(peak, time.process_time(), file=sys.stderr)
sys.exit(status)
"""
