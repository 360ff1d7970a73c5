"""Replay a plan op by op in simulated time and memory."""

from .breakdown import sharing_bounds, speedup_factors
from .engine import simulate
from .memory import OutOfMemory, out_of_memory

__all__ = [
    "OutOfMemory",
    "out_of_memory",
    "sharing_bounds",
    "simulate",
    "speedup_factors",
]
