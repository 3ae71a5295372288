"""Support of the CPU kernels: they take every problem whose tensors are in host memory."""

from __future__ import annotations

from dataclasses import replace

from mlakit.dispatch.specs import KernelSpec, Problem
from mlakit.model.masks import INTERVAL_TRAITS


def _why_not(problem: Problem) -> str | None:
    return None if problem.device == "cpu" else f"needs CPU tensors, got {problem.device}"


def _spec(op: str, topic: str) -> KernelSpec:
    launcher = f"{__package__}.{topic}:{op}"
    return KernelSpec("cpu", op, launcher, _why_not, mask_traits=INTERVAL_TRAITS)


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
    _spec("sparse_mla", "sparse"),
    _spec("indexer_logits", "indexer"),
    _spec("indexer_topk", "indexer"),
    replace(_spec("indexer_select", "indexer_select"), planner=_QUERY_BLOCKS),
    _spec("physical_rows", "physical_rows"),
    _spec("merge_states", "merge"),
)
