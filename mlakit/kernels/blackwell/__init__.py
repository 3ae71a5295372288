"""Gluon kernels for sm_100 and sm_103: compiled and emulated, not run (docs/blackwell.md)."""
