"""What people run: the command line, benchmarks, checks, and the emulator of kernels."""
