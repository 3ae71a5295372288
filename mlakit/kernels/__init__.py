"""Kernels by dialect. Arguments are right by the time they arrive; nothing is checked again."""
