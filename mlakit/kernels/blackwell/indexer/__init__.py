"""Indexer logits on Blackwell: one kernel, compiled for 32 or 64 heads and 1, 2, 4 or 8 tokens."""
