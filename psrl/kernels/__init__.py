"""Attention over packed prefix trees: shared prefixes are computed once, cached and read back."""

from .buffer_store import BufferStore, LinearStore
from .reference import reference_attention
from .store import DictStore, KeyValueStore
from .tree_attention import prepare_attention, tree_attention
from .visibility_rule import Visibility, visibility

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
