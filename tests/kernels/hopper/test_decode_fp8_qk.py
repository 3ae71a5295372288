"""Hopper decode with FP8 Q and KV (fp8_qk): converted to float16, or multiplied as FP8 (m64)."""

from __future__ import annotations

import pytest
import torch

from mlakit import PagedLatentCache, mla_decode
from mlakit.tools.workloads import DecodeCase, fp8_scores
from tests.kernels.hopper.decode_cases import (
    BATCHES,
    FP8,
    FP8_FORMATS,
    FP8_HEADS,
    HEADS,
    LENGTHS,
    MANY_TILES,
    ROW,
    around_pages,
    random_batch,
    run,
    with_magnitudes,
)
from tests.pairs import pairwise

FP8_QK = {"dtype": "e4m3", "q_scaled": True, "tensor_scale": 0.05}


@pytest.mark.gpu
@pairwise(lengths=LENGTHS, heads=HEADS, format=FP8)
def test_fp8_qk_lengths(lengths, heads, format):
    kv_lens, q_lens = lengths
    run(kv_lens=kv_lens, q_lens=q_lens, heads=heads, format=format, **FP8_QK)


@pytest.mark.gpu
@FP8_FORMATS
@pytest.mark.parametrize("heads", [1, 7, 9, 17, 31, 33, 65])
def test_fp8_qk_heads(heads, format):
    """TMA tiles of queries end in the heads of the next token, or past the last."""
    lengths = {"kv_lens": (300, 64, 1), "q_lens": (2, 1, 1)}
    run(**lengths, heads=heads, format=format, sink="finite", **FP8_QK)


@pytest.mark.gpu
@pairwise(
    page_size=[1, 3, 8, 96],
    kernel={  # heads and format
        "small_m": (8, "fp8_token"),
        "m64_fp8_qk": (128, "fp8"),
        "m64_fp8_qk-fp8_token": (128, "fp8_token"),
        "m64_fp8_kv": (128, "fp8_block128"),
    },
)
def test_fp8_qk_page_sizes_not_of_64(page_size, kernel):
    heads, format = kernel
    run(heads=heads, format=format, **FP8_QK, **around_pages(page_size))


@pytest.mark.gpu
@pairwise(
    fields={
        "q_scaled": {"q_scaled": False},
        "num_layers": {"num_layers": 2, "page_size": 192},
        "wide_indices": {"wide_indices": True},
        "given_results": {"given_results": True},
        "q_rope_dtype": {"q_rope_dtype": "e4m3"},
        "mask": {"mask": "null", "sink": "mixed", "sharpness": -2.0},
        "sharpness 0": {"sharpness": 0.0},
        "sharpness 30": {"sharpness": 30.0},
        "3 ctas": {"num_ctas": 3, "tile": 16},
        "50 ctas": {"num_ctas": 50, "tile": 64},
        "deterministic": {"deterministic": True, "implicit_starts": True, "q_lens": (1,) * 4},
    },
    heads=[16, 128],
    format=FP8,
)
def test_fp8_qk_with_other_arguments(fields, heads, format):
    given = {"kv_lens": (400, 65, 9, 0), "q_lens": (20, 1, 9, 1), **FP8_QK, **fields}
    run(heads=heads, format=format, **given)


@pytest.mark.gpu
@FP8_HEADS
def test_fp8_qk_with_a_scale_of_the_tensor_on_the_gpu(heads):
    lengths = {"kv_lens": (400, 65, 9, 0), "q_lens": (20, 1, 9, 1)}
    run(heads=heads, format="fp8", tensor_scale_on_device=True, **lengths, **FP8_QK)


@pytest.mark.gpu
@pairwise(heads=[8, 32, 100], format=FP8[1:], q_scaled={"plain": False, "scaled": True})
def test_fp8_qk_with_bf16_q_rope(heads, format, q_scaled):
    lengths = {"kv_lens": (700, 65, 0, 130), "q_lens": (2, 1, 1, 3)}
    queries = {"dtype": "e4m3", "q_rope_dtype": "bf16", "q_scaled": q_scaled}
    run(**lengths, **queries, heads=heads, format=format, sink="finite")


BY_NAME = {"kernel": "hopper:m64_fp8_qk", "format": "fp8_block128", **FP8_QK}


@pytest.mark.gpu
@pairwise(lengths=LENGTHS, heads=[1, 33, 64, 128])
def test_fp8_products_with_a_scale_per_tile(lengths, heads):
    kv_lens, q_lens = lengths
    run(kv_lens=kv_lens, q_lens=q_lens, heads=heads, **BY_NAME)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 3, 8, 32, 96])
def test_fp8_products_with_a_scale_per_tile_and_page_sizes_not_of_64(page_size):
    run(heads=128, **BY_NAME, **around_pages(page_size))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fields",
    [
        {"q_rope_dtype": "bf16"},
        {"q_scaled": False, "sink": "mixed", "sharpness": -2.0, "mask": "null"},
        {"num_ctas": 3, "tile": 16},
        {"sharpness": 30.0, "tensor_scale": 1.0},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_fp8_products_with_a_scale_per_tile_and_other_arguments(fields):
    given = {"kv_lens": (400, 65, 9, 0), "q_lens": (20, 1, 9, 1), "heads": 128}
    run(**{**given, **BY_NAME, **fields})


@pytest.mark.gpu
@pytest.mark.parametrize("format", fp8_scores.FORMATS)
def test_m64_fp8_qk_scores_are_accumulated_as_the_hardware_does(format):
    """With one key per query the lse is the score."""
    cache, _ = with_magnitudes(format, [1.0, 3.0, 0.2])
    layer = cache.layer(0)
    first_rows = layer.read(torch.arange(8, device="cuda") * 64, dtype=torch.float64)
    units = torch.ones(8).double().cuda() if layer.scales is None else layer.scales[:, 0, 0]
    own = torch.Generator().manual_seed(7)
    q = torch.randn(90, 128, 576, generator=own).cuda().to(torch.float8_e4m3fn)
    page = torch.arange(90, dtype=torch.int32, device="cuda") % 8
    lens = torch.ones_like(page)
    given = {"softmax_scale": 0.5, "backend": "hopper:m64_fp8_qk"}
    _, lse = mla_decode(q, cache, page[:, None], lens, **given)
    row = DecodeCase(**ROW).row
    modelled = torch.stack(
        [
            fp8_scores.fp8_qk_scores(each.double(), first_rows[[i]], units[[i]], row, format)[:, 0]
            for each, i in zip(q, page.tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(lse, modelled * 0.5, rtol=2.0**-22, atol=0.0)
    exact = (q.double() @ first_rows[page][..., None])[..., 0] * 0.5
    assert (lse - exact).abs().max() > 2.0**-10  # a conversion to float16 would lose less


@pytest.mark.gpu
def test_m64_fp8_qk_over_rows_of_very_different_magnitude():
    """Probabilities of rows with small scales matter where the large one is not attended to."""
    cache, rows = with_magnitudes("fp8_token", [1e-3] * 400 + [1e6] + [1e-3] * 111)
    own = torch.Generator().manual_seed(8)
    q = torch.randn(2, 64, 576, generator=own).cuda().to(torch.float8_e4m3fn)
    largest = (q.double() @ rows.T).abs().amax((1, 2))
    scales = (3000.0 / largest).float()  # at the softmax's scale scores are up to 60
    out, lse = attend_all(q, cache, scales, backend="hopper:m64_fp8_qk")
    scores = q.double() * scales.double()[:, None, None] @ rows.T * 0.02
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-3, atol=1e-3)
    want = scores.softmax(-1) @ rows[:, :512]
    is_small = want.abs().amax(-1) < 1e-3 * rows.abs().max()
    assert 0.1 < is_small.double().mean() < 0.9
    error = (out.double() - want).abs().amax(-1) / want.abs().amax(-1)
    assert error[~is_small].max() < 2.0**-4  # the scores of large rows have errors of their own
    assert error[is_small].max() < 2.0**-6


@pytest.mark.gpu
@FP8_FORMATS
@FP8_HEADS
def test_fp8_qk_many_work_tiles_of_one_cta(heads, format):
    """Queries of the next work tile are loaded while the current one is computed."""
    q_lens = (1, 2, 1, 1, 3, 1, 1, 0, 1, 1)
    run(**MANY_TILES, **FP8_QK, q_lens=q_lens, heads=heads, format=format)


@pytest.mark.gpu
@pairwise(heads=[1, 16, 32, 100, 128], batch=BATCHES, format=FP8)
def test_fp8_qk_random_batches(heads, batch, format):
    run(seed=batch, heads=heads, format=format, sink="mixed", **random_batch(batch), **FP8_QK)


def attend_all(
    q: torch.Tensor, cache: PagedLatentCache, q_scale: torch.Tensor | None = None, **more: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every token a request of its own over all 512 rows of `with_magnitudes`."""
    table = torch.arange(8, dtype=torch.int32, device="cuda").expand(len(q), 8)
    lens = torch.full((len(q),), 512, dtype=torch.int32, device="cuda")
    given = {"softmax_scale": 0.02, "q_scale": q_scale, "backend": "hopper", **more}
    return mla_decode(q, cache, table, lens, **given)


def assert_attended(
    q: torch.Tensor, q_scale: torch.Tensor, rows: torch.Tensor, results: tuple[torch.Tensor, ...]
) -> None:
    out, lse = results
    scores = q.double() * q_scale.double()[:, None, None] @ rows.T * 0.02
    want = scores.softmax(-1) @ rows[:, :512]
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-4, atol=1e-4)
    error = (out.double() - want).abs().amax(-1)
    assert (error <= 2.0**-7 * want.abs().amax(-1)).all(), error / want.abs().amax(-1)


@pytest.mark.gpu
@FP8_FORMATS
@pytest.mark.parametrize("heads", [8, 16, 32])
def test_fp8_qk_every_e4m3_value_is_converted_exactly(heads, format):
    """One value per token, one column per head, scaled so that every value changes the result."""
    cache, rows = with_magnitudes(format, [1.0])
    numbers = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
    q = torch.zeros(len(numbers), heads, 576, dtype=torch.uint8)
    columns = torch.arange(len(numbers) * heads).view(-1, heads, 1) * 7 % 576
    q = q.scatter(2, columns, numbers[:, None, None].expand(-1, heads, 1))
    q = q.cuda().view(torch.float8_e4m3fn)
    largest = q.float().abs().amax((1, 2))
    scales = torch.where(largest > 0, 50 / largest, 1.0)
    assert_attended(q, scales, rows, attend_all(q, cache, scales))


@pytest.mark.gpu
@pairwise(form=["packed", "strided", "one for all"], heads=[16, 100], format=FP8)
def test_q_scales_of_any_size_sign_and_stride(form, heads, format):
    cache, rows = with_magnitudes(format, [1.0])
    own = torch.Generator().manual_seed(2)
    q = torch.randn(7, heads, 576, generator=own).cuda().to(torch.float8_e4m3fn)
    scales = torch.tensor([1.0, -1.5, 0.0, 1e-30, 0.37, 4.0, -1e-3], device="cuda")
    if form == "strided":
        scales = torch.stack([scales, torch.full_like(scales, torch.nan)], 1)[:, 0]
    if form == "one for all":
        scales = torch.tensor([-0.6], device="cuda").expand(7)
    assert_attended(q, scales, rows, attend_all(q, cache, scales))


@pytest.mark.gpu
@FP8_FORMATS
@pytest.mark.parametrize("heads", [1, 16, 32, 100])
def test_fp8_qk_queries_surrounded_by_nan(heads, format):
    """Rows at a distance of 608 bytes; TMA tiles reach past the heads of a token."""
    cache, rows = with_magnitudes(format, [1.0])
    own = torch.Generator().manual_seed(6)
    memory = torch.full((5, heads + 2, 608), 0x7F, dtype=torch.uint8, device="cuda")
    q = memory.view(torch.float8_e4m3fn)[1:-1, 1:-1, 16:592]
    q.copy_(torch.randn(3, heads, 576, generator=own))
    scales = torch.rand(3, generator=own).cuda() + 0.5
    assert_attended(q, scales, rows, attend_all(q, cache, scales))


@pytest.mark.gpu
@FP8_FORMATS
@pytest.mark.parametrize("column", [0, 200, 511, 512, 575])
def test_fp8_qk_nan_in_a_query_stays_in_its_head(column, format):
    cache, _ = with_magnitudes(format, [1.0])
    own = torch.Generator().manual_seed(3)
    q = torch.randn(3, 40, 576, generator=own).cuda().to(torch.float8_e4m3fn)
    plain_out, plain_lse = attend_all(q, cache)
    q.view(torch.uint8)[1, 35, column] = 0xFF
    out, lse = attend_all(q, cache)
    is_hit = torch.zeros(3, 40, dtype=torch.bool, device="cuda")
    is_hit[1, 35] = True
    assert out[is_hit].isnan().all()
    assert lse[is_hit].isnan().all()
    assert torch.equal(out[~is_hit], plain_out[~is_hit])
    assert torch.equal(lse[~is_hit], plain_lse[~is_hit])


@pytest.mark.gpu
@FP8_FORMATS
def test_a_q_scale_of_nan_stays_in_its_token(format):
    cache, rows = with_magnitudes(format, [1.0])
    own = torch.Generator().manual_seed(4)
    q = torch.randn(3, 40, 576, generator=own).cuda().to(torch.float8_e4m3fn)
    scales = torch.tensor([0.5, torch.nan, 2.0], device="cuda")
    out, lse = attend_all(q, cache, scales)
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    others = torch.tensor([0, 2], device="cuda")
    assert_attended(q[::2], scales[::2], rows, (out[others], lse[others]))


@pytest.mark.gpu
@FP8_FORMATS
def test_fp8_qk_replayed_launches_read_their_own_scales(format):
    """The third call and later ones replay the launch that the second recorded."""
    cache, rows = with_magnitudes(format, [1.0])
    own = torch.Generator().manual_seed(5)
    for _ in range(4):
        q = torch.randn(3, 16, 576, generator=own).cuda().to(torch.float8_e4m3fn)
        scales = torch.rand(3, generator=own).cuda() + 0.5
        assert_attended(q, scales, rows, attend_all(q, cache, scales))
