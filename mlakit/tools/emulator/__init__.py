"""Runs Gluon kernels on a CPU: an interpreter of Triton's TTGIR with asynchronous hardware.

ir        TTGIR text -> operations
layouts   which thread has which element; where an element is in shared memory
dtypes    the formats of elements
machine   memories, mbarriers, asynchronous engines, the scheduler, the race detector
ptx       inline assembly
codegen   operations -> a Python generator per function and warp partition
frontend  launches of @gluon.jit and @triton.jit kernels, compiled to TTGIR without a GPU
mutations deliberate faults
"""
