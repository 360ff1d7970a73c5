"""slime rollout dumps (`--save-debug-rollout-data`): torch.save of `rollout_id` and `samples`."""

import re
from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from psrl.traces.recording import Recording

from .assemble import assemble
from .formats import FileHead, Importer
from .options import ImportOptions
from .pickles import load_pickled
from .reading import BadRecords, Record, parse_each
from .samples import RecordedSample, spans_of, token_digest


def recognise(head: FileHead) -> str | None:
    return head.reason("a torch.save file", "rollout_id", "samples")


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read samples: the group is `group_index`, the iteration `rollout_id`.

    Samples with the same `session_id` are the agent steps of one trajectory.

    Raises:
        TraceError: at the first malformed sample, unless `options.skip_bad`.
    """
    bad = BadRecords(options.skip_bad)
    steps: dict[str, int] = {}

    def parse(where: str, raw: tuple[int | None, Any]) -> RecordedSample:
        return _sample(Record.of(raw[1], where), raw[0], steps)

    samples = list(parse_each(paths, options.limit, bad, _places, parse))
    return assemble(samples, None, paths, options, bad, ["token ids as recorded"], None)


SLIME = Importer(
    "a torch.save file with 'rollout_id' and 'samples'", recognise, read, ("recorded",)
)


def _places(path: Path) -> Iterator[tuple[str, tuple[int | None, Any]]]:
    record = Record.of(load_pickled(path), str(path))
    iteration = record.values.get("rollout_id")
    if isinstance(iteration, str) and re.fullmatch(r"\d{1,9}", iteration):
        iteration = int(iteration)
    elif iteration is not None:
        iteration = record.integer("rollout_id", 0)
    for position, value in enumerate(record.items("samples")):
        yield f"{path} sample {position}", (iteration, value)


def _sample(record: Record, iteration: int | None, steps: dict[str, int]) -> RecordedSample:
    tokens = record.token_ids("tokens")
    num_response = record.integer("response_length", 0)
    if num_response > len(tokens):
        raise record.error("response_length", f"is {num_response}, of {len(tokens)} tokens")
    num_prompt = len(tokens) - num_response
    written = np.ones(num_response, np.bool_)
    if record.has("loss_mask"):
        written = record.mask("loss_mask", num_response)
    if record.flag("remove_sample"):
        written = np.zeros(num_response, np.bool_)
    group = (
        record.label("group_index")
        if record.has("group_index")
        else token_digest(tokens[:num_prompt])
    )
    trajectory, step = "", 0
    if record.has("session_id"):
        trajectory = f"{group}/{record.label('session_id')}"
        step = steps.get(trajectory, 0)
        steps[trajectory] = step + 1
    reward = record.values.get("reward")
    return RecordedSample(
        symbols=tokens,
        loss_spans=spans_of(np.concatenate([np.zeros(num_prompt, np.bool_), written])),
        group_id=group,
        trajectory_id=trajectory,
        agent_step=step,
        reward=nan if isinstance(reward, dict) else record.number("reward"),
        environment_s=record.number("non_generation_time", 0),
        iteration=iteration,
    )
