"""Costs of block and cache policies other than the plan's own."""
