"""`mla_prefill` of e4m3 queries, keys and values, on every backend."""

from __future__ import annotations

import pytest
import torch

from mlakit import reference
from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.formats import E4M3_MAX
from mlakit.model.masks import CAUSAL, NULL, Mask
from mlakit.ops import mla_prefill
from mlakit.tools.testing import assert_matches
from mlakit.tools.workloads import PrefillFp8Case

E4M3 = torch.float8_e4m3fn
EACH_BACKEND = pytest.mark.parametrize("spec", selection.specs("mla_prefill"), ids=str)
Tensors = dict[str, torch.Tensor]


@EACH_BACKEND
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"scaled": False},
        {"transposed": False},
        {"uniform_keys": True},
        {"uniform_values": True, "seed": 1},
        {"block_scales": True},
        {"block_scales": True, "kv_lens": (131, 0, 60), "q_lens": (3, 0, 2), "heads": 1},
        {"mask": "null"},
        {"mask": "sliding_window_causal", "window": 7},
        {"mask": "chunked", "window": 6},
        {"sink": "mixed"},
        {"padded": True, "given_results": True, "wide_indices": True},
        {"qk_nope_head_dim": 24, "qk_rope_head_dim": 0, "v_head_dim": 20},
        {"kv_lens": (), "q_lens": ()},
    ],
    ids=str,
)
def test_matches_the_oracle_of_dequantised_tensors(spec, fields, device):
    try:
        PrefillFp8Case(**fields).run(device, spec.backend)
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))


def quantise(x: torch.Tensor, *axes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3, float32 scales of `axes` together)"""
    scale = x.abs().amax(axes, keepdim=True) / E4M3_MAX
    return (x / scale).to(E4M3), scale.squeeze(axes)


def quantised(q, k_nope, k_rope, v) -> Tensors:
    """q and v with a scale per token and head, k with one per token."""
    q8, q_scale = quantise(q, -1)
    v8, v_scale = quantise(v, -1)
    keys = torch.cat([k_nope.flatten(1), k_rope], dim=1)
    k8, k_scale = quantise(keys, 1)
    pitch = -(-len(v) // 16) * 16  # TMA needs a multiple of 16 bytes
    by_head = torch.full((*v.shape[1:], pitch), torch.nan).to(E4M3)
    by_head[..., : len(v)] = v8.permute(1, 2, 0)
    return {
        "q": q8,
        "k_nope": k8[:, : k_nope[0].numel()].reshape(k_nope.shape),
        "k_rope": k8[:, k_nope[0].numel() :],
        "v": by_head.permute(2, 0, 1)[: len(v)],
        "q_scale": q_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }


def moved(tensors: Tensors, device: torch.device) -> Tensors:
    """On `device`; v with the same pitch: `to` would pack it."""
    there = {name: each.to(device) for name, each in tensors.items()}
    v = tensors["v"]
    whole = v.as_strided((*v.shape[1:], v.stride(2)), (v.stride(1), v.stride(2), 1)).to(device)
    there["v"] = whole.permute(2, 0, 1)[: len(v)]
    return there


@pytest.mark.slow
@EACH_BACKEND
@pytest.mark.parametrize("mask", [CAUSAL, NULL], ids=lambda mask: mask.kind)
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_error_is_at_most_twice_that_of_quantising_the_inputs(
    spec, sharpness, mask, device, generator
):
    """Both against attention over the tensors before they were quantised, in float64."""
    lengths = [0, 96, 112, 240]
    heads, softmax_scale = 2, sharpness / 192**0.5
    shapes = ((240, heads, 192), (240, heads, 128), (240, 64), (240, heads, 128))
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    fp8 = quantised(*tensors)
    starts = torch.tensor(lengths, dtype=torch.int32, device=device)
    on_device = moved(fp8, device)
    try:
        out, _ = mla_prefill(
            q_starts=starts,
            kv_starts=starts,
            softmax_scale=softmax_scale,
            mask=mask,
            backend=spec.backend,
            **on_device,
        )
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))
    given = {"softmax_scale": softmax_scale, "mask": mask}
    exact, _ = reference.mla_prefill(*tensors, lengths, lengths, **given)
    rounded, _ = reference.mla_prefill(q_starts=lengths, kv_starts=lengths, **given, **fp8)
    error, allowed = out.cpu().double() - exact, rounded - exact
    assert allowed.square().mean().sqrt() > 0.01 * exact.square().mean().sqrt()
    assert error.square().mean().sqrt() <= 2 * allowed.square().mean().sqrt()
    assert error.abs().max() <= 2 * allowed.abs().max()


def assert_same_where_not_finite(spec, on_device: Tensors, starts, given, exact) -> None:
    """Call the op and compare what is not finite exactly, the rest with a run wrong by 1/16."""
    q_starts, kv_starts = (
        torch.tensor(each, dtype=torch.int32, device=on_device["q"].device) for each in starts
    )
    try:
        results = mla_prefill(
            **on_device, q_starts=q_starts, kv_starts=kv_starts, **given, backend=spec.backend
        )
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))
    for name, result, want in zip(("out", "lse"), results, exact, strict=True):
        assert_matches(name, result.cpu(), want, want * (1 + 1 / 16))


@EACH_BACKEND
def test_scales_of_blocks_that_are_not_finite_reach_exactly_the_queries_that_see_them(
    spec, device, generator
):
    starts = [0, 4, 9], [0, 270, 405]
    shapes = ((9, 1, 192), (405, 1, 128), (405, 64), (405, 1, 128))
    tensors = [torch.randn(shape, generator=generator).to(E4M3) for shape in shapes]
    names = dict(zip(("q", "k_nope", "k_rope", "v"), tensors, strict=True))
    # request 0 has blocks 0 to 2, of which no query sees 1; request 1 has 3 and 4
    names["k_scale"] = torch.tensor([1.0, torch.nan, 0.5, 2.0, -1.0])
    names["v_scale"] = torch.tensor([2.0, torch.nan, 1.0, torch.nan, -0.5])[:, None]
    given = {"softmax_scale": 0.02, "mask": Mask("chunked", 256), "keys_per_scale": 128}
    exact = reference.mla_prefill(q_starts=starts[0], kv_starts=starts[1], **given, **names)
    assert exact[0][:4].isfinite().all()
    assert not exact[0][4:].isfinite().any()
    on_device = {name: each.to(device) for name, each in names.items()}
    assert_same_where_not_finite(spec, on_device, starts, given, exact)


@pytest.mark.slow
@EACH_BACKEND
@pytest.mark.parametrize(
    ("kind", "window"),
    [("causal", 0), ("null", 0), ("sliding_window_causal", 10), ("chunked", 11)],
    ids=["causal", "null", "sliding_window_causal", "chunked"],
)
def test_values_and_scales_that_are_not_finite_reach_exactly_the_queries_that_see_them(
    spec, kind, window, device, generator
):
    """Widths of Hopper's kernel; the second request begins inside of a block."""
    n = 3 if device.type == "cuda" else 1  # the interpreter takes seconds for 100 keys
    starts = [0, 50 * n, 97 * n], [0, 55 * n, 102 * n]
    num_queries, num_keys = starts[0][-1], starts[1][-1]
    shapes = ((num_queries, 2, 192), (num_keys, 2, 128), (num_keys, 64), (num_keys, 2, 128))
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    fp8 = quantised(*tensors)
    fp8["v"].view(torch.uint8)[20 * n, 0, 3] = 0x7F
    fp8["v"].view(torch.uint8)[83 * n, 1] = 0xFF
    fp8["v_scale"][33 * n, 1], fp8["v_scale"][100 * n, 0] = torch.nan, torch.inf
    fp8["k_scale"][30 * n, ...] = torch.nan
    given = {"softmax_scale": 0.1, "mask": Mask(kind, window * n)}
    exact = reference.mla_prefill(q_starts=starts[0], kv_starts=starts[1], **given, **fp8)
    assert exact[0].isnan().any()
    assert_same_where_not_finite(spec, moved(fp8, device), starts, given, exact)
