"""Options of an execution, and the checks that need no process group."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from psrl.backend.model.moe import RouterOptions
from psrl.core.cost.cluster import check_layout
from psrl.core.errors import BackendError, PlanError
from psrl.core.plan.check_ops import check_op_patterns
from psrl.core.plan.plan import PHASES, Plan
from psrl.core.samples.trace import Trace
from psrl.kernels.attention.tree_attention import Implementation

from .loss import LossOptions, check_loss
from .optimizer import OptimizerOptions, check_optimizer
from .option_range import require

DtypeName = Literal["bfloat16", "float32", "float64"]
DTYPE_OF_BYTES: dict[int, DtypeName] = {2: "bfloat16", 4: "float32", 8: "float64"}


@dataclass(frozen=True)
class ExecuteOptions:
    """How to execute a plan.

    Attributes:
        weights: Hugging Face directory of the policy; None for random weights.
        reference_weights: that of the reference policy; None for the policy's.
        seed: of the random weights.
        init_std: standard deviation of the random weights.
        reference_perturb: the reference policy's random weights differ by this many `init_std`.
        token_advantages: Parquet file, see `read_token_advantages`; None for the trace's
            advantages of samples.
        dtype: working precision; None for the one that the plan's device has.
        implementation: of tree attention; None for the fastest on this device.
        warmup, repeat: run every phase this many times untimed, then timed; reported times are
            medians. Weights are reset before each, so results do not depend on them.
        reduce_token_ids: map a trace's token ids into the vocabulary by modulo.
        keep_gradients: keep each mini-batch's reduced gradients.
        measure_activations: see `RankEngine`.
        checkpoint: directory that gets a checkpoint after the last optimizer step of the plan;
            None for none.
        resume: start from its latest checkpoint; the reference policy stays that of the weights.
    """

    weights: Path | None = None
    reference_weights: Path | None = None
    seed: int = 0
    init_std: float = 0.02
    reference_perturb: float = 0.1
    token_advantages: Path | None = None
    dtype: DtypeName | None = None
    implementation: Implementation | None = None
    loss: LossOptions = field(default_factory=LossOptions)
    router: RouterOptions = field(default_factory=RouterOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    warmup: int = 0
    repeat: int = 1
    reduce_token_ids: bool = False
    keep_gradients: bool = False
    measure_activations: bool = True
    checkpoint: Path | None = None
    resume: bool = False


def check_executable(plan: Plan, trace: Trace, options: ExecuteOptions) -> None:
    """Check what can be checked before any process starts.

    Raises:
        PlanError: if the plan belongs to another trace, or ranks that share experts run different
            ops, so that they would wait for each other forever.
        BackendError: if a feature is refused, or the loss needs a phase that the plan lacks.
        ConfigError: if the model cannot be divided.
    """
    if plan.trace_hash != trace.content_hash:
        raise PlanError(
            f"the plan was made for trace {plan.trace_hash[:12]}, {trace.path} is "
            f"{trace.content_hash[:12]}",
            "execute the plan with its own trace, or plan again",
        )
    check_layout(plan.model, plan.cluster, plan.parallel)
    for index, program in enumerate(plan.programs):
        check_op_patterns(index, program, plan.parallel)
    phases = {phase for program in plan.programs for phase in program.phases}
    unknown = sorted(phases - set(PHASES))
    if unknown:
        raise BackendError(f"the plan has unknown phases {unknown}", f"known: {list(PHASES)}")
    if "update" in phases:
        check_loss(options.loss, phases)
        check_optimizer(options.optimizer)
    elif options.checkpoint is not None and not options.resume:
        raise BackendError(
            f"the plan has no update phase, so there is nothing to save in {options.checkpoint}",
            "leave out --checkpoint, or add --resume to run with the weights of a checkpoint",
        )
    if options.resume and options.checkpoint is None:
        raise BackendError("--resume has no directory to resume from", "add --checkpoint DIR")
    require(options.repeat >= 1, "repeat", options.repeat, "1 or more")
    require(options.warmup >= 0, "warmup", options.warmup, "0 or more")
    require(options.init_std > 0, "init_std", options.init_std, "positive")
