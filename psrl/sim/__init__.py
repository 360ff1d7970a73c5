"""Replay a plan op by op in simulated time and memory."""
