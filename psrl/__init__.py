"""psRL: replay, plan, simulate and execute prefix-sharing RL training.

The names below are the library (docs/api.md). Each is loaded when it is first used: importing this
package loads nothing else, neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from psrl.analysis.report.report import write_report
    from psrl.api.comparison import PolicyComparison, compare
    from psrl.api.execution import execute, verify
    from psrl.api.inputs import load_plan, load_setup, load_trace
    from psrl.api.plans import check_plan, explain, make_plan
    from psrl.api.runs import Run, simulate
    from psrl.backend.options import ExecuteOptions
    from psrl.core.errors import PsrlError
    from psrl.core.plan.plan import Plan
    from psrl.core.run.config import Setup
    from psrl.core.samples.sample import SampleBatch, make_batch
    from psrl.core.samples.trace import Trace, write_trace
    from psrl.sim.options import SimOptions

__version__ = "0.1.0"

__all__ = [
    "ExecuteOptions",
    "Plan",
    "PolicyComparison",
    "PsrlError",
    "Run",
    "SampleBatch",
    "Setup",
    "SimOptions",
    "Trace",
    "check_plan",
    "compare",
    "execute",
    "explain",
    "load_plan",
    "load_setup",
    "load_trace",
    "make_batch",
    "make_plan",
    "simulate",
    "verify",
    "write_report",
    "write_trace",
]

_HOME = {
    "ExecuteOptions": "psrl.backend.options",
    "Plan": "psrl.core.plan.plan",
    "PolicyComparison": "psrl.api.comparison",
    "PsrlError": "psrl.core.errors",
    "Run": "psrl.api.runs",
    "SampleBatch": "psrl.core.samples.sample",
    "Setup": "psrl.core.run.config",
    "SimOptions": "psrl.sim.options",
    "Trace": "psrl.core.samples.trace",
    "check_plan": "psrl.api.plans",
    "compare": "psrl.api.comparison",
    "execute": "psrl.api.execution",
    "explain": "psrl.api.plans",
    "load_plan": "psrl.api.inputs",
    "load_setup": "psrl.api.inputs",
    "load_trace": "psrl.api.inputs",
    "make_batch": "psrl.core.samples.sample",
    "make_plan": "psrl.api.plans",
    "simulate": "psrl.api.runs",
    "verify": "psrl.api.execution",
    "write_report": "psrl.analysis.report.report",
    "write_trace": "psrl.core.samples.trace",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'psrl' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
