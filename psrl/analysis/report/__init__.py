"""The comparison of policies, in a table and in a self-contained page."""
