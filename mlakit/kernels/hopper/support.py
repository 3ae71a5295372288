"""Support of the Gluon kernels; the portable kernels take everything else.

`mla_decode` has six kernels. Each says what it cannot take (`why_not`); the m64 kernels also say
when a small_m kernel is faster (`why_slower`). `mla_prefill`, `indexer_logits` and `scaled_mm_fp8`
have one. `sparse_mla` has one per kind of cache row, and others for few heads over FP8 and four-bit
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mlakit.dispatch.architectures import arch_name
from mlakit.dispatch.specs import KernelSpec, Problem, Use
from mlakit.formats import SPLIT_FORMATS, FormatTraits, known_format, row_codec
from mlakit.kernels.hopper.decode.configs import (
    BLOCK,
    D_C,
    D_R,
    MIN_TMA_PAGE_M64_BF16,
    NARROW_D_C,
    PAGES,
    SMALL_M_HEADS,
    SMALL_WORK_BLOCKS,
    small_m_tiles,
)
from mlakit.kernels.hopper.fp8.configs import PIECE as PRODUCT_PIECE
from mlakit.kernels.hopper.fp8.configs import STEP as PRODUCT_STEP
from mlakit.kernels.hopper.fp8.configs import pick_config as pick_product_config
from mlakit.kernels.hopper.indexer.configs import MAX_HEADS as MAX_INDEX_HEADS
from mlakit.kernels.hopper.indexer.configs import PIECE as INDEX_PIECE
from mlakit.kernels.hopper.indexer.configs import WIDTH as INDEX_WIDTH
from mlakit.kernels.hopper.prefill.configs import BLOCK_K as PREFILL_WIDTHS
from mlakit.kernels.hopper.prefill.configs import FP8_BLOCK_K as FP8_PREFILL_WIDTHS
from mlakit.kernels.hopper.prefill.configs import UNPROVED_WIDTHS as UNPROVED_PREFILL_WIDTHS
from mlakit.kernels.hopper.sparse.configs import D_V as SPARSE_D_V
from mlakit.kernels.hopper.sparse.configs import ROWS as SPARSE_ROWS

__all__ = ["ARCH", "BLOCK", "FORMATS", "PAGES", "ROW", "SPARSE_ROWS", "SPECS"]

ARCH = 90
ROW = (D_C + D_R, D_C)
E4M3 = "torch.float8_e4m3fn"
# a kernel before it rewrites values and their scales
FP8_PREFILL_USES = (Use.UNALIGNED_VALUES, Use.CONTIGUOUS_KEYS, Use.SCALES_OF_KEYS)
FORMATS = {
    "bf16": ("torch.bfloat16",),
    "fp16": ("torch.float16",),
    "fp8": ("torch.bfloat16", "torch.float16", E4M3),
    "fp8_token": ("torch.bfloat16", E4M3),  # bf16 as its rotated columns
    "fp8_block128": ("torch.bfloat16", E4M3),
}
FP4_FORMATS = {"mxfp4_block32": ("torch.bfloat16",)}
DECODE_MASK_TRAITS = INDEXER_MASK_TRAITS = ("IS_CAUSAL",)
# its blocks are counted down from the last key, and masked at both ends
PREFILL_MASK_TRAITS = ("IS_CAUSAL", "IS_SLIDING", "IS_CHUNKED")
_FP8_FORMATS = ("fp8", "fp8_token", "fp8_block128")
INDEX_FORMAT = "fp8_token"
# results: FP8 tensor cores keep 14 bits of a sum, which the rounding of these hides
PRODUCT_DTYPES = ("torch.bfloat16", E4M3)
FEW_ROWS = 16
SMALL_M_ROWS = 32  # of the portable kernel of few rows
PREFILL_DTYPES = ("torch.bfloat16", "torch.float16", E4M3)


def _why_not_device(problem: Problem) -> str | None:
    if problem.device == "cuda" and problem.arch == ARCH:
        return None
    where = arch_name(problem.arch) if problem.device == "cuda" else problem.device
    return f"needs sm_{ARCH}, got {where}"


def _why_not_decode(
    problem: Problem,
    formats: Mapping[str, tuple[str, ...]] = FORMATS,
    latent_columns: Sequence[int] = (D_C,),
) -> str | None:
    """Return why no decode kernel for rows of `formats`, with such latent columns, takes a problem;
    None if some may."""
    refusal = _why_not_device(problem)
    if refusal is not None:
        return refusal
    stored = _stored(problem)
    if stored not in formats:
        return f"needs rows of {' or '.join(formats)}, got {problem.format}"
    if problem.dtype not in formats[stored]:
        needed = " or ".join(formats[stored])
        return f"needs queries of {needed} with rows of {problem.format}, got {problem.dtype}"
    row = problem.row
    taken = [(columns + D_R, columns) for columns in latent_columns]
    if row is None or (row.width, row.v_width) not in taken:
        needed = " or ".join(f"{width}/{v_width}" for width, v_width in taken)
        got = "none" if row is None else f"{row.width}/{row.v_width}"
        return f"needs rows of {needed}, got {got}"
    if row.kv_lora_rank != row.v_width:
        got = f"{row.kv_lora_rank} + {row.qk_rope_head_dim}"
        return f"needs {row.v_width} + {D_R} columns, got {got}"
    refused = [use for use in problem.uses if use not in _taken_uses(problem)]
    return refused[0].refusal if refused else None


def _stored(problem: Problem) -> str:
    """Return the format of rows, whether they are in one tensor or in two."""
    return problem.format.removesuffix("_split")


def _taken_uses(problem: Problem) -> tuple[Use, ...]:
    if problem.dtype != E4M3:
        return ()
    return (Use.Q_SCALE, Use.BF16_Q_ROPE) if _traits(problem).IS_BF16_ROPE else (Use.Q_SCALE,)


def _traits(problem: Problem) -> FormatTraits:
    assert problem.row is not None
    return row_codec(known_format(problem.format), problem.row).traits


def _needs_format(
    *formats: str, latent_columns: Sequence[int] = (D_C,)
) -> Callable[[Problem], str | None]:
    def why_not(problem: Problem) -> str | None:
        refusal = _why_not_decode(problem, latent_columns=latent_columns)
        if refusal is None and _stored(problem) not in formats:
            refusal = f"needs rows of {' or '.join(formats)}, got {problem.format}"
        return refusal

    return why_not


def _needs_fp8_query(problem: Problem) -> str | None:
    refusal = _needs_format(*_FP8_FORMATS)(problem)
    if refusal is None and problem.dtype != E4M3:
        refusal = f"needs queries of {E4M3}, got {problem.dtype}"
    return refusal


def _why_not_m64_fp8_kv(problem: Problem) -> str | None:
    refusal = _needs_format(*_FP8_FORMATS)(problem)
    if refusal is None and problem.dtype == E4M3 and _traits(problem).SCALED_BY != "group":
        refusal = f"needs 16-bit queries with rows of {problem.format}, got {problem.dtype}"
    return refusal


def _why_not_small_m_fp4_kv(problem: Problem) -> str | None:
    refusal = _why_not_decode(problem, FP4_FORMATS)
    is_tma_page = problem.page_size in PAGES or problem.page_size % BLOCK == 0
    if refusal is None and not is_tma_page:
        sizes = f"{', '.join(map(str, PAGES))} or a multiple of {BLOCK}"
        refusal = f"needs pages of {sizes} rows with {problem.format}, got {problem.page_size}"
    return refusal


def _why_slower_small_m_fp4_kv(problem: Problem) -> str | None:
    """Every tile of heads reads and converts all rows again."""
    if problem.heads > SMALL_M_HEADS:
        return f"is for up to {SMALL_M_HEADS} heads, got {problem.heads}"
    return None


def _fp4_variant(problem: Problem) -> str:
    """Return the rows and the tile of heads of a call, and whether it has a second cache."""
    second = ", second cache" if problem.has_extra else ""
    return f"{problem.format}, {_small_m_rows(problem)} heads{second}"


def _small_m_rows(problem: Problem) -> int:
    return small_m_tiles(problem.heads, problem.page_size).rows


def _why_slower_m64(problem: Problem) -> str | None:
    """Return why a small_m kernel is faster: it wastes no rows on few heads, and starts sooner.

    With batch-invariant results the work in the batch does not decide: kernels round differently.
    """
    if problem.heads <= SMALL_M_HEADS:
        return f"is for more than {SMALL_M_HEADS} heads, got {problem.heads}"
    if problem.is_batch_invariant or problem.num_sms == 0:
        return None
    head_tiles = -(-problem.heads // SMALL_M_HEADS)
    blocks = problem.num_tokens * head_tiles * -(-problem.max_keys // BLOCK)
    most = SMALL_WORK_BLOCKS * problem.num_sms
    if blocks <= most:
        return (
            f"is for more than {most} blocks of {SMALL_M_HEADS} heads x {BLOCK} keys, got {blocks}"
        )
    return None


def _why_slower_m64_fp8_qk(problem: Problem) -> str | None:
    if _stored(problem) == "fp8_block128":
        return f"has not been timed on a GPU with rows of {problem.format}"
    return _why_slower_m64(problem)


def _why_not_indexer_logits(problem: Problem) -> str | None:
    return _why_not_device(problem) or why_not_index_keys(problem)


def why_not_index_keys(problem: Problem) -> str | None:
    """Return why no indexer kernel in Gluon takes a problem, whichever GPU it is on."""
    if problem.format != INDEX_FORMAT:
        return f"needs keys of {INDEX_FORMAT}, got {problem.format}"
    if problem.dtype != E4M3:
        return f"needs queries of {E4M3}, got {problem.dtype}"
    row = problem.row
    if row is None or (row.kv_lora_rank, row.qk_rope_head_dim) != (INDEX_WIDTH, 0):
        got = "none" if row is None else f"{row.kv_lora_rank} + {row.qk_rope_head_dim} columns"
        return f"needs keys of {INDEX_WIDTH} columns, none of them rotated, got {got}"
    if not 1 <= problem.heads <= MAX_INDEX_HEADS:
        return f"needs 1 to {MAX_INDEX_HEADS} heads, got {problem.heads}"
    if problem.page_size % INDEX_PIECE:
        return f"needs pages of a multiple of {INDEX_PIECE} keys, got {problem.page_size}"
    return problem.uses[0].refusal if problem.uses else None


def _why_not_prefill(problem: Problem) -> str | None:
    refusal = _why_not_device(problem)
    if refusal is not None:
        return refusal
    if problem.dtype not in PREFILL_DTYPES:
        return f"needs {' or '.join(PREFILL_DTYPES)}, got {problem.dtype}"
    taken = FP8_PREFILL_WIDTHS if problem.dtype == E4M3 else PREFILL_WIDTHS
    if problem.head_widths not in taken:
        known = ", ".join("+".join(map(str, widths)) for widths in taken)
        got = "+".join(map(str, problem.head_widths or ())) or "none"
        return f"needs widths D_N+D_R+D_V of {known}, got {got}"
    uses = [use for use in problem.uses if problem.dtype != E4M3 or use not in FP8_PREFILL_USES]
    return uses[0].refusal if uses else None


def _prefill_variant(problem: Problem) -> str:
    """Return the widths of a problem that no GPU has run yet; "" for the others."""
    widths = problem.head_widths
    return "+".join(map(str, widths)) if widths in UNPROVED_PREFILL_WIDTHS else ""


# rows of a cache, and the queries that `sparse_mla` takes with them
_SPARSE_FORMATS: dict[str, dict[str, tuple[str, ...]]] = {
    "m64_bf16": {"bf16": ("torch.bfloat16",), "fp16": ("torch.float16",)},
    "m64_fp8_kv": {
        # bf16 as their rotated columns
        "fp8_block128": ("torch.bfloat16",),
        "fp8_token": ("torch.bfloat16",),
        "fp8_block64": ("torch.bfloat16", "torch.float16"),
        "fp8": ("torch.bfloat16", "torch.float16"),
    },
    "small_m_fp8_kv": {
        "fp8_block128": ("torch.bfloat16",),
        "fp8_token": ("torch.bfloat16",),
    },
    "small_m_fp4_kv": FP4_FORMATS,
}


def _sparse_takes(kernel: str) -> Callable[[Problem], str | None]:
    formats = _SPARSE_FORMATS[kernel]

    def why_not(problem: Problem) -> str | None:
        refusal = _why_not_device(problem)
        if refusal is not None:
            return refusal
        stored = _stored(problem)
        if stored not in formats:
            return f"needs rows of {' or '.join(formats)}, got {problem.format}"
        if problem.dtype not in formats[stored]:
            needed = " or ".join(formats[stored])
            return f"needs queries of {needed} with rows of {problem.format}, got {problem.dtype}"
        row = problem.row
        if row is None or (row.width, row.v_width) not in SPARSE_ROWS:
            needed = " or ".join(f"{width}/{v_width}" for width, v_width in SPARSE_ROWS)
            got = "none" if row is None else f"{row.width}/{row.v_width}"
            return f"needs rows of {needed}, got {got}"
        if kernel != "m64_bf16" or problem.format in SPLIT_FORMATS:
            taken = [(D_C, D_R), (D_C, 0)]
            if _traits(problem).IS_E2M1:
                taken = [(D_C, D_R)]
            elif _traits(problem).HAS_E8M0_SCALES:
                taken = [(SPARSE_D_V - D_R, D_R)]
            if (row.kv_lora_rank, row.qk_rope_head_dim) not in taken:
                needed = " or ".join(f"{columns} + {rope}" for columns, rope in taken)
                got = f"{row.kv_lora_rank} + {row.qk_rope_head_dim}"
                return f"needs {needed} columns in rows of {problem.format}, got {got}"
        uses = [use for use in problem.uses if use not in (Use.Q_ROPE, Use.UNEVEN_PAGES)]
        if Use.Q_ROPE in problem.uses and row.kv_lora_rank != SPARSE_D_V:
            return f"needs {SPARSE_D_V} latent columns with q_rope, got {row.kv_lora_rank}"
        return uses[0].refusal if uses else None

    return why_not


def _why_slower_sparse_m64(problem: Problem) -> str | None:
    """Return why small_m_fp8_kv is faster than m64_fp8_kv, or None."""
    takes = problem.format in _SPARSE_FORMATS["small_m_fp8_kv"]
    if takes and problem.heads <= SMALL_M_HEADS:
        return f"is for more than {SMALL_M_HEADS} heads, got {problem.heads}"
    return None


def _sparse(kernel: str) -> KernelSpec:
    slower = {"m64_fp8_kv": _why_slower_sparse_m64, "small_m_fp4_kv": _why_slower_small_m_fp4_kv}
    return KernelSpec(
        "hopper",
        "sparse_mla",
        f"{__package__}.sparse.launch:sparse_mla",
        _sparse_takes(kernel),
        kernel=kernel,
        why_slower=slower.get(kernel),
        # no GPU has run it yet: `auto` takes it where a check on that machine has passed
        variant=_fp4_variant if kernel == "small_m_fp4_kv" else None,
    )


_LAUNCH = f"{__package__}.decode.launch"


def _with_pages(
    kernel: str, why_not: Callable[[Problem], str | None]
) -> Callable[[Problem], str | None]:
    """Return the predicate of a kernel whose gather producer reads rows of one tensor only; that of
    m64_fp8_kv loads rotated columns itself."""
    smallest = MIN_TMA_PAGE_M64_BF16 if kernel == "m64_bf16" else PAGES[0]
    taken = [page for page in PAGES if page >= smallest]

    def why_not_pages(problem: Problem) -> str | None:
        refusal = why_not(problem)
        is_tma_page = problem.page_size in taken or problem.page_size % BLOCK == 0
        is_taken = is_tma_page or kernel == "m64_fp8_kv"
        if refusal is None and problem.format in SPLIT_FORMATS and not is_taken:
            sizes = f"{', '.join(map(str, taken))} or a multiple of {BLOCK}"
            refusal = f"needs pages of {sizes} rows with {problem.format}, got {problem.page_size}"
        return refusal

    return why_not_pages


def _decode(
    kernel: str,
    why_not: Callable[[Problem], str | None],
    why_slower: Callable[[Problem], str | None] | None = None,
    variant: Callable[[Problem], str] | None = None,
) -> KernelSpec:
    return KernelSpec(
        "hopper",
        "mla_decode",
        f"{_LAUNCH}:mla_decode",
        _with_pages(kernel, why_not),
        planner=f"{_LAUNCH}:plan_mla_decode",
        kernel=kernel,
        why_slower=why_slower,
        mask_traits=DECODE_MASK_TRAITS,
        variant=variant,
    )


def _narrow_rows(problem: Problem) -> str:
    """Return the rows, and the tile of heads, of a problem that no GPU has run yet; "" for rows of
    512 latent columns."""
    row = problem.row
    if row is None or row.kv_lora_rank == D_C:
        return ""
    return f"{_stored(problem)} {row.width}/{row.v_width}, {_small_m_rows(problem)} heads"


def _why_not_product(problem: Problem) -> str | None:
    refusal = _why_not_device(problem)
    if refusal is not None:
        return refusal
    if problem.dtype not in PRODUCT_DTYPES:
        return f"needs results of {' or '.join(PRODUCT_DTYPES)}, got {problem.dtype}"
    shape = problem.product
    if shape is None:
        return "needs the sizes of a product, got none"
    if shape.depth == 0:
        return "needs columns to add up, got none"
    for name, group, size in (
        ("n_group", shape.n_group, shape.columns),
        ("k_group", shape.k_group, shape.depth),
    ):
        if group % PRODUCT_STEP and group < size:
            return f"needs {name} of a multiple of {PRODUCT_STEP}, got {group}"
    return problem.uses[0].refusal if problem.uses else None


def _product_variant(problem: Problem) -> str:
    """Return the tile that a product is computed with."""
    assert problem.product is not None
    return pick_product_config(problem.product, problem.num_sms).name


def _why_slower_product(problem: Problem) -> str | None:
    """The portable kernel splits K among the warps of narrow tiles, which fill all SMs."""
    shape = problem.product
    if shape is None:
        return None
    if shape.rows <= FEW_ROWS:
        return f"is for more than {FEW_ROWS} rows, got {shape.rows}"
    tiles = shape.batch * -(-shape.columns // PRODUCT_PIECE)
    if shape.rows <= SMALL_M_ROWS and 2 * tiles < problem.num_sms:
        return f"is for tiles on half of the SMs or more, got {tiles} tiles"
    return None


SPECS = (
    _decode("m64_bf16", _needs_format("bf16", "fp16"), _why_slower_m64),
    _decode("m64_fp8_qk", _needs_fp8_query, _why_slower_m64_fp8_qk),
    _decode("m64_fp8_kv", _why_not_m64_fp8_kv, _why_slower_m64),
    # `auto` takes it for rows of 256 latent columns where a check on that machine has passed
    _decode(
        "small_m_bf16",
        _needs_format("bf16", "fp16", latent_columns=(D_C, NARROW_D_C)),
        variant=_narrow_rows,
    ),
    _decode("small_m_fp8_kv", _needs_format(*_FP8_FORMATS)),
    # no GPU has run it yet: `auto` takes it where a check on that machine has passed
    _decode(
        "small_m_fp4_kv",
        _why_not_small_m_fp4_kv,
        _why_slower_small_m_fp4_kv,
        _fp4_variant,
    ),
    KernelSpec(
        "hopper",
        "indexer_logits",
        f"{__package__}.indexer.launch:indexer_logits",
        _why_not_indexer_logits,
        mask_traits=INDEXER_MASK_TRAITS,
    ),
    # no GPU has run it yet: `auto` takes it where a check on that machine has passed
    KernelSpec(
        "hopper",
        "scaled_mm_fp8",
        f"{__package__}.fp8.launch:scaled_mm_fp8",
        _why_not_product,
        why_slower=_why_slower_product,
        variant=_product_variant,
    ),
    *(_sparse(kernel) for kernel in _SPARSE_FORMATS),
    KernelSpec(
        "hopper",
        "mla_prefill",
        f"{__package__}.prefill.launch:mla_prefill",
        _why_not_prefill,
        mask_traits=PREFILL_MASK_TRAITS,
        variant=_prefill_variant,
    ),
)
