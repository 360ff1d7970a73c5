"""What a block policy costs: longer ops, other bytes, padding, metadata, misses and transfers."""

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from psrl.core.cost.calibrated_cost_model import choose_cost_model
from psrl.core.cost.cost_model import CostModel
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.plan.op_table import BACKWARD, OpTable, op_table, sorted_by_rank, stage_order
from psrl.core.plan.packing import PackedMicroBatch, pack_rank
from psrl.core.plan.plan import Plan, Program
from psrl.core.plan.tables import Blocks
from psrl.core.samples.sample import FloatArray, IntArray, SampleBatch
from psrl.core.tree.prefix_tree import build_prefix_tree

from .block_policies import BlockPolicy, CachedReads, policy_blocks
from .block_replay import Replay, reading_blocks, replay_blocks
from .block_section import blocks_section

PCIE_BYTES_PER_S = 50e9
"""One direction of PCIe 5.0 x16 as copies reach it."""

QUERY_TILE_TOKENS = 128
"""Queries of a tile, which looks up every block that its micro-batch reads."""

# What a look-up moves: the number of a fixed block, or first row and length of an adaptive one.
_FIXED_ENTRY_BYTES, _ADAPTIVE_ENTRY_BYTES = 8, 16


@dataclass(frozen=True)
class BlockEffects:
    """What replaces or joins a program's own times and bytes; [P, n], in each stage's order.

    Attributes:
        recompute_s: a forward of the missing rows before the op, from the stage's kept input.
        transfer_s: copies to and from the host before the op, nothing overlapped.
        access_s: reading the block table.
        live_tokens: allocated while the op runs.
        kept_input_tokens: evicted rows whose stage input stays, so that they can be recomputed.
    """

    recompute_s: FloatArray
    transfer_s: FloatArray
    access_s: FloatArray
    live_tokens: IntArray
    kept_input_tokens: IntArray

    @property
    def extra_s(self) -> FloatArray:
        return self.recompute_s + self.transfer_s + self.access_s


@dataclass(frozen=True)
class ReplacedBlocks:
    """A plan with other block tables.

    Attributes:
        plan: the tables know no evictions; `effects` do.
        effects: per program, for `simulate`.
        metrics: the section `blocks`.
    """

    plan: Plan
    effects: tuple[BlockEffects, ...]
    metrics: dict[str, Any]


def apply_block_policy(
    plan: Plan,
    batch: SampleBatch,
    policy: BlockPolicy,
    cost_model: CostModel | None = None,
    pcie_bytes_per_s: float = PCIE_BYTES_PER_S,
) -> ReplacedBlocks:
    """Replace a plan's blocks; every stage evicts for itself, in the order of its own ops."""
    costs = cost_model or choose_cost_model(
        plan.model, plan.cluster, plan.parallel, plan.calibration
    )
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    num_stages = plan.parallel.pipeline_model_parallel_size
    totals: dict[str, int] = defaultdict(int)
    busy_s = np.zeros((3, plan.num_ranks, num_stages))
    peak_tokens, programs, effects = 0, [], []
    for program in plan.programs:
        ops = op_table(program, plan.num_ranks)
        tables, found = _replace(program, batch, policy, ops, num_stages, totals)
        programs.append(replace(program, blocks=tables, block_tokens=policy.block_tokens or 1))
        effect = _effects(plan, program, ops, found, policy, costs, pcie_bytes_per_s)
        effects.append(effect)
        peak_tokens = max(peak_tokens, int(effect.live_tokens.max(initial=0)))
        for kind, added_s in enumerate((effect.recompute_s, effect.transfer_s, effect.access_s)):
            for stage in range(num_stages):
                np.add.at(busy_s[kind, :, stage], ops.rank, added_s[stage] * len(program.phases))
    metrics = blocks_section(policy, totals, peak_tokens * memory.kv_bytes_per_token, busy_s)
    return ReplacedBlocks(replace(plan, programs=tuple(programs)), tuple(effects), metrics)


@dataclass(frozen=True)
class _RankReplay:
    """One rank's new blocks and what happens to them, stage by stage."""

    packed: list[PackedMicroBatch]
    blocks: Blocks
    reading: dict[int, list[int]]
    stages: list[Replay]


def _replace(
    program: Program,
    batch: SampleBatch,
    policy: BlockPolicy,
    ops: OpTable,
    num_stages: int,
    totals: dict[str, int],
) -> tuple[Blocks, list[_RankReplay]]:
    """New tables and replays of all ranks; adds to the totals of the section."""
    tree, tables, found = program.tree(batch), [], []
    _add_lost_hits(totals, program, batch, policy)
    for rank in range(len(ops.first_op) - 1):
        mine = program.on_rank(rank)
        packed = pack_rank(mine, tree)
        reads = CachedReads.of(mine, packed)
        blocks = policy_blocks(mine, packed, reads, policy)
        reading = reading_blocks(blocks, reads)
        last, first = mine.ops(), int(ops.first_op[rank])
        stages: list[Replay] = []
        for stage in range(num_stages):
            if stages and not program.is_update:  # every stage runs the forwards in one order
                stages.append(stages[0])
                continue
            order = stage_order(ops, program.is_update, num_stages, stage)
            places = order[first : first + len(last)] - first
            stages.append(replay_blocks([last[i] for i in places], blocks, reading, policy))
        tables.append(replace(blocks, rank=np.full(len(blocks), rank)))
        found.append(_RankReplay(packed, blocks, reading, stages))
        totals["allocated_tokens"] += int(blocks.allocated_tokens.sum())
        totals["cached_tokens"] += int(blocks.num_tokens.sum())
        totals["read_tokens"] += sum(int(r.sum()) for r in reads.is_read.values())
        totals["num_blocks"] += len(blocks)
        totals["num_block_reads"] += sum(len(read) for read in reading.values())
        entry_bytes = _entry_bytes(policy)
        largest = entry_bytes * max(map(len, reading.values()), default=0)
        totals["metadata_bytes"] = max(totals["metadata_bytes"], largest)
        for name in ("hit_tokens", "miss_tokens", "sent_tokens"):
            totals[name] += int(getattr(stages[-1], name).sum())
    return Blocks.concatenate(tables), found


def _entry_bytes(policy: BlockPolicy) -> int:
    return _ADAPTIVE_ENTRY_BYTES if policy.block_tokens is None else _FIXED_ENTRY_BYTES


def _add_lost_hits(
    totals: dict[str, int], program: Program, batch: SampleBatch, policy: BlockPolicy
) -> None:
    samples, key = batch.select(program.assignments.sample), program.assignments.share_key
    whole = build_prefix_tree(samples, key, policy.block_tokens or 1)
    totals["logical_tokens"] += whole.logical_tokens
    totals["lost_tokens"] += whole.unique_tokens - build_prefix_tree(samples, key).unique_tokens


def _effects(
    plan: Plan,
    program: Program,
    ops: OpTable,
    found: list[_RankReplay],
    policy: BlockPolicy,
    costs: CostModel,
    pcie_bytes_per_s: float,
) -> BlockEffects:
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    num_stages = plan.parallel.pipeline_model_parallel_size
    offloads = policy.retention == "offload"
    lookup_s = _lookup_s(plan, policy)
    recompute_s, transfer_s, access_s = np.zeros((3, num_stages, len(ops.kind)))
    of_op = program.schedule.micro_batch[sorted_by_rank(program.schedule)[0]]
    live, kept = (np.zeros((num_stages, len(ops.kind)), np.int64) for _ in range(2))
    for stage in range(num_stages):
        order = stage_order(ops, program.is_update, num_stages, stage)
        # A backward runs two kernels over the keys.
        num_kernels, micro_batch = 1 + (ops.kind[order] == BACKWARD), of_op[order]
        for rank, one in enumerate(found):
            mine = slice(ops.first_op[rank], ops.first_op[rank + 1])
            replay = one.stages[stage]
            live[stage, mine] = replay.live_tokens
            if offloads:
                moved = (replay.miss_tokens + replay.sent_tokens) * memory.kv_bytes_per_token
                transfer_s[stage, mine] = moved / pcie_bytes_per_s
            else:
                tokens, pairs = _missing_rows(one, replay)
                recompute_s[stage, mine] = costs.stage_forward_s(
                    stage, tokens, pairs, np.zeros_like(tokens)
                ) * np.sign(tokens)
                if not program.is_update and num_stages > 1:
                    kept[stage, mine] = replay.evicted_tokens
            lookups = _lookups(one, micro_batch[mine]) * num_kernels[mine]
            access_s[stage, mine] = lookups * lookup_s
    return BlockEffects(recompute_s, transfer_s, access_s, live, kept)


def _lookup_s(plan: Plan, policy: BlockPolicy) -> float:
    """One look-up by all query heads of a device in all layers of a stage."""
    heads = plan.model.num_attention_heads / plan.parallel.tensor_model_parallel_size
    layers = plan.model.num_layers / plan.parallel.pipeline_model_parallel_size
    device = plan.cluster.device
    rate = device.memory_bandwidth_bytes_per_s * device.bandwidth_efficiency
    return heads * layers * _entry_bytes(policy) / rate


def _lookups(one: _RankReplay, micro_batch: IntArray) -> IntArray:
    """[n] (query tile, block) pairs of each op."""
    of = {
        p.index: -(-p.total_tokens // QUERY_TILE_TOKENS) * len(one.reading[p.index])
        for p in one.packed
    }
    return np.array([of[m] for m in micro_batch.tolist()], np.int64)


def _missing_rows(one: _RankReplay, replay: Replay) -> tuple[FloatArray, FloatArray]:
    """[n] rows that each op misses, and the pairs of computing them."""
    positions = {p.index: p.position_ids for p in one.packed}
    table = one.blocks
    rows = {
        block: (count, int((positions[owner][start : start + count] + 1).sum()))
        for block, owner, start, count in zip(
            table.block.tolist(),
            table.micro_batch.tolist(),
            table.start_row.tolist(),
            table.num_tokens.tolist(),
            strict=True,
        )
    }
    sums = [[sum(rows[b][i] for b in missing) for missing in replay.missing] for i in range(2)]
    tokens, pairs = np.array(sums, np.float64).reshape(2, -1)
    return tokens, pairs
