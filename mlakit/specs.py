"""The description of a call and of kernels: `mlakit.dispatch.specs` under a shorter path."""

from mlakit.dispatch.specs import KernelSpec, Problem, Use

__all__ = ["KernelSpec", "Problem", "Use"]
