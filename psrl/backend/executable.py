"""Whether a plan can be executed: what can be checked before torch is imported or a rank starts."""

from psrl.core.cost.cluster import check_layout
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
