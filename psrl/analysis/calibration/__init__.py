"""Fits the cost model's coefficients to measurements and says how far off the result is."""
