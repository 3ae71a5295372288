"""Hopper decode of queries whose heads are the outer axis, as a product per head leaves them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlakit import mla_decode
from mlakit.ops._checks import lie_by_head, lie_evenly
from tests.kernels.hopper.decode_cases import kernel_for, with_magnitudes
from tests.pairs import pairwise

E4M3 = torch.float8_e4m3fn


def by_head(x: Tensor) -> Tensor:
    """The same numbers, with the tokens of a head together."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def test_which_queries_lie_by_head():
    q = torch.zeros(5, 6, 64, dtype=torch.bfloat16)
    assert lie_by_head(by_head(q))
    assert lie_by_head(by_head(q)[..., :24])
    assert not lie_evenly(by_head(q))
    for other in (q, q[:1], q[:, :1], by_head(q)[:1], by_head(q)[:, :1], q.expand(5, 6, 64)):
        assert not lie_by_head(other)
        assert lie_evenly(other)
    for loose in (by_head(q)[..., 1:], by_head(torch.zeros(5, 6, 60).bfloat16())):
        assert not lie_by_head(loose)
        assert not lie_evenly(loose)
    assert not lie_by_head(q.as_strided((5, 6, 64), (64, 128, 1)))  # heads that overlap


@pytest.mark.gpu
@pairwise(
    heads=[7, 16, 32, 100],
    types={  # of queries; how they lie and the format of rows meet in no kernel
        "bf16-bf16": (torch.bfloat16, "bf16"),
        "bf16-fp8_token": (torch.bfloat16, "fp8_token"),
        "e4m3-fp8": (E4M3, "fp8"),
        "e4m3-fp8_block128": (E4M3, "fp8_block128"),
    },
    parts=["whole", "latent", "rope", "both"],
)
def test_queries_by_head_give_the_same_bits(heads, types, parts):
    """With NaN around them: TMA tiles reach past the last head."""
    dtype, format = types
    tokens = 5
    memory = torch.full((heads + 2, tokens + 2, 608), torch.nan, device="cuda").to(dtype)
    q = memory[1:-1, 1:-1, 16:592].transpose(0, 1)
    own = torch.Generator().manual_seed(0)
    q.copy_(torch.randn(tokens, heads, 576, generator=own))
    plain = q.contiguous()
    latent, rope = plain[..., :512].contiguous(), plain[..., 512:].contiguous()
    given: dict[str, Tensor] = {"q": q}
    if parts != "whole":
        given["q"] = q[..., :512] if parts in ("latent", "both") else latent
        given["q_rope"] = q[..., 512:] if parts in ("rope", "both") else rope
    cache, _ = with_magnitudes(format, [1.0])
    table = torch.arange(8, dtype=torch.int32, device="cuda").expand(tokens, 8)
    lens = torch.tensor([512, 1, 64, 300, 65], dtype=torch.int32, device="cuda")
    name = kernel_for(heads, format, "e4m3" if dtype == E4M3 else "bf16")
    more = {"softmax_scale": 0.05, "backend": name}
    want = mla_decode(plain, cache, table, lens, **more)
    for _ in range(4):  # the third call and later ones replay a launch
        got = mla_decode(cache=cache, page_table=table, kv_lens=lens, **given, **more)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
