"""The Qwen2.5 chat format: messages to turns, each cut where training needs a border.

A turn is rendered without looking at later turns, and borders fall where a sampler stops and
starts tokenising. So the prompt of a model call starts with the previous call, token by token.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
DEFAULT_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
THINK_END = "</think>"
TOOLS_BEFORE = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
# Two parts with markers between them: in the official vocabulary these are single tokens.
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and "
    "arguments within "
)
TOOLS_EXAMPLE = '\n{"name": <function-name>, "arguments": <args-json-object>}\n'


@dataclass(frozen=True)
class ToolCall:
    """A call in an assistant message; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        tool_calls, reasoning: only with role assistant; reasoning is rendered as
            `<think>...</think>` before the content.
        is_trained: False for an assistant message that the model did not write in this episode.
        is_summary: it stands for everything between the system message and itself.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    is_trained: bool = True
    is_summary: bool = False


@dataclass(frozen=True)
class Marker:
    """Markup of the format: one token where the vocabulary has it, else text like any other."""

    text: str


Piece = str | Marker
IM_START, IM_END = Marker("<|im_start|>"), Marker("<|im_end|>")
CALL_START, CALL_END = Marker("<tool_call>"), Marker("</tool_call>")


@dataclass(frozen=True)
class Turn:
    """A rendered turn: `before` and `after` are context, `response` is what the model wrote.

    Only assistant turns have a response; it ends with the end-of-turn marker.

    Attributes:
        shortened: the response as later prompts show it when they leave thinking out; None when
            it has none.
        is_summary: the turns between the first one and this one may be dropped.
    """

    before: tuple[Piece, ...]
    response: tuple[Piece, ...] = ()
    after: tuple[Piece, ...] = ()
    shortened: tuple[Piece, ...] | None = None
    is_summary: bool = False


def render(messages: Sequence[Message], tools: Sequence[Any] = ()) -> list[Turn]:
    """Turns of a conversation.

    The first system message, or the format's default one, carries the tools. Consecutive tool
    results form one user turn.
    """
    rest = list(messages)
    system = DEFAULT_SYSTEM
    if rest and rest[0].role == "system":
        system = rest.pop(0).content
    turns = [_context("system", system, *(_tool_list(tools) if tools else ()))]
    position = 0
    while position < len(rest):
        message = rest[position]
        position += 1
        if message.role == "assistant":
            turns.append(_assistant_turn(message))
        elif message.role == "tool":
            results = [message.content]
            while position < len(rest) and rest[position].role == "tool":
                results.append(rest[position].content)
                position += 1
            body = "\n".join(f"<tool_response>\n{r}\n</tool_response>" for r in results)
            turns.append(_context("user", body))
        else:
            turns.append(
                replace(_context(message.role, message.content), is_summary=message.is_summary)
            )
    return turns


def turns_text(turns: Sequence[Turn]) -> str:
    """The text of turns, markers written out."""
    pieces = (p for t in turns for p in (*t.before, *t.response, *t.after))
    return "".join(p if isinstance(p, str) else p.text for p in pieces)


def dump_json(value: Any) -> str:
    """JSON text as the format writes it."""
    return json.dumps(value, ensure_ascii=False)


def _context(role: str, content: str, *more: Piece) -> Turn:
    return Turn((IM_START, f"{role}\n{content}", *more, IM_END, "\n"))


def _tool_list(tools: Sequence[Any]) -> tuple[Piece, ...]:
    listed = "".join("\n" + dump_json(tool) for tool in tools)
    before = TOOLS_BEFORE + listed + TOOLS_AFTER
    example = (CALL_START, TOOLS_EXAMPLE, CALL_END)
    return (before, CALL_START, CALL_END, " XML tags:\n", *example)


def _assistant_turn(message: Message) -> Turn:
    response = (*_assistant(message), IM_END)
    start: tuple[Piece, ...] = (IM_START, "assistant\n")
    if not message.is_trained:
        return Turn((*start, *response, "\n"))
    shortened = None
    if message.reasoning or THINK_END in message.content:
        content = message.content.rpartition(THINK_END)[2].lstrip("\n")
        plain = replace(message, content=content, reasoning="")
        shortened = (*_assistant(plain), IM_END)
    return Turn(start, response, ("\n",), shortened)


def _assistant(message: Message) -> list[Piece]:
    pieces: list[Piece] = []
    if message.reasoning:
        pieces.append(f"<think>\n{message.reasoning}\n{THINK_END}\n\n")
    if message.content:
        pieces.append(message.content)
    for position, call in enumerate(message.tool_calls):
        if message.content or position:
            pieces.append("\n")
        body = f'\n{{"name": "{call.name}", "arguments": {call.arguments}}}\n'
        pieces += [CALL_START, body, CALL_END]
    return pieces
