"""The `psrl` command: composes all parts and holds no logic of its own."""

from .main import main

__all__ = ["main"]
