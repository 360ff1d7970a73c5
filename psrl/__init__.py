"""psRL: replay, plan, simulate and execute prefix-sharing RL training.

Importing this package loads nothing else, neither torch nor numpy.
"""

__version__ = "0.1.0"
