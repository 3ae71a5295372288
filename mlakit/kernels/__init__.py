"""Kernels by dialect. The ops have checked all arguments; kernels check nothing again."""
