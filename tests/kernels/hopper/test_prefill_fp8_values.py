"""What Hopper's FP8 prefill makes of values and scales, by Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from mlakit.kernels.hopper.prefill import fp8_values
from mlakit.kernels.hopper.prefill.fp8_values import (
    BLOCK,
    CHUNK,
    LOG2_SHIFT,
    NO_SCALE,
    rewrite_values,
    scale_kinds,
)
from mlakit.tools.workloads.paged import starts_of

HEADS = 2
D_V = 128
LENGTHS = [(128,), (5,), (0, 300, 77, 0, 40), (127, 128, 129), (260, 0, 0, 1), (1,) * 9]
LENGTHS += [pytest.param((1,) * (CHUNK + 4), marks=pytest.mark.thorough)]


@pytest.fixture(autouse=True)
def four_requests_at_a_time(monkeypatch, lens):
    if len(lens) < CHUNK:
        monkeypatch.setattr(fp8_values, "CHUNK", 4)


def plain_vectors(rows: torch.Tensor) -> torch.Tensor:
    """[16, 32] as shared memory has them after TMA, 16 bytes of row r at place ^ (r % 8), in the
    order of keys."""
    chunks = rows.view(16, 8, 4)
    order = torch.arange(8) ^ (torch.arange(16) % 8)[:, None]
    vectors = chunks.gather(1, order[..., None].expand(-1, -1, 4))
    return vectors.reshape(4, BLOCK // 16, 4, 2, 2).transpose(2, 3).reshape(4, BLOCK)


def wanted_tile(bits: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """bits [keys, D_V], scale [keys] of a tile: (tile, flag)."""
    is_bad = ((bits & 0x7F) == 0x7F) | ~scale.isfinite()[:, None]
    signed = torch.where(is_bad, 0, bits ^ torch.where(scale < 0, 0x80, 0)[:, None])
    tile = torch.zeros(D_V, BLOCK, dtype=torch.uint8)
    tile[:, : len(bits)] = signed.T
    # place 4t + 2h + b has key 8h + 2t + b
    tile = tile.view(D_V, BLOCK // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(D_V, BLOCK)
    return tile, bool(is_bad.any())


def rewritten(
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    starts: list[int],
    keys_per_scale: int,
) -> tuple[torch.Tensor, ...]:
    k_scale, v_scale = (None if each is None else each.to(v.device) for each in (k_scale, v_scale))
    kinds = scale_kinds(k_scale, v_scale, keys_per_scale)
    kv_starts = torch.tensor(starts, dtype=torch.int32, device=v.device)
    return tuple(each.cpu() for each in rewrite_values(v, k_scale, v_scale, kv_starts, kinds))


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("lens", LENGTHS, ids=lambda lens: f"{len(lens)} from {lens[:5]}")
def test_tiles_flags_and_scales(lens, transposed, device):
    own = torch.Generator("cpu").manual_seed(0)
    keys, starts = sum(lens), starts_of(lens)
    v = torch.randn(keys, HEADS, D_V, generator=own, device="cpu").to(torch.float8_e4m3fn)
    v.view(torch.uint8)[keys // 2, 1, 5] = 0xFF
    k_scale = torch.rand(keys, generator=own, device="cpu") + 0.1
    v_scale = torch.rand(keys, HEADS, generator=own, device="cpu") - 0.3
    v_scale[0, 0], v_scale[-1, 0] = 0.0, torch.nan
    placed = v.to(device)
    if transposed:
        placed = placed.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    tiles, flags, scales = rewritten(placed, k_scale, v_scale, starts, 1)
    bits = v.view(torch.uint8)
    for request, length in enumerate(lens):
        first_tile = starts[request] // BLOCK + request
        for start in range(0, length, BLOCK):
            own_keys = slice(starts[request] + start, starts[request] + min(start + BLOCK, length))
            count = own_keys.stop - own_keys.start
            for head in range(HEADS):
                at = head, first_tile + start // BLOCK
                tile, is_flagged = wanted_tile(bits[own_keys, head], v_scale[own_keys, head])
                assert torch.equal(tiles.view(torch.uint8)[at], tile)
                assert bool(flags[at]) == is_flagged
                vectors = plain_vectors(scales[at])[:, :count]
                size = v_scale[own_keys, head].abs().nan_to_num().clamp(min=NO_SCALE)
                assert torch.equal(vectors[0], k_scale[own_keys])
                torch.testing.assert_close(vectors[1], size.log2() + LOG2_SHIFT, rtol=2e-6, atol=0)
                torch.testing.assert_close(vectors[2], 1 / size, rtol=2e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["nothing", "k_scale", "v_scale"])
@pytest.mark.parametrize("lens", LENGTHS, ids=lambda lens: f"{len(lens)} from {lens[:5]}")
def test_scales_of_blocks(lens, missing, device):
    """Scales of blocks without keys are NaN: they flag no tile."""
    own = torch.Generator("cpu").manual_seed(0)
    starts, blocks = starts_of(lens), sum(lens) // BLOCK + len(lens)
    v = torch.randn(sum(lens), HEADS, D_V, generator=own, device="cpu").to(torch.float8_e4m3fn)
    k_scale = torch.rand(blocks, generator=own, device="cpu") - 0.5
    v_scale = torch.rand(blocks, HEADS, generator=own, device="cpu") - 0.5
    v_scale[0, 0], v_scale[1:2, 1] = 0.0, torch.inf
    has_keys = torch.zeros(blocks, dtype=torch.bool, device="cpu")
    for request, length in enumerate(lens):
        first = starts[request] // BLOCK + request
        has_keys[first : first + -(-length // BLOCK)] = True
    k_scale[~has_keys], v_scale[~has_keys] = torch.nan, torch.nan
    given_k, given_v = (None if missing == "k_scale" else k_scale), v_scale
    if missing == "v_scale":
        given_v, v_scale = None, torch.ones_like(v_scale)
    tiles, flags, scales = rewritten(v.to(device), given_k, given_v, starts, BLOCK)
    assert scales.shape == (HEADS, blocks, 8, 8)
    bits = v.view(torch.uint8)
    for request, length in enumerate(lens):
        first = starts[request] // BLOCK + request
        for start in range(0, length, BLOCK):
            block = first + start // BLOCK
            keys = slice(starts[request] + start, starts[request] + min(start + BLOCK, length))
            for head in range(HEADS):
                scale = v_scale[block, head]
                tile, is_flagged = wanted_tile(
                    bits[keys, head], scale.expand(keys.stop - keys.start)
                )
                assert torch.equal(tiles.view(torch.uint8)[head, block], tile)
                assert bool(flags[head, block]) == is_flagged
                size = scale.abs() if 0 < scale.abs() < torch.inf else torch.tensor(NO_SCALE)
                of_keys = torch.tensor(1.0) if given_k is None else k_scale[block]
                wanted = torch.stack([of_keys, size.log2(), 1 / size, torch.tensor(0.0)])
                copies = scales[head, block].reshape(16, 4)
                torch.testing.assert_close(copies, wanted.expand(16, 4), rtol=2e-6, atol=1e-6)
