"""Runs a batch of whole samples by a plan, for one of the three phases."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from psrl.backend.compat import parallel_state
from psrl.backend.options import LossOptions
from psrl.backend.train.engine import RankEngine
from psrl.backend.train.inputs import EdgeInputs
from psrl.backend.train.look_ahead import forward_only
from psrl.backend.train.predictions import edge_predictions
from psrl.backend.train.stage import PhaseInputs, StageRun
from psrl.core.errors import BackendError
from psrl.core.samples.sample import FloatArray

from .planning import BatchPlanner
from .sample_loss import WholeSampleLoss


@dataclass(frozen=True)
class BatchRun:
    """The model on this rank, and who plans for it."""

    engine: RankEngine
    planner: BatchPlanner

    def __call__(
        self, whole: WholeSampleLoss, temperature: float, is_update: bool, max_tokens: int
    ) -> dict[str, float]:
        """Run one phase; `whole` then has the logprobs of all ranks.

        Gradients of an update are added to the model's, not yet reduced.

        Returns:
            Metrics by name, the same on every rank but for times.
        """
        if not whole.samples.batch.num_samples:
            return _metrics(0, 0, 0, 0.0, 0, 0)
        planned, plan_time_s = self.planner.plan(whole.samples, is_update, max_tokens)
        rank_program, inputs = planned.rank_program, None
        engine = replace(
            self.engine,
            loss=LossOptions(temperature=temperature),
            stage_run=partial(VerlStageRun, whole=whole),
        )
        if is_update:
            if not whole.token_wise:
                _share(whole, engine.run(forward_only(rank_program)).logprobs)
                whole.differentiate()
            unknown = np.full(len(whole.samples.loss_tokens), np.nan)
            inputs = engine.look_ahead(rank_program, PhaseInputs(unknown, unknown))
        run = engine.run(rank_program, phase_inputs=inputs)
        _share(whole, run.logprobs)
        peak = torch.tensor(run.peak_kv_bytes, device=whole.logprob.device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        return _metrics(
            planned.logical_tokens,
            planned.unique_tokens,
            planned.executed_tokens,
            plan_time_s,
            len(rank_program.micro_batches),
            int(peak),
        )


@dataclass
class VerlStageRun(StageRun):
    """Takes the gradient at each edge from `whole`, and reports entropies to it."""

    whole: WholeSampleLoss | None = None

    def _predictions(self, edges: EdgeInputs, hidden_TH: Tensor) -> tuple[Tensor, Tensor | None]:
        assert self.whole is not None
        logprob_E, entropy_E = edge_predictions(
            self.model, hidden_TH, edges, self.loss_options, self.whole.with_entropy
        )
        self.logprobs[edges.number] = logprob_E.detach().double().cpu().numpy()
        if entropy_E is not None:
            self.whole.entropy[edges.number] = entropy_E.detach().to(self.whole.entropy)
        return logprob_E, entropy_E

    def _loss(self, edges: EdgeInputs | None, hidden_TH: Tensor) -> Tensor:
        if edges is None:
            return super()._loss(edges, hidden_TH)
        assert self.whole is not None
        logprob_E, entropy_E = self._predictions(edges, hidden_TH)
        by_logprob_E, by_entropy_E = self.whole.gradients(edges.number, logprob_E, entropy_E)
        loss = (by_logprob_E.to(logprob_E) * logprob_E).sum()
        if entropy_E is not None:
            loss = loss + (by_entropy_E.to(entropy_E) * entropy_E).sum()
        return loss


def _share(whole: WholeSampleLoss, logprobs: FloatArray) -> None:
    """Give every rank the logprobs and entropies that the last stages computed."""
    mine = ~np.isnan(logprobs)
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        mine[:] = False  # the first tensor-parallel rank has the same values
    known = torch.from_numpy(mine).to(whole.logprob.device)
    found = torch.from_numpy(np.nan_to_num(logprobs)).to(whole.logprob)
    shared = torch.stack([known.to(found), found * known, whole.entropy * known])
    dist.all_reduce(shared)
    count, logprob, entropy = shared
    if bool((count != 1).any()):
        wrong = torch.nonzero(count != 1).flatten()
        first = int(wrong[0])
        tokens = whole.samples.loss_tokens
        raise BackendError(
            f"{len(wrong)} of {len(count)} trained tokens have no finite logprob; the first is "
            f"token {int(tokens.token[first])} of sample {int(whole.samples.row[first])}",
            "has training diverged? look at grad_norm of the steps before",
        )
    whole.logprob.copy_(logprob)
    whole.entropy.copy_(entropy)


def _metrics(
    logical_tokens: int,
    unique_tokens: int,
    executed_tokens: int,
    plan_time_s: float,
    num_micro_batches: int,
    peak_kv_bytes: int,
) -> dict[str, float]:
    return {
        "psrl/logical_tokens": logical_tokens,
        "psrl/unique_tokens": unique_tokens,
        "psrl/executed_tokens": executed_tokens,
        "psrl/prefix_match_rate": 1.0 - unique_tokens / max(logical_tokens, 1),
        "psrl/plan_time_s": plan_time_s,
        "psrl/num_micro_batches": num_micro_batches,
        # veRL takes the maximum over mini-batches of what has "max" in its name.
        "psrl/peak_kv_bytes_max": peak_kv_bytes,
    }
