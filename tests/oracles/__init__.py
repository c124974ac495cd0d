"""Slow, plain versions of what jaxattr computes fast: Python loops and float64, written from the formulas alone."""
