"""What runs where, and the proof of it that needs no GPU.

table        which backend an op gets on every architecture, and why not the others
compilation  compiles the GPU kernels for every architecture, and reads what they ask of it
"""
