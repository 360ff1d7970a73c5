"""The Megatron model, its attention over prefix trees, and its weights."""
