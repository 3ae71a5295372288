"""What the tests of Hopper's decode kernels run: lengths, pages and heads of every kind."""

from __future__ import annotations

from random import Random

import pytest
import torch

from mlakit import PagedLatentCache
from mlakit.tools.workloads import DecodeCase

ROW = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
LENGTHS = {
    "one token": ((1,), (1,)),
    "a block less one, a block, a block and one": ((63, 64, 65), (1, 1, 1)),
    "pairs of blocks": ((127, 128, 129, 300), (1, 1, 1, 1)),
    "nothing cached": ((0, 0), (1, 1)),
    "some empty": ((0, 200, 0, 1), (1, 1, 1, 1)),
    "long": ((5000, 3), (1, 1)),
    "queries see different ends": ((130, 64, 2), (3, 2, 2)),
    "more queries than keys": ((130, 64, 5), (3, 1, 5)),
    "ragged queries, none of one": ((300, 70, 129), (5, 0, 1)),
    "a request of many queries": ((700, 90), (40, 1)),
    "pipelines that wrap many times": ((4097, 1, 2880, 0, 191), (1, 2, 1, 1, 3)),
}
# one CTA has all work tiles: with no block, an odd number of blocks, an even number
MANY_TILES = {"kv_lens": (1, 0, 65, 64, 200, 0, 130, 3, 700, 1), "num_ctas": 1, "tile": 64}
FP8 = ("fp8", "fp8_token", "fp8_block128")
BF16_AND_FP8 = ("bf16", *FP8)
HEADS = (8, 16, 32, 128)  # of every tile: those of small_m kernels, and of an m64 kernel
SMALL_M_HEADS = pytest.mark.parametrize("heads", HEADS[:3])
FP8_HEADS = pytest.mark.parametrize("heads", HEADS)
FP8_FORMATS = pytest.mark.parametrize("format", FP8)
PAGE_SIZES_NOT_OF_64 = (1, 3, 4, 8, 16, 24, 32, 96)
# one of each kind: a part of a block or not, by a gather producer, or the smallest or largest TMA
# tile of a part of a block; a kernel is compiled for each
FEW_PAGE_SIZES = (1, 3, 8, 32, 96)
BATCHES = (1, 7, 40, 150)  # of random batches
# heads of a small_m kernel, and of an m64 kernel
KERNELS = pytest.mark.parametrize("heads", [16, 64], ids=["small_m", "m64"])


def kernel_for(heads: int, format: str = "bf16", dtype: str = "bf16", *, m64: bool = True) -> str:
    """What `backend=` takes for the kernel that decodes much work; without `m64` that of little."""
    is_fp8 = format in FP8
    if heads <= 32 or not m64:
        return "hopper:small_m_fp8_kv" if is_fp8 else "hopper:small_m_bf16"
    if is_fp8:
        is_fp8_qk = dtype == "e4m3" and format != "fp8_block128"
        return "hopper:m64_fp8_qk" if is_fp8_qk else "hopper:m64_fp8_kv"
    return "hopper:m64_bf16"


def run(*, m64: bool = True, kernel: str = "", **fields: object) -> None:
    """More than 32 heads go to an m64 kernel, by its name, or without `m64` to a small_m kernel;
    or all to `kernel`."""
    case = DecodeCase(**{**ROW, "page_size": 64, "heads": 16, **fields})
    trial = case.trial("cuda")
    kernel = kernel or kernel_for(case.heads, case.format, case.dtype, m64=m64)
    trial.check(trial.call(kernel))


def around_pages(page_size: int) -> dict[str, tuple[int, ...]]:
    """Lengths that end at, before and just after a page's end, and those of a block."""
    ends = (page_size, abs(64 - page_size), 64, 64 + page_size, 640)
    lengths = (0, 1, *(end + more for end in ends for more in (-1, 0, 1)))
    return {"kv_lens": lengths, "q_lens": (1,) * len(lengths), "page_size": page_size}


def random_batch(batch: int, longest: int = 9000) -> dict[str, tuple[int, ...]]:
    """Lengths of 100,000 tokens at most, each shorter than `longest`."""
    draw = Random(batch)
    q_lens = tuple(draw.choice([1, 1, 1, 0, 2, 4]) for _ in range(batch))
    longest = min(100_000 // batch, longest)
    return {"kv_lens": tuple(max(q, draw.randrange(longest)) for q in q_lens), "q_lens": q_lens}


def with_magnitudes(format: str, sizes: list[float]) -> tuple[PagedLatentCache, torch.Tensor]:
    """A cache of one request whose rows have these magnitudes, and what was written."""
    cache = PagedLatentCache.allocate(
        DecodeCase(**ROW).row, format, num_pages=8, page_size=64, device="cuda"
    )
    own = torch.Generator().manual_seed(0)
    rows = torch.randn(512, 576, generator=own)
    rows *= torch.tensor(sizes).repeat(512 // len(sizes) + 1)[:512, None]
    rows[:, 512:] = torch.randn(512, 64, generator=own)
    layer = cache.layer(0)
    layer.write(torch.arange(512, device="cuda"), rows.cuda())
    return cache, layer.read(torch.arange(512, device="cuda")).double()
