"""Hopper decode with a four-bit KV cache (small_m_fp4_kv), on poisoned caches."""

from __future__ import annotations

import pytest
import torch

from mlakit import PagedLatentCache, mla_decode
from mlakit.dispatch import selection
from mlakit.dispatch.specs import Problem
from mlakit.kernels.hopper.decode.configs import (
    D_C,
    D_R,
    OTHER_SMEM_BYTES,
    SMEM_BYTES,
    small_m_fp4_kv_config,
)
from mlakit.model.geometry import RowShape
from tests.kernels.hopper import decode_cases
from tests.kernels.hopper.decode_cases import LENGTHS, MANY_TILES, around_pages, random_batch
from tests.pairs import pairwise

FORMAT = "mxfp4_block32"
KERNEL = "hopper:small_m_fp4_kv"
TILES = (8, 16, 32)  # heads


def problem(**fields: object) -> Problem:
    given = {"dtype": "torch.bfloat16", "format": FORMAT, "heads": 16, "page_size": 64}
    return Problem("cuda", 90, **{**given, "row": RowShape(512, 64), "mask": "causal", **fields})


def run(**fields: object) -> None:
    decode_cases.run(kernel=KERNEL, **{"format": FORMAT, **fields})


@pytest.mark.parametrize("fields", [{}, {"heads": 1}, {"heads": 130}, {"page_size": 8}], ids=str)
def test_what_the_kernel_takes(fields):
    assert selection.select("mla_decode", problem(**fields), "hopper").name == KERNEL


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"format": "bf16"}, "needs rows of mxfp4_block32, got bf16"),
        (
            {"dtype": "torch.float16"},
            f"needs queries of torch.bfloat16 with rows of {FORMAT}, got torch.float16",
        ),
        (
            {"page_size": 4},
            f"needs pages of 8, 16, 32 or a multiple of 64 rows with {FORMAT}, got 4",
        ),
        ({"row": RowShape(448, 64, v_width=512)}, "needs rows of 576/512, got 512/512"),
        ({"mask": "chunked"}, "needs a mask of null or causal, got chunked"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_left_to_the_portable_kernel(fields, reason):
    (spec,) = (spec for spec in selection.specs("mla_decode") if spec.name == KERNEL)
    assert spec.why_not(problem(**fields)) == reason


def test_auto_takes_only_tiles_that_a_check_has_proved():
    (spec,) = (spec for spec in selection.specs("mla_decode") if spec.name == KERNEL)
    assert spec.variant is not None
    assert [spec.variant(problem(heads=heads)) for heads in (1, 16, 17, 128)] == [
        f"{FORMAT}, {rows} heads" for rows in (8, 16, 32, 32)
    ]
    assert selection.select("mla_decode", problem()).backend == "triton"
    reason = selection.explain_kernels("mla_decode", problem())[KERNEL]
    assert str(reason).startswith("has not been checked on this machine")


@pytest.mark.parametrize("rows", TILES)
def test_stages_fit_beside_the_queries(rows):
    config = small_m_fp4_kv_config(rows)
    raw = 64 * (D_C // 2 + 16 + 2 * D_R)
    used = config.STAGES * 64 * D_C + config.RAW_STAGES * raw + rows * 2 * (D_C + D_R + 64)
    assert used + OTHER_SMEM_BYTES <= SMEM_BYTES < used + OTHER_SMEM_BYTES + 64 * D_C
    assert config.STAGES >= 2
    assert 2 * config.DEQUANT_REGISTERS + config.PRODUCER_REGISTERS < 4 * config.MAX_REGISTERS


@pytest.mark.gpu
@pairwise(lengths=LENGTHS, heads=TILES)
def test_lengths(lengths, heads):
    kv_lens, q_lens = lengths
    run(kv_lens=kv_lens, q_lens=q_lens, heads=heads)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 7, 9, 17, 31, 33, 100])
def test_heads(heads):
    run(kv_lens=(300, 64, 1), q_lens=(2, 1, 1), heads=heads, sink="finite")


@pytest.mark.gpu
@pairwise(page_size=[8, 16, 32, 192], heads=TILES)
def test_page_sizes(page_size, heads):
    run(heads=heads, num_layers=2, **around_pages(page_size))


@pytest.mark.gpu
@pairwise(
    fields=[
        {"given_results": True},
        {"wide_indices": True},
        {"mask": "null", "sink": "mixed"},
        {"sharpness": -2.0},
        {"sharpness": 30.0},
        {"tile": 16, "num_ctas": 3},
        {"deterministic": True, "implicit_starts": True},
    ],
    heads=[16, 32],
)
def test_forms_of_arguments(fields, heads):
    run(kv_lens=(500, 65, 0, 130), q_lens=(1, 1, 1, 1), heads=heads, **fields)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", TILES)
def test_pipeline_phases_continue_across_work_tiles(heads):
    run(**MANY_TILES, q_lens=(1,) * 10, heads=heads)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [7, 40, 150])
def test_random_batches(batch):
    run(seed=batch, heads=16, **random_batch(batch))


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [0, 1, 60, 127, 128, 129, 200, 250])
def test_every_code_times_scales_of_any_size_is_exact(exponent):
    """A request of one key: the result is its row, as the codec decodes it."""
    generator = torch.Generator().manual_seed(exponent)
    pages = torch.randint(0, 256, (2, 64, 400), dtype=torch.uint8, generator=generator)
    pages[..., 256:272] = exponent
    pages[..., 256:272:5] = 127  # other scales in the same row
    pages[..., 272:] = 0
    cache = PagedLatentCache.wrap(pages.cuda(), RowShape(512, 64), format=FORMAT)
    table = torch.tensor([[1], [0]], dtype=torch.int32, device="cuda")
    kv_lens = torch.ones(2, dtype=torch.int32, device="cuda")
    q = torch.zeros(2, 16, 576, dtype=torch.bfloat16, device="cuda")
    out, _ = mla_decode(q, cache, table, kv_lens, softmax_scale=0.1, backend=KERNEL)
    rows = cache.layer(0).read(torch.tensor([64, 0], device="cuda"), torch.float64)
    assert torch.equal(out.double(), rows[:, None, :512].expand(2, 16, 512))


@pytest.mark.gpu
def test_a_scale_of_nan_is_nan_in_all_of_its_columns():
    pages = torch.randint(0, 256, (1, 64, 400), dtype=torch.uint8)
    pages[..., 256:272] = 127
    pages[..., 272:] = 0
    pages[0, 3, 256 + 5] = 255
    cache = PagedLatentCache.wrap(pages.cuda(), RowShape(512, 64), format=FORMAT)
    table = torch.zeros(2, 1, dtype=torch.int32, device="cuda")
    kv_lens = torch.tensor([3, 4], dtype=torch.int32, device="cuda")
    q = torch.zeros(2, 16, 576, dtype=torch.bfloat16, device="cuda")
    out, _ = mla_decode(q, cache, table, kv_lens, softmax_scale=0.1, backend=KERNEL)
    assert not bool(out[0].isnan().any())  # row 3 is past its last key
    assert bool(out[1].isnan()[:, 160:192].all())
