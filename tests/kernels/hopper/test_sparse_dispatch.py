"""Which sparse problems Hopper kernels take, and how they are launched: host logic, no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlakit import PagedLatentCache, sparse_mla
from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.specs import Problem, Use, pretending
from mlakit.model.geometry import RowShape
from mlakit.ops import ExtraRows
from mlakit.plan import EvenSplit
from tests.kernels.hopper.sparse_cases import ROWS

ROW = RowShape(512, 64)
NO_TMA = ": no TMA descriptor can address them"


def problem(**fields: object) -> Problem:
    given = {"dtype": "torch.bfloat16", "format": "bf16", "heads": 16, "page_size": 64, "row": ROW}
    return Problem("cuda", **{"arch": 90, **given, **fields})


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("row", ROWS)
def test_16_bit_rows_go_to_hopper(row, dtype):
    name = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]
    given = problem(dtype=name, format=dtype, row=RowShape(**ROWS[row]), heads=3)
    assert selection.select("sparse_mla", given).name == "hopper:m64_bf16"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"arch": 80}, "needs sm_90, got sm_80"),
        ({"arch": 100}, "needs sm_90, got sm_100"),
        ({"format": "fp32", "dtype": "torch.float32"}, "needs rows of bf16 or fp16, got fp32"),
        (
            {"dtype": "torch.float8_e4m3fn"},
            "needs queries of torch.bfloat16 with rows of bf16, got torch.float8_e4m3fn",
        ),
        ({"row": RowShape(256, 64)}, "needs rows of 576/512 or 512/512, got 320/256"),
        ({"row": None}, "needs rows of 576/512 or 512/512, got none"),
        ({"uses": (Use.UNALIGNED_CACHE,)}, "takes no unaligned rows of the cache" + NO_TMA),
        ({"uses": (Use.UNALIGNED_QUERY,)}, "takes no unaligned rows of q" + NO_TMA),
        ({"uses": (Use.OTHER_EXTRA_FORMAT,)}, "takes no extra cache of another format"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons(fields, reason):
    given = problem(**fields)
    assert selection.explain_kernels("sparse_mla", given)["hopper:m64_bf16"] == reason
    assert selection.select("sparse_mla", given).backend == "triton"


class Launched(list):
    """The launches that a call makes, without a GPU: (kernel, grid, arguments by name)."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        self.append((kernel, grid, dict(zip(kernel.arg_names, args, strict=False)) | options))


@pytest.fixture
def launched(monkeypatch):
    from mlakit.kernels import sparse_merge
    from mlakit.kernels.hopper.sparse import launch
    from mlakit.kernels.launch import SHARED_BYTES, Target

    launches = Launched()
    monkeypatch.setattr(launch, "launch", launches)
    monkeypatch.setattr(sparse_merge, "launch", launches)
    monkeypatch.setattr(launch, "target", lambda device: Target(90, 132, SHARED_BYTES[90]))
    with pretending(90, 132):
        yield launches


def pages(page_size: int = 64, num_layers: int = 1) -> PagedLatentCache:
    """A page of all layers after the other: with several, a layer has a gap between pages."""
    blocks = torch.zeros(4, 1, num_layers, page_size, 1, 576, dtype=torch.bfloat16)
    return PagedLatentCache.wrap(blocks, ROW, format="bf16")


def call(
    tokens: int = 2, heads: int = 16, topk: int = 100, cache: Any = None, q: Any = None, **more: Any
) -> tuple[torch.Tensor, ...]:
    q = torch.zeros(tokens, heads, 576, dtype=torch.bfloat16) if q is None else q
    rows = torch.zeros(tokens, topk, dtype=torch.int32)
    given = {"softmax_scale": 0.1, "backend": "hopper", **more}
    return sparse_mla(q, pages() if cache is None else cache, rows, **given)


@pytest.mark.parametrize(("tokens", "heads"), [(0, 16), (3, 0)])
def test_without_queries_no_kernel_is_started(launched, tokens, heads):
    out, lse, max_logits = call(tokens, heads)
    assert (out.shape, lse.shape) == ((tokens, heads, 512), (tokens, heads))
    assert max_logits.shape == lse.shape
    assert launched == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "heads", "topk", "grid", "num_splits"),
    [
        (4096, 128, 1000, 132, 1),
        (66, 128, 2048, 132, 1),
        (65, 64, 2048, 130, 2),
        (1, 16, 2048, 8, 8),  # 16 pairs of blocks, two per split
        (1, 16, 16384, 32, 32),
        (1, 16, 128, 1, 1),
        (2, 65, 256, 4, 1),
    ],
)
def test_few_tokens_split_their_lists(launched, tokens, heads, topk, grid, num_splits):
    call(tokens, heads, topk)
    _, launched_grid, arguments = launched[0]
    assert (launched_grid, arguments["num_splits"]) == ((grid,), num_splits)
    assert len(launched) == (1 if num_splits == 1 else 2)
    assert (arguments["outputs"].out.dtype == torch.float32) == (num_splits > 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "heads", "topk", "first"),
    [
        (4096, 64, 2048, 31 * 132),
        (4096, 128, 2048, 62 * 66),
        (4096, 65, 2048, 62 * 66),
        (4096, 200, 2048, 124 * 33),  # 16 tiles are left: 4 tokens of 4 head tiles
        (132, 64, 2048, 132),  # no tile is left
        (131, 64, 2048, 131),  # no wave is full
        (200, 64, 2048, 200),  # too many are left
        (133, 64, 1024, 132),
        (133, 64, 1023, 133),  # a short tile
    ],
)
def test_the_last_tiles_are_split_where_they_would_take_a_wave(
    launched, tokens, heads, topk, first
):
    call(tokens, heads, topk)
    main = launched[0][2]
    assert (main["tokens"], main["num_splits"]) == (first, 1)
    if first == tokens:
        assert len(launched) == 1
        return
    tail = launched[1][2]
    assert tail["tokens"] == tokens - first
    assert tail["num_splits"] > 1
    # the rows of the last tokens, in the same memory
    assert tail["main"].rows.data_ptr() == main["main"].rows.data_ptr() + 4 * first * topk
    assert len(launched) == 3
    launched.clear()
    call(tokens, heads, topk, plan=EvenSplit(1))
    assert len(launched) == 1


def test_a_plan_sets_the_splits_and_the_merge_adds_the_sink(launched):
    sink = torch.zeros(16)
    call(300, topk=640, plan=EvenSplit(3), sink=sink)
    _, grid, arguments = launched[0]
    assert (grid, arguments["num_splits"], arguments["outputs"].sink) == ((132,), 3, None)
    assert launched[1][2]["outputs"].sink is sink
    launched.clear()
    call(300, topk=640, plan=EvenSplit(1), sink=sink)
    assert launched[0][2]["outputs"].sink is sink


@pytest.mark.parametrize(
    ("page_size", "num_layers", "page", "row_chunks", "page_chunks"),
    [
        (64, 1, 0, 72, 64 * 72),
        (61, 1, 0, 72, 61 * 72),
        (64, 2, 64, 72, 2 * 64 * 72),
        (1, 3, 0, 3 * 72, 3 * 72),  # rows of a page: the only ones at this distance
    ],
)
def test_pages_without_a_gap_need_no_page_size(
    launched, page_size, num_layers, page, row_chunks, page_chunks
):
    call(cache=pages(page_size, num_layers))
    arguments = launched[0][2]
    assert page == arguments["TRAITS"].PAGE
    rows = arguments["main"]
    assert (rows.row_chunks, rows.page_chunks) == (row_chunks, page_chunks)


def test_what_a_kernel_is_compiled_for_does_not_depend_on_sizes(launched):
    for tokens, heads, topk in ((300, 16, 100), (777, 128, 2048), (1, 5, 3)):
        call(tokens, heads, topk)
    names = ("TRAITS", "CONFIG", "num_warps", "maxnreg")
    assert len({tuple(arguments[name] for name in names) for _, _, arguments in launched}) == 1


def test_the_second_cache_has_its_own_pages(launched):
    extra = ExtraRows(pages(16, num_layers=2), torch.zeros(2, 7, dtype=torch.int32), None, 1)
    call(extra=extra)
    arguments = launched[0][2]
    traits = arguments["TRAITS"]
    assert (traits.HAS_EXTRA, traits.PAGE, traits.EXTRA_PAGE) == (True, 0, 16)
    assert (arguments["extra_topk"], arguments["extra"].num_slots) == (7, 64)


@pytest.mark.parametrize("softmax_scale", [0.3, -0.3, 0.0])
def test_the_sign_of_the_scale_is_a_constant(launched, softmax_scale):
    call(softmax_scale=softmax_scale)
    arguments = launched[0][2]
    assert arguments["scales"].scale_log2 > 0
    assert (softmax_scale > 0) - (softmax_scale < 0) == arguments["TRAITS"].SIGN


def test_calls_that_hopper_refuses(launched):
    other = PagedLatentCache.allocate(ROW, "fp8_token", num_pages=4, page_size=64)
    extra = ExtraRows(other, torch.zeros(2, 7, dtype=torch.int32))
    with pytest.raises(UnsupportedError, match="takes no extra cache of another format"):
        call(extra=extra)
    unaligned = torch.zeros(2, 16, 577, dtype=torch.bfloat16)[..., :576]
    with pytest.raises(UnsupportedError, match="takes no unaligned rows of q"):
        call(q=unaligned)
    blocks = torch.zeros(4, 64, 580, dtype=torch.bfloat16)[..., :576]
    with pytest.raises(UnsupportedError, match="takes no unaligned rows of the cache"):
        call(cache=PagedLatentCache.wrap(blocks, ROW, format="bf16"))


def test_queries_of_one_token_or_head_have_strides_that_tma_takes(launched):
    q = torch.zeros(16 * 576 + 3, dtype=torch.bfloat16)[: 16 * 576].as_strided(
        (1, 16, 576), (7, 576, 1)
    )
    call(q=q, tokens=1)
    q_tiles = launched[0][2]["q"]
    assert [stride * 2 % 16 for stride in q_tiles.strides[:2]] == [0, 0]
    assert q_tiles.block_shape == [1, 64, 256]


def test_queries_by_head_are_not_copied(launched):
    """As a product per head leaves them, the tokens of a head lie together."""
    q = torch.zeros(16, 5, 512, dtype=torch.bfloat16).transpose(0, 1)
    q_rope = torch.zeros(5, 16, 192, dtype=torch.bfloat16)[..., 128:]
    call(q=q, q_rope=q_rope, tokens=5)
    given = launched[0][2]
    assert given["q"].base.data_ptr() == q.data_ptr()
    assert given["q"].strides == [512, 5 * 512, 1]
    assert given["q_rope"].base.data_ptr() == q_rope.data_ptr()
    assert given["q_rope"].strides == [16 * 192, 192, 1]
