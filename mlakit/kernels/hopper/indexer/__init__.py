"""Indexer logits on Hopper: one kernel, compiled for 32 or 64 heads and 1, 2, 4 or 8 tokens.

`launch` starts it, `configs` has its tile sizes, stages and registers, `scheduler` shares out the
work tiles, `loads` has the producer, `consumer` and `head_sum` compute the logits.
"""
