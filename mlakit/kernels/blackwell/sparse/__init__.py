"""Sparse attention; `launch` is the entry point."""
