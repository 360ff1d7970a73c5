"""Plots: a function per figure, tables in, figures out."""
