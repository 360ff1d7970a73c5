"""Checks that the installed veRL is the one that this adapter was written for."""

from importlib import metadata
from importlib.util import find_spec

from psrl.core.errors import ConfigError

VERL_VERSION = "0.9.1"

UNDECLARED = {
    "cachetools": "cachetools",
    "fastapi": "fastapi",
    "transfer_queue": "TransferQueue",
    "uvicorn": "uvicorn",
}
"""Modules that veRL's trainer and workers import without declaring them, and their packages."""


def check_verl() -> None:
    """Check version and undeclared dependencies, without importing veRL.

    Raises:
        ConfigError: naming what is installed, what is needed, and the command that fixes it.
    """
    try:
        version = metadata.version("verl")
    except metadata.PackageNotFoundError:
        version = "none"
    if version != VERL_VERSION:
        raise ConfigError(
            f"psRL's engine is written for verl {VERL_VERSION}, installed: {version}",
            f"pip install 'verl=={VERL_VERSION}', or unset VERL_USE_EXTERNAL_MODULES to run "
            "without psRL",
        )
    missing = [package for module, package in UNDECLARED.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"verl {VERL_VERSION} needs packages that it does not declare; missing: "
            f"{', '.join(missing)}",
            "pip install 'psrl[verl]', or: pip install " + " ".join(missing),
        )
