"""Support of the Gluon kernels for sm_100 and sm_103; the portable kernels take everything else.

They are compiled and emulated, and have not run on a GPU: `auto` takes one only where a check on
that machine has passed (`dispatch.proofs`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version

from mlakit.dispatch.architectures import arch_name
from mlakit.dispatch.names import one_of
from mlakit.dispatch.specs import KernelSpec, Problem, Use
from mlakit.kernels.blackwell.device.configs import D_C, D_R, head_rows
from mlakit.kernels.blackwell.prefill.configs import FP8_WIDTHS as FP8_PREFILL_WIDTHS
from mlakit.kernels.blackwell.prefill.configs import WIDTHS as PREFILL_WIDTHS
from mlakit.kernels.hopper.indexer.configs import padded_heads
from mlakit.kernels.hopper.sparse.configs import D_V, ROWS
from mlakit.kernels.hopper.support import (
    INDEXER_MASK_TRAITS,
    PREFILL_MASK_TRAITS,
    why_not_index_keys,
)

ARCHS = (100, 103)
OLDEST_TRITON = (3, 9)
FORMATS = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
SPLIT_FORMATS = {f"{format}_split": dtype for format, dtype in FORMATS.items()}
FP8_FORMATS = {"fp8_block128": "torch.bfloat16"}  # rotated columns are bfloat16, too
E4M3 = "torch.float8_e4m3fn"
PREFILL_DTYPES = (*FORMATS.values(), E4M3)
FEW_HEADS = 64


def _why_not_device(problem: Problem) -> str | None:
    if problem.device != "cuda" or problem.arch not in ARCHS:
        where = arch_name(problem.arch) if problem.device == "cuda" else problem.device
        return f"needs {one_of([arch_name(arch) for arch in ARCHS])}, got {where}"
    return why_not_triton()


def why_not_triton() -> str | None:
    """Return why the installed Triton cannot compile the kernels; None if it can."""
    try:
        installed = version("triton")
    except PackageNotFoundError:
        installed = "none"
    numbers = tuple(int(each) for each in installed.split(".")[:2] if each.isdecimal())
    if numbers >= OLDEST_TRITON:
        return None
    return f"needs Triton {'.'.join(map(str, OLDEST_TRITON))} or newer, got {installed}"


def _why_not_sparse(problem: Problem, formats: Mapping[str, str] = FORMATS) -> str | None:
    refusal = _why_not_device(problem)
    if refusal is not None:
        return refusal
    if problem.format not in formats:
        return f"needs rows of {one_of(list(formats))}, got {problem.format}"
    needed = formats[problem.format]
    if problem.dtype != needed:
        return f"needs queries of {needed} with rows of {problem.format}, got {problem.dtype}"
    row = problem.row
    if row is None or (row.width, row.v_width) not in ROWS:
        got = "none" if row is None else f"{row.width}/{row.v_width}"
        return f"needs rows of {one_of([f'{w}/{v}' for w, v in ROWS])}, got {got}"
    if Use.Q_ROPE in problem.uses and row.kv_lora_rank != D_V:
        return f"needs {D_V} latent columns with q_rope, got {row.kv_lora_rank}"
    uses = [use for use in problem.uses if use != Use.Q_ROPE]
    return uses[0].refusal if uses else None


def _why_not_sparse_fp8(problem: Problem) -> str | None:
    refusal = _why_not_sparse(problem, FP8_FORMATS)
    if refusal is not None:
        return refusal
    assert problem.row is not None
    if (problem.row.kv_lora_rank, problem.row.qk_rope_head_dim) not in ((D_C, D_R), (D_C, 0)):
        got = f"{problem.row.kv_lora_rank} + {problem.row.qk_rope_head_dim}"
        return f"needs {D_C} + {D_R} or {D_C} + 0 columns, got {got}"
    return None


def _variant(problem: Problem) -> str:
    """Return what of a problem a kernel is compiled for: rows, mask, and whether there is a second
    cache."""
    assert problem.row is not None
    rows = f"{problem.format} {problem.row.width}/{problem.row.v_width}"
    second = "second cache" if problem.has_extra else ""
    return ", ".join(filter(None, (rows, problem.mask, second)))


def _n64_variant(problem: Problem) -> str:
    """Return what a kernel with keys as M is compiled for: the heads of a work tile, too."""
    return f"{_variant(problem)}, {head_rows(problem.heads)} heads"


def _why_slower_m128(problem: Problem) -> str | None:
    """Half of the tensor cores' work or more is for heads that are not there."""
    if problem.heads <= FEW_HEADS:
        return f"is for more than {FEW_HEADS} heads, got {problem.heads}"
    return None


def _why_slower_n64(problem: Problem) -> str | None:
    """Every 64 heads load the keys again."""
    if problem.heads > FEW_HEADS:
        return f"is for {FEW_HEADS} heads or fewer, got {problem.heads}"
    return None


def _sparse_spec(
    kernel: str,
    why_not: Callable[[Problem], str | None],
    why_slower: Callable[[Problem], str | None] | None = None,
) -> KernelSpec:
    return KernelSpec(
        "blackwell",
        "sparse_mla",
        f"{__package__}.sparse.launch:sparse_mla",
        why_not,
        kernel=kernel,
        why_slower=why_slower,
        variant=_variant if kernel == "m128_bf16" else _n64_variant,
    )


def _decode_takes(formats: Mapping[str, str]) -> Callable[[Problem], str | None]:
    def why_not(problem: Problem) -> str | None:
        refusal = _why_not_device(problem)
        if refusal is not None:
            return refusal
        if problem.format not in formats:
            return f"needs rows of {one_of(list(formats))}, got {problem.format}"
        needed = formats[problem.format]
        if problem.dtype != needed:
            return f"needs queries of {needed} with rows of {problem.format}, got {problem.dtype}"
        row = problem.row
        if row is None or (row.kv_lora_rank, row.qk_rope_head_dim, row.v_width) != (D_C, D_R, D_C):
            got = "none" if row is None else f"{row.kv_lora_rank} + {row.qk_rope_head_dim}"
            return f"needs rows of {D_C} + {D_R} columns, got {got}"
        return problem.uses[0].refusal if problem.uses else None

    return why_not


def _decode_spec(kernel: str, formats: Mapping[str, str]) -> KernelSpec:
    return KernelSpec(
        "blackwell",
        "mla_decode",
        f"{__package__}.decode.launch:mla_decode",
        _decode_takes(formats),
        planner=f"{__package__}.decode.launch:plan_mla_decode",
        kernel=kernel,
        mask_traits=("IS_CAUSAL",),
        variant=_n64_variant,
    )


def _why_not_prefill(problem: Problem) -> str | None:
    refusal = _why_not_device(problem)
    if refusal is not None:
        return refusal
    if problem.dtype not in PREFILL_DTYPES:
        return f"needs {one_of(list(PREFILL_DTYPES))}, got {problem.dtype}"
    taken = FP8_PREFILL_WIDTHS if problem.dtype == E4M3 else PREFILL_WIDTHS
    if problem.head_widths not in taken:
        known = one_of(["+".join(map(str, widths)) for widths in taken])
        got = "+".join(map(str, problem.head_widths or ())) or "none"
        return f"needs widths D_N+D_R+D_V of {known}, got {got}"
    return problem.uses[0].refusal if problem.uses else None


def _prefill_variant(problem: Problem) -> str:
    """Return the dtype, the widths and the mask that the kernel is compiled for."""
    assert problem.head_widths is not None
    d_n, d_r, d_v = problem.head_widths
    return f"{problem.dtype.removeprefix('torch.')} {d_n + d_r}/{d_v}, {problem.mask}"


def _why_not_indexer_logits(problem: Problem) -> str | None:
    return _why_not_device(problem) or why_not_index_keys(problem)


def _indexer_variant(problem: Problem) -> str:
    """Return the mask and the heads that the kernel is compiled for; a check runs all blocks."""
    return f"{problem.mask}, {padded_heads(problem.heads)} heads"


SPECS = (
    _decode_spec("n64_bf16", FORMATS | SPLIT_FORMATS),
    _decode_spec("n64_fp8_kv", FP8_FORMATS),
    _sparse_spec("m128_bf16", _why_not_sparse, _why_slower_m128),
    _sparse_spec("n64_bf16", _why_not_sparse, _why_slower_n64),
    _sparse_spec("n64_fp8_kv", _why_not_sparse_fp8),
    KernelSpec(
        "blackwell",
        "mla_prefill",
        f"{__package__}.prefill.launch:mla_prefill",
        _why_not_prefill,
        mask_traits=PREFILL_MASK_TRAITS,
        variant=_prefill_variant,
    ),
    KernelSpec(
        "blackwell",
        "indexer_logits",
        f"{__package__}.indexer.launch:indexer_logits",
        _why_not_indexer_logits,
        mask_traits=INDEXER_MASK_TRAITS,
        variant=_indexer_variant,
    ),
)
