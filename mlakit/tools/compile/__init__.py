"""Which backend runs where, and compile checks of the GPU kernels that need no GPU.

table            the backend of an op on every architecture, and why the others do not run it
compilation      compiles the GPU kernels for every architecture and checks their resources
configurations   the problems that it compiles
samples          fewer of them, for one more version of Triton
machine_code     reads registers, spills and barriers from a compiled kernel
spills           the largest number of register spills of each kernel
"""
