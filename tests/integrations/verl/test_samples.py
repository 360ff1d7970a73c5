"""Whole samples of veRL's layouts; needs no veRL."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.errors import BackendError
from psrl.integrations.verl.batch.samples import response_values, whole_samples
from tests.integrations.verl.batches import Rows, fields, ragged

PROMPTS = [np.array([5, 6]), np.array([5, 6, 7]), np.array([9])]
RESPONSES = [np.array([1, 2, 3, 4]), np.array([8, 8]), np.array([], int)]
MASKS = [np.array([1, 0, 1, 1]), np.array([0, 0]), np.array([], int)]


def padded(prompts: Rows, responses: Rows, masks: Rows) -> dict[str, Any]:
    """veRL's older layout: prompts padded on the left, responses on the right."""
    found = fields(prompts, responses, masks)
    before, after = (max(map(len, rows)) for rows in (prompts, responses))

    def rows_of(rows: Rows, width: int, left: bool) -> torch.Tensor:
        out = np.zeros((len(rows), width), np.int64)
        for i, row in enumerate(rows):
            out[i, slice(width - len(row), width) if left else slice(len(row))] = row
        return torch.from_numpy(out)

    ones = [[np.ones_like(r) for r in rows] for rows in (prompts, responses)]
    return found | {
        "prompts": rows_of(prompts, before, True),
        "responses": rows_of(responses, after, False),
        "response_mask": rows_of(masks, after, False),
        "attention_mask": torch.cat(
            [rows_of(ones[0], before, True), rows_of(ones[1], after, False)], dim=1
        ),
    }


@pytest.mark.parametrize("layout", [fields, padded])
def test_trained_tokens_are_spans_of_the_sample(layout: Any) -> None:
    samples = whole_samples(layout(PROMPTS, RESPONSES, MASKS), ["a", "a", "b"])
    assert samples.kept.tolist() == [0], "the others have no trained token"
    assert samples.batch.sample_loss_spans(0).tolist() == [[2, 3], [4, 6]]
    assert samples.batch.sample_symbols(0).tolist() == [5, 6, 1, 2, 3, 4]
    assert samples.batch.group_id.tolist() == ["a"]
    assert samples.position.tolist() == [1, 3, 4]
    assert samples.response_position.tolist() == [0, 2, 3]


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.lists(st.booleans(), max_size=6)), min_size=1, max_size=6
    )
)
def test_values_reach_the_place_where_verl_reads_them(rows: list[tuple[int, list[bool]]]) -> None:
    prompts = [np.arange(n) for n, _ in rows]
    masks = [np.array(mask, np.int64) for _, mask in rows]
    data = fields(prompts, masks, masks)
    samples = whole_samples(data)
    values = 1.0 + torch.arange(len(samples.loss_tokens))
    output = samples.to_output(values)
    # As veRL cuts responses out of model outputs: the value at t belongs to token t + 1.
    cut = [
        row[n - 1 : n - 1 + len(mask)] for row, (n, mask) in zip(output.unbind(), rows, strict=True)
    ]
    flat = torch.cat(cut)
    assert flat[torch.from_numpy(np.concatenate(masks)) != 0].tolist() == values.tolist()
    assert float(output.values().sum()) == float(values.sum())
    data["advantages"] = ragged([np.arange(len(m)) for m in masks], torch.float32)
    inside = response_values(data, "advantages")[samples.response_position]
    assert torch.equal(inside, samples.of_response(data, "advantages"))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompts": ragged([PROMPTS[0], np.array([], int), PROMPTS[2]])}, "another length|empty"),
        ({"responses": ragged([*RESPONSES[:2], np.array([1])])}, "sample 2 has another length"),
        ({"responses": ragged(RESPONSES[:2])}, "3 input_ids, but 2 responses"),
        ({"response_mask": ragged(MASKS[:2])}, None),
        ({"response_mask": ragged(MASKS[:1])}, "response_mask has 4 entries for 6"),
        ({"position_ids": ragged([np.zeros(6), np.arange(5), [0]])}, "position_ids do not count"),
        ({"position_ids": torch.zeros(3, 4)}, "position_ids do not count"),
        ({"input_ids": torch.zeros(3, 4)}, "use_remove_padding=True"),
        ({"prompts": None}, "no field 'prompts'"),
    ],
)
def test_fields_that_do_not_fit_are_refused(changed: dict[str, Any], message: str | None) -> None:
    data = {k: v for k, v in (fields(PROMPTS, RESPONSES, MASKS) | changed).items() if v is not None}
    if message is None:  # an empty response has no entry to lack
        whole_samples(data)
        return
    with pytest.raises(BackendError, match=message):
        whole_samples(data)


def test_empty_prompt_is_refused() -> None:
    data = fields([PROMPTS[0], np.array([], int)], RESPONSES[:2], MASKS[:2])
    with pytest.raises(BackendError, match="sample 1 has an empty prompt"):
        whole_samples(data)


def test_batch_without_samples_is_refused() -> None:
    empty = torch.nested.nested_tensor_from_jagged(torch.zeros(0), torch.tensor([0]))
    names = ("input_ids", "prompts", "responses", "response_mask")
    with pytest.raises(BackendError, match="no sample"):
        whole_samples(dict.fromkeys(names, empty))
