"""FlashInfer's attention over expanded keys and values, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import reference
from mlakit.compat.flashinfer import (
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from mlakit.dispatch.checks import UnsupportedError
from mlakit.model.masks import CAUSAL, NULL
from mlakit.tools.testing import assert_matches, assert_same_bits, poison
from tests.compat.flash_mla.inputs import padded
from tests.compat.flashinfer.inputs import LOG2_E, starts_of
from tests.pairs import pairwise

Q_LENS, KV_LENS = (3, 0, 7, 1), (9, 4, 7, 0)
SIZES = {"num_qo_heads": 4, "num_kv_heads": 4, "head_dim_qk": 24, "head_dim_vo": 16}
BF16 = {"q_data_type": torch.bfloat16}


def tensors(
    device: torch.device | str = "cpu", kv_heads: int = 4, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(Q_LENS), 4, 24), (sum(KV_LENS), kv_heads, 24), (sum(KV_LENS), kv_heads, 16))
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return q, k, v


def check(
    got: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor],
    *,
    causal: bool,
    scale: float | None = None,
) -> None:
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    exact, naive = (
        reference.mla_prefill(
            *(each.cpu().double() for each in (q, k, k.new_empty(len(k), 0), v)),
            *(each.tolist() for each in starts),
            softmax_scale=q.shape[-1] ** -0.5 if scale is None else scale,
            mask=CAUSAL if causal else NULL,
            weights_dtype=q.dtype if dtype == torch.float32 else None,
            dtype=dtype,
        )
        for dtype in (torch.float64, torch.float32)
    )
    out, lse = (each.cpu() for each in got)
    assert_matches("out", out, exact[0], naive[0])
    assert lse.dtype == torch.float32
    assert_matches("lse", lse, exact[1] * LOG2_E, naive[1] * LOG2_E)


def wrapper(
    device: torch.device | str = "cpu", **options: Any
) -> BatchPrefillWithRaggedKVCacheWrapper:
    return BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1, device=device), **options)


@pairwise(
    causal=[False, True],
    kv_heads=[4, 2, 1],
    layout=["NHD", "HND"],
    scale=[None, 0.7],
    dtype=[torch.float16, torch.bfloat16, torch.float32],
    is_padded=[False, True],
)
def test_ragged_batches_match_the_oracle(causal, kv_heads, layout, scale, dtype, is_padded, device):
    q, k, v = tensors(device, kv_heads, dtype)
    given = [padded(each) for each in (q, k, v)] if is_padded else [q, k, v]
    if layout == "HND":
        given[1:] = [each.transpose(0, 1) for each in given[1:]]
    starts = starts_of(Q_LENS), starts_of(KV_LENS)
    planned = wrapper(device, kv_layout=layout)
    planned.plan(
        *starts,
        **{**SIZES, "num_kv_heads": kv_heads},
        causal=causal,
        sm_scale=scale,
        q_data_type=str(dtype).removeprefix("torch."),
    )
    got = planned.run(*given, return_lse=True)
    check(got, q, k, v, starts, causal=causal, scale=scale)
    out, lse = poison(torch.empty_like(got[0])), poison(torch.empty_like(got[1]))
    assert planned.run(*given, out=out, lse=lse) is out
    for name, mine, other in zip(("out", "lse"), (out, lse), got, strict=True):
        assert_same_bits(name, mine, other)
    for mine, other in zip(planned.run_return_lse(*given), got, strict=True):
        assert_same_bits("run_return_lse", mine, other)


def test_what_a_graph_reads_stays_in_place(device):
    q, k, v = tensors(device)
    buffers = [torch.empty(5, dtype=torch.int32, device=device) for _ in range(2)]
    planned = wrapper(
        device, use_cuda_graph=True, qo_indptr_buf=buffers[0], kv_indptr_buf=buffers[1]
    )
    assert planned.is_cuda_graph_enabled
    for q_lens, kv_lens in ((Q_LENS, KV_LENS), ((1, 5, 5, 0), (5, 9, 5, 1))):
        starts = starts_of(q_lens), starts_of(kv_lens)
        planned.plan(*starts, **SIZES, causal=True, **BF16)
        assert [each.tolist() for each in buffers] == [each.tolist() for each in starts]
        check(planned.run_return_lse(q, k, v), q, k, v, starts, causal=True)
    with pytest.raises(ValueError, match="qo_indptr must have the buffers' batch, 4, got 1"):
        planned.plan(starts_of([11]), starts_of([20]), **SIZES, **BF16)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_one_request(causal, layout, device):
    q, k, v = tensors(device, kv_heads=2)
    given = [each.transpose(0, 1) if layout == "HND" else each for each in (k, v)]
    options = {"causal": causal, "kv_layout": layout, "sm_scale": 0.3}
    got = single_prefill_with_kv_cache(q, *given, **options, return_lse=True)
    starts = starts_of([len(q)]), starts_of([len(k)])
    check(got, q, k, v, starts, causal=causal, scale=0.3)
    assert_same_bits("out", single_prefill_with_kv_cache(q, *given, **options), got[0])
    again = single_prefill_with_kv_cache_return_lse(q, *given, **options)
    assert_same_bits("lse", again[1], got[1])


@pytest.mark.slow
def test_the_widths_of_deepseek(device):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(n, 2, width, generator=generator).half().to(device)
        for n, width in ((40, 192), (70, 192), (70, 128))
    )
    got = single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True, backend="fa3")
    check(got, q, k, v, (starts_of([40]), starts_of([70])), causal=True)


OTHER = torch.zeros(1)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"custom_mask": OTHER}, "custom_mask must be None, got a tensor"),
    ({"packed_custom_mask": OTHER}, "packed_custom_mask must be None, got a tensor"),
    ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode must be 'NONE', got 'ALIBI'"),
    ({"window_left": 128}, "window_left must be -1, got 128"),
    ({"logits_soft_cap": 30.0}, "logits_soft_cap must be 0.0, got 30.0"),
    ({"rope_theta": 1e4}, "rope_theta must be None, got 10000.0"),
]


@pytest.mark.parametrize(("option", "message"), REFUSED)
def test_what_no_kernel_takes_is_refused_by_name(option, message):
    starts = starts_of(Q_LENS), starts_of(KV_LENS)
    with pytest.raises(UnsupportedError, match=f"plan: {message}"):
        wrapper().plan(*starts, **SIZES, **BF16, **option)
    with pytest.raises(UnsupportedError, match=f"single_prefill_with_kv_cache: {message}"):
        single_prefill_with_kv_cache(*tensors(), **option)


@pytest.mark.parametrize(
    ("plan", "run", "kind", "message"),
    [
        ({"q_data_type": "int8"}, {}, ValueError, "q_data_type must be one of torch.bfloat16"),
        ({"kv_data_type": "float16"}, {}, ValueError, "kv_data_type must be q_data_type"),
        ({"kv_indptr": starts_of([20])}, {}, ValueError, r"kv_indptr must have batch \+ 1 entries"),
        ({"head_dim_vo": 0}, {}, ValueError, "head_dim_vo must be at least 1, got 0"),
        ({"max_item_len_ptr": OTHER}, {}, UnsupportedError, "max_item_len_ptr must be None"),
        ({"sinks": OTHER}, {}, TypeError, "unexpected keyword argument 'sinks'"),
        ({"num_qo_heads": 8}, {}, ValueError, r"q.shape\[1\] \(h_q\) must equal h_q of the plan"),
        ({"head_dim_vo": 24}, {}, ValueError, r"v.shape\[2\] \(d_v\) must equal d_v of the plan"),
        ({"q_data_type": "float16"}, {}, ValueError, "q.dtype must match the planned q_data_type"),
        ({}, {"k_scale": 1.0}, UnsupportedError, "k_scale must be None, got 1.0"),
        ({}, {"lse": torch.zeros(11, 4).half()}, TypeError, "lse must be float32, got float16"),
        ({"qo_indptr": starts_of([1] * 4)}, {}, ValueError, r"qo_indptr\[-1\] must equal total_q"),
        ({}, {"enable_ptl": True}, TypeError, "unexpected keyword argument 'enable_ptl'"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(plan, run, kind, message):
    given = {"qo_indptr": starts_of(Q_LENS), "kv_indptr": starts_of(KV_LENS), **SIZES, **BF16}

    def plan_and_run() -> None:
        planned = wrapper()
        planned.plan(**{**given, **plan})
        planned.run(*tensors(), **run)

    with pytest.raises(kind, match=message):
        plan_and_run()


def test_run_needs_a_plan():
    with pytest.raises(ValueError, match="plan must be called before run"):
        wrapper().run(*tensors())
    with pytest.raises(UnsupportedError, match="jit_args must be None"):
        wrapper(jit_args=["mine"])
    planned = wrapper()
    planned.plan(starts_of(Q_LENS), starts_of(KV_LENS), **SIZES, **BF16)
    with pytest.raises(UnsupportedError, match="args must be None"):
        planned.run(*tensors(), 1.0)
