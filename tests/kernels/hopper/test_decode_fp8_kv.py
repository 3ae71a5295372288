"""Hopper decode with an FP8 KV cache (fp8_kv), compared with the oracle on poisoned caches."""

from __future__ import annotations

import pytest
import torch

from mlakit import mla_decode
from mlakit.workloads.fp16_rows import rounds_rows
from tests.kernels.hopper.decode_cases import (
    BATCHES,
    FEW_PAGE_SIZES,
    FP8,
    FP8_FORMATS,
    FP8_HEADS,
    HEADS,
    LENGTHS,
    MANY_TILES,
    around_pages,
    kernel_for,
    random_batch,
    run,
    with_magnitudes,
)
from tests.pairs import pairwise


@pytest.mark.gpu
@pairwise(page_size=FEW_PAGE_SIZES, heads=[8, 32, 128], format=FP8)
def test_fp8_kv_page_sizes_not_of_64(page_size, heads, format):
    run(heads=heads, format=format, tensor_scale=0.05, **around_pages(page_size))


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", FEW_PAGE_SIZES)
def test_fp8_kv_page_sizes_not_of_64_in_random_batches(page_size):
    batch = random_batch(150, longest=2000)
    run(seed=page_size, page_size=page_size, format="fp8_block128", **batch)


@pytest.mark.gpu
@pairwise(lengths=LENGTHS, heads=HEADS, format=FP8)
def test_fp8_kv_lengths(lengths, heads, format):
    kv_lens, q_lens = lengths
    run(kv_lens=kv_lens, q_lens=q_lens, heads=heads, format=format, tensor_scale=0.05)


@pytest.mark.gpu
@FP8_FORMATS
@pytest.mark.parametrize("heads", [1, 7, 9, 17, 31, 33, 64, 100])
def test_fp8_kv_heads(heads, format):
    run(kv_lens=(300, 64, 1), q_lens=(2, 1, 1), heads=heads, format=format, sink="finite")


@pytest.mark.gpu
@pairwise(page_size=[64, 192, 1024], heads=[16, 64], format=FP8)
def test_fp8_kv_page_sizes(page_size, heads, format):
    run(
        heads=heads,
        kv_lens=(1500, 130, 1),
        q_lens=(1, 2, 1),
        page_size=page_size,
        format=format,
        num_layers=2,
    )


@pytest.mark.gpu
@pairwise(heads=HEADS, dtype=["bf16", "fp16"], on_device={"float": False, "tensor": True})
def test_fp8_kv_tensor_scales(heads, dtype, on_device):
    run(
        kv_lens=(500, 65),
        q_lens=(3, 2),
        dtype=dtype,
        format="fp8",
        heads=heads,
        tensor_scale=0.01,
        tensor_scale_on_device=on_device,
    )


@pytest.mark.gpu
@pairwise(sharpness=[-2.0, 0.0, 0.01, 30.0], heads=[16, 128], format=FP8)
def test_fp8_kv_softmax_scales(sharpness, heads, format):
    run(
        kv_lens=(500, 65),
        q_lens=(1, 2),
        sharpness=sharpness,
        heads=heads,
        format=format,
        mask="null",
        sink="mixed",
    )


@pytest.mark.gpu
@pairwise(
    plan=[{"tile": 16, "num_ctas": 3}, {"tile": 64, "num_ctas": 1}, {"tile": 128, "num_ctas": 50}],
    heads=HEADS,
    format=FP8,
)
def test_fp8_kv_plans(plan, heads, format):
    run(
        kv_lens=(900, 65, 0, 130),
        q_lens=(1, 2, 1, 1),
        heads=heads,
        format=format,
        **plan,
    )


@pytest.mark.gpu
@FP8_FORMATS
@FP8_HEADS
def test_fp8_kv_pipeline_phases_continue_across_work_tiles(heads, format):
    """Two QK-softmax warpgroups take alternate blocks."""
    run(**MANY_TILES, q_lens=(1,) * 10, heads=heads, format=format)


@pytest.mark.gpu
@pairwise(heads=[1, 16, 32, 64, 128], batch=BATCHES, format=FP8, sink=["", "finite"])
def test_fp8_kv_random_batches(heads, batch, format, sink):
    run(seed=batch, heads=heads, format=format, sink=sink, **random_batch(batch))


@pytest.mark.gpu
@pairwise(
    sizes={
        "1": [1.0],
        "1e-6 to 1e3": [1e-6, 1e3, 1.0],
        "1e12": [1e12],
        "1e-12": [1e-12],
        "one of 1e6": [1e-3] * 400 + [1e6] + [1e-3] * 111,
    },
    format=["fp8_token", "fp8_block128"],
    heads=[16, 64],
)
def test_fp8_kv_rows_of_any_magnitude(sizes, format, heads):
    """float16 has a small range: rows are scaled into it before the product."""
    cache, rows = with_magnitudes(format, sizes)
    own = torch.Generator().manual_seed(1)
    # not beyond: where scores reach 2**30, float32 no longer resolves the distance to the largest
    q = torch.randn(1, heads, 576, generator=own)
    q *= 2.0 ** torch.arange(-60, 20, 5).repeat(heads // 16)[:, None]
    q[..., :512] /= rows[:, :512].abs().max().item()
    q = q.bfloat16().cuda()
    table = torch.arange(8, dtype=torch.int32, device="cuda")[None]
    lens = torch.tensor([512], dtype=torch.int32, device="cuda")
    backend = kernel_for(heads, format)
    got, lse = mla_decode(q, cache, table, lens, softmax_scale=0.1, backend=backend)
    scores = q[0].double() @ rows.T * 0.1
    want = scores.softmax(-1) @ rows[:, :512]
    want_lse = scores.logsumexp(-1)
    tolerance = 1e-4 + 1e-4 * want_lse.abs()
    if rounds_rows(q.device, backend, format=format, heads=heads):
        # half of a unit in float16's last place, of every product
        tolerance += 2.0**-12 * (q[0].double().abs() @ rows.T.abs() * 0.1).amax(-1)
    assert ((lse[0] - want_lse).abs() <= tolerance).all()
    error = (got[0].double() - want).abs().amax(-1)
    assert (error <= 2.0**-7 * want.abs().amax(-1)).all(), error / want.abs().amax(-1)


@pytest.mark.gpu
@pairwise(column=[0, 200, 511], heads=[16, 64], format=FP8)
def test_fp8_kv_nan_in_an_attended_row_reaches_the_output(column, heads, format):
    cache, _ = with_magnitudes(format, [1.0])
    cache.payload.view(torch.uint8)[0, 7, 63, column] = 0xFF
    q = torch.ones(2, heads, 576, dtype=torch.bfloat16, device="cuda")
    table = torch.arange(8, dtype=torch.int32, device="cuda").expand(2, 8)
    lens = torch.tensor([512, 511], dtype=torch.int32, device="cuda")
    backend = kernel_for(heads, format)
    out, lse = mla_decode(q, cache, table, lens, softmax_scale=0.1, backend=backend)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[1].isfinite().all()
