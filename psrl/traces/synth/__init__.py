"""Synthetic traces: seeded generators of agent rollouts with dials and published presets."""

from .generate import synthesise
from .spec import PRESETS, SYNTH_MODES, Distribution, SynthSpec, load_spec

__all__ = ["PRESETS", "SYNTH_MODES", "Distribution", "SynthSpec", "load_spec", "synthesise"]
