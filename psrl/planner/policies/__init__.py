"""Scheduling policies by name: how each decides where samples run and how they are cut."""
