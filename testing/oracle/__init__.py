"""Oracles: the built-in ops in float64 NumPy, each written apart from what it judges."""
