"""What a command says: text for people on stdout, or one JSON object with `--json`."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from psrl.core.run.run_directory import finite


@dataclass(frozen=True)
class OutputOptions:
    """Options that every command has."""

    json: Annotated[bool, tyro.conf.arg(help="print one JSON object on stdout, nothing else")] = (
        False
    )
    quiet: Annotated[bool, tyro.conf.arg(help="no progress on stderr")] = False

    def emit(self, result: dict[str, Any], text: str) -> None:
        """Print the result of a command."""
        if self.json:
            print(json.dumps(finite(result), sort_keys=True, allow_nan=False))
        else:
            print(text)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Say on stderr what goes on, and how long it took."""
        if self.quiet or self.json:
            yield
            return
        print(f"{what} ...", end="", file=sys.stderr, flush=True)
        started_s = time.perf_counter()
        try:
            yield
        except BaseException:
            print(" failed", file=sys.stderr, flush=True)
            raise
        print(f" {time.perf_counter() - started_s:.1f} s", file=sys.stderr, flush=True)
