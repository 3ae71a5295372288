"""What a model is: its widths, its releases, its RoPE tables and its masks."""
