"""Where tasks run: Dask clusters, their workers, and how tasks are waited for."""
