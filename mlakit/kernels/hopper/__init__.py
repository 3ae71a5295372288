"""Kernels in Gluon for sm_90a, where speed is won; `support` says what they take."""
