"""psRL as a library: what `import psrl` offers, and what the command line and the paper call.

From a trace and a set-up to a problem, plans, simulated and executed runs, tables and a report.
docs/api.md says what is stable.
"""
