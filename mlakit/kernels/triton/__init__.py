"""Portable kernels in plain Triton: sm_80 and newer, and, interpreted, host memory.

This module imports no Triton: `support` must be readable where Triton is not installed.
"""
