"""What veRL loads: psRL's configuration of the Megatron engine, and the engine that it chooses.

Name this module in VERL_USE_EXTERNAL_MODULES. It registers `MegatronEngine` under the vendor key,
which veRL looks up before its own Megatron engine. Whoever reads a `PsrlEngineConfig` imports it
too, so a process whose environment lacks the variable does not train with veRL's engine.
"""

from psrl.integrations.verl.settings.refusals import check_verl

check_verl()

import logging
import warnings
from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import McoreEngineConfig
from verl.workers.engine import BaseEngine, EngineRegistry

from .engine import PsrlEngine

logger = logging.getLogger(__name__)


@dataclass
class PsrlEngineConfig(McoreEngineConfig):
    """Chooses psRL for the actor or reference that has it as `megatron._target_`.

    Attributes:
        psrl: options, see `psrl.integrations.verl.settings.options.PsrlOptions`.
        dtype: also float32, which the Megatron engine refuses.
    """

    psrl: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wanted = self.dtype
        if wanted == "float32":
            self.__dict__["dtype"] = "bfloat16"  # what the base class lets pass
        with warnings.catch_warnings():
            # The default asks for sequence parallelism, which one tensor-parallel rank cannot have.
            warnings.filterwarnings("ignore", "set sequence parallel to false")
            super().__post_init__()
        self.__dict__["dtype"] = wanted


@EngineRegistry.register(
    model_type="language_model",
    backend="megatron",
    device=["cuda", "cpu"],
    vendor=["nvidia", "cpu"],
)
class MegatronEngine(BaseEngine):
    """psRL's engine for a `PsrlEngineConfig`, veRL's own for any other configuration."""

    def __new__(cls, *, engine_config: Any, **kwargs: Any) -> Any:
        if isinstance(engine_config, PsrlEngineConfig):
            return PsrlEngine(engine_config=engine_config, **kwargs)
        logger.warning(
            "psRL is loaded, but an engine's megatron._target_ is %s: veRL's own engine runs it",
            type(engine_config).__name__,
        )
        return EngineRegistry._engines["language_model"]["megatron"]["cuda"](
            engine_config=engine_config, **kwargs
        )
