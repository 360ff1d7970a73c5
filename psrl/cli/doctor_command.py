"""`psrl doctor`: what is installed, and whether it works together."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl.core.errors import ExitCode
from psrl.core.run.run_directory import environment_versions

from .output import OutputOptions

_NEEDED_FOR = {
    "torch": ("execute", "pip install 'psrl[backend]'"),
    "megatron": ("execute", "pip install 'psrl[backend]'"),
    "tiktoken": ("trace import of text", "pip install 'psrl[tokenizer]'"),
    "dashscope": ("the Qwen vocabulary", "pip install 'psrl[tokenizer]'"),
}


@dataclass(frozen=True)
class Doctor:
    """Report versions, devices and missing parts of this installation."""

    output: OutputOptions

    def run(self) -> ExitCode:
        missing = {
            name: f"needed for {purpose}: {cure}"
            for name, (purpose, cure) in _NEEDED_FOR.items()
            if importlib.util.find_spec(name) is None
        }
        result: dict[str, Any] = {
            "versions": environment_versions(),
            "cpu_count": os.cpu_count(),
            "devices": _cuda_devices(),
            "missing": missing,
            "warnings": _shadowing(),
        }
        lines = [f"{name:<16}{version}" for name, version in result["versions"].items()]
        lines.append(f"{'devices':<16}{', '.join(result['devices']) or 'CPU only'}")
        lines += [f"missing {name} ({why})" for name, why in missing.items()]
        lines += [f"warning: {text}" for text in result["warnings"]]
        self.output.emit(result, "\n".join(lines))
        return ExitCode.OK


def _cuda_devices() -> list[str]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _shadowing() -> list[str]:
    """The repository root on sys.path would hide Hugging Face's `kernels` behind our link."""
    found = importlib.util.find_spec("kernels")
    ours = Path(__file__).resolve().parents[1] / "kernels" / "__init__.py"
    if found is None or found.origin is None or Path(found.origin).resolve() != ours:
        return []
    return ["`import kernels` finds psRL's folder: set PYTHONSAFEPATH=1"]
