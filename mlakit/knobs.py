"""The settings: `mlakit.dispatch.knobs` under a shorter path."""

from mlakit.dispatch.knobs import REGISTRY, Backend, DecodeKernel, Knob, override

__all__ = ["REGISTRY", "Backend", "DecodeKernel", "Knob", "override"]
