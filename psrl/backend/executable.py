"""Whether a plan can be executed: what can be checked before torch is imported or a rank starts."""

from psrl.core.cost.cluster import check_layout
from psrl.core.cost.memory_model import MemoryModel
from psrl.core.errors import ConfigError, PlanError
from psrl.core.plan.check_ops import check_op_patterns
from psrl.core.plan.plan import PHASES, Plan
from psrl.core.samples.trace import Trace

from .options import DTYPE_OF_BYTES, DtypeName, ExecuteOptions, PhaseOptions


def check_executable(plan: Plan, trace: Trace, options: ExecuteOptions) -> None:
    """Check plan, trace and options.

    Raises:
        PlanError: if the plan belongs to another trace, has unknown phases, or ranks that share
            experts run different ops, so that they would wait for each other forever.
        ConfigError: if the model cannot be divided, or an option is wrong.
    """
    phases = {phase for program in plan.programs for phase in program.phases}
    options.check(plan.model, phases)
    working_dtype(plan, options)
    plan.check_trace(trace)
    unknown = sorted(phases - set(PHASES))
    if unknown:
        raise PlanError(f"the plan has unknown phases {unknown}", f"known: {list(PHASES)}")
    check_layout(plan.model, plan.cluster, plan.parallel)
    for index, program in enumerate(plan.programs):
        check_op_patterns(index, program, plan.parallel)
    if "update" in phases and options.num_runs > 1:
        _check_copy(plan)


def _check_copy(plan: Plan) -> None:
    """Whether the copy of the weights that a repeated update keeps fits beside the plan."""
    memory = MemoryModel(plan.model, plan.cluster, plan.parallel)
    copy = memory.weight_bytes_on(plan.parallel.pipeline_model_parallel_size - 1)
    peak = max(int(plan.predicted.get("peak_memory_bytes", 0)), memory.static_bytes)
    limit, gib = plan.cluster.device.memory_bytes, 2**30
    if peak + copy > limit:
        raise ConfigError(
            f"to repeat the update, a copy of the weights ({copy / gib:.2f} GiB) stays on the "
            f"device beside the plan's {peak / gib:.2f} GiB: more than its {limit / gib:.2f} GiB",
            "run it once: --repeat 1 --warmup 0",
        )


def working_dtype(plan: Plan, options: PhaseOptions) -> DtypeName:
    """The precision of an execution.

    Raises:
        ConfigError: if none is chosen and none has the width of the plan's.
    """
    name = options.dtype or DTYPE_OF_BYTES.get(plan.cluster.device.dtype_bytes)
    if name is None:
        raise ConfigError(
            f"no dtype has the plan's {plan.cluster.device.dtype_bytes} bytes",
            f"choose one: --dtype {{{','.join(DTYPE_OF_BYTES.values())}}}",
        )
    return name
