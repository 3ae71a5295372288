"""Which sparse problems Blackwell's kernels take, and how they are launched: host logic, no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlakit import PagedLatentCache, sparse_mla
from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.specs import Problem, Use, pretending
from mlakit.kernels.blackwell import support
from mlakit.model.geometry import RowShape
from mlakit.ops import ExtraRows
from mlakit.plan import EvenSplit

ROW = RowShape(512, 64)
KERNELS = ("blackwell:m128_bf16", "blackwell:n64_bf16")


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    """A Triton that can compile the kernels, whichever is installed."""
    monkeypatch.setattr(support, "version", lambda package: "3.9.0")


def problem(**fields: object) -> Problem:
    given = {"dtype": "torch.bfloat16", "format": "bf16", "heads": 128, "page_size": 64, "row": ROW}
    return Problem("cuda", **{"arch": 100, **given, **fields})


def why_not(given: Problem) -> str | None:
    """The reason of all of the kernels."""
    specs = [spec for spec in selection.specs("sparse_mla") if spec.name in KERNELS]
    assert len(specs) == len(KERNELS)
    (reason,) = {spec.why_not(given) for spec in specs}
    return reason


@pytest.mark.parametrize("arch", [100, 103])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "row", [RowShape(512, 64), RowShape(512, 0), RowShape(448, 64, v_width=512)]
)
def test_16_bit_rows_are_taken(row, dtype, arch):
    name = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]
    for heads, kernel in ((65, KERNELS[0]), (64, KERNELS[1]), (3, KERNELS[1])):
        given = problem(arch=arch, dtype=name, format=dtype, row=row, heads=heads)
        assert selection.select("sparse_mla", given, "blackwell").name == kernel


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"arch": 90}, "needs sm_100 or sm_103, got sm_90"),
        ({"arch": 120}, "needs sm_100 or sm_103, got sm_120"),
        ({"device": "cpu"}, "needs sm_100 or sm_103, got cpu"),
        ({"format": "fp32", "dtype": "torch.float32"}, "needs rows of bf16 or fp16, got fp32"),
        (
            {"dtype": "torch.float8_e4m3fn"},
            "needs queries of torch.bfloat16 with rows of bf16, got torch.float8_e4m3fn",
        ),
        ({"row": RowShape(256, 64)}, "needs rows of 576/512 or 512/512, got 320/256"),
        ({"row": None}, "needs rows of 576/512 or 512/512, got none"),
        (
            {"row": RowShape(448, 64, v_width=512), "uses": (Use.Q_ROPE,)},
            "needs 512 latent columns with q_rope, got 448",
        ),
        (
            {"uses": (Use.UNEVEN_PAGES,)},
            "takes no pages at distances that are no multiple of a row's",
        ),
        ({"uses": (Use.Q_ROPE, Use.SPLIT_EXTRA)}, "takes no split extra cache"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons(fields, reason):
    device = fields.get("device", "cuda")
    given = problem(**{name: each for name, each in fields.items() if name != "device"})
    assert why_not(Problem(**{**vars(given), "device": device})) == reason


@pytest.mark.parametrize(
    ("installed", "got"), [("3.8.1", "3.8.1"), ("3.10.0", None), ("4.0.0+git", None)]
)
def test_an_older_triton_is_refused(installed, got, monkeypatch):
    monkeypatch.setattr(support, "version", lambda package: installed)
    reason = f"needs Triton 3.9 or newer, got {got}" if got else None
    assert why_not(problem()) == reason


def test_a_missing_triton_is_refused(monkeypatch):
    def missing(package: str) -> str:
        raise support.PackageNotFoundError(package)

    monkeypatch.setattr(support, "version", missing)
    assert why_not(problem()) == "needs Triton 3.9 or newer, got none"


FP8_KERNEL = "blackwell:n64_fp8_kv"


@pytest.mark.parametrize("heads", [1, 64, 128])
@pytest.mark.parametrize("row", [ROW, RowShape(512, 0)])
def test_fp8_rows_are_taken(row, heads):
    given = problem(format="fp8_block128", row=row, heads=heads)
    assert selection.select("sparse_mla", given, "blackwell").name == FP8_KERNEL


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"arch": 90}, "needs sm_100 or sm_103, got sm_90"),
        ({"format": "fp8_token"}, "needs rows of fp8_block128, got fp8_token"),
        (
            {"dtype": "torch.float16"},
            "needs queries of torch.bfloat16 with rows of fp8_block128, got torch.float16",
        ),
        (
            {"row": RowShape(448, 64, v_width=512)},
            "needs 512 + 64 or 512 + 0 columns, got 448 + 64",
        ),
        (
            {"uses": (Use.OTHER_EXTRA_FORMAT,)},
            "takes no extra cache of another format",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reasons_against_fp8_rows(fields, reason):
    (spec,) = (spec for spec in selection.specs("sparse_mla") if spec.name == FP8_KERNEL)
    assert spec.why_not(problem(**{"format": "fp8_block128", **fields})) == reason


class Launched(list):
    """The launches that a call makes, without a GPU: (kernel, grid, arguments by name)."""

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        self.append((kernel, grid, dict(zip(kernel.arg_names, args, strict=False)) | options))


@pytest.fixture
def launched(monkeypatch):
    pytest.importorskip("triton", minversion="3.9", reason="Blackwell's kernels need Triton 3.9")
    from mlakit.kernels import sparse_merge
    from mlakit.kernels.blackwell.sparse import launch
    from mlakit.kernels.launch import SHARED_BYTES, Target

    launches = Launched()
    monkeypatch.setattr(launch, "launch", launches)
    monkeypatch.setattr(sparse_merge, "launch", launches)
    monkeypatch.setattr(launch, "target", lambda device: Target(100, 148, SHARED_BYTES[100]))
    with pretending(100, 148):
        yield launches


def pages(page_size: int = 64, num_layers: int = 1) -> PagedLatentCache:
    """A page of all layers after the other: with several, a layer has a gap between pages."""
    blocks = torch.zeros(4, 1, num_layers, page_size, 1, 576, dtype=torch.bfloat16)
    return PagedLatentCache.wrap(blocks, ROW, format="bf16")


def call(tokens: int = 2, heads: int = 128, topk: int = 100, cache: Any = None, **more: Any) -> Any:
    q = torch.zeros(tokens, heads, 576, dtype=torch.bfloat16)
    rows = torch.zeros(tokens, topk, dtype=torch.int32)
    given = {"softmax_scale": 0.1, "backend": "blackwell", **more}
    return sparse_mla(q, pages() if cache is None else cache, rows, **given)


@pytest.mark.parametrize(("tokens", "heads"), [(0, 128), (3, 0)])
def test_without_queries_no_kernel_is_started(launched, tokens, heads):
    out, _, _ = call(tokens, heads)
    assert out.shape == (tokens, heads, 512)
    assert launched == []


@pytest.mark.parametrize(
    ("heads", "rows", "stages", "tiles"),
    [(1, 16, 5, 2), (16, 16, 5, 2), (17, 32, 5, 2), (33, 64, 4, 2), (64, 64, 4, 2), (65, 64, 4, 4)],
)
def test_keys_as_m_have_tiles_of_16_heads_or_more(launched, heads, rows, stages, tiles):
    call(2, heads, backend="blackwell:n64_bf16")
    _, grid, arguments = launched[0]
    config = arguments["CONFIG"]
    assert (config.ROWS, config.STAGES, grid) == (rows, stages, (tiles,))
    assert list(arguments["q"].block_shape) == [1, rows, 128]


@pytest.mark.parametrize(
    ("tokens", "heads", "topk", "grid", "num_splits"),
    [
        (4096, 128, 1000, 8192, 1),
        (2, 65, 64, 4, 1),
        (2, 129, 64, 8, 1),  # two head tiles
        (1, 128, 2048, 32, 16),
    ],
)
def test_two_ctas_compute_a_tile(launched, tokens, heads, topk, grid, num_splits):
    call(tokens, heads, topk)
    _, launched_grid, arguments = launched[0]
    assert (launched_grid, arguments["num_splits"]) == ((grid,), num_splits)
    assert len(launched) == (1 if num_splits == 1 else 2)
    assert (arguments["outputs"].out.dtype == torch.float32) == (num_splits > 1)


def test_the_merge_adds_the_sink(launched):
    sink = torch.zeros(128)
    call(300, topk=640, plan=EvenSplit(3), sink=sink)
    assert launched[0][2]["outputs"].sink is None
    assert launched[1][2]["outputs"].sink is sink


@pytest.mark.parametrize(
    ("page_size", "num_layers", "rows", "stride"),
    [
        (64, 1, 4 * 64, 576),
        (64, 2, 3 * 2 * 64 + 64, 576),  # the other layer's pages in between are not listed
        (1, 3, 4, 3 * 576),
    ],
)
def test_rows_from_the_first_page_to_the_last_are_one_matrix(
    launched, page_size, num_layers, rows, stride
):
    call(cache=pages(page_size, num_layers))
    kv = launched[0][2]["caches"][0]
    assert (list(kv.shape), list(kv.strides)) == ([rows, 576], [stride, 1])
    assert list(kv.block_shape) == [1, 64]


def test_the_only_row_of_a_cache_has_a_stride_that_tma_takes(launched):
    blocks = torch.zeros(576, dtype=torch.bfloat16).as_strided((1, 1, 576), (7, 7, 1))
    call(cache=PagedLatentCache.wrap(blocks, ROW, format="bf16"))
    assert list(launched[0][2]["caches"][0].strides) == [576, 1]


def test_the_second_cache_has_its_own_rows(launched):
    extra = ExtraRows(pages(16, num_layers=2), torch.zeros(2, 7, dtype=torch.int32), None, 1)
    call(extra=extra)
    arguments = launched[0][2]
    assert list(arguments["caches"][1].shape) == [3 * 2 * 16 + 16, 576]
    traits = arguments["TRAITS"]
    assert (traits.HAS_EXTRA, traits.PAGE, traits.EXTRA_PAGE) == (True, 0, 16)


def test_fp8_rows_are_read_as_words_and_not_gathered(launched):
    cache = PagedLatentCache.allocate(ROW, "fp8_block128", num_pages=4, page_size=64)
    call(2, 100, cache=cache)
    _, grid, arguments = launched[0]
    assert grid == (4,)  # two tiles of 64 heads each
    assert "caches" not in arguments
    assert arguments["main"].payload.dtype == torch.int32
    assert arguments["TRAITS"].FORMAT.SCALES_AT == 512
    config = arguments["CONFIG"]
    assert (config.ROWS, config.PRODUCER_REGISTERS, config.ISSUE_REGISTERS) == (64, 176, 72)


def test_pages_between_rows_are_refused_here_and_not_on_hopper(launched):
    blocks = torch.zeros(4, 64 * 576 + 8, dtype=torch.bfloat16)
    uneven = blocks.as_strided((4, 64, 576), (64 * 576 + 8, 576, 1))
    cache = PagedLatentCache.wrap(uneven, ROW, format="bf16")
    with pytest.raises(UnsupportedError, match="no multiple of a row's"):
        call(cache=cache)
    hopper = problem(arch=90, uses=(Use.UNEVEN_PAGES,))
    assert selection.select("sparse_mla", hopper).name == "hopper:m64_bf16"
