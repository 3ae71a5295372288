"""Rows of fp8_block128 rounded as a Hopper kernel rounds them."""

from __future__ import annotations

import torch

from mlakit import PagedLatentCache
from mlakit.geometry import RowShape
from mlakit.workloads.fp16_rows import block_scales, rounded_rows


def written(size: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(64 rows as they are stored, their scales)."""
    own = torch.Generator().manual_seed(0)
    cache = PagedLatentCache.allocate(
        RowShape(512, 64, 512), "fp8_block128", num_pages=1, page_size=64, device="cpu"
    )
    slots = torch.arange(64)
    cache.layer(0).write(slots, torch.randn(64, 576, generator=own) * size)
    payload = cache.layer(0).payload.view(torch.uint8).view(64, -1)
    return cache.layer(0).read(slots, torch.float64), block_scales(payload, 512)


def test_scales_are_those_inside_of_rows():
    stored, scales = written(1.0)
    largest = stored[:, :512].unflatten(-1, (4, 128)).abs().amax(-1)
    assert torch.equal(largest, 448 * scales)


def test_products_are_those_of_float16_at_any_magnitude():
    """2**13 times the scale of normal numbers is 32 to 128: nothing is subnormal in float16."""
    stored, scales = written(1.0)
    scale = (2.0**13 * scales).repeat_interleave(128, -1)
    large = scale.half()
    small = (scale - large).half()
    values = stored[:, :512] * 2.0**13 / scale
    assert torch.equal(values, values.float().to(torch.float8_e4m3fn).double())
    # exact in float64, so that each is rounded once
    low = (values * small.double()).half()
    want = (values * large.double() + low.double()).half().double() / 2.0**13
    assert torch.equal(rounded_rows(stored, scales)[:, :512], want)
    tiny, tiny_scales = stored * 2.0**-60, scales * 2.0**-60
    assert torch.equal(rounded_rows(tiny, tiny_scales)[:, :512], want * 2.0**-60)


def test_rotated_columns_and_poison_stay():
    stored, scales = written(1.0)
    stored[3], scales[3] = torch.nan, torch.nan
    stored[5, :128], scales[5, 0] = 0.0, 0.0
    rounded = rounded_rows(stored, scales)
    assert rounded[3].isnan().all()
    assert torch.equal(rounded[4:, 512:], stored[4:, 512:])
    assert (rounded[5, :128] == 0).all()
