"""Compiles kernels before serving: `warmup`, which `mlakit warmup` calls.

deployment    what decides which kernels a serving process launches
calls         the calls of such a process, with the shapes that make a difference to kernels
engine_calls  those of the plugins for vLLM and SGLang
step_calls    those of `mlakit.steps`
allocation    the memory that a call takes
listing       the entries of Triton's cache that the calls use
worker        a process that compiles
run           lists what is missing, and has it compiled
"""

from mlakit.precompile.run import Warmup, WarmupError, warmup

__all__ = ["Warmup", "WarmupError", "warmup"]
