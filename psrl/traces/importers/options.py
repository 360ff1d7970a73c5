"""Options of all importers."""

from dataclasses import dataclass
from pathlib import Path

from psrl.core.errors import ConfigError, TraceError

from .files import read_bytes


@dataclass(frozen=True)
class ImportOptions:
    """How to import.

    Attributes:
        mode: sampling mode, where the format offers several; None takes the format's usual one.
        block_tokens: tokens per hashed block; None takes the file's own or the format's usual
            size. Only for formats that hold block hashes.
        tokenizer: "qwen" or the path of a tokenizer.json. Only for formats that hold text.
        prompt_file: text that stood before every episode but is not in the recording, such as
            the few-shot prompt of a text log. Only for formats that leave it out.
        limit: read at most this many recorded episodes (sessions, requests or conversations).
        skip_bad: leave out malformed records and list them, rather than stop at the first.
        groups_per_iteration: semantic groups per RL iteration, in order of appearance; None
            puts all into one iteration, or keeps the recorded iterations.
        num_mini_batches: optimizer steps per iteration; whole groups are dealt round-robin.
        source, licence: written into the trace; an empty source takes the file names.
    """

    mode: str | None = None
    block_tokens: int | None = None
    tokenizer: str = "qwen"
    prompt_file: Path | None = None
    limit: int | None = None
    skip_bad: bool = False
    groups_per_iteration: int | None = None
    num_mini_batches: int = 1
    source: str = ""
    licence: str = "unknown"

    def __post_init__(self) -> None:
        for name in ("block_tokens", "limit", "groups_per_iteration", "num_mini_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}", "give a whole number of at least 1")

    def prompt_text(self) -> str:
        """Content of the prompt file; empty without one."""
        if self.prompt_file is None:
            return ""
        try:
            return read_bytes(self.prompt_file).decode("utf-8")
        except UnicodeDecodeError as error:
            raise TraceError(
                f"{self.prompt_file}: invalid UTF-8 at offset {error.start}", "give a text file"
            ) from None
