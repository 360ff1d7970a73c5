"""Plans of veRL's batches; a batch that comes again is not planned again.

Log-old-prob and reference run the same program, and so does every epoch over a mini-batch. All
engines of a process share the plans. Every rank plans by itself: the planner is deterministic.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass

import torch

from psrl.backend.train.inputs import RankProgram, prepare_rank_program
from psrl.backend.train.pipe import Pipeline
from psrl.backend.train.tokens import TokenIds
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.run.config import Setup
from psrl.core.samples.trace import batch_hash
from psrl.planner import PlanningProblem, make_plan

from .samples import WholeSamples

MAX_CACHED = 8
_CACHE: OrderedDict[tuple[object, ...], "PlannedBatch"] = OrderedDict()


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """This rank's part of a plan, and how much is shared.

    Attributes:
        unique_tokens: of the batch's prefix tree; `executed_tokens` of all ranks together, which
            is more where ranks share a prefix.
    """

    rank_program: RankProgram
    logical_tokens: int
    unique_tokens: int
    executed_tokens: int

    @property
    def prefix_match_rate(self) -> float:
        return 1.0 - self.unique_tokens / self.logical_tokens


@dataclass(frozen=True)
class BatchPlanner:
    """Plans for one place in the parallel layout.

    Attributes:
        rank: data-parallel rank.
        coupled_ranks: see `psrl.backend.model.moe.rows_to_exchange`.
    """

    setup: Setup
    policy: str
    rank: int
    pipeline: Pipeline
    device: torch.device
    coupled_ranks: int = 1

    @property
    def _trained_bytes(self) -> int:
        """Gradients and optimizer, which an actor may keep on the device in its forward phases.

        Those of the reference leave the same room, so that both run the same plans.
        """
        setup = self.setup
        memory = MemoryModel(setup.model, setup.cluster, setup.parallel)
        return memory.static_bytes - memory.weight_bytes_on(self.pipeline.num_stages - 1)

    def plan(
        self, samples: WholeSamples, is_update: bool, max_tokens: int
    ) -> tuple[PlannedBatch, float]:
        """The plan of a batch, and the seconds that it took; 0 if it was known.

        Args:
            max_tokens: most tokens that a micro-batch may compute.

        Raises:
            InfeasibleError: if no plan fits the device memory.
        """
        fraction = self.setup.planning.memory_fraction
        if not is_update:
            fraction -= self._trained_bytes / self.setup.cluster.device.memory_bytes
        planning = self.setup.planning.model_copy(
            update={"max_tokens_per_micro_batch": max_tokens, "memory_fraction": fraction}
        )
        setup = self.setup.model_copy(update={"planning": planning})
        digest = batch_hash(samples.batch)
        place = (self.policy, self.rank, self.pipeline.stage, str(self.device))
        key = (digest, is_update, setup.model_dump_json(), *place)
        if key in _CACHE:
            _CACHE.move_to_end(key)
            return _CACHE[key], 0.0
        started_s = time.perf_counter()
        _CACHE[key] = self._plan(samples, is_update, setup, digest)
        if len(_CACHE) > MAX_CACHED:
            _CACHE.popitem(last=False)
        return _CACHE[key], time.perf_counter() - started_s

    def _plan(
        self, samples: WholeSamples, is_update: bool, setup: Setup, digest: str
    ) -> PlannedBatch:
        batch = samples.batch
        phases = ("update",) if is_update else ("log_old_prob",)
        problem = PlanningProblem(batch, digest, 0, setup, phases)
        (program,) = make_plan(problem, self.policy).programs
        rank_program = prepare_rank_program(
            0,
            program,
            self.rank,
            batch,
            TokenIds(batch, setup.model.vocab_size),
            samples.loss_tokens,
            self.device,
            stage=self.pipeline.stage,
            num_stages=self.pipeline.num_stages,
            coupled_ranks=self.coupled_ranks,
        )
        (subproblem,) = problem.programs()
        return PlannedBatch(
            rank_program=rank_program,
            logical_tokens=batch.logical_tokens,
            unique_tokens=subproblem.tree.unique_tokens,
            executed_tokens=program.unique_tokens,
        )
