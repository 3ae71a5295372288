"""Support of the portable kernels: they take every problem on a GPU of sm_80 and newer, or of AMD's
gfx942, gfx950 and gfx1100, for which they are compiled and not run.

Under `TRITON_INTERPRET=1` they run in host memory too, slowly: that is how they are tested without
a GPU, never what `backend="auto"` picks.
"""

from __future__ import annotations

from dataclasses import replace

from mlakit.dispatch import knobs
from mlakit.dispatch.architectures import AMD, arch_name, is_amd
from mlakit.dispatch.specs import KernelSpec, Problem
from mlakit.formats import FORMATS, GROUP_FORMATS, SPLIT_FORMATS
from mlakit.model.masks import INTERVAL_TRAITS

OLDEST_ARCH = 80


def _why_not(problem: Problem) -> str | None:
    if problem.device == "cuda":
        if is_amd(problem.arch):
            return None if problem.arch in AMD else _needs_amd(problem.arch)
        if problem.arch < OLDEST_ARCH:
            return f"needs sm_{OLDEST_ARCH} or newer, got sm_{problem.arch}"
        return None
    if problem.device == "cpu":
        if knobs.interpreted():
            return None
        return "needs CUDA tensors, got cpu (TRITON_INTERPRET=1 runs it there, to test it)"
    return f"needs CUDA tensors, got {problem.device}"


def _needs_amd(arch: int) -> str:
    *others, last = map(arch_name, AMD)
    return f"needs {', '.join(others)} or {last} of AMD's, got {arch_name(arch)}"


def _spec(op: str, topic: str) -> KernelSpec:
    launcher = f"{__package__}.{topic}:{op}"
    return KernelSpec("triton", op, launcher, _why_not, mask_traits=INTERVAL_TRAITS)


def _general_why_not(problem: Problem) -> str | None:
    if problem.format in GROUP_FORMATS:
        return _needs_general(problem)
    return _why_not(problem)


def _why_not_indexer(problem: Problem) -> str | None:
    if problem.format in SPLIT_FORMATS:
        return _needs_general(problem)
    return _general_why_not(problem)


def _needs_general(problem: Problem) -> str:
    return f"needs rows of {' or '.join(FORMATS)}, got {problem.format}"


_DECODE_PLANNER = f"{__package__}.decode:plan_mla_decode"
_QUERY_BLOCKS = f"{__package__}.indexer_select:plan_query_blocks"


SPECS = (
    _spec("norm_rope_quant_append", "norm_rope_quant"),
    _spec("append_rows", "append_rows"),
    _spec("compress_rows", "compress_rows"),
    _spec("batched_matmul", "matmul"),
    _spec("quantize_fp8", "fp8"),
    _spec("scaled_mm_fp8", "fp8"),
    _spec("mla_prefill", "prefill"),
    replace(_spec("mla_decode", "decode"), planner=_DECODE_PLANNER),
    replace(_spec("sparse_mla", "sparse"), predicate=_general_why_not),
    replace(_spec("indexer_logits", "indexer"), predicate=_why_not_indexer),
    _spec("indexer_topk", "indexer_topk"),
    replace(_spec("indexer_select", "indexer_select"), planner=_QUERY_BLOCKS),
    _spec("physical_rows", "physical_rows"),
    _spec("merge_states", "merge"),
)
