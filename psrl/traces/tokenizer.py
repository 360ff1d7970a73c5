"""Tokenizers for recorded text, loaded only when a trace holds text.

Message content is always encoded as ordinary text: special tokens written in it stay text.
"""

import base64
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from psrl.core.errors import ConfigError, TraceError
from psrl.core.samples.sample import IntArray

from .chat_template import IM_END, IM_START, Piece

# How the Qwen vocabularies cut text before byte-pair merging.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_VOCABULARY_SIZE = 151643
QWEN_SPECIAL = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<tool_call>": 151657,
    "</tool_call>": 151658,
}
# tiktoken's regular expressions panic between half a million and a million blanks in a row.
MAX_BLANK_RUN = 200_000


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary.

    Attributes:
        name: the specification it was loaded from, without folders.
        special: token id of each special token.
        encode_text: token ids of ordinary text; never a special token.
    """

    name: str
    special: Mapping[str, int]
    encode_text: Callable[[str], list[int]]

    def encode(self, pieces: Sequence[Piece]) -> IntArray:
        """[n] token ids; neighbouring text is encoded as one, markers outside it."""
        ids: list[int] = []
        text = ""
        for piece in pieces:
            if isinstance(piece, str):
                text += piece
            elif piece.text in self.special:
                ids += self._plain(text)
                ids.append(self.special[piece.text])
                text = ""
            else:
                text += piece.text
        return np.array(ids + self._plain(text), np.int64)

    def _plain(self, text: str) -> list[int]:
        if len(text) >= MAX_BLANK_RUN and re.search(rf"\s{{{MAX_BLANK_RUN}}}", text):
            raise TraceError(
                f"a text has {MAX_BLANK_RUN} or more blanks in a row, too many for the tokenizer",
                "shorten the run in the recording",
            )
        return self.encode_text(text) if text else []


def load_tokenizer(spec: str) -> Tokenizer:
    """Load "qwen" (the vocabulary that the dashscope package ships) or a tokenizer.json.

    Raises:
        ConfigError: if a package is missing, or the file is no tokenizer with the special tokens
            of the chat format.
    """
    if spec == "qwen":
        return _load_qwen()
    path = Path(spec)
    if not path.is_file():
        raise ConfigError(
            f"tokenizer '{spec}' is neither 'qwen' nor a file",
            "give 'qwen' or the path of a Hugging Face tokenizer.json",
        )
    return _load_hugging_face(path)


def _load_qwen() -> Tokenizer:
    _require("tiktoken", "dashscope")
    import tiktoken

    package = find_spec("dashscope")
    folders = package.submodule_search_locations if package else None
    path = Path(next(iter(folders or [""]))) / "resources" / "qwen.tiktoken"
    try:
        lines = path.read_bytes().split(b"\n")
        ranks = {base64.b64decode(a): int(b) for a, b in (x.split() for x in lines if x)}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the installed dashscope has no usable {path.name} ({error})",
            "run: pip install --force-reinstall dashscope",
        ) from None
    if len(ranks) != QWEN_VOCABULARY_SIZE:
        raise ConfigError(
            f"{path.name} has {len(ranks)} tokens, expected {QWEN_VOCABULARY_SIZE}",
            "give the path of a tokenizer.json instead",
        )
    encoding = tiktoken.Encoding(
        "qwen", pat_str=QWEN_SPLIT, mergeable_ranks=ranks, special_tokens={}
    )

    def encode_text(text: str) -> list[int]:
        ids: list[int] = encoding.encode_ordinary(unicodedata.normalize("NFC", text))
        return ids

    return Tokenizer("qwen", QWEN_SPECIAL, encode_text)


def _load_hugging_face(path: Path) -> Tokenizer:
    _require("tokenizers")
    import tokenizers

    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8"))
        added = settings.get("added_tokens") or []
        special = {str(token["content"]): int(token["id"]) for token in added}
        # Without added tokens the vocabulary cannot see a special token in a message.
        settings |= {"added_tokens": [], "post_processor": None}
        settings |= {"truncation": None, "padding": None}
        vocabulary = tokenizers.Tokenizer.from_str(json.dumps(settings))
    except Exception as error:  # the package raises bare Exception for a malformed file
        raise ConfigError(
            f"{path} is not a usable tokenizer.json ({error})",
            "give a tokenizer.json of the Hugging Face tokenizers package",
        ) from None
    missing = [m.text for m in (IM_START, IM_END) if m.text not in special]
    if missing:
        raise ConfigError(
            f"{path} has no special token {' and no '.join(missing)}; the chat format needs it",
            "choose the tokenizer of a Qwen2.5 model, or 'qwen'",
        )

    def encode_text(text: str) -> list[int]:
        ids: list[int] = vocabulary.encode(text, add_special_tokens=False).ids
        return ids

    return Tokenizer(path.name, special, encode_text)


def _require(*packages: str) -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        names = " ".join(missing)
        raise ConfigError(
            f"this tokenizer needs the package {' and '.join(missing)}", f"run: pip install {names}"
        )
