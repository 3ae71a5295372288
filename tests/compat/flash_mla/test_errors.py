"""What the drop-in for FlashMLA refuses, under FlashMLA's own names for the arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.checks import UnsupportedError
from mlakit.compat.flash_mla import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
)
from tests.compat.flash_mla.dense_cases import as_keywords, dense_problem
from tests.compat.flash_mla.sparse_cases import PrefillCase
from tests.compat.flash_mla.varlen_cases import VarlenCase

E4M3 = torch.float8_e4m3fn


def without(tensor: Tensor, axis: int) -> Tensor:
    return tensor.narrow(axis, 0, tensor.shape[axis] - 1)


SINK = torch.zeros(4)
LISTS = torch.zeros(3, 2, 5, dtype=torch.int32)
COUNTS = torch.zeros(3, dtype=torch.int32)
BYTES = torch.zeros(8, 4, 1, 656, dtype=torch.uint8)
FOOTERS = torch.zeros(8, 4, 1, 584, dtype=torch.uint8)
Change = Callable[[dict[str, Any]], dict[str, Any]]

# what is changed in a good dense call, the error, what its message says
DECODE_ERRORS: list[tuple[Change, type[Exception], str]] = [
    (lambda a: {"q": a["q"][0]}, ValueError, r"q must have axes \(b, s_q, h_q, d\)"),
    (lambda a: {"q": a["q"].int()}, TypeError, "q must be bfloat16 or"),
    (lambda a: {"q": a["q"].mT.contiguous().mT}, ValueError, "q must have a contiguous last axis"),
    (lambda a: {"q": None}, TypeError, "q must be a tensor, got NoneType"),
    (lambda a: {"q": a["q"].half()}, TypeError, "k_cache must be float16, got bfloat16"),
    (lambda a: {"q": without(a["q"], 3)}, ValueError, "equal d of q, 575, got 576"),
    (lambda a: {"k_cache": a["k_cache"][:, :, 0]}, ValueError, "k_cache must have axes"),
    (lambda a: {"k_cache": a["k_cache"].double()}, TypeError, "k_cache must be"),
    (
        lambda a: {"k_cache": a["k_cache"][:, :0]},
        ValueError,
        r"k_cache.shape\[1\] must be at least",
    ),
    (
        lambda a: {"k_cache": a["k_cache"].expand(-1, -1, 3, -1)},
        ValueError,
        "h_q must be a multiple",
    ),
    (lambda a: {"k_cache": BYTES[..., :600]}, ValueError, r"576 \(fp8\) or 656 \(fp8_block128\)"),
    (lambda a: {"k_cache": BYTES}, ValueError, "is_fp8_kvcache must be True for k_cache of fp8_b"),
    (lambda a: {"is_fp8_kvcache": True}, ValueError, "is_fp8_kvcache must be False for k_cache"),
    (
        lambda a: {"k_cache": BYTES.expand(-1, -1, 2, -1), "is_fp8_kvcache": True},
        ValueError,
        r"k_cache.shape\[2\] must be 1 for fp8_block128 rows, got 2",
    ),
    (
        lambda a: {
            "q": a["q"][..., :512],
            "k_cache": FOOTERS.repeat(1, 2, 1, 1)[:, ::2],
            "is_fp8_kvcache": True,
        },
        ValueError,
        "k_cache must have contiguous pages",
    ),
    (lambda a: {"block_table": None}, TypeError, "block_table must be a tensor, got NoneType"),
    (lambda a: {"block_table": a["block_table"][:2]}, ValueError, r"block_table.shape\[0\] \(b\)"),
    (lambda a: {"block_table": a["block_table"].float()}, TypeError, "block_table must be int32"),
    (
        lambda a: {"block_table": a["block_table"] * 0 - 1},
        ValueError,
        r"block_table\[0, 0\] must be",
    ),
    (
        lambda a: {"block_table": a["block_table"][:, :0]},
        ValueError,
        r"cache_seqlens\[0\] must not ex",
    ),
    (lambda a: {"cache_seqlens": None}, TypeError, "cache_seqlens must be a tensor"),
    (
        lambda a: {"cache_seqlens": a["cache_seqlens"] - 99},
        ValueError,
        r"cache_seqlens\[0\] must not",
    ),
    (lambda a: {"head_dim_v": 577}, ValueError, "head_dim_v must not exceed d of q, 576, got 577"),
    (lambda a: {"head_dim_v": 512.0}, TypeError, "head_dim_v must be an integer"),
    (lambda a: {"tile_scheduler_metadata": 3}, TypeError, "tile_scheduler_metadata must be what"),
    (lambda a: {"num_splits": 3}, TypeError, "num_splits must be None or a tensor, got int"),
    (lambda a: {"softmax_scale": True}, TypeError, "softmax_scale must be a number, got bool"),
    (lambda a: {"softmax_scale": torch.inf}, ValueError, "softmax_scale must be finite"),
    (lambda a: {"attn_sink": SINK[:3]}, ValueError, r"attn_sink.shape\[0\] \(h_q\) must equal"),
    (lambda a: {"attn_sink": SINK.half()}, TypeError, "attn_sink must be float32"),
    (lambda a: {"topk_length": COUNTS}, ValueError, "topk_length must be None without indices"),
    (lambda a: {"extra_k_cache": BYTES}, ValueError, "extra_k_cache must be None without indices"),
    (
        lambda a: {"extra_indices_in_kvcache": LISTS},
        ValueError,
        "extra_indices_in_kvcache must be None without indices",
    ),
    (lambda a: {"extra_topk_length": COUNTS}, ValueError, "extra_topk_length must be None without"),
    (lambda a: {"indices": LISTS, "causal": True}, ValueError, "causal must be False with indices"),
    (lambda a: {"indices": LISTS[:, :1]}, ValueError, r"indices.shape\[1\] \(s_q\) must equal"),
    (lambda a: {"indices": LISTS.float()}, TypeError, "indices must be int32 or int64"),
    (
        lambda a: {"indices": LISTS, "descale_q": 2.0},
        ValueError,
        "descale_q must be None with indic",
    ),
    (
        lambda a: {"indices": LISTS, "topk_length": COUNTS + 6},
        ValueError,
        r"topk_length\[0\] must not exceed the entries of indices, 5, got 6",
    ),
    (
        lambda a: {"indices": LISTS, "k_cache": a["k_cache"].expand(-1, -1, 2, -1)},
        ValueError,
        r"k_cache.shape\[2\] must be one KV head, got 2",
    ),
    (
        lambda a: {"indices": LISTS, "extra_indices_in_kvcache": LISTS},
        TypeError,
        "extra_k_cache must be a tensor, got NoneType",
    ),
    (
        lambda a: {"indices": LISTS, "extra_k_cache": a["k_cache"]},
        TypeError,
        "extra_indices_in_kvcache must be a tensor, got NoneType",
    ),
    (
        lambda a: {
            "q": a["q"][..., :512],
            "k_cache": FOOTERS,
            "is_fp8_kvcache": True,
            "indices": LISTS,
            "extra_k_cache": BYTES[..., :528],
            "extra_indices_in_kvcache": LISTS,
        },
        ValueError,
        "extra_k_cache must have rows like k_cache's",
    ),
    (lambda a: {"descale_q": 2.0}, ValueError, "descale_q must be None for torch.bfloat16 q"),
    (lambda a: {"descale_k": 2.0}, ValueError, "descale_k must be None for bf16 rows"),
    (
        lambda a: {"k_cache": a["k_cache"].to(E4M3), "descale_k": SINK},
        ValueError,
        "descale_k must have one element",
    ),
    *(
        (
            lambda a, wrong=wrong: {"k_cache": a["k_cache"].to(E4M3), "descale_k": wrong},
            ValueError,
            f"descale_k must be {rule}, got {wrong.item()}",
        )
        for wrong, rule in [
            (torch.zeros(1), "positive and a normal float32"),
            (torch.tensor(-2.0), "positive and a normal float32"),
            (torch.tensor(1e-40), "positive and a normal float32"),
            (torch.tensor(torch.nan), "finite"),
            (torch.tensor([torch.inf]), "finite"),
        ]
    ),
    (
        lambda a: {"q": a["q"].to(E4M3), "descale_q": torch.zeros(1)},
        ValueError,
        "descale_q must be positive and a normal float32, got 0.0",
    ),
    *(
        (
            lambda a, wrong=wrong: {"q": a["q"].to(E4M3), "descale_q": wrong},
            ValueError,
            "descale_q must be positive and a normal float32, got 1e",
        )
        for wrong in (1e-40, 1e39)
    ),
    (
        lambda a: {"k_cache": a["k_cache"].to(E4M3), "descale_k": -1.0},
        ValueError,
        "descale_k must be positive",
    ),
    (lambda a: {"out": torch.empty(3, 2, 4, 511).bfloat16()}, ValueError, r"out.shape\[3\]"),
    (lambda a: {"out": torch.empty(3, 2, 4, 512)}, TypeError, "out must be bfloat16, got float32"),
    (
        lambda a: {"out": torch.empty(3, 1, 4, 512).bfloat16().expand(3, 2, 4, 512)},
        ValueError,
        "out must be writable",
    ),
    (
        lambda a: {"q": a["q"].clone().requires_grad_()},
        UnsupportedError,
        "q must not require grad",
    ),
    (lambda a: {"q": a["q"].to("meta")}, ValueError, "q must be on a device that holds data"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"), DECODE_ERRORS, ids=[message for _, _, message in DECODE_ERRORS]
)
def test_decode_says_what_is_wrong(change, error, message):
    keywords = as_keywords(dense_problem(page=4))
    flash_mla_with_kvcache(**keywords)
    with pytest.raises(error, match=f"^flash_mla_with_kvcache: .*{message}"):
        flash_mla_with_kvcache(**{**keywords, **change(keywords)})


PREFILL_ERRORS: list[tuple[Change, type[Exception], str]] = [
    (lambda a: {"q": a["q"][0]}, ValueError, r"q must have axes \(s_q, h_q, d_qk\)"),
    (lambda a: {"kv": a["kv"].float()}, TypeError, "kv must be bfloat16, got float32"),
    (
        lambda a: {"kv": a["kv"].expand(-1, 2, -1)},
        ValueError,
        r"kv.shape\[1\] \(h_kv\) must equal the",
    ),
    (lambda a: {"kv": without(a["kv"], 2)}, ValueError, r"kv.shape\[2\] \(d_qk\) must equal"),
    (
        lambda a: {"kv": a["kv"].repeat(1, 1, 2)[..., ::2]},
        ValueError,
        "kv must have a contiguous last axis",
    ),
    (lambda a: {"indices": a["indices"][:, 0]}, ValueError, "indices must have axes"),
    (lambda a: {"indices": a["indices"][1:]}, ValueError, r"indices.shape\[0\] \(s_q\) must equal"),
    (lambda a: {"sm_scale": None}, TypeError, "sm_scale must be a number"),
    (lambda a: {"d_v": 600}, ValueError, "d_v must not exceed d_qk of q, 576, got 600"),
    (lambda a: {"attn_sink": SINK}, ValueError, r"attn_sink.shape\[0\] \(h_q\)"),
    (lambda a: {"topk_length": COUNTS}, ValueError, r"topk_length.shape\[0\] \(s_q\)"),
    (
        lambda a: {"topk_length": a["topk_length"] + 99},
        ValueError,
        r"topk_length\[0\] must not exceed",
    ),
    (lambda a: {"indexer_topk": -1}, ValueError, "indexer_topk must be at least 0"),
    (lambda a: {"out": torch.empty(5, 3, 500).bfloat16()}, ValueError, r"out.shape\[2\] \(d_v\)"),
    (lambda a: {"kv": a["kv"].clone().requires_grad_()}, UnsupportedError, "kv must not require"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    PREFILL_ERRORS,
    ids=[message for _, _, message in PREFILL_ERRORS],
)
def test_sparse_prefill_says_what_is_wrong(change, error, message):
    problem = PrefillCase(5, 50, 17, 3, has_length=True).make("cpu")
    keywords = {name: getattr(problem, name) for name in ("q", "kv", "indices", "topk_length")}
    keywords |= {"sm_scale": 0.5}
    flash_mla_sparse_fwd(**keywords)
    with pytest.raises(error, match=f"^flash_mla_sparse_fwd: .*{message}"):
        flash_mla_sparse_fwd(**{**keywords, **change(keywords)})


VARLEN_ERRORS: list[tuple[Change, type[Exception], str]] = [
    (lambda a: {"dropout_p": 0.1}, UnsupportedError, "dropout_p must be 0.0, got 0.1"),
    (lambda a: {"q": a["q"].clone().requires_grad_()}, UnsupportedError, "q must not require grad"),
    (lambda a: {"k": a["k"].clone().requires_grad_()}, UnsupportedError, "k must not require grad"),
    (lambda a: {"k": without(a["k"], 2)}, ValueError, r"k.shape\[2\] \(d_qk\) must equal q.shape"),
    (lambda a: {"v": a["v"][..., :0]}, ValueError, "d_v must be at least 1, got 0"),
    (
        lambda a: {"q": a["q"][..., :0], "k": a["k"][..., :0]},
        ValueError,
        "d_qk must be at least 1, got 0",
    ),
    (
        lambda a: {"v": without(a["v"], 0)},
        ValueError,
        r"v.shape\[0\] \(total_kv\) must equal k.shape",
    ),
    (lambda a: {"v": a["v"].half()}, TypeError, "v must be bfloat16, got float16"),
    (lambda a: {"q": without(a["q"], 1)}, ValueError, "h_q must be a multiple of h_kv, 2, got 3"),
    (lambda a: {"k": a["k"].mT.contiguous().mT}, ValueError, "k must have a contiguous last axis"),
    (
        lambda a: {"cu_seqlens_qo": a["cu_seqlens_qo"] + 1},
        ValueError,
        r"cu_seqlens_qo\[0\] must be 0",
    ),
    (
        lambda a: {"cu_seqlens_kv": a["cu_seqlens_qo"]},
        ValueError,
        r"cu_seqlens_kv\[-1\] must equal",
    ),
    (lambda a: {"cu_seqlens_kv": a["cu_seqlens_kv"][1:]}, ValueError, r"cu_seqlens_kv.shape\[0\]"),
    (lambda a: {"cu_seqlens_kv": None}, TypeError, "cu_seqlens_kv must be a tensor"),
    (lambda a: {"softmax_scale": "1"}, TypeError, "softmax_scale must be a number, got str"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"), VARLEN_ERRORS, ids=[message for _, _, message in VARLEN_ERRORS]
)
def test_varlen_says_what_is_wrong(change, error, message):
    problem = VarlenCase(9, 20, varlen=False, h=4, h_k=2).make("cpu")
    names = inspect.signature(flash_attn_varlen_func).parameters
    keywords = dict(zip(names, problem.arguments, strict=False))
    with pytest.raises(error, match=f"^flash_attn_varlen_func: .*{message}"):
        flash_attn_varlen_func(**{**keywords, **change(keywords)})


def test_packed_forms_say_what_is_wrong():
    qkv, starts = torch.randn(3, 2, 512), torch.tensor([0, 3])
    with pytest.raises(
        ValueError, match=r"qkvpacked_func: qkv.shape\[2\] must exceed 2 · head_dim"
    ):
        flash_attn_varlen_qkvpacked_func(qkv, starts, 3, 256)
    with pytest.raises(ValueError, match=r"kvpacked_func: kv must have axes"):
        flash_attn_varlen_kvpacked_func(qkv, qkv[0], starts, starts, 3, 3, 192)
    with pytest.raises(UnsupportedError, match="qkvpacked_func: dropout_p must be 0"):
        flash_attn_varlen_qkvpacked_func(qkv, starts, 3, 192, 0.5)


def test_without_grad_a_parameter_may_be_given():
    problem = VarlenCase(9, 20, h=4, h_k=2).make("cpu")
    problem.q.requires_grad_()
    with torch.no_grad():
        out, _ = flash_attn_varlen_func(*problem.arguments)
    assert out.isfinite().all()
