"""Random launches in few configurations: thousands of launches compile few kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, cast
from unittest.mock import patch

from mlakit.dispatch import knobs, selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.specs import KernelSpec, Problem
from mlakit.formats import Format
from mlakit.kernels.blackwell.prefill.configs import FP8_WIDTHS, WIDTHS
from mlakit.tools.workloads.case import BatchedCase, Case
from mlakit.tools.workloads.decode import DecodeCase
from mlakit.tools.workloads.fp8 import ScaledMatmulCase
from mlakit.tools.workloads.indexer import IndexerLogitsCase, IndexerTopkCase
from mlakit.tools.workloads.indexer_select import IndexerSelectCase
from mlakit.tools.workloads.paged import SPARE_COLUMNS
from mlakit.tools.workloads.prefill import PrefillCase
from mlakit.tools.workloads.prefill_fp8 import PrefillFp8Case
from mlakit.tools.workloads.random_cases import Draw
from mlakit.tools.workloads.sparse import SparseCase

EDGES = (0, 1, 63, 64, 65)
LONGEST = 4000
# keys of a batch, padded to its longest request: a GPU checks such a problem in a millisecond
GPU_KEYS = 12_000
CPU_KEYS = 400
GPU_BATCHES = (1, 2, 3, 4, 7, 8, 30, 32)  # few distinct powers of two: plans are compiled for these
CPU_BATCHES = (1, 2, 3)
GPU_WORKERS = 132
CPU_WORKERS = 5


# fields of a case that are compile-time parameters, and what others are drawn from
Configuration: TypeAlias = dict[str, Any]


def _decode(heads: tuple[int, int], *, sign: int = 1, **more: Any) -> Configuration:
    """heads  first, last; sign  of softmax_scale"""
    row = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    return {"heads": heads, "sign": sign, "page_size": 64, **row, **more}


SPARE_KEYS = 70_400  # table capacity with which the m64 kernels are selected
NARROW_RANK = 256  # latent columns of Mistral 4's rows
# a kernel each for up to 8, 16, 32, 64 and 128 heads, for FP8 caches and for FP8 queries
FOR_HOPPER = (
    _decode((1, 8), sink="mixed"),
    _decode((9, 16), format="fp16", dtype="fp16", page_size=128, mask="null", sign=-1),
    _decode((17, 32)),
    _decode((33, 64), mask="null", sink="finite"),
    _decode((97, 128)),
    _decode((97, 128), format="fp16", dtype="fp16", page_size=256, sink="mixed", sign=-1),
    _decode((1, 8), format="fp8", mask="null"),
    _decode((9, 16), format="fp8_token", sink="mixed"),
    _decode((97, 128), format="fp8_block128", page_size=128, sign=-1),
    _decode((9, 16), format="fp8", dtype="e4m3", q_scaled=True, sink="finite"),
    _decode((17, 32), format="fp8_token", dtype="e4m3", q_scaled=True, mask="null", sign=-1),
    _decode((33, 64), format="fp8_block128", dtype="e4m3", page_size=16),
    _decode((97, 128), format="fp8_token", sink="mixed"),
    _decode((33, 64), format="fp8", dtype="e4m3", page_size=32, q_scaled=True, mask="null"),
    _decode((9, 16), page_size=1),
    _decode((97, 128), page_size=24, sink="mixed"),
    _decode((9, 16), format="fp8_token", page_size=1, mask="null"),
    _decode((97, 128), format="fp8_token", page_size=1),
    _decode((97, 128), format="fp8", dtype="e4m3", page_size=1, q_scaled=True),
    _decode((97, 128), format="fp8", dtype="fp16"),
    _decode((33, 64), format="fp8", page_size=32, sink="mixed"),
    _decode((17, 32), format="fp8_token", dtype="e4m3", q_rope_dtype="bf16"),
    _decode((97, 128), format="fp8_block128", dtype="e4m3", q_scaled=True, q_rope_dtype="bf16"),
    _decode((97, 128), format="fp8_block128", dtype="e4m3", page_size=1, sink="finite"),
    # four-bit rows
    _decode((1, 8), format="mxfp4_block32", mask="null"),
    _decode((9, 16), format="mxfp4_block32", page_size=128, sink="mixed"),
    _decode((17, 32), format="mxfp4_block32", page_size=8, sign=-1),
    # rows of 256 + 64 columns
    _decode((17, 32), kv_lora_rank=NARROW_RANK, sink="mixed"),
    _decode((33, 64), kv_lora_rank=NARROW_RANK, format="fp16", dtype="fp16", mask="null", sign=-1),
    _decode((1, 8), kv_lora_rank=NARROW_RANK, page_size=1),
    _decode((17, 32), kv_lora_rank=NARROW_RANK, format="bf16_split", page_size=32),
    _decode((9, 16), kv_lora_rank=NARROW_RANK, format="fp16_split", dtype="fp16", mask="null"),
    # rows in two tensors
    _decode((9, 16), format="bf16_split", page_size=32, mask="null"),
    _decode((97, 128), format="bf16_split", sink="finite"),
    _decode((33, 64), format="fp16_split", dtype="fp16", page_size=128, sign=-1),
    _decode((9, 16), format="fp8_split", sink="mixed"),
    _decode((97, 128), format="fp8_split", page_size=1, mask="null"),
    _decode((33, 64), format="fp8_split", dtype="e4m3", q_scaled=True),
    _decode((33, 64), format="fp8_split", dtype="fp16", sign=-1),
)
# kernels that dispatch gives no call: they are drawn, and run, where they are asked for by name
BY_NAME = ("m64_fp8_qk",)
FOR_ANY = (
    *FOR_HOPPER,
    _decode((1, 16), page_size=16, sink="finite"),
    _decode((17, 32), mask="sliding_window_causal", window=70),
    _decode((1, 64), format="fp8_block128", sign=-1),
    _decode((1, 64), format="fp8_token", dtype="e4m3", mask="null", sink="mixed"),
)
# a tile each of 16, 32 and 64 heads, and two of them
FOR_BLACKWELL = (
    _decode((1, 16), sink="mixed"),
    _decode((17, 32), format="fp16", dtype="fp16", page_size=128, mask="null", sign=-1),
    _decode((33, 64), page_size=24, sink="finite", page_major=True),
    _decode((97, 128)),
    _decode((1, 16), format="bf16_split", page_size=1),
    _decode((1, 16), format="fp8_block128", page_size=1, mask="null"),
    _decode((17, 32), format="fp8_block128", page_major=True, sign=-1),
    _decode((97, 128), format="fp8_block128", sink="mixed"),
)
CONFIGURATIONS = {"hopper": FOR_HOPPER, "blackwell": FOR_BLACKWELL}


def random_launch(
    draw: Draw, op: str, backend: str, device: str, calls: int | None = None
) -> BatchedCase:
    """A launch of `op`; problems on a CPU are small.

    backend  if its kernels support few problems: a launch that they support
    calls    calls per launch, without effect on the other choices; None: random
    """
    launch = LAUNCHES[op](draw, backend, device)
    return launch if calls is None else replace(launch, calls=calls)


class _Selected(Exception):
    """Carries the selected kernel out of a call before its launch."""

    def __init__(self, spec: KernelSpec, problem: Problem) -> None:
        self.spec, self.problem = spec, problem


def kernel_of(launch: Case, device: str, backend: str) -> str:
    """The name of the kernel to which dispatch gives a launch, which does not run; "" if none."""
    selected = selection_of(launch, device, backend)
    return "" if selected is None else selected[0].kernel


def selection_of(launch: Case, device: str, backend: str) -> tuple[KernelSpec, Problem] | None:
    """Return the kernel of a launch, which does not run, and its problem; None if there is none."""
    real = selection.select

    def select(op: str, problem: Problem, asked: str = "auto") -> KernelSpec:
        spec = real(op, problem, asked)
        if op == launch.op:
            raise _Selected(spec, problem)
        return spec

    try:
        with patch.object(selection, "select", select), knobs.override(launch_cache=False):
            launch.trial(device).call(cast("Backend", backend))
    except _Selected as selected:
        return selected.spec, selected.problem
    except UnsupportedError:
        pass
    return None


def backend_for(backend: str, kernel: str) -> str:
    """Return what `backend=` is where launches of a kernel are checked; "" is any kernel."""
    return f"{backend}:{kernel}" if kernel in BY_NAME else backend


def _common(draw: Draw) -> dict[str, Any]:
    return {
        "oracle": "batched",
        "seed": draw.integer(0, 2**31),
        "calls": draw.choice((1, 1, 1, 3)),
    }


def decode_launch(draw: Draw, backend: str, device: str) -> DecodeCase:
    is_gpu = device != "cpu"
    batch = draw.choice(GPU_BATCHES if is_gpu else CPU_BATCHES)
    longest = min(LONGEST, (GPU_KEYS if is_gpu else CPU_KEYS) // batch)
    configuration = dict(draw.choice(CONFIGURATIONS.get(backend, FOR_ANY)))
    heads, sign = configuration.pop("heads"), configuration.pop("sign")
    q_lens = tuple(draw.choice((1, 1, 1, 1, 2, 4, 0)) for _ in range(batch))
    if draw.flip() or not any(q_lens):
        q_lens = (1,) * batch
    sharpness = draw.choice((0.5, 1.5, 4.0))
    return DecodeCase(
        **_common(draw),
        given_results=True,
        **_scheduled(draw, most_ctas=GPU_WORKERS if is_gpu else CPU_WORKERS, backend=backend),
        spare_pages=draw.choice((0, SPARE_KEYS // configuration["page_size"])) if is_gpu else 0,
        num_layers=draw.integer(1, 2),
        kv_lens=tuple(_length(draw, longest) for _ in range(batch)),
        q_lens=q_lens,
        heads=draw.choice((*heads, draw.integer(*heads))),
        sharpness=sign * sharpness,
        **configuration,
    )


def _length(draw: Draw, longest: int) -> int:
    drawn = draw.integer(0, longest)
    return draw.choice((draw.choice(EDGES), drawn // 64 * 64, drawn, drawn))


def _scheduled(draw: Draw, *, most_ctas: int, backend: str) -> dict[str, Any]:
    tile = draw.choice((64, 128))
    cut = {"num_ctas": draw.integer(1, most_ctas), "tile": tile}
    schedules: list[dict[str, Any]] = [{}, cut, {**cut, "fixed_split": draw.integer(1, 8) * tile}]
    if backend not in CONFIGURATIONS:
        schedules.append({"num_splits": draw.integer(1, 5)})
    return draw.choice(schedules)


# q_lens of a request: their mean is that of a token block of 1, 2, 4 or 8
INDEXER_CONFIGURATIONS: tuple[Configuration, ...] = (
    {"page_size": 64, "heads": 64, "q_lens": (1,)},
    {"heads": 64, "q_lens": (1, 2, 2), "page_size": 128, "mask": "null"},
    {"page_size": 64, "heads": 64, "q_lens": (3, 4, 4, 0)},
    {"page_size": 64, "heads": 64, "q_lens": (1, 9, 30, 8, 0)},
    {"heads": 32, "q_lens": (1,), "page_size": 128},
    {"page_size": 64, "heads": 20, "q_lens": (1, 2, 2)},
    {"page_size": 64, "heads": 32, "q_lens": (3, 4, 4, 0), "mask": "null"},
    {"page_size": 64, "heads": 32, "q_lens": (1, 9, 30, 8, 0)},
    {"page_size": 64, "heads": 48, "q_lens": (1, 9, 30, 8, 0), "mask": "null"},
)
INDEX_ROW: dict[str, Any] = {"kv_lora_rank": 128, "qk_rope_head_dim": 0}
INDEXER_EDGES = (*EDGES, 127, 128, 129, 255, 256, 257)


def indexer_launch(draw: Draw, backend: str, device: str) -> IndexerLogitsCase:
    is_gpu = device != "cpu"
    batch = draw.choice(GPU_BATCHES if is_gpu else CPU_BATCHES)
    configuration = dict(draw.choice(INDEXER_CONFIGURATIONS))
    known, heads = configuration.pop("q_lens"), configuration.pop("heads")
    q_lens = tuple(draw.choice(known) for _ in range(batch))
    if not any(q_lens):
        q_lens = (known[0],) * batch
    # pairs of query and key, padded to the longest request, take a GPU milliseconds
    pairs = (4 * GPU_KEYS if is_gpu else CPU_KEYS) // (batch * max(q_lens))
    longest = max(min(LONGEST, pairs), max(q_lens))
    return IndexerLogitsCase(
        **_common(draw),
        **INDEX_ROW,
        given_results=True,
        format="fp8_token",
        dtype="e4m3",
        num_layers=draw.integer(1, 2),
        kv_lens=tuple(_indexer_length(draw, longest) for _ in range(batch)),
        q_lens=q_lens,
        heads=heads if is_gpu else draw.integer(1, 3),
        spare_columns=draw.choice((0, 1, 200, 9000)) if is_gpu else draw.integer(0, 3),
        **configuration,
    )


def _indexer_length(draw: Draw, longest: int) -> int:
    drawn = draw.integer(0, longest)
    return min(draw.choice((draw.choice(INDEXER_EDGES), drawn // 64 * 64, drawn, drawn)), longest)


V4_ROW: Configuration = {"kv_lora_rank": 448, "qk_rope_head_dim": 64, "v_width": 512}
NO_ROPE_ROW: Configuration = {"kv_lora_rank": 512, "qk_rope_head_dim": 0, "v_width": 512}


def _sparse(format: Format = "bf16", *, sign: int = 1, **more: Any) -> Configuration:
    """sign  of softmax_scale; padded  with gaps between rows and between pages

    with_lens  the first list has lengths; the second one: if the first has none
    """
    row = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_width": 512}
    known = {"format": format, "page_size": 64, "extra_page_size": 64, "with_lens": True}
    return {**row, **known, "sign": sign, **more}


# rows of 576 and of 512 columns, with and without a gap between pages, with a second cache
SPARSE_FOR_HOPPER = (
    _sparse(),
    _sparse("fp16", dtype="fp16", page_size=3, sink="mixed"),
    _sparse(padded=True, with_lens=False, sign=-1),
    _sparse(extra_format="bf16", extra_page_size=2, padded=True, sink="finite"),
    _sparse(**V4_ROW, sink="mixed"),
    _sparse("fp16", dtype="fp16", **NO_ROPE_ROW, with_lens=False, extra_format="fp16", sign=-1),
    _sparse("fp8_block128", sink="finite"),
    _sparse(
        "fp8_block128", padded=True, extra_format="fp8_block128", extra_page_size=2, sink="mixed"
    ),
    _sparse("fp8_block64", **V4_ROW, page_size=61, sign=-1),
    _sparse("fp8_token", page_size=16, extra_format="fp8_token", padded=True),
    _sparse("fp8", dtype="fp16", with_lens=False, sink="finite"),
    _sparse(q_rope_dtype="bf16"),
    _sparse(**NO_ROPE_ROW),
    _sparse("fp16", dtype="fp16", **V4_ROW, padded=True),
    _sparse("fp8", page_size=16),
    _sparse("fp8_block64", dtype="fp16", **V4_ROW, with_lens=False),
    # rows in two tensors
    _sparse("bf16_split", sink="mixed"),
    _sparse("fp16_split", dtype="fp16", padded=True, with_lens=False, sign=-1),
    _sparse("fp8_split", sink="finite"),
    _sparse("fp8_split", dtype="fp16", padded=True, sign=-1),
    # FP8 rows without rope columns: GLM-5.3-Flash's have 528 bytes
    _sparse("fp8_block128", **NO_ROPE_ROW, with_lens=False),
    _sparse("fp8_block128", **NO_ROPE_ROW, extra_format="fp8_block128", padded=True, sign=-1),
    _sparse("fp8_token", **NO_ROPE_ROW, page_size=16, sink="mixed"),
    _sparse("fp8", **NO_ROPE_ROW),
    _sparse("fp8", dtype="fp16", **NO_ROPE_ROW, with_lens=False, sink="finite"),
    # four-bit rows
    _sparse("mxfp4_block32", with_lens=False, sink="mixed"),
    _sparse("mxfp4_block32", padded=True, extra_format="mxfp4_block32", extra_page_size=2, sign=-1),
)
SPARSE_FOR_ANY = (
    *SPARSE_FOR_HOPPER,
    _sparse("fp8_token", extra_format="bf16", page_size=16),
)
# TMA refuses a gap between pages that is no multiple of a row's
SPARSE_FOR_BLACKWELL = (
    _sparse(),
    _sparse("fp16", dtype="fp16", page_size=3, sink="mixed"),
    _sparse(page_major=True, with_lens=False, sign=-1),
    _sparse(extra_format="bf16", extra_page_size=2, page_major=True, sink="finite"),
    _sparse(**V4_ROW, sink="mixed"),
    _sparse("fp16", dtype="fp16", **NO_ROPE_ROW, with_lens=False, extra_format="fp16", sign=-1),
    _sparse("fp8_block128", sink="finite"),
    _sparse("fp8_block128", page_major=True, extra_format="fp8_block128", extra_page_size=2),
    _sparse("fp8_block128", **NO_ROPE_ROW, with_lens=False, sign=-1),
)
SPARSE_CONFIGURATIONS = {"hopper": SPARSE_FOR_HOPPER, "blackwell": SPARSE_FOR_BLACKWELL}
LIST_EDGES = (1, 63, 64, 65, 127, 128, 129)


def sparse_launch(draw: Draw, backend: str, device: str) -> SparseCase:
    is_gpu = device != "cpu"
    configuration = dict(draw.choice(SPARSE_CONFIGURATIONS.get(backend, SPARSE_FOR_ANY)))
    sign = configuration.pop("sign")
    tokens = draw.choice((1, 2, 7, 40, 150) if is_gpu else (1, 2, 3))
    longest = min(2100, 12_000 // tokens) if is_gpu else 200
    topk, extra_topk = (
        draw.choice((draw.choice(LIST_EDGES), draw.integer(1, longest))) for _ in range(2)
    )
    sharpness = draw.choice((0.5, 1.5, 4.0))
    return SparseCase(
        **_common(draw),
        num_tokens=tokens,
        topk=topk,
        extra_topk=extra_topk,
        extra_with_lens=not configuration["with_lens"],
        num_splits=draw.choice((0, 0, 1, draw.integer(2, 9))),
        num_pages=-(-draw.integer(10, 1500 if is_gpu else 150) // configuration["page_size"]),
        heads=draw.choice((16, 64, 128, draw.integer(1, 140)) if is_gpu else (1, 5)),
        num_layers=draw.integer(1, 2),
        sharpness=sign * sharpness,
        **configuration,
        given_results=draw.flip(),
    )


class TopkConfiguration(NamedTuple):
    """Ranges with the same compile-time parameters of an `indexer_topk` kernel."""

    columns: tuple[int, int]  # first, last
    k: tuple[int, int]  # first, last
    rows: tuple[int, ...]  # many are not split; few are
    with_starts: bool = False
    with_ends: bool = False
    padded: bool = False
    is_aligned: bool = True  # columns and k are multiples of ALIGNED, or none is


# distinct numbers; many equal ones; almost all equal; best at the end, or at the start; infinities
# and NaN; almost all −inf
TOPK_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"levels": 50},
    {"rare": 0.01},
    {"order": "ascending"},
    {"order": "descending"},
    {"specials": 0.5},
    {"invisible": 0.97},
)
ALIGNED = 16  # Triton compiles kernels for strides that are multiples of this
# rows in registers, rows that are narrowed down, rows that are read again and again
TOPK_CONFIGURATIONS = (
    TopkConfiguration((2049, 4096), (16, 2048), (1, 40, 600), with_ends=True),
    TopkConfiguration((4097, 8192), (2, 8192), (1, 300), with_starts=True, is_aligned=False),
    TopkConfiguration((8193, 16384), (1639, 2048), (300, 600), with_ends=True),
    TopkConfiguration((65537, 131072), (1639, 2048), (265, 280), with_starts=True, with_ends=True),
    TopkConfiguration((69632, 131072), (1639, 2048), (1, 3, 8), with_ends=True, padded=True),
    TopkConfiguration((16385, 32768), (2, 512), (265, 600), padded=True, is_aligned=False),
    TopkConfiguration((24576, 28671), (2, 512), (1, 16), with_starts=True, is_aligned=False),
    TopkConfiguration((8193, 16384), (8192, 8192), (1, 140), with_ends=True),
    TopkConfiguration((16385, 32768), (4097, 8192), (265, 300)),
    TopkConfiguration((16385, 32768), (8193, 9008), (1, 140), with_ends=True, is_aligned=False),
)
CPU_TOPK_CONFIGURATIONS = (
    TopkConfiguration((48, 400), (16, 48), (5,), padded=True),
    TopkConfiguration((50, 400), (2, 40), (5,), with_ends=True, is_aligned=False),
    TopkConfiguration((50, 400), (2, 400), (5,), True, True, padded=True, is_aligned=False),
)


def topk_launch(draw: Draw, backend: str, device: str) -> IndexerTopkCase:
    is_gpu = device != "cpu"
    configuration = draw.choice(TOPK_CONFIGURATIONS if is_gpu else CPU_TOPK_CONFIGURATIONS)
    is_aligned = configuration.is_aligned
    return IndexerTopkCase(
        **_common(draw),
        **draw.choice((TOPK_KINDS[0], *TOPK_KINDS)),
        given_results=True,
        padded=configuration.padded,
        num_tokens=draw.choice(configuration.rows),
        num_columns=_width(draw, *configuration.columns, is_aligned=is_aligned),
        k=_width(draw, *configuration.k, is_aligned=is_aligned),
        with_starts=configuration.with_starts,
        with_ends=configuration.with_ends,
    )


def _width(draw: Draw, first: int, last: int, *, is_aligned: bool) -> int:
    """`last`, or less; a multiple of ALIGNED, or none."""
    drawn = draw.choice((last, last, draw.integer(first, last)))
    if is_aligned:
        return max(drawn // ALIGNED * ALIGNED, -(-first // ALIGNED) * ALIGNED)
    return drawn if drawn % ALIGNED else drawn - 1


# pages of the page table, per request
SELECT_CONFIGURATIONS: tuple[Configuration, ...] = (
    {"heads": 64, "format": "fp8_token", "k": 2048, "pages": 64},
    {"heads": 32, "format": "bf16", "k": 512, "pages": 128, "mask": "null"},
    {"heads": 64, "format": "bf16", "k": 2048, "pages": 256},
    {"heads": 64, "format": "fp8_token", "k": 2048, "pages": 1000, "mask": "null"},
    {"heads": 32, "format": "fp8_token", "k": 16, "pages": 300},
)
SELECT_PAGE = 64


def select_launch(draw: Draw, backend: str, device: str) -> IndexerSelectCase:
    is_gpu = device != "cpu"
    configuration = dict(draw.choice(SELECT_CONFIGURATIONS))
    known = configuration.pop("pages")
    batch = draw.choice((1, 2, 3, 8) if is_gpu else CPU_BATCHES)
    pages = known if is_gpu else 30
    longest = min((12_000 if is_gpu else CPU_KEYS) // batch, (pages - SPARE_COLUMNS) * SELECT_PAGE)
    kv_lens = tuple(_length(draw, longest) for _ in range(batch))
    q_lens = tuple(draw.choice((1, 1, 2, 5, 0)) for _ in range(batch))
    if draw.flip() or not any(q_lens):
        q_lens = (1,) * batch
    if batch == 1 and draw.flip():
        q_lens = (draw.integer(1, 100 if is_gpu else 9),)
    return IndexerSelectCase(
        **_common(draw),
        **INDEX_ROW,
        given_results=True,
        spare_columns=None,
        kv_lens=kv_lens,
        q_lens=q_lens,
        dtype="e4m3" if configuration["format"] == "fp8_token" else "bf16",
        page_size=SELECT_PAGE,
        **configuration,
        block_tokens=draw.choice((0, 0, 1, 3, 40)),
        # tables of one width: the kernel depends on it
        spare_pages=pages - SPARE_COLUMNS - max(1, -(-max(kv_lens) // SELECT_PAGE)),
    )


PREFILL_EDGES = (0, 1, 63, 64, 65, 127, 128, 129, 256)
LONGEST_PREFILL = 1500
GPU_SCORES = 3_000_000  # a GPU checks so many in milliseconds
CPU_SCORES = 60_000
PREFILL_BATCHES = (1, 2, 3, 5, 20)
# D_N, D_R and D_V, dtype, mask, window, sink, sign of softmax_scale
PREFILL_CONFIGURATIONS = (
    ((128, 64, 128), "bf16", "causal", 0, "", 1),
    ((128, 64, 128), "bf16", "null", 0, "", 1),
    ((128, 64, 128), "fp16", "causal", 0, "mixed", -1),
    ((128, 64, 128), "bf16", "sliding_window_causal", 100, "finite", 1),
    ((128, 64, 128), "bf16", "sliding_window_noncausal", 300, "", 1),
    ((128, 64, 128), "bf16", "chunked", 90, "", 1),
    ((128, 64, 128), "bf16", "chunked_causal", 260, "", 1),
    ((192, 64, 256), "bf16", "causal", 0, "finite", 1),
    ((192, 64, 256), "fp16", "null", 0, "", 1),
    ((128, 0, 128), "bf16", "causal", 0, "", 1),
    ((64, 32, 64), "bf16", "causal", 0, "", 1),
    ((64, 32, 64), "fp16", "null", 0, "finite", -1),
    ((256, 0, 256), "bf16", "causal", 0, "mixed", 1),
    ((256, 0, 256), "fp16", "null", 0, "", -1),
    ((64, 64, 128), "bf16", "causal", 0, "", 1),
    ((64, 64, 128), "fp16", "sliding_window_causal", 100, "finite", 1),
    ((128, 64, 128), "e4m3", "causal", 0, "", 1),
    ((128, 64, 128), "e4m3", "null", 0, "finite", 1),
    ((128, 0, 128), "e4m3", "causal", 0, "", 1),
    ((128, 64, 128), "e4m3", "chunked", 90, "finite", -1),
)
PREFILL_FOR_BLACKWELL = tuple(
    each
    for each in PREFILL_CONFIGURATIONS
    if each[0] in (FP8_WIDTHS if each[1] == "e4m3" else WIDTHS)
)


def prefill_launch(draw: Draw, backend: str, device: str) -> PrefillCase:
    known = PREFILL_FOR_BLACKWELL if backend == "blackwell" else PREFILL_CONFIGURATIONS
    widths, dtype, mask, window, sink, sign = draw.choice(known)
    batch, heads = draw.choice(PREFILL_BATCHES), draw.integer(1, 4)
    most = (GPU_SCORES if device != "cpu" else CPU_SCORES) // (batch * heads)
    longest = min(LONGEST_PREFILL, int(most**0.5))
    q_lens = [_prefill_length(draw, longest) for _ in range(batch)]
    kv_lens = [
        draw.choice((n, n, n + _prefill_length(draw, longest), max(n - 3, 0))) for n in q_lens
    ]
    fields: dict[str, Any] = {
        **_common(draw),
        "given_results": True,
        "padded": draw.flip(),
        "q_lens": tuple(q_lens),
        "kv_lens": tuple(kv_lens),
        "heads": heads,
        "qk_nope_head_dim": widths[0],
        "qk_rope_head_dim": widths[1],
        "v_head_dim": widths[2],
        "mask": mask,
        "window": window,
        "sink": sink,
        "sharpness": sign * draw.choice((0.5, 1.5, 4.0)),
    }
    if dtype == "e4m3" and backend == "blackwell":
        one_scale = bool(sink)  # of each head
        fields |= {"uniform_keys": one_scale, "uniform_values": one_scale, "transposed": False}
        return PrefillFp8Case(**fields, block_scales=not one_scale)
    if dtype == "e4m3":
        return PrefillFp8Case(**fields, block_scales=not sink)
    return PrefillCase(**fields, dtype=dtype, expanded=True)


def _prefill_length(draw: Draw, longest: int) -> int:
    drawn = draw.integer(0, longest)
    edge = min(draw.choice(PREFILL_EDGES), longest)
    return draw.choice((edge, drawn // 128 * 128, drawn, drawn))


# rows of a for the tiles of `hopper.fp8.configs`, columns of b, K, groups, and what differs
PRODUCT_ROWS = ((1, 16), (17, 32), (33, 64), (65, 300), (2049, 2300))
PRODUCT_CONFIGURATIONS: tuple[Configuration, ...] = (
    {"n_group": 128, "k_group": 128},
    {"n_group": 128, "k_group": 128, "batch": 3},
    {"n_group": 256, "k_group": 256, "out_dtype": "e4m3"},
    {"n_group": 1000, "k_group": 128, "batch": 2, "out_dtype": "e4m3"},
)
MOST_PRODUCTS = 3 << 30  # of numbers: a GPU checks so many in float64 in milliseconds


def product_launch(draw: Draw, backend: str, device: str) -> ScaledMatmulCase:
    """K and N are neither multiples of a group nor of a step; they are of 16 bytes."""
    is_gpu = device != "cpu"
    configuration = dict(draw.choice(PRODUCT_CONFIGURATIONS))
    m = draw.integer(*draw.choice(PRODUCT_ROWS if is_gpu else PRODUCT_ROWS[:2]))
    k = 16 * draw.integer(1, 130 if is_gpu else 20)
    most = MOST_PRODUCTS // (m * k * configuration.get("batch", 1))
    last = min(most, 9000 if is_gpu and m > PRODUCT_ROWS[2][1] else 1500 if is_gpu else 200)
    if configuration["n_group"] == 1000:  # not of whole steps: one group
        last = min(last, 1000)
    return ScaledMatmulCase(
        **_common(draw),
        m=m,
        n=draw.choice((draw.integer(1, last), max(last // 128, 1) * 128)),
        k=k,
        spare_columns=draw.integer(0, 3),
        given_results=True,
        **configuration,
    )


Launcher: TypeAlias = Callable[[Draw, str, str], BatchedCase]
LAUNCHES: dict[str, Launcher] = {
    "mla_decode": decode_launch,
    "mla_prefill": prefill_launch,
    "indexer_logits": indexer_launch,
    "sparse_mla": sparse_launch,
    "indexer_topk": topk_launch,
    "indexer_select": select_launch,
    "scaled_mm_fp8": product_launch,
}
