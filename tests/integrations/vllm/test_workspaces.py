"""What attention takes in a step, beside the memory that vLLM sees while it measures itself."""

from __future__ import annotations

import pytest
import torch

from mlakit import RowShape
from mlakit.integrations.vllm.workspaces import (
    Layer,
    context_rows,
    decode_bytes,
    invariant_splits,
    sparse_bytes,
)
from mlakit.kernels.launch import SHARED_BYTES, Target, compiling

HOPPER, ADA = Target(90, 132, SHARED_BYTES[90]), Target(89, 128, SHARED_BYTES[89])
COLUMNS = 128 + 128  # of a head's expanded key, without the rotated ones, and value
LAYERS = {
    "bf16-16": Layer(RowShape(512, 64), "bf16", torch.bfloat16, 16, 64),
    "bf16-128": Layer(RowShape(512, 64), "bf16", torch.bfloat16, 128, 64),
    "fp8-16": Layer(RowShape(512, 64), "fp8", torch.bfloat16, 16, 64),
    "fp8_block128-128": Layer(RowShape(512, 64), "fp8_block128", torch.bfloat16, 128, 64),
}
# of requests and the longest of them: V3's release with vLLM's defaults is the last
STEPS = [(1, 1000), (16, 33_280), (128, 33_280), (256, 163_840), (1024, 4096), (1024, 163_840)]


@pytest.fixture(autouse=True)
def memory_that_is_never_written(monkeypatch):
    """The suite writes NaN to every new tensor, which for these would take gigabytes."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)


def context_bytes(layer: Layer, requests: int, longest: int) -> int:
    rows = context_rows(longest, requests, layer.page_size)
    return rows * layer.heads * COLUMNS * layer.dtype.itemsize


@pytest.mark.parametrize("target", [HOPPER, ADA], ids=["sm_90", "sm_89"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize(("requests", "longest"), STEPS)
@pytest.mark.parametrize("drafts", [0, 3])
def test_decode_fits_in_the_expanded_context_of_a_prefill(layer, requests, longest, drafts, target):
    with compiling(target):
        taken = decode_bytes(layer, target, requests=requests, drafts=drafts, max_model_len=longest)
    results = requests * (1 + drafts) * layer.heads * 512 * 2
    assert results < taken <= context_bytes(layer, requests, longest)


@pytest.mark.parametrize("target", [HOPPER, ADA], ids=["sm_90", "sm_89"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize(("requests", "longest"), STEPS)
def test_batch_invariant_decode_is_cut_so_that_it_fits_too(layer, requests, longest, target):
    limits = {"requests": requests, "drafts": 0, "max_model_len": longest}
    budget = context_bytes(layer, requests, longest)
    with compiling(target):
        splits = invariant_splits(layer, target, **limits, budget=budget)
        taken = decode_bytes(layer, target, **limits, is_batch_invariant=True, num_splits=splits)
        uncut = decode_bytes(layer, target, **limits, is_batch_invariant=True)
    assert taken <= budget
    assert (splits is None) == (uncut <= budget)
    if (requests, longest) == (1024, 163_840):
        assert uncut > 4 * budget
        assert splits is not None
        assert splits >= 8


def test_attention_to_selections_takes_results_rows_and_partial_results():
    layer, k = LAYERS["fp8_block128-128"], 2048
    with compiling(HOPPER):
        most = sparse_bytes(layer, HOPPER, tokens=8192, k=k)
        few = sparse_bytes(layer, HOPPER, tokens=64, k=k)
        one = sparse_bytes(layer, HOPPER, tokens=1, k=k)
    each = layer.heads * (512 * 2 + 2 * 4) + k * 4  # results, and the rows of the cache
    assert 8192 * each <= most < 8400 * each  # the last tokens may be split
    assert few > 64 * each  # of fewer tokens, whose lists are split
    assert one > 4 * each
