"""Runs Gluon kernels on a CPU: an interpreter of Triton's TTGIR with asynchronous hardware.

A launch is lowered to TTGIR without a GPU. Its text becomes operations, operations become Python
generators, and a seeded scheduler interleaves these with the engines of a CTA. Every access of
shared memory is checked for races, missing fences and use before a wait.

From a launch to Python:
    frontend   launches of @gluon.jit and @triton.jit kernels on tensors in host memory
    lowering   the TTGIR of a launch
    parser     text to operations; `scanning` splits text, `ir` has the records, `types` the types
    codegen    operations to a Python generator per function and warp partition

What generated code runs on:
    runtime    the operations of generated code, by topics
    machine    a CTA: partitions, engines and the scheduler; `faults` are what it reports
    races      vector clocks, shadow memory and proxies; `global_races` is of global memory
    ptx        inline assembly on all threads of a partition
    layouts    which thread has which element; where an element is in shared memory
    dtypes     formats of elements

Tests with it:
    harness    Hopper's configurations against the float64 oracle
    mutations  kernels with one synchronisation changed; `campaign` runs them
    command    `mlakit emulate`
"""
