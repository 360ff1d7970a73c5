"""Scheduling policies: planning problem in, plan out."""
