"""What a call asks for and what a kernel takes: `mlakit.dispatch.specs` under a shorter path."""

from mlakit.dispatch.specs import KernelSpec, Problem, Use

__all__ = ["KernelSpec", "Problem", "Use"]
