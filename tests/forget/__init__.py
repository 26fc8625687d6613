"""Erasure."""
