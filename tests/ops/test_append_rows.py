"""`append_rows` against the oracle on a cache that is all poison, and beside other writers."""

from __future__ import annotations

import pytest
import torch

from mlakit import PagedLatentCache, RowShape, append_rows, norm_rope_quant_append
from mlakit.dispatch import selection
from mlakit.formats import FORMATS
from mlakit.tools.testing import assert_same_bits
from mlakit.tools.workloads import AppendRowsCase
from tests.ops.cases import append_rows_call
from tests.ops.random_cases import problems_of

each_kernel = pytest.mark.parametrize("spec", selection.specs("append_rows"), ids=str)


def skip_other_devices(spec, device):
    if spec.backend == "cpu" and device.type != "cpu":
        pytest.skip("the CPU kernels take CPU tensors only")


@each_kernel
@pytest.mark.parametrize("format", FORMATS)
def test_rows_among_poison(format, spec, device):
    skip_other_devices(spec, device)
    row = {"format": format, "page_size": 4, "num_layers": 2, "wide_indices": True}
    AppendRowsCase(**row, padded=True, num_tokens=9).run(device, spec.backend)


@each_kernel
@pytest.mark.parametrize("power_of_two", [False, True])
def test_index_keys_among_poison(power_of_two, spec, device):
    skip_other_devices(spec, device)
    row = {"kv_lora_rank": 128, "qk_rope_head_dim": 0, "format": "fp8_token", "page_size": 4}
    AppendRowsCase(**row, power_of_two=power_of_two).run(device, spec.backend)


@pytest.mark.slow
@each_kernel
@pytest.mark.parametrize(
    "case",
    [
        AppendRowsCase(num_tokens=0),
        AppendRowsCase(num_tokens=4, skipped=1.0),
        AppendRowsCase(num_tokens=200, num_pages=20, format="fp8_token", dtype="fp32"),
        AppendRowsCase(format="fp8", tensor_scale=0.03, tensor_scale_on_device=True),
        AppendRowsCase(kv_lora_rank=36, qk_rope_head_dim=6, rope_dtype="fp16", padded=True),
    ],
    ids=["no tokens", "padding only", "programs of several rows", "tensor scale", "odd widths"],
)
def test_corners(case, spec, device):
    skip_other_devices(spec, device)
    case.run(device, spec.backend)


@each_kernel
def test_index_keys_of_another_engine(spec, device):
    """A page of [keys, then scales], as DeepGEMM and vLLM lay it out."""
    skip_other_devices(spec, device)
    keys = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).to(device)
    blocks = torch.zeros(2, 64, 132, dtype=torch.uint8, device=device)
    cache = PagedLatentCache.wrap_index_keys(blocks)
    slots = torch.tensor([64, -1, 2], device=device)
    append_rows(keys, None, cache, slots, power_of_two_scales=True, backend=spec.backend)
    stored = cache.layer(0).read(slots[[0, 2]])
    assert_same_bits("keys", stored, _stored(keys[[0, 2]], "fp8_token", power_of_two=True))
    assert (blocks[0, :, :].flatten()[: 64 * 128].view(64, 128)[[0, 1, 3]] == 0).all()


def _stored(rows, format, **options):
    """What a pool of one page gives back."""
    shape = RowShape(rows.shape[1], 0)
    pool = PagedLatentCache.allocate(shape, format, num_pages=1, device=rows.device)
    slots = torch.arange(len(rows), device=rows.device)
    pool.layer(0).write(slots, rows, power_of_two_scales=options.get("power_of_two", False))
    return pool.layer(0).read(slots)


@each_kernel
@pytest.mark.parametrize("format", FORMATS)
def test_the_fused_append_stores_the_same_rows(format, spec, device):
    """Without a norm, at position 0 of a table without a rotation."""
    skip_other_devices(spec, device)
    row = RowShape(448, 64, 512) if format == "fp8_block64" else RowShape(512, 64)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(5, row.width, generator=generator).to(device, torch.bfloat16)
    latent, k_rope = rows.split([row.kv_lora_rank, row.qk_rope_head_dim], dim=-1)
    slots = torch.tensor([7, 0, -1, 3, 9], device=device)
    pools = [
        PagedLatentCache.allocate(row, format, num_pages=3, page_size=4, device=device)
        for _ in range(2)
    ]
    append_rows(latent, k_rope, pools[0], slots, backend=spec.backend)
    no_rotation = torch.tensor([1.0, 0.0] * 32, device=device)[None]
    norm_rope_quant_append(
        rows.new_zeros(5, 1, 64),
        rows,
        no_rotation,
        None,
        pools[1],
        slots=slots,
        positions=torch.zeros_like(slots),
        epsilon=0.0,
        backend=spec.backend,
    )
    for part in ("payload", "beside"):
        one, other = (getattr(pool, part) for pool in pools)
        if one is not None:
            assert_same_bits(part, one, other)


def test_versions_of_the_cache_count_writes():
    """So autograd notices a cache that it had saved."""
    call = append_rows_call("fp8_token")
    cache = call.arguments["cache"]
    before = cache.payload._version, cache.scales._version
    call.run()
    assert cache.payload._version > before[0]
    assert cache.scales._version > before[1]


@pytest.mark.gpu
def test_slots_outside_of_the_pool_are_skipped():
    """On a GPU no host looks at them."""
    cache = PagedLatentCache.allocate(
        RowShape(512, 64), num_pages=2, page_size=4, device="cuda"
    ).zero_()
    rows = torch.ones(4, 576, device="cuda", dtype=torch.bfloat16)
    slots = torch.tensor([8, 5, -7, 2**40], device="cuda")
    append_rows(rows[:, :512], rows[:, 512:], cache, slots)
    written = cache.payload.flatten(0, 2).any(-1).nonzero().flatten()
    assert written.tolist() == [5]


@pytest.mark.slow
@problems_of("append_rows")
def test_problems_match_the_oracle(problem, device, pytestconfig):
    problem(device, pytestconfig.getoption("--hypothesis-seed"))
