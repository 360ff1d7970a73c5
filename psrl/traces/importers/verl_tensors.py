"""veRL token dumps: TransferQueue batches (`tq_batch.pt`) and pickled `DataProto` objects.

Fields are padded tensors, prompts on the left and responses on the right, or nested ones without
padding. Both hold `input_ids` (prompt and response) and `responses`; `response_mask` tells which
response tokens the model wrote.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

import numpy as np

from psrl.core.errors import TraceError
from psrl.core.samples.sample import FloatArray
from psrl.traces.recording import Recording

from .assemble import assemble
from .formats import FileHead, Importer
from .options import ImportOptions
from .pickles import load_pickled
from .reading import MAX_INTEGER, SKIP_HINT, BadRecords, Record, kind_of, parse_each
from .samples import RecordedSample, mean_advantage, spans_of, token_digest
from .tensors import AnyArray, Jagged, StoredTensor
from .verl_text import split_key

REWARD_FIELDS = ("token_level_scores", "rm_scores", "token_level_rewards")


@dataclass(frozen=True)
class Batch:
    """Rows of one dump.

    Attributes:
        rows: field name to one array per sample.
        keys: group, trajectory and agent step of each sample; None where they are not recorded.
        padding: samples that only fill the batch.
        iteration: RL iteration; None when unknown.
    """

    rows: Mapping[str, list[AnyArray]]
    keys: list[str | None]
    padding: frozenset[int] = frozenset()
    iteration: int | None = None


def recognise_transfer_queue(head: FileHead) -> str | None:
    return head.reason("a torch.save file", "tensordict", "keys", "global_steps")


def recognise_data_proto(head: FileHead) -> str | None:
    return head.reason("a pickled DataProto", "batch", "non_tensor_batch", "meta_info")


def read_transfer_queue(paths: list[Path], options: ImportOptions) -> Recording:
    """Read `tq_batch.pt` files: the keys name group, rollout and agent step."""
    return _read(paths, options, _transfer_queue)


def read_data_proto(paths: list[Path], options: ImportOptions) -> Recording:
    """Read DataProto pickles: the group is `uid`, else a hash of the prompt's tokens."""
    return _read(paths, options, _data_proto)


VERL_TRANSFER_QUEUE = Importer(
    "tq_batch.pt (veRL skip.rollout_tq)",
    recognise_transfer_queue,
    read_transfer_queue,
    ("recorded",),
)
VERL_DATA_PROTO = Importer(
    "a pickled DataProto (veRL save_to_disk)", recognise_data_proto, read_data_proto, ("recorded",)
)


def _read(paths: list[Path], options: ImportOptions, batch_of: Any) -> Recording:
    bad = BadRecords(options.skip_bad)
    varying: list[str] = []

    def places(path: Path) -> Iterator[tuple[str, tuple[Batch, int]]]:
        batch: Batch = batch_of(Record.of(load_pickled(path), str(path)))
        for sample in range(len(batch.keys)):
            if sample not in batch.padding:
                yield f"{path} sample {sample}", (batch, sample)

    def parse(where: str, raw: tuple[Batch, int]) -> RecordedSample:
        return _sample(where, *raw, varying)

    samples = list(parse_each(paths, options.limit, bad, places, parse))
    notes = ["token ids as recorded"]
    if varying:
        notes.append(
            f"advantages differ between the tokens of {len(varying)} samples: their mean is kept"
        )
    return assemble(samples, None, paths, options, bad, notes, None)


def _transfer_queue(record: Record) -> Batch:
    fields = record.child("tensordict")
    keys = record.items("keys")
    for key in keys:
        if not isinstance(key, str):
            raise record.error("keys", f"must hold strings, found {kind_of(key)}")
    tags = record.items("tags") if record.has("tags") else []
    padding = {i for i, tag in enumerate(tags) if isinstance(tag, dict) and tag.get("is_padding")}
    step = record.values.get("global_steps")
    known = type(step) is int and 0 <= step <= MAX_INTEGER
    return Batch(_rows(fields, len(keys)), list(keys), frozenset(padding), step if known else None)


def _data_proto(record: Record) -> Batch:
    fields = record.child("batch")
    input_ids = _rows_of(fields, "input_ids")
    uids: Any = record.child("non_tensor_batch").values.get("uid")
    keys: list[str | None] = [None] * len(input_ids)
    if uids is not None:
        if not isinstance(uids, np.ndarray | list) or len(uids) != len(input_ids):
            raise record.error("non_tensor_batch", f"needs a uid for each of {len(input_ids)} rows")
        keys = [str(uid) for uid in uids]
    meta = record.values.get("meta_info")
    step = meta.get("global_steps") if isinstance(meta, dict) else None
    known = type(step) is int and 0 <= step <= MAX_INTEGER
    return Batch(_rows(fields, len(keys)), keys, iteration=step if known else None)


def _rows(fields: Record, count: int) -> dict[str, list[AnyArray]]:
    """The fields that are needed and there, one array per sample."""
    rows: dict[str, list[AnyArray]] = {}
    needed = ("input_ids", "responses")
    for name in (*needed, "attention_mask", "response_mask", "advantages", *REWARD_FIELDS):
        if name in needed or fields.has(name):
            rows[name] = _rows_of(fields, name)
            if len(rows[name]) != count:
                raise fields.error(name, f"has {len(rows[name])} rows for {count} samples")
    return rows


def _rows_of(fields: Record, name: str) -> list[AnyArray]:
    value = fields.get(name)
    if isinstance(value, Jagged):
        rows = value.rows()
    elif isinstance(value, StoredTensor):
        array = value.array()
        rows = list(array) if array.ndim else []
    elif isinstance(value, list) and all(isinstance(v, StoredTensor) for v in value):
        rows = [tensor.array() for tensor in value]
    else:
        raise fields.error(name, f"must be a tensor, found {type(value).__name__}")
    if any(not isinstance(row, np.ndarray) or row.ndim != 1 for row in rows):
        raise fields.error(name, "must have one row of tokens per sample")
    return rows


def _sample(where: str, batch: Batch, index: int, varying: list[str]) -> RecordedSample:
    row = {name: rows[index] for name, rows in batch.rows.items()}
    ids, num_response = row["input_ids"], len(row["responses"])
    num_prompt = len(ids) - num_response
    attention = row.get("attention_mask", np.ones(len(ids), np.bool_)) != 0
    written = row.get("response_mask", attention[num_prompt:]) != 0
    if num_prompt < 0 or len(attention) != len(ids) or len(written) != num_response:
        raise TraceError(
            f"{where}: {len(ids)} input_ids, {num_response} responses, {len(attention)} entries "
            f"of attention_mask and {len(written)} of response_mask do not fit together",
            SKIP_HINT,
        )
    tokens = ids[attention]
    if ids.dtype.kind not in "iu" or tokens.min(initial=0) < 0:
        raise TraceError(f"{where}: field 'input_ids' holds no token ids", SKIP_HINT)
    mask = np.concatenate([np.zeros(num_prompt, np.bool_), written])[attention]
    advantage = nan
    if "advantages" in row:
        advantage, differ = mean_advantage(_values(where, row, "advantages", num_response), written)
        varying += [where] if differ else []
    rewards = [name for name in REWARD_FIELDS if name in row]
    reward = float(_values(where, row, rewards[0], num_response).sum()) if rewards else nan
    prompt = ids[:num_prompt][attention[:num_prompt]]
    key = batch.keys[index]
    group, trajectory, step = split_key(key) if key else (token_digest(prompt), "", 0)
    return RecordedSample(
        symbols=tokens.astype(np.int64, copy=False),
        loss_spans=spans_of(mask),
        group_id=group,
        trajectory_id=trajectory,
        agent_step=step,
        advantage=advantage,
        reward=reward,
        iteration=batch.iteration,
    )


def _values(where: str, row: Mapping[str, AnyArray], name: str, length: int) -> FloatArray:
    values = row[name].astype(np.float64)
    if len(values) != length or not np.isfinite(values).all() or (np.abs(values) > 1e15).any():
        raise TraceError(
            f"{where}: field '{name}' needs {length} finite numbers, it has {len(values)} entries",
            SKIP_HINT,
        )
    return values
