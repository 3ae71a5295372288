"""Block-scaled FP8 products on Hopper: one kernel, compiled for tiles of several sizes.

`launch` starts it, `configs` has its tile sizes, stages and registers, `kernel` has the warp roles,
`tiles` the order of the work tiles, `epilogue` writes the results.
"""
