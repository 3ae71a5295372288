"""Expanded (multi-head) MLA prefill on Hopper.

`kernels.hopper.support` says which problems it takes, `launch` starts it with the TMA `descriptors`
of its tensors, `configs` has its tile sizes and registers, `schedule` deals out work tiles,
`kernel` has the warp roles, `values` keeps values that are not finite from queries that do not see
them. e4m3 queries, keys and values have files of their own, `fp8_*`.
"""
