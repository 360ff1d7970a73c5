"""Replay a plan op by op in simulated time and memory."""

from .breakdown import least_work, speedup_factors
from .memory import OutOfMemory, out_of_memory
from .options import SimOptions, chosen_engine
from .replay.engine import OnProgress, Progress, simulate

__all__ = [
    "OnProgress",
    "OutOfMemory",
    "Progress",
    "SimOptions",
    "chosen_engine",
    "least_work",
    "out_of_memory",
    "simulate",
    "speedup_factors",
]
