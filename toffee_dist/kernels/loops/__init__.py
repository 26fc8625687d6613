"""Loops that NumPy cannot say, compiled by numba: importing a module of this package loads the compiler.

Callers import them inside the function that runs them, so that commands and workers start without numba.
Nothing compiled is kept on disk: numba's cache is a pickle.
"""
