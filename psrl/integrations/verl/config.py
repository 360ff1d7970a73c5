"""veRL's configuration of the Megatron engine, with psRL's options."""

import warnings
from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import McoreEngineConfig


@dataclass
class PsrlEngineConfig(McoreEngineConfig):
    """Chooses psRL for the actor or reference that has it as `megatron._target_`.

    Attributes:
        psrl: options, see `psrl.integrations.verl.options.PsrlOptions`.
        dtype: also float32, which the Megatron engine refuses.
    """

    psrl: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Where the environment variable was forgotten, veRL's engine would take this configuration.
        from . import plugin  # noqa: F401

        wanted = self.dtype
        if wanted == "float32":
            self.__dict__["dtype"] = "bfloat16"  # what the base class lets pass
        with warnings.catch_warnings():
            # The default asks for sequence parallelism, which one tensor-parallel rank cannot have.
            warnings.filterwarnings("ignore", "set sequence parallel to false")
            super().__post_init__()
        self.__dict__["dtype"] = wanted
