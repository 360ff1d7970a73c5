"""What an importer returns: the samples of a recorded rollout and where they come from."""

from dataclasses import dataclass

from psrl.core.samples.sample import SampleBatch


@dataclass(frozen=True)
class Recording:
    """Samples read from recorded files.

    Attributes:
        batches: one per RL iteration; all have the very same symbol table.
        source: where the data come from; licence: under which terms.
        sampling_mode: how the samples were cut from the episodes, e.g. "step".
        notes: what the importer had to assume.
        skipped: one message per record that was left out because it was malformed.
    """

    batches: tuple[SampleBatch, ...]
    source: str
    licence: str
    sampling_mode: str
    notes: str
    skipped: tuple[str, ...] = ()
