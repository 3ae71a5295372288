"""Expanded (multi-head) MLA prefill; `launch` is the entry point."""
