"""Small models and random programs, run by the engine and, for comparison, sample by sample."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from psrl.backend.compat import GPTModel, parallel_state
from psrl.backend.launch import model_parallel
from psrl.backend.model.model import build_model, hidden_states, logits, rotary_angles
from psrl.backend.model.parameters import ParallelGroups, gather_full
from psrl.backend.model.tree_spec import TreeSeqParams
from psrl.backend.options import LossOptions, RouterOptions
from psrl.backend.train.engine import RankEngine, reduce_gradients
from psrl.backend.train.inputs import LossTokens, prepare_rank_program
from psrl.backend.train.kv_store import BlockStore
from psrl.backend.train.optimizer import MainGradients
from psrl.backend.train.phase_log import PhaseLog, resident_bytes
from psrl.backend.train.pipe import SINGLE_STAGE, Pipeline
from psrl.backend.train.stage import PhaseInputs
from psrl.backend.train.tokens import TokenIds, expand_tokens
from psrl.core.cost.cluster import ModelSpec, ParallelConfig
from psrl.core.plan.clock import SEND_WINDOW
from psrl.core.plan.packing import Chain, PackedMicroBatch
from psrl.core.run.events import Events
from psrl.core.run.relative_error import relative_error as error_of_norms
from psrl.core.samples.sample import FloatArray, SampleBatch
from tests import gradient_errors
from tests.random_plans import RandomProgram, random_batch, random_program

ACTIVATIONS = ("keep", "recompute", "drop")
TINY = ModelSpec(
    name="tiny",
    num_layers=3,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    ffn_hidden_size=40,
    vocab_size=48,
    rotary_base=100.0,
)
VARIANTS = (
    TINY,
    TINY.model_copy(update={"tied_embeddings": True, "qk_layernorm": True, "qkv_bias": False}),
)
PPO = LossOptions(clip_ratio=0.2, kl_coefficient=0.3, temperature=0.7)


@dataclass(frozen=True)
class Case:
    """A random program, the model that runs it, and the logprobs that its loss reads."""

    planned: RandomProgram
    spec: ModelSpec
    inputs: PhaseInputs
    loss: LossOptions
    # Logits of order one: with larger ones, exp(reference - logprob) in the penalty amplifies the
    # rounding of float32, on CPUs without fused multiply-add to above the tolerances.
    init_std: float = 0.15


def make_case(seed: int, num_ranks: int = 1, **program: Any) -> Case:
    """A case in which some ratios are clipped: old logprobs lie around those of random weights."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, num_samples=int(rng.integers(1, 10)), max_new_tokens=12)
    settings: dict[str, Any] = {
        "num_ranks": num_ranks,
        "activations": ACTIVATIONS,
        "max_block_tokens": None if seed % 2 else 3,
        "num_share_keys": 1 + seed % 3 // 2,
        "granularity_tokens": 1 + 2 * (seed % 5 == 0),
    }
    planned = random_program(rng, batch, **settings | program)
    count = len(LossTokens(batch))
    inputs = PhaseInputs(rng.uniform(-5, -3, count), rng.uniform(-5, -3, count))
    return Case(planned, VARIANTS[seed % len(VARIANTS)], inputs, PPO)


@dataclass(frozen=True)
class Outcome:
    """What training on a case gives: full gradients by canonical name, and logprobs by token.

    The loss includes those of routers; `expert_load` is [layers, experts] logical tokens.
    """

    loss: float
    gradients: dict[str, torch.Tensor]
    logprobs: FloatArray
    events: Events | None = None
    expert_load: torch.Tensor | None = None


def case_model(
    case: Case, dtype: torch.dtype, sequence_parallel: bool = False, **settings: Any
) -> GPTModel:
    """The model of a case, divided as `parallel_state` says."""
    parallel = ParallelConfig(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
    )
    return build_model(case.spec, parallel, seed=3, dtype=dtype, init_std=case.init_std, **settings)


def run_case(
    case: Case,
    dtype: torch.dtype,
    *,
    store_class: type[BlockStore] = BlockStore,
    implementation: Any = "parts",
    chunk_rows: int = 5,
    pipeline: Pipeline = SINGLE_STAGE,
    send_window: int = SEND_WINDOW,
    router: RouterOptions | None = None,
    sequence_parallel: bool = False,
) -> Outcome:
    """Run a case's update on this rank; but for the events, the outcome is complete everywhere."""
    planned = case.planned
    router = router or RouterOptions()
    settings = {"moe_token_dispatcher_type": router.dispatcher} if case.spec.moe_topk else {}
    model = case_model(case, dtype, sequence_parallel, **settings)
    loss_tokens = LossTokens(planned.batch)
    tensor_size = parallel_state.get_tensor_model_parallel_world_size()
    coupled = max(1, parallel_state.get_expert_model_parallel_world_size() // tensor_size)
    rank = parallel_state.get_data_parallel_rank()
    rank_program = prepare_rank_program(
        0,
        planned.program,
        rank,
        planned.batch,
        TokenIds(planned.batch, case.spec.vocab_size),
        loss_tokens,
        chunk_rows=chunk_rows,
        stage=pipeline.stage,
        num_stages=pipeline.num_stages,
        coupled_ranks=coupled if router.dispatcher == "allgather" else 1,
    )
    gradients = MainGradients(model, ParallelGroups.current())
    engine = RankEngine(
        model=model,
        spec=case.spec,
        implementation=implementation,
        loss=case.loss,
        router=router,
        pipeline=pipeline,
        send_window=send_window,
        store_class=store_class,
    )
    resident = resident_bytes(model.parameters(), gradients.tensors())
    log = PhaseLog("update", rank, pipeline.stage, torch.device("cpu"), resident)
    run = engine.run(rank_program, log, engine.look_ahead(rank_program, case.inputs))
    reduce_gradients(gradients, log, rank_program.index)
    shared = torch.tensor([run.loss, *np.nan_to_num(run.logprobs)], dtype=torch.float64)
    torch.distributed.all_reduce(shared)
    shared /= tensor_size
    full = gather_full(gradients, ParallelGroups.current())
    reported = run.routers
    return Outcome(
        float(shared[0]) + (reported.loss() if reported else 0.0),
        full,
        shared[1:].numpy(),
        log.finish(),
        reported.load() if reported else None,
    )


def run_samples_alone(case: Case, dtype: torch.dtype) -> Outcome:
    """Every sample by itself through the same model; the loss is written out here once more."""
    model = case_model(case, dtype)
    batch = case.planned.batch
    terms, logprobs = [], []
    for sample in range(batch.num_samples):
        spans = batch.sample_loss_spans(sample)
        if len(spans):
            target = np.concatenate([np.arange(a, z) for a, z in spans])
            ids = expand_tokens(batch, sample, case.spec.vocab_size)
            logprob = _sample_logprobs(model, case, ids, target, dtype)
            logprobs.append(logprob)
            terms.append(batch.advantage[sample] * torch.ones_like(logprob))
    if not logprobs:
        zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        return Outcome(0.0, zeros, np.empty(0))
    logprob, advantage = torch.cat(logprobs), torch.cat(terms)
    old = torch.from_numpy(case.inputs.old_logprob).to(dtype)
    reference = torch.from_numpy(case.inputs.reference_logprob).to(dtype)
    ratio = torch.exp(logprob - old)
    low, high = 1 - case.loss.clip_ratio, 1 + case.loss.clip_ratio
    gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    penalty = torch.exp(reference - logprob) - (reference - logprob) - 1
    loss = (case.loss.kl_coefficient * penalty - gain).mean()
    loss.backward()
    gradients = {name: p.grad.detach().clone() for name, p in model.named_parameters()}
    return Outcome(float(loss.detach()), gradients, logprob.detach().double().numpy())


def _sample_logprobs(
    model: GPTModel, case: Case, ids: np.ndarray, target: np.ndarray, dtype: torch.dtype
) -> torch.Tensor:
    """[trained tokens] logprobs of one sample, dense and causal."""
    count = len(ids)
    packed = PackedMicroBatch(
        index=0,
        node=np.array([1]),
        start_depth=np.array([0]),
        num_tokens=np.array([count]),
        chains=(Chain(0, count, ()),),
        cached=(),
    )
    params = TreeSeqParams(packed=packed, store=None, implementation="reference")
    rotary = rotary_angles(torch.arange(count), case.spec, dtype)
    hidden = hidden_states(model, torch.from_numpy(ids), rotary, params)
    scaled = logits(model, hidden) / case.loss.temperature
    every = torch.log_softmax(scaled, dim=-1)
    return every[torch.from_numpy(target - 1), torch.from_numpy(ids[target])]


def relative_l2(found: FloatArray, wanted: FloatArray) -> float:
    """Relative L2 error of an array, such as logprobs."""
    difference, reference = float(np.linalg.norm(found - wanted)), float(np.linalg.norm(wanted))
    return error_of_norms(difference, reference)


def relative_error(found: Outcome, wanted: Outcome) -> dict[str, float]:
    """Relative L2 error of all gradients together and of the worst one; others absolute."""
    logprob = np.abs(found.logprobs - wanted.logprobs).max(initial=0.0)
    worst = max(gradient_errors.by_parameter(found.gradients, wanted.gradients).values())
    return {
        "gradient": gradient_errors.together(found.gradients, wanted.gradients),
        "worst_gradient": worst,
        "loss": error_of_norms(abs(found.loss - wanted.loss), max(abs(wanted.loss), 1.0)),
        "logprob": float(logprob),
    }


def compare_alone(seeds: Sequence[int], dtype: torch.dtype, **run: Any) -> list[dict[str, float]]:
    """Errors of cases on one process, against every sample alone."""
    with model_parallel(ParallelConfig()):
        return [
            relative_error(run_case(case, dtype, **run), run_samples_alone(case, dtype))
            for case in map(make_case, seeds)
        ]


def run_cases(seeds: Sequence[int], dtype: torch.dtype, parallel: ParallelConfig) -> list[Outcome]:
    """Outcomes of cases on this process group."""
    with model_parallel(parallel) as pipeline:
        cases = [make_case(seed, num_ranks=parallel.data_parallel_size) for seed in seeds]
        return [replace(run_case(c, dtype, pipeline=pipeline), events=None) for c in cases]


def run_alone(seeds: Sequence[int], dtype: torch.dtype, num_ranks: int) -> list[Outcome]:
    """What `run_cases` should give, from every sample alone."""
    with model_parallel(ParallelConfig()):
        return [run_samples_alone(make_case(s, num_ranks=num_ranks), dtype) for s in seeds]


def single_process(batch: SampleBatch, **program: Any) -> RandomProgram:
    """A program of one rank for a given batch."""
    seed = program.pop("seed", 0)
    return random_program(np.random.default_rng(seed), batch, **program)
