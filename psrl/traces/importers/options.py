"""Options of all importers."""

from dataclasses import dataclass

from psrl.core.errors import ConfigError


@dataclass(frozen=True)
class ImportOptions:
    """How to import.

    Attributes:
        block_tokens: tokens per hashed block; None takes the file's own or the format's usual
            size. Only for formats that hold block hashes.
        tokenizer: "qwen" or the path of a tokenizer.json. Only for formats that hold text.
        limit: read at most this many recorded episodes (sessions, requests or conversations).
        skip_bad: leave out malformed records and list them, rather than stop at the first.
        groups_per_iteration: semantic groups per RL iteration, in order of appearance; None
            puts all into one iteration.
        num_mini_batches: optimizer steps per iteration; whole groups are dealt round-robin.
        source, licence: written into the trace; an empty source takes the file names.
    """

    block_tokens: int | None = None
    tokenizer: str = "qwen"
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
