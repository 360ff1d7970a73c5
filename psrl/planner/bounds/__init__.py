"""Proven lower bounds on the most loaded rank."""
