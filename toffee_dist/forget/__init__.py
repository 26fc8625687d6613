"""Erasure: nodes that must not be in any run of a folder any more."""
