"""Numbers of the hardware's 16 named barriers that kernels use themselves (`primitives`)."""

from __future__ import annotations

# The compiler has one for each warp role, of which there are up to five, and one to start them:
# `tools.compile.machine_code` counts whether it keeps to that.
NAMED_FIRST = 6
