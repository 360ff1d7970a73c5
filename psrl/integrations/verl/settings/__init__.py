"""veRL's configuration: what psRL reads of it, and what it refuses."""
