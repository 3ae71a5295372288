"""`norm_rope_quant_append` against the float64 oracle on a cache that is all poison.

Unused entries of page tables are garbage, pages are shuffled, tensors are strided, angles of other
positions are NaN. A case fails if anything but the new tokens' rows and the queries is written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import PagedLatentCache, RowShape, norm_rope_quant_append
from mlakit.cache import KVShard
from mlakit.dispatch import selection
from mlakit.formats import FORMATS
from mlakit.tools.testing import assert_same_bits
from mlakit.tools.workloads import AppendCase
from tests.ops.random_cases import problems_of

WAYS: dict[str, dict[str, Any]] = {
    "page table": {},
    "some slots": {"slots": "some", "wide_indices": True},
    "given positions": {"positions": "given"},
    "a shard": {"rank": 1, "world": 2, "interleave": 1},
    "a shard by slots": {"slots": "some", "rank": 0, "world": 3, "interleave": 2},
    "a shard of a flat table": {"rank": 2, "world": 3, "flat_table": True, "positions": "given"},
}
# a last page of one token, a full one, no new tokens, no tokens at all, over a page of new ones
LENGTHS = {"kv_lens": (5, 0, 3, 4, 10), "q_lens": (1, 0, 0, 1, 5)}


def skip_other_devices(spec, device):
    if spec.backend == "cpu" and device.type != "cpu":
        pytest.skip("the CPU kernels take CPU tensors only")


@pytest.mark.slow
@pytest.mark.parametrize("spec", selection.specs("norm_rope_quant_append"), ids=str)
@pytest.mark.parametrize(
    ("format", "way"),
    [
        *((format, next(iter(WAYS))) for format in FORMATS),
        # how a slot is found and how a row is stored meet in no code path
        *((format, way) for way in list(WAYS)[1:] for format in ("bf16", "fp8", "fp8_block128")),
    ],
)
def test_rows_among_poison(format, way, spec, device):
    skip_other_devices(spec, device)
    row = {"format": format, "page_size": 4, "num_layers": 2}
    AppendCase(**row, padded=True, heads=2, **LENGTHS, **WAYS[way]).run(device, spec.backend)


def test_slots_of_tokens_that_other_ranks_store_may_be_equal():
    cache = PagedLatentCache.allocate(RowShape(32, 8), "fp32", num_pages=2, page_size=4)
    slots, positions = torch.tensor([3, 5, 3]), torch.tensor([0, 1, 2])
    arguments = (torch.ones(3, 1, 8), torch.ones(3, 40), torch.ones(3, 8), None, cache)
    options = {"slots": slots, "positions": positions, "epsilon": 0.0}
    norm_rope_quant_append(*arguments, **options, kv_shard=(1, 2, 1))
    assert cache.payload.view(8, 40).any(1).nonzero().flatten().tolist() == [5]
    with pytest.raises(ValueError, match="slots must be unique"):
        norm_rope_quant_append(*arguments, **options, kv_shard=(0, 2, 1))


def test_every_token_is_on_one_rank(device):
    """Three ranks store what one rank alone stores, each token once, and rotate the same."""
    generator = torch.Generator().manual_seed(0)
    row, shape = RowShape(32, 8), {"num_pages": 8, "page_size": 4, "device": device}
    q_rope = torch.randn(11, 2, 8, generator=generator).to(device)
    kv = torch.randn(11, 40, generator=generator).to(device)
    freqs = torch.randn(30, 8, generator=generator).to(device)
    gamma = torch.rand(32, generator=generator).to(device)
    table = torch.arange(8, dtype=torch.int32, device=device).view(2, 4)
    kv_lens, starts = (torch.tensor(n, device=device) for n in ([9, 14], [0, 6, 11]))
    step = (q_rope, kv, freqs, gamma)

    def append(**shard: Any) -> tuple[Tensor, PagedLatentCache]:
        cache = PagedLatentCache.allocate(row, "fp32", **shape)
        cache.payload.fill_(torch.nan)
        where = (cache, table, kv_lens, starts)
        return norm_rope_quant_append(*step, *where, epsilon=1e-6, **shard), cache

    rotated, whole = append()
    shards = [KVShard(rank, 3, 2) for rank in range(3)]
    parts = [append(kv_shard=tuple(shard)) for shard in shards]
    for request, (first, last) in enumerate(((3, 9), (9, 14))):
        for position in range(first, last):
            shard = shards[shards[0].owner(position)]
            local = shard.local_position(position)
            assert shard.local_count(position) == local
            stored = parts[shard.rank][1].payload[0, table[request, local // 4], local % 4]
            expected = whole.payload[0, table[request, position // 4], position % 4]
            assert_same_bits("row", stored, expected)
    assert sum(int((~cache.payload[..., 0].isnan()).sum()) for _, cache in parts) == 11
    for each, _ in parts:
        assert_same_bits("queries", each, rotated)


@pytest.mark.parametrize("spec", selection.specs("norm_rope_quant_append"), ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_finished_index_keys_among_poison(power_of_two, way, spec, device):
    """Without gamma there is no norm: the op quantises and appends rows as they are."""
    skip_other_devices(spec, device)
    row = {"kv_lora_rank": 128, "qk_rope_head_dim": 0, "format": "fp8_token", "page_size": 4}
    keys = {**row, "gamma_dtype": "", "heads": 1, "power_of_two": power_of_two}
    AppendCase(**keys, padded=True, **LENGTHS, **WAYS[way]).run(device, spec.backend)


@pytest.mark.parametrize("spec", selection.specs("norm_rope_quant_append"), ids=str)
@pytest.mark.parametrize("format", ["bf16", "fp8_block128"])
def test_finished_latents_among_poison(format, spec, device):
    skip_other_devices(spec, device)
    row = {"format": format, "page_size": 4, "gamma_dtype": ""}
    AppendCase(**row, padded=True, heads=2, **LENGTHS).run(device, spec.backend)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_tiles_of_tokens(way, device):
    """More tokens than the CPU kernel takes at once."""
    AppendCase(
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        heads=16,
        kv_lens=(103, 40),
        q_lens=(3, 40),
        workspace_mib=1,
        **WAYS[way],
    ).run(device, "cpu" if device.type == "cpu" else "auto")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", [((), ()), ((4, 0), (0, 0))], ids=["no requests", "no tokens"])
@pytest.mark.parametrize("spec", selection.specs("norm_rope_quant_append"), ids=str)
def test_a_step_without_tokens(spec, lengths, way, device):
    skip_other_devices(spec, device)
    kv_lens, q_lens = lengths
    AppendCase(kv_lens=kv_lens, q_lens=q_lens, **WAYS[way]).run(device, spec.backend)


@pytest.mark.slow
@problems_of("norm_rope_quant_append")
def test_problems_match_the_oracle(problem, device, pytestconfig):
    problem(device, pytestconfig.getoption("--hypothesis-seed"))
