"""NeMo RL training data (`train_data_step{N}.jsonl`): one sample per line, with token ids.

A line holds `token_ids`, `token_loss_mask`, `input_lengths`, `rewards`, `advantages` (of each
token, or one number) and `sample_loss_mask`.
"""

import re
from collections.abc import Iterator
from math import nan
from pathlib import Path

import numpy as np

from psrl.traces.recording import Recording

from .assemble import assemble
from .files import read_lines
from .formats import FileHead, Importer
from .options import ImportOptions
from .reading import BadRecords, BoolArray, Record, parse_each, parse_record
from .samples import RecordedSample, mean_advantage, spans_of, token_digest

STEP_IN_NAME = re.compile(r"step_?(\d{1,9})")


def recognise(head: FileHead) -> str | None:
    return head.reason("JSON lines", "token_ids", "token_loss_mask")


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read samples: a hash of the prompt's tokens is the group, a line is a trajectory.

    The RL iteration is the number in the file's name.

    Raises:
        TraceError: at the first malformed line, unless `options.skip_bad`.
    """
    bad = BadRecords(options.skip_bad)
    varying: list[str] = []

    def parse(where: str, raw: tuple[int | None, bytes]) -> RecordedSample:
        return _sample(parse_record(where, raw[1]), raw[0], varying)

    samples = list(parse_each(paths, options.limit, bad, _places, parse))
    notes = ["token ids as recorded; samples with equal prompts form a group"]
    if varying:
        notes.append(
            f"advantages differ between the tokens of {len(varying)} samples: their mean is kept"
        )
    return assemble(samples, None, paths, options, bad, notes, "traj")


NEMO_RL = Importer("JSON lines with 'token_ids' and 'token_loss_mask'", recognise, read, ("traj",))


def _places(path: Path) -> Iterator[tuple[str, tuple[int | None, bytes]]]:
    match = STEP_IN_NAME.search(path.name)
    for where, line in read_lines(path):
        yield where, (int(match[1]) if match else None, line)


def _sample(record: Record, iteration: int | None, varying: list[str]) -> RecordedSample:
    tokens = record.token_ids("token_ids")
    mask = record.mask("token_loss_mask", len(tokens))
    length = record.integer("input_lengths", 0) if record.has("input_lengths") else len(tokens)
    if length > len(tokens):
        raise record.error("input_lengths", f"is {length}, of {len(tokens)} tokens")
    advantage = _advantage(record, mask[:length], varying)
    tokens, mask = tokens[:length], mask[:length]
    if record.has("sample_loss_mask") and record.number("sample_loss_mask", 0) == 0:
        mask = np.zeros(length, np.bool_)
    prompt = tokens[: int(mask.argmax()) if mask.any() else length]
    return RecordedSample(
        symbols=tokens,
        loss_spans=spans_of(mask),
        group_id=token_digest(prompt),
        trajectory_id="",
        advantage=advantage,
        reward=record.number("rewards"),
        iteration=iteration,
    )


def _advantage(record: Record, mask: BoolArray, varying: list[str]) -> float:
    if not record.has("advantages"):
        return nan
    if not isinstance(record.get("advantages"), list):
        return record.number("advantages")
    values = record.numbers("advantages")
    if len(values) < len(mask):
        raise record.error("advantages", f"has {len(values)} entries for {len(mask)} tokens")
    mean, differ = mean_advantage(values[: len(mask)], mask)
    varying += [record.where] if differ else []
    return mean
