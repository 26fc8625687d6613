"""Files: local or behind a URL, written whole or not at all; runs, tensors, slices, Parquet."""
