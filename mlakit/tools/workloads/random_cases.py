"""Random cases of every op, from a source of random integers: a seed, or hypothesis.

Problems are small and use everything that the contract allows. With `model_widths` rows and heads
have the dimensions of real models and pages have common sizes, so that few kernels are compiled;
lengths, heads, masks, formats and the rest stay random.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from mlakit.formats import FORMATS, SPLIT_FORMATS, Format, row_codec, split_format
from mlakit.model.geometry import RowShape
from mlakit.model.masks import KINDS, WINDOWED
from mlakit.tools.workloads.append_rows import AppendRowsCase
from mlakit.tools.workloads.case import Case
from mlakit.tools.workloads.compress_rows import CompressCase
from mlakit.tools.workloads.decode import DecodeCase
from mlakit.tools.workloads.fp8 import QuantizeCase, ScaledMatmulCase
from mlakit.tools.workloads.indexer import IndexerLogitsCase, IndexerTopkCase
from mlakit.tools.workloads.indexer_select import IndexerSelectCase
from mlakit.tools.workloads.matmul import BatchedMatmulCase
from mlakit.tools.workloads.merge import MergeCase
from mlakit.tools.workloads.norm_rope_quant import AppendCase
from mlakit.tools.workloads.physical_rows import PhysicalRowsCase
from mlakit.tools.workloads.prefill import PrefillCase
from mlakit.tools.workloads.prefill_fp8 import PrefillFp8Case
from mlakit.tools.workloads.sparse import SparseCase

T = TypeVar("T")

PLAIN = ("bf16", "fp16", "fp32")
SINKS = ("", "finite", "mixed")
# kv_lora_rank, qk_rope_head_dim, v_width of DeepSeek-V3, V4, Mistral, MiniCPM3, and without rope
MODEL_ROWS = ((512, 64, 0), (448, 64, 512), (256, 64, 0), (256, 32, 0), (512, 0, 0))
# qk_nope_head_dim, qk_rope_head_dim, v_head_dim of DeepSeek-V3, GLM-5, Mistral, MiniCPM3
MODEL_HEADS = ((128, 64, 128), (192, 64, 256), (64, 64, 128), (64, 32, 64))
USUAL_PAGES = (1, 16, 64)
KINDS_OF_HOPPER = tuple(kind for kind, traits in KINDS.items() if not traits.IS_COMPRESSED)


class Draw(ABC):
    """A source of random choices. A low number is the simpler choice."""

    def __init__(self, *, model_widths: bool = False) -> None:
        self.model_widths = model_widths

    @abstractmethod
    def integer(self, low: int, high: int) -> int:
        """In [low, high], inclusive."""

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def flip(self) -> bool:
        return self.choice((False, True))


class SeededDraw(Draw):
    """The same choices for the same seed, in every process and on every machine."""

    def __init__(self, seed: int | str, *, model_widths: bool = False) -> None:
        super().__init__(model_widths=model_widths)
        self._random = Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)


def random_case(draw: Draw, kind: type[Case], backend: str = "") -> Case:
    """A case of `kind`, with a random format if it has a cache.

    backend  if its kernels support few problems: a case that they support
    """
    if (backend, kind) in SPECIALISED:
        return SPECIALISED[backend, kind](draw)
    if kind in UNCACHED:
        return UNCACHED[kind](draw)
    return CACHED[kind](draw, draw.choice(FORMATS))


def _common(draw: Draw) -> dict[str, Any]:
    # 64 MiB hold a whole small problem; with 1 MiB kernels work in tiles
    workspace = draw.choice((1, 64))
    return {"seed": draw.integer(0, 2**31), "padded": draw.flip(), "workspace_mib": workspace}


def _cached(draw: Draw, format: Format) -> dict[str, Any]:
    """Rows of any shape that the format supports."""
    is_scaled = row_codec(format, RowShape(128, 64)).has_tensor_scale
    if draw.model_widths or draw.integer(0, 7) == 7:
        rank, rope, v_width = draw.choice(MODEL_ROWS)
    else:
        # scales and 16-bit columns in FP8 rows are aligned
        step = 1 if format in PLAIN or is_scaled else 4
        rank = draw.choice((16, 28, 32, 132)) if draw.flip() else step * draw.integer(1, 10)
        rope = 2 * draw.integer(0, 4)
        v_width = draw.choice((0, rank + rope, max(rank // 2, 1)))
    usual_page = draw.model_widths or draw.flip()
    return {
        **_common(draw),
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rope,
        "v_width": v_width,
        "format": format,
        "page_size": draw.choice(USUAL_PAGES) if usual_page else draw.integer(1, 130),
        "num_layers": draw.integer(1, 2),
        "tensor_scale": draw.choice((0.03, 0.01, 1.0)) if is_scaled else 1.0,
        "tensor_scale_on_device": is_scaled and draw.flip(),
        "power_of_two": draw.flip(),
        "wide_indices": draw.flip(),
    }


def _cached_or_split(draw: Draw, format: Format) -> dict[str, Any]:
    """`_cached`, often in two tensors where such rows can be."""
    shape = _cached(draw, format)
    has_scales = f"{format}_split" not in SPLIT_FORMATS
    if has_scales or shape["qk_rope_head_dim"] == 0 or shape["v_width"] > shape["kv_lora_rank"]:
        return shape
    return {**shape, "format": split_format(format)} if draw.flip() else shape


def _query_dtype(draw: Draw, format: Format) -> str:
    return draw.choice((format, "e4m3") if format in PLAIN else (*PLAIN, "e4m3"))


def _lengths(
    draw: Draw, page_size: int = 1, longest: int = 200, most_queries: int = 5
) -> dict[str, Any]:
    """kv_lens and q_lens; often the last page is full or has one token, sometimes there is none."""
    pages = draw.integer(1, max(longest // page_size, 1))
    known = (1, pages * page_size, pages * page_size + 1, 0)
    queries = (1, 1, 1, 2, most_queries, 0)
    batch = draw.choice((1, 2, 3, 4, 3, 2, 0))
    return {
        "kv_lens": tuple(
            draw.choice(known) if draw.flip() else draw.integer(1, longest) for _ in range(batch)
        ),
        "q_lens": tuple(draw.choice(queries) for _ in range(batch)),
    }


def _may_imply_starts(draw: Draw, requests: dict[str, Any]) -> bool:
    return all(q_len == 1 for q_len in requests["q_lens"]) and draw.flip()


def _masked(draw: Draw, kinds: Sequence[str] = tuple(KINDS)) -> dict[str, Any]:
    kind = draw.choice(("causal", "causal", *kinds))
    return {"mask": kind, "window": draw.choice((1, 7, 16, 50, 90)) if kind in WINDOWED else 0}


def _attending(draw: Draw) -> dict[str, Any]:
    return {
        "heads": draw.integer(1, 20),
        "sharpness": draw.choice((0.5, 1.5, 4.0)),
        "sink": draw.choice(SINKS),
        "given_results": draw.flip(),
    }


def _scheduled(draw: Draw) -> dict[str, Any]:
    tile = draw.choice((1, 16, 64))
    match draw.choice(("none", "even", "balanced", "fixed")):
        case "even":
            return {"num_splits": draw.integer(1, 5)}
        case "balanced":
            return {"num_ctas": draw.integer(1, 7), "tile": tile}
        case "fixed":
            # smaller splits only take time
            return {"num_ctas": draw.integer(1, 7), "tile": tile, "fixed_split": max(tile, 32)}
        case _:
            return {}


def append_case(draw: Draw, format: Format) -> AppendCase:
    shape = _cached_or_split(draw, format)
    steps = _lengths(draw, shape["page_size"])
    steps["kv_lens"] = tuple(map(max, steps["kv_lens"], steps["q_lens"]))
    world = draw.choice((1, 1, 2, 3))
    slots = draw.choice(("", "", "all", "some"))
    return AppendCase(
        **shape,
        **steps,
        implicit_starts=_may_imply_starts(draw, steps),
        heads=draw.integer(1, 20),
        dtype=draw.choice(PLAIN),
        freqs_dtype=draw.choice(PLAIN),
        gamma_dtype=draw.choice([*PLAIN, ""]),
        epsilon=draw.choice((0.0, 1e-6, 1e-3)),
        rope=draw.choice(("interleaved", "half")),
        flat_table=draw.flip(),
        q_out=draw.choice(("", "in_place", "given", "e4m3")),
        slots=slots,
        positions="" if slots else draw.choice(("", "", "given")),
        rank=draw.integer(0, world - 1),
        world=world,
        interleave=draw.choice((1, 3, 16)),
    )


def append_rows_case(draw: Draw, format: Format) -> AppendRowsCase:
    return AppendRowsCase(
        **_cached_or_split(draw, format),
        num_tokens=draw.integer(0, 40),
        num_pages=draw.integer(1, 4),
        skipped=draw.choice((0.3, 0.0, 1.0)),
        dtype=draw.choice(PLAIN),
        rope_dtype=draw.choice(PLAIN),
    )


def compress_case(draw: Draw, format: Format) -> CompressCase:
    shape = _cached(draw, format)
    rate, overlap = draw.choice(((4, True), (128, False), (1, False), (3, True), (7, False)))
    steps = _lengths(draw, rate, longest=40 if rate < 100 else 300, most_queries=5 * rate // 2)
    steps["kv_lens"] = tuple(map(max, steps["kv_lens"], steps["q_lens"]))
    return CompressCase(
        **shape,
        **steps,
        implicit_starts=_may_imply_starts(draw, steps),
        rate=rate,
        overlap=overlap,
        keep=draw.choice((0, 3)),
        normed=draw.choice((True, True, False)),
        dtype=draw.choice(PLAIN),
        bias_dtype=draw.choice(PLAIN),
        gamma_dtype=draw.choice(PLAIN),
        freqs_dtype=draw.choice(PLAIN),
        epsilon=draw.choice((0.0, 1e-6)),
        rotated=shape["kv_lora_rank"] % 2 == 0 and draw.flip(),
        angles=2 * draw.integer(0, shape["kv_lora_rank"] // 2),
        state_page_size=draw.choice((1, 4, 8, 13)),
        flat_table=draw.flip(),
    )


def prefill_case(draw: Draw) -> PrefillCase:
    if draw.model_widths:
        nope, rope, value = draw.choice(MODEL_HEADS)
    else:
        nope, rope, value = draw.integer(1, 40), draw.integer(0, 12), draw.integer(1, 40)
    fields: dict[str, Any] = {
        **_common(draw),
        **_lengths(draw, longest=draw.choice((60, 60, 300)), most_queries=30),
        **_masked(draw),
        **_attending(draw),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "wide_indices": draw.flip(),
    }
    if draw.integer(0, 2) == 0:
        return _prefill_fp8_case(draw, fields)
    return PrefillCase(**fields, dtype=draw.choice(PLAIN), alibi=draw.flip(), expanded=draw.flip())


def _prefill_fp8_case(draw: Draw, fields: dict[str, Any]) -> PrefillFp8Case:
    uniform = {"uniform_keys": draw.flip(), "uniform_values": draw.flip()}
    blocks = {"block_scales": True}
    kinds: list[dict[str, Any]] = [{}, {"scaled": False}, blocks, blocks, uniform]
    return PrefillFp8Case(**fields, **draw.choice(kinds), transposed=draw.flip())


def decode_case(draw: Draw, format: Format) -> DecodeCase:
    if draw.model_widths and format in ("bf16", "fp16") and draw.flip():
        return _plain_decode_case(draw, format)
    shape = _cached_or_split(draw, format)
    requests = _lengths(draw, shape["page_size"])
    return DecodeCase(
        **shape,
        **requests,
        **_masked(draw),
        **_attending(draw),
        **_scheduled(draw),
        implicit_starts=_may_imply_starts(draw, requests),
        dtype=_query_dtype(draw, format),
        q_rope_dtype=draw.choice(("", "", *PLAIN, "e4m3")),
        q_scaled=draw.flip(),
        flat_table=draw.flip(),
        world=draw.choice((1, 1, 2, 3)),
        interleave=draw.choice((1, 3, 16)),
        deterministic=draw.flip(),
    )


def _plain_decode_case(draw: Draw, format: Format) -> DecodeCase:
    """A call as in an engine: other random cases are rarely supported by the Hopper kernels."""
    rank, rope, _ = MODEL_ROWS[0]
    splits: dict[str, Any] = {}
    if draw.flip():
        splits = {"num_ctas": draw.integer(1, 7), "tile": 64}
    return DecodeCase(
        **_common(draw),
        **_lengths(draw, page_size=64, longest=600),
        **_attending(draw),
        **splits,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        format=format,
        dtype=format,
        page_size=64,
        mask=draw.choice(("causal", "null")),
    )


def sparse_case(draw: Draw, format: Format) -> SparseCase:
    attending = _attending(draw)
    # some with more heads and longer lists than a tile of the largest configuration
    is_large = draw.integer(0, 3) == 3
    if is_large:
        attending["heads"] = draw.integer(33, 130)
    return SparseCase(
        **_cached_or_split(draw, format),
        **attending,
        num_pages=draw.integer(1, 5),
        num_tokens=draw.integer(0, 4 if is_large else 12),
        topk=draw.integer(0, 200 if is_large else 60),
        with_lens=draw.flip(),
        dtype=_query_dtype(draw, format),
        extra_format=draw.choice(("", format, "fp32", "fp8")),
        extra_page_size=draw.choice(USUAL_PAGES) if draw.model_widths else draw.integer(1, 20),
        extra_topk=draw.integer(0, 30),
        extra_with_lens=draw.flip(),
        num_splits=draw.integer(0, 4),
        q_rope_dtype=draw.choice(("", "", *PLAIN, "e4m3")),
        q_scaled=draw.flip(),
    )


def indexer_logits_case(draw: Draw, format: Format) -> IndexerLogitsCase:
    shape = _cached(draw, format)
    requests = _lengths(draw, shape["page_size"])
    return IndexerLogitsCase(
        **shape,
        **requests,
        **_masked(draw),
        implicit_starts=_may_imply_starts(draw, requests),
        heads=draw.integer(1, 20),
        dtype=draw.choice((*PLAIN, "e4m3")),
        flat_table=draw.flip(),
        spare_columns=draw.integer(0, 9) if draw.flip() else None,
        given_results=draw.flip(),
    )


def indexer_select_case(draw: Draw, format: Format) -> IndexerSelectCase:
    shape = _cached(draw, format)
    requests = _lengths(draw, shape["page_size"])
    masked = _masked(draw)
    may_split = masked["mask"] not in ("sliding_window_noncausal", "chunked")
    k = draw.choice((draw.integer(1, 12), draw.integer(1, 250)))
    always = draw.integer(0, k) if draw.flip() else 0
    init_tokens = draw.integer(0, always)
    return IndexerSelectCase(
        **{**shape, "tensor_scale": 0.25 if format == "fp8" else 1.0, "power_of_two": True},
        **requests,
        **masked,
        implicit_starts=_may_imply_starts(draw, requests),
        heads=draw.integer(1, 20),
        k=k,
        init_tokens=init_tokens,
        local_tokens=always - init_tokens,
        dtype=draw.choice((*PLAIN, "e4m3")),
        flat_table=draw.flip(),
        spare_columns=draw.integer(0, 9) if draw.flip() else None,
        block_tokens=draw.choice((0, 1, 2, 5)) if may_split else 0,
        specials=draw.choice((0.0, 0.0, 0.3)),
        given_results=draw.flip(),
    )


def topk_case(draw: Draw) -> IndexerTopkCase:
    return IndexerTopkCase(
        seed=draw.integer(0, 2**31),
        padded=draw.flip(),
        num_tokens=draw.integer(0, 12),
        num_columns=draw.integer(0, 80),
        k=draw.integer(1, 90),
        with_starts=draw.flip(),
        with_ends=draw.flip(),
        levels=draw.choice((0, 2, 9)),
        specials=draw.choice((0.0, 0.1, 0.7)),
        wide_indices=draw.flip(),
        given_results=draw.flip(),
    )


def physical_rows_case(draw: Draw) -> PhysicalRowsCase:
    page_size = draw.choice(USUAL_PAGES) if draw.model_widths else draw.integer(1, 70)
    requests = _lengths(draw, page_size)
    implicit = _may_imply_starts(draw, requests)
    return PhysicalRowsCase(
        **_common(draw),
        **requests,
        implicit_starts=implicit,
        padding=0 if implicit else draw.choice((0, 0, 1, 5)),
        topk=draw.integer(0, 70),
        page_size=page_size,
        flat_table=draw.flip(),
        outside=draw.choice((0.3, 0.0, 0.9)),
        wide_indices=draw.flip(),
        given_results=draw.flip(),
    )


def merge_case(draw: Draw) -> MergeCase:
    is_model = draw.model_widths or draw.flip()
    return MergeCase(
        **_common(draw),
        num_parts=draw.integer(1, 6),
        num_tokens=draw.integer(0, 12),
        heads=draw.integer(1, 20),
        v_width=512 if is_model else draw.integer(1, 64),
        dtype=draw.choice(PLAIN),
        empty=draw.choice((0.0, 0.3, 0.8)),
        spread=draw.choice((0.5, 3.0, 30.0)),
        sink=draw.choice(SINKS),
        mixed=draw.flip(),
        given_results=draw.flip(),
    )


def quantize_case(draw: Draw) -> QuantizeCase:
    return QuantizeCase(
        **_common(draw),
        batch=draw.integer(0, 3),
        m=draw.integer(0, 9),
        k=draw.integer(0, 70),
        group=draw.choice((16, 32)) if draw.model_widths else draw.integer(1, 40),
        dtype=draw.choice(PLAIN),
        scale_ub=draw.choice((None, 30.0, 1200.0)),
        given_results=draw.flip(),
    )


def scaled_matmul_case(draw: Draw) -> ScaledMatmulCase:
    groups = (16, 32)
    return ScaledMatmulCase(
        **_common(draw),
        batch=draw.integer(0, 3),
        m=draw.integer(0, 9),
        n=draw.integer(0, 40),
        k=draw.integer(0, 70),
        n_group=draw.choice(groups) if draw.model_widths else draw.integer(1, 20),
        k_group=draw.choice(groups) if draw.model_widths else draw.integer(1, 40),
        spare_columns=draw.integer(0, 3),
        out_dtype=draw.choice((*PLAIN, "e4m3")),
        given_results=draw.flip(),
    )


def matmul_case(draw: Draw) -> BatchedMatmulCase:
    return BatchedMatmulCase(
        **_common(draw),
        batch=draw.integer(0, 4),
        m=draw.integer(0, 9),
        n=draw.integer(0, 40),
        k=draw.integer(0, 40),
        dtype=draw.choice(PLAIN),
        out_dtype=draw.choice(("", *PLAIN, "e4m3")),
        a_batch_second=draw.flip(),
        b_transposed=draw.flip(),
        out_batch_second=draw.flip(),
    )


def hopper_decode_case(draw: Draw) -> DecodeCase:
    """A case for the Hopper kernels, in few configurations to limit compilation."""
    batch = draw.choice((1, 2, 3, 8, 40, 150))
    longest = draw.choice((130, 700, 3000)) if batch > 3 else draw.choice((130, 3000, 20000))
    q_lens = tuple(draw.choice((1, 1, 1, 1, 2, 4, 0)) for _ in range(batch))
    # the first request has keys: the kernels do not support a pool without pages
    ends = tuple(draw.integer(1 if request == 0 else 0, longest) for request in range(batch))
    whole = tuple(-(-end // 64) * 64 for end in ends)
    tile = draw.choice((64, 128))
    cut = {"num_ctas": draw.integer(1, 132), "tile": tile}
    plans: tuple[dict[str, Any], ...] = ({}, cut, {**cut, "fixed_split": 4 * tile})
    formats: tuple[Format, ...] = ("bf16", "bf16", "bf16", "fp8", "fp8_token", "fp8_block128")
    format = draw.choice(formats)
    has_fp8_queries = format != "bf16"
    return DecodeCase(
        seed=draw.integer(0, 2**31),
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        format=format,
        tensor_scale=0.03 if format == "fp8" else 1.0,
        page_size=64,
        num_layers=draw.integer(1, 2),
        dtype="e4m3" if has_fp8_queries else "bf16",
        q_scaled=has_fp8_queries,
        kv_lens=draw.choice((ends, whole)),
        q_lens=q_lens,
        heads=draw.choice((draw.integer(1, 128), 16, 64, 128) if batch < 40 else (16, 64)),
        sharpness=draw.choice((0.5, 1.5, 4.0)),
        sink=draw.choice(("", "finite")),
        **draw.choice(plans),
    )


def hopper_prefill_case(draw: Draw) -> PrefillCase:
    """A case for the Hopper kernels; a work tile is 128 or 192 queries, a block 64 or 128 keys."""
    is_fp8 = draw.integer(0, 2) == 0
    widths = [(128, 64, 128), (128, 0, 128)]
    if not is_fp8:
        widths += [(192, 64, 256), (64, 32, 64)]
    nope, rope, value = draw.choice(widths)
    fields: dict[str, Any] = {
        **_common(draw),
        **_lengths(draw, longest=400, most_queries=300),
        **_masked(draw, KINDS_OF_HOPPER),
        **_attending(draw),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "wide_indices": draw.flip(),
    }
    if is_fp8:
        return _prefill_fp8_case(draw, fields)
    return PrefillCase(**fields, expanded=draw.flip())


def hopper_product_case(draw: Draw) -> ScaledMatmulCase:
    """A case for the Hopper kernel: rows of 16 bytes, and groups of whole steps."""
    groups = (128, 256, 1024)
    return ScaledMatmulCase(
        **_common(draw),
        batch=draw.integer(0, 3),
        m=draw.choice((draw.integer(1, 64), draw.integer(65, 700))),
        n=draw.choice((draw.integer(1, 300), 16 * draw.integer(1, 80))),
        k=16 * draw.integer(1, 130),
        n_group=draw.choice(groups),
        k_group=draw.choice(groups),
        spare_columns=draw.integer(0, 3),
        out_dtype=draw.choice(("bf16", "bf16", "e4m3")),
        given_results=draw.flip(),
    )


def blackwell_decode_case(draw: Draw) -> DecodeCase:
    """A case for the Blackwell kernels: rows that they take, in pages of any size."""
    formats: tuple[Format, ...] = ("bf16", "fp16", "fp8_block128")
    rows: dict[str, Any] = {"format": draw.choice(formats), "page_size": draw.choice((64, 1, 24))}
    dtype = "fp16" if rows["format"] == "fp16" else "bf16"
    case = hopper_decode_case(draw)
    return replace(case, **rows, dtype=dtype, q_scaled=False, tensor_scale=1.0)


def blackwell_prefill_case(draw: Draw) -> PrefillCase:
    """A case for the Blackwell kernel; a work tile is 128 or 256 queries, a block 128 keys."""
    nope, rope, value = draw.choice(((128, 64, 128), (192, 64, 256), (128, 0, 128)))
    return PrefillCase(
        **_common(draw),
        **_lengths(draw, longest=400, most_queries=300),
        **_masked(draw, KINDS_OF_HOPPER),
        **_attending(draw),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        wide_indices=draw.flip(),
        dtype=draw.choice(("bf16", "bf16", "fp16")),
        expanded=draw.flip(),
    )


SPECIALISED: dict[tuple[str, type[Case]], Callable[[Draw], Case]] = {
    ("hopper", DecodeCase): hopper_decode_case,
    ("hopper", PrefillCase): hopper_prefill_case,
    ("hopper", ScaledMatmulCase): hopper_product_case,
    ("blackwell", DecodeCase): blackwell_decode_case,
    ("blackwell", PrefillCase): blackwell_prefill_case,
}
# ops with a cache: a case for one format
CACHED: dict[type[Case], Callable[[Draw, Format], Case]] = {
    AppendCase: append_case,
    AppendRowsCase: append_rows_case,
    CompressCase: compress_case,
    DecodeCase: decode_case,
    SparseCase: sparse_case,
    IndexerLogitsCase: indexer_logits_case,
    IndexerSelectCase: indexer_select_case,
}
UNCACHED: dict[type[Case], Callable[[Draw], Case]] = {
    PrefillCase: prefill_case,
    IndexerTopkCase: topk_case,
    PhysicalRowsCase: physical_rows_case,
    MergeCase: merge_case,
    QuantizeCase: quantize_case,
    ScaledMatmulCase: scaled_matmul_case,
    BatchedMatmulCase: matmul_case,
}
