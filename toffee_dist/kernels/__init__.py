"""Pure functions of arrays: NumPy and SciPy only."""
