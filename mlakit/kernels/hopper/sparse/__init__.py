"""Hopper kernels of `sparse_mla`: absorbed attention over lists of cache rows."""
