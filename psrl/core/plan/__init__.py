"""The plan file, its op lists, blocks and bytes, and the independent check of them all."""
