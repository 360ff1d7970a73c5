"""Attention over packed prefix trees: shared prefixes are computed once, cached and read back."""

from .attention.buffer_store import BufferStore, LinearStore
from .attention.reference import reference_attention
from .attention.store import DictStore, KeyValueStore
from .attention.tree_attention import prepare_attention, tree_attention
from .attention.visibility_rule import Visibility, visibility

__all__ = [
    "BufferStore",
    "DictStore",
    "KeyValueStore",
    "LinearStore",
    "Visibility",
    "prepare_attention",
    "reference_attention",
    "tree_attention",
    "visibility",
]
