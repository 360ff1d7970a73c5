"""A batch of veRL: its samples, its plan, its losses, and their run on a rank."""
