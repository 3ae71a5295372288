"""`norm_rope_quant_append` against the float64 oracle on a cache that is all poison.

Unused entries of page tables are garbage, pages are shuffled, tensors are strided, angles of other
positions are NaN. A case fails if anything but the new tokens' rows and the queries is written.
"""

from __future__ import annotations

from typing import Any

import pytest

from mlakit import dispatch
from mlakit.formats import FORMATS
from mlakit.workloads import AppendCase

WAYS: dict[str, dict[str, Any]] = {
    "page table": {},
    "some slots": {"slots": "some", "wide_indices": True},
}
# a last page of one token, a full one, no new tokens, no tokens at all, over a page of new ones
LENGTHS = {"kv_lens": (5, 0, 3, 4, 10), "q_lens": (1, 0, 0, 1, 5)}


def skip_other_devices(spec, device):
    if spec.backend == "cpu" and device.type != "cpu":
        pytest.skip("the CPU kernels take CPU tensors only")


@pytest.mark.parametrize("spec", dispatch.specs("norm_rope_quant_append"), ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("format", FORMATS)
def test_rows_among_poison(format, way, spec, device):
    skip_other_devices(spec, device)
    row = {"format": format, "page_size": 4, "num_layers": 2}
    AppendCase(**row, padded=True, heads=2, **LENGTHS, **WAYS[way]).run(device, spec.backend)


@pytest.mark.parametrize("spec", dispatch.specs("norm_rope_quant_append"), ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_finished_index_keys_among_poison(power_of_two, way, spec, device):
    """Without gamma there is no norm: the op quantises and appends rows as they are."""
    skip_other_devices(spec, device)
    row = {"kv_lora_rank": 128, "qk_rope_head_dim": 0, "format": "fp8_token", "page_size": 4}
    keys = {**row, "gamma_dtype": "", "heads": 1, "power_of_two": power_of_two}
    AppendCase(**keys, padded=True, **LENGTHS, **WAYS[way]).run(device, spec.backend)


@pytest.mark.parametrize("spec", dispatch.specs("norm_rope_quant_append"), ids=str)
@pytest.mark.parametrize("format", ["bf16", "fp8_block128"])
def test_finished_latents_among_poison(format, spec, device):
    skip_other_devices(spec, device)
    row = {"format": format, "page_size": 4, "gamma_dtype": ""}
    AppendCase(**row, padded=True, heads=2, **LENGTHS).run(device, spec.backend)


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
@pytest.mark.parametrize("spec", dispatch.specs("norm_rope_quant_append"), ids=str)
def test_a_step_without_tokens(spec, lengths, way, device):
    skip_other_devices(spec, device)
    kv_lens, q_lens = lengths
    AppendCase(kv_lens=kv_lens, q_lens=q_lens, **WAYS[way]).run(device, spec.backend)
