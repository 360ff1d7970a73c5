"""The chat format and its tokens."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.core.errors import ConfigError, TraceError
from psrl.traces.chat_template import IM_END, IM_START, Message, ToolCall, Turn, render, turns_text
from psrl.traces.tokenizer import MAX_BLANK_RUN, load_tokenizer

GOLDEN = """<|im_start|>system
Be brief.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"name": "add"}
{"name": "caf\u00e9"}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
<|im_start|>user
1 + 2?<|im_end|>
<|im_start|>assistant
Let me see.
<tool_call>
{"name": "add", "arguments": {"a": 1}}
</tool_call>
<tool_call>
{"name": "add", "arguments": {"b": 2}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
3
</tool_response>
<tool_response>
4
</tool_response><|im_end|>
<|im_start|>assistant
<tool_call>
{"name": "stop", "arguments": {}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
5
</tool_response><|im_end|>
<|im_start|>assistant
7<|im_end|>
"""

CONVERSATION = [
    Message("system", "Be brief."),
    Message("user", "1 + 2?"),
    Message("assistant", "Let me see.", (ToolCall("add", '{"a": 1}'), ToolCall("add", '{"b": 2}'))),
    Message("tool", "3"),
    Message("tool", "4"),
    Message("assistant", "", (ToolCall("stop", "{}"),)),
    Message("tool", "5"),
    Message("assistant", "7"),
]


def test_golden_conversation() -> None:
    turns = render(CONVERSATION, [{"name": "add"}, {"name": "caf\u00e9"}])
    assert turns_text(turns) == GOLDEN


def test_default_system_prompt_and_later_system_message() -> None:
    text = turns_text(render([Message("user", "Hi"), Message("system", "Stop.")]))
    assert text == (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>system\nStop.<|im_end|>\n"
    )


def test_only_assistant_turns_have_a_response_and_it_ends_the_turn() -> None:
    turns = render(CONVERSATION)
    trained = [turns_text([Turn((), t.response)]) for t in turns if t.response]
    assert trained[-1] == "7<|im_end|>"
    assert trained[1] == '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call><|im_end|>'
    assert len(trained) == 3


messages = st.lists(
    st.builds(
        Message,
        st.sampled_from(["system", "user", "assistant", "tool"]),
        st.text(st.sampled_from("\n <|im_end|>e\u0301"), max_size=8),
    ),
    max_size=6,
)


@given(messages, messages)
def test_turns_do_not_depend_on_later_ones(before: list[Message], after: list[Message]) -> None:
    before = [*before, Message("assistant", "x")]
    turns = render(before)
    assert render(before + after)[: len(turns)] == turns


@given(st.text(st.sampled_from("<|im_startend>tool_call/ \n"), max_size=40))
def test_special_tokens_in_text_stay_text(byte_tokenizer: str, text: str) -> None:
    tokenizer = load_tokenizer(byte_tokenizer)
    hostile = text + "<|im_end|><tool_call>"
    ids = tokenizer.encode([IM_START, hostile, IM_END])
    assert ids[0] == 256
    assert ids[-1] == 257
    assert len(ids) == 2 + len(hostile.encode())
    assert ids[1:-1].max() < 256


def test_markers_without_a_token_join_the_text(byte_tokenizer: str) -> None:
    tokenizer = load_tokenizer(byte_tokenizer)
    call = render([Message("assistant", "", (ToolCall("f", "{}"),))])[1].response
    assert tokenizer.encode(call)[0] == 258
    plain = type(tokenizer)("plain", {"<|im_end|>": 257}, tokenizer.encode_text)
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert plain.encode(call).tolist() == [*tokenizer.encode_text(text), 257]


@pytest.mark.slow
def test_qwen_vocabulary() -> None:
    pytest.importorskip("tiktoken")
    pytest.importorskip("dashscope")
    tokenizer = load_tokenizer("qwen")
    assert tokenizer.encode([IM_START, "user\nhello", IM_END, "\n"]).tolist() == [
        151644,
        872,
        198,
        14990,
        151645,
        198,
    ]
    assert tokenizer.encode(["<|im_end|>"]).tolist() == [27, 91, 318, 6213, 91, 29]
    composed, decomposed = tokenizer.encode(["caf\u00e9"]), tokenizer.encode(["cafe\u0301"])
    assert composed.tolist() == decomposed.tolist()
    assert tokenizer.encode([]).dtype == np.int64
    with pytest.raises(TraceError, match="blanks in a row"):
        tokenizer.encode([" " * MAX_BLANK_RUN])


def test_tokenizer_errors(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="neither 'qwen' nor a file"):
        load_tokenizer("quen")
    pytest.importorskip("tokenizers")
    broken = tmp_path_factory.mktemp("broken") / "tokenizer.json"
    for content in (b"\xff", b"[]", b"{}", b'{"added_tokens": [3]}'):
        broken.write_bytes(content)
        with pytest.raises(ConfigError, match=r"not a usable tokenizer\.json"):
            load_tokenizer(str(broken))
    broken.write_text(
        '{"added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
    )
    with pytest.raises(ConfigError, match=r"no special token <\|im_start\|> and no <\|im_end\|>"):
        load_tokenizer(str(broken))
    monkeypatch.setattr("psrl.traces.tokenizer.find_spec", lambda name: None)
    assert "tiktoken" not in sys.builtin_module_names
    with pytest.raises(ConfigError, match="pip install tiktoken dashscope"):
        load_tokenizer("qwen")
