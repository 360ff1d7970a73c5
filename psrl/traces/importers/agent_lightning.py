"""Agent Lightning rollouts: JSON lines with `triplets` of prompt, response and reward.

Prompt and response hold `token_ids`. A triplet is one model call.
"""

from math import nan
from pathlib import Path

import numpy as np

from psrl.traces.recording import Recording

from .assemble import assemble
from .files import read_lines
from .formats import FileHead, Importer
from .options import ImportOptions
from .reading import BadRecords, Record, parse_each, parse_record
from .samples import RecordedSample, token_digest


def recognise(head: FileHead) -> str | None:
    return head.reason("JSON lines", "rollout_id", "triplets")


def read(paths: list[Path], options: ImportOptions) -> Recording:
    """Read rollouts: `data_id` is the group, else a hash of the first prompt.

    The reward is `final_reward`, else that of the last triplet that has one.

    Raises:
        TraceError: at the first malformed line, unless `options.skip_bad`.
    """
    bad = BadRecords(options.skip_bad)

    def parse(where: str, line: bytes) -> list[RecordedSample]:
        return _rollout(parse_record(where, line))

    rollouts = parse_each(paths, options.limit, bad, read_lines, parse)
    samples = [sample for rollout in rollouts for sample in rollout]
    return assemble(samples, None, paths, options, bad, ["token ids as recorded"])


AGENT_LIGHTNING = Importer("JSON lines with 'rollout_id' and 'triplets'", recognise, read)


def _rollout(record: Record) -> list[RecordedSample]:
    triplets = record.children("triplets", "triplet")
    calls = [
        (t.child("prompt").token_ids("token_ids"), t.child("response").token_ids("token_ids"))
        for t in triplets
    ]
    rewards = [t.number("reward") for t in triplets if t.has("reward")]
    reward = record.number("final_reward") if record.has("final_reward") else nan
    if np.isnan(reward) and rewards:
        reward = rewards[-1]
    group = record.label("data_id") if record.has("data_id") else ""
    iteration = record.integer("step", 0) if record.has("step") else None
    name = record.label("rollout_id")
    return [
        RecordedSample(
            symbols=np.concatenate([prompt, response]),
            loss_spans=((len(prompt), len(prompt) + len(response)),)
            if len(prompt) and len(response)
            else (),
            group_id=group or token_digest(calls[0][0]),
            trajectory_id=name,
            agent_step=step,
            reward=reward,
            iteration=iteration,
        )
        for step, (prompt, response) in enumerate(calls)
    ]
