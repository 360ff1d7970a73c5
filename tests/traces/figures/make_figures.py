"""Makes the traces beside this file from public recordings, so that figures can be checked.

    python tests/traces/figures/make_figures.py FOLDER

FOLDER holds the recordings under the names below. A trace keeps what its figure depends on:
lengths and sharing, and for agents which calls belong to which trajectory and task. It has
anonymous blocks, no text, token ids, hashes, times or rewards.
"""

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from psrl.core.samples.sample import SampleBatch
from psrl.core.samples.trace import write_trace
from psrl.traces.blocks import to_blocks
from psrl.traces.importers import ImportOptions, import_recording
from psrl.traces.modes import derive

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Figure:
    """A trace and where its recording is published."""

    name: str
    files: tuple[str, ...]
    source: str
    licence: str
    prompt_file: str | None = None
    is_agent: bool = True


FIGURES = (
    Figure(
        "mooncake_conversation",
        ("mooncake/conversation_trace.jsonl",),
        "GitHub kvcache-ai/Mooncake at 3b5a59413395, FAST25-release/traces",
        "Apache-2.0",
        is_agent=False,
    ),
    Figure(
        "mooncake_synthetic",
        ("mooncake/synthetic_trace.jsonl",),
        "GitHub kvcache-ai/Mooncake at 3b5a59413395, FAST25-release/traces",
        "Apache-2.0",
        is_agent=False,
    ),
    Figure(
        "alfworld",
        (
            "knowagent/KnowAgentALFWorld_llama-2-13b_D0.jsonl",
            "knowagent/KnowAgentALFWorld_llama-2-13b_D1.jsonl",
            "knowagent/ALFWorld_processed_knowagent.jsonl",
        ),
        "GitHub zjunlp/KnowAgent at 82bc535f1ef2, Self-Learning/trajs/datas",
        "Apache-2.0",
    ),
    Figure(
        "webshop",
        ("react_webshop/webshop_react_log.txt",),
        "GitHub ysymyth/ReAct at 6bdb3a1fd38b, WebShop notebook",
        "MIT",
        prompt_file="react_webshop/prompt_1shot.txt",
    ),
)


def make_figure(figure: Figure, folder: Path) -> int:
    """Write one trace; returns its size in bytes."""
    prompt = None if figure.prompt_file is None else folder / figure.prompt_file
    options = ImportOptions(tokenizer="qwen", prompt_file=prompt)
    paths = [folder / name for name in figure.files]
    (batch,) = import_recording(paths, None, options).batches
    batch = without_labels(to_blocks(batch), figure.is_agent)
    directory = HERE / figure.name
    shutil.rmtree(directory, ignore_errors=True)
    write_trace(
        directory,
        # A trajectory says in one sample what its calls repeat.
        [derive(batch, "traj", "step") if figure.is_agent else batch],
        source=figure.source,
        licence=figure.licence,
        sampling_mode="traj" if figure.is_agent else "step",
        notes="lengths and sharing of the whole recording, in anonymous blocks",
    )
    return sum(file.stat().st_size for file in directory.iterdir())


def without_labels(batch: SampleBatch, is_agent: bool) -> SampleBatch:
    """The batch with numbers for names, and nothing that sharing does not depend on."""
    count = batch.num_samples
    unknown, zero = np.full(count, np.nan), np.zeros(count, np.int64)
    bare = replace(
        batch,
        advantage=np.ones(count),
        reward=unknown,
        arrival_s=unknown,
        generate_s=unknown,
        environment_s=unknown,
    )
    if is_agent:
        return replace(
            bare,
            group_id=np.unique(batch.group_id, return_inverse=True)[1].astype(np.str_),
            trajectory_id=np.unique(batch.trajectory_id, return_inverse=True)[1].astype(np.str_),
        )
    return replace(
        bare,
        group_id=zero.astype(np.str_),
        trajectory_id=zero.astype(np.str_),
        loss_spans=np.empty((0, 2), np.int64),
        loss_span_offsets=np.zeros(count + 1, np.int64),
    )


if __name__ == "__main__":
    for figure in FIGURES:
        print(f"{figure.name}: {make_figure(figure, Path(sys.argv[1]))} bytes")
