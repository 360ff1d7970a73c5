"""What veRL loads: registers psRL's engine under `strategy: megatron`.

Name this module in VERL_USE_EXTERNAL_MODULES. It takes the vendor key, which veRL looks up before
its own Megatron engine; an engine whose configuration is no `PsrlEngineConfig` is still veRL's.
"""

from .requirements import check_verl

check_verl()

from verl.workers.engine import EngineRegistry

from .engine import PsrlEngine

EngineRegistry.register(
    model_type="language_model",
    backend="megatron",
    device=["cuda", "cpu"],
    vendor=["nvidia", "cpu"],
)(PsrlEngine)
