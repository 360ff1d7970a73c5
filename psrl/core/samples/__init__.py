"""Samples of one RL iteration, and the trace that holds them."""
