"""The scheduled refresh: a rolling window, the rows and axes of the previous run, a quality gate."""
