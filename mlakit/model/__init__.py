"""A model's widths, releases, RoPE tables and masks."""
