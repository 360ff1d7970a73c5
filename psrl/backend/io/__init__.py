"""Checkpoints, run output and launch scripts."""
