"""Absorbed decode; `launch` is the entry point."""
