"""The same attention in Triton, and how its launches are laid out."""
