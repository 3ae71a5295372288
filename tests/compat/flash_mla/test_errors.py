"""What the drop-in for FlashMLA refuses, under FlashMLA's own names for the arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from mlakit.compat.flash_mla import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
)
from mlakit.dispatch.checks import UnsupportedError
from tests.compat.flash_mla.dense_cases import as_keywords, dense_problem
from tests.compat.flash_mla.sparse_cases import PrefillCase
from tests.compat.flash_mla.varlen_cases import VarlenCase
from tests.spoiling import (
    COLUMNS_FIRST,
    ON_META,
    REQUIRES_GRAD,
    Edit,
    WrongCalls,
    name_of,
    of,
    part,
    rows,
    shortened,
)

E4M3 = torch.float8_e4m3fn


SINK = torch.zeros(4)
LISTS = torch.zeros(3, 2, 5, dtype=torch.int32)
COUNTS = torch.zeros(3, dtype=torch.int32)
BYTES = torch.zeros(8, 4, 1, 656, dtype=torch.uint8)
FOOTERS = torch.zeros(8, 4, 1, 584, dtype=torch.uint8)

WRONG_DECODE: WrongCalls = {
    "q must have axes (b, s_q, h_q, d), got shape (2, 4, 576)": {"q": part[0]},
    "TypeError: q must be bfloat16 or float16 or float32 or float8_e4m3fn, got int32": {
        "q": of(torch.int32)
    },
    "q must have a contiguous last axis, got strides (4608, 2304, 1, 4)": {"q": COLUMNS_FIRST},
    "TypeError: q must be a tensor, got NoneType": {"q": None},
    "TypeError: k_cache must be float16, got bfloat16": {"q": of(torch.float16)},
    "k_cache.shape[3] must equal d of q, 575, got 576": {"q": shortened(3)},
    "k_cache must have axes (num_blocks of k_cache, page_block_size of k_cache, ...": {
        "k_cache": part[:, :, 0]
    },
    "TypeError: k_cache must be bfloat16 or float16 or float32 or uint8 or int8 or ...": {
        "k_cache": of(torch.float64)
    },
    "k_cache.shape[1] must be at least 1, got 0": {"k_cache": part[:, :0]},
    "h_q must be a multiple of h_k, 3, got 4": {"k_cache": Edit(lambda t: t.expand(-1, -1, 3, -1))},
    "k_cache must have rows of 576 (fp8) or 656 (fp8_block128) bytes for d = 576 ...": {
        "k_cache": BYTES[..., :600]
    },
    "is_fp8_kvcache must be True for k_cache of fp8_block128 rows, got False": {"k_cache": BYTES},
    "is_fp8_kvcache must be False for k_cache of bf16 rows, got True": {"is_fp8_kvcache": True},
    "k_cache.shape[2] must be 1 for fp8_block128 rows, got 2": {
        "k_cache": BYTES.expand(-1, -1, 2, -1),
        "is_fp8_kvcache": True,
    },
    "k_cache must have contiguous pages, row stride 584, got row stride 1168": {
        "q": part[..., :512],
        "k_cache": FOOTERS.repeat(1, 2, 1, 1)[:, ::2],
        "is_fp8_kvcache": True,
    },
    "TypeError: block_table must be a tensor, got NoneType": {"block_table": None},
    "block_table.shape[0] (b) must equal q.shape[0], 3, got 2": {"block_table": part[:2]},
    "TypeError: block_table must be int32 or int64, got float32": {
        "block_table": of(torch.float32)
    },
    "block_table[0, 0] must be in [0, 192), got -1": {"block_table": Edit(lambda t: t * 0 - 1)},
    "cache_seqlens[0] must not exceed the 0 blocks of 4 in block_table, 0, got 88": {
        "block_table": part[:, :0]
    },
    "TypeError: cache_seqlens must be a tensor, got NoneType": {"cache_seqlens": None},
    "cache_seqlens[0] must not be negative, got -11": {"cache_seqlens": Edit(lambda t: t - 99)},
    "head_dim_v must not exceed d of q, 576, got 577": {"head_dim_v": 577},
    "TypeError: head_dim_v must be an integer, got float": {"head_dim_v": 512.0},
    "TypeError: tile_scheduler_metadata must be what get_mla_metadata returns, got int": {
        "tile_scheduler_metadata": 3
    },
    "TypeError: num_splits must be None or a tensor, got int": {"num_splits": 3},
    "TypeError: softmax_scale must be a number, got bool": {"softmax_scale": True},
    "softmax_scale must be finite, got inf": {"softmax_scale": torch.inf},
    "attn_sink.shape[0] (h_q) must equal q.shape[2], 4, got 3": {"attn_sink": SINK[:3]},
    "TypeError: attn_sink must be float32, got float16": {"attn_sink": SINK.half()},
    "topk_length must be None without indices, got a tensor": {"topk_length": COUNTS},
    "extra_k_cache must be None without indices, got a tensor": {"extra_k_cache": BYTES},
    "extra_indices_in_kvcache must be None without indices, got a tensor": {
        "extra_indices_in_kvcache": LISTS
    },
    "extra_topk_length must be None without indices, got a tensor": {"extra_topk_length": COUNTS},
    "causal must be False with indices, got True": {"indices": LISTS, "causal": True},
    "indices.shape[1] (s_q) must equal q.shape[1], 2, got 1": {"indices": LISTS[:, :1]},
    "TypeError: indices must be int32 or int64, got float32": {"indices": LISTS.float()},
    "descale_q must be None with indices, got a scale": {"indices": LISTS, "descale_q": 2.0},
    "topk_length[0] must not exceed the entries of indices, 5, got 6": {
        "indices": LISTS,
        "topk_length": COUNTS + 6,
    },
    "k_cache.shape[2] must be one KV head, got 2": {
        "indices": LISTS,
        "k_cache": Edit(lambda t: t.expand(-1, -1, 2, -1)),
    },
    "TypeError: extra_k_cache must be a tensor, got NoneType": {
        "indices": LISTS,
        "extra_indices_in_kvcache": LISTS,
    },
    "TypeError: extra_indices_in_kvcache must be a tensor, got NoneType": lambda a: {
        "indices": LISTS,
        "extra_k_cache": a["k_cache"],
    },
    "extra_k_cache must have rows like k_cache's, RowShape(kv_lora_rank=448, ...": {
        "q": part[..., :512],
        "k_cache": FOOTERS,
        "is_fp8_kvcache": True,
        "indices": LISTS,
        "extra_k_cache": BYTES[..., :528],
        "extra_indices_in_kvcache": LISTS,
    },
    "descale_q must be None for torch.bfloat16 q, got 2.0": {"descale_q": 2.0},
    "descale_k must be None for bf16 rows, got a scale": {"descale_k": 2.0},
    "descale_k must have one element, got shape (4,)": {"k_cache": of(E4M3), "descale_k": SINK},
    **{
        f"descale_k must be {rule}, got {wrong.item()}": {"k_cache": of(E4M3), "descale_k": wrong}
        for wrong, rule in [
            (torch.zeros(1), "positive and a normal float32"),
            (torch.tensor(-2.0), "positive and a normal float32"),
            (torch.tensor(1e-40), "positive and a normal float32"),
            (torch.tensor(torch.nan), "finite"),
            (torch.tensor([torch.inf]), "finite"),
        ]
    },
    "descale_q must be positive and a normal float32, got 0.0": {
        "q": of(E4M3),
        "descale_q": torch.zeros(1),
    },
    **{
        f"descale_q must be positive and a normal float32, got {wrong}": {
            "q": of(E4M3),
            "descale_q": wrong,
        }
        for wrong in (1e-40, 1e39)
    },
    "descale_k must be positive and a normal float32, got -1.0": {
        "k_cache": of(E4M3),
        "descale_k": -1.0,
    },
    "out.shape[3] (head_dim_v) must equal head_dim_v, 512, got 511": {
        "out": torch.empty(3, 2, 4, 511).bfloat16()
    },
    "TypeError: out must be bfloat16, got float32": {"out": torch.empty(3, 2, 4, 512)},
    "out must be writable, got stride 0 on axis 1 (an expanded tensor)": {
        "out": torch.empty(3, 1, 4, 512).bfloat16().expand(3, 2, 4, 512)
    },
    "UnsupportedError: q must not require grad, for there is no backward; call it ...": {
        "q": REQUIRES_GRAD
    },
    "q must be on a device that holds data, got a meta tensor": {"q": ON_META},
}


WRONG_PREFILL: WrongCalls = {
    "q must have axes (s_q, h_q, d_qk), got shape (3, 576)": {"q": part[0]},
    "TypeError: kv must be bfloat16, got float32": {"kv": of(torch.float32)},
    "kv.shape[1] (h_kv) must equal the one KV head, 1, got 2": {
        "kv": Edit(lambda t: t.expand(-1, 2, -1))
    },
    "kv.shape[2] (d_qk) must equal q.shape[2], 576, got 575": {"kv": shortened(2)},
    "kv must have a contiguous last axis, got strides (1152, 1152, 2)": {
        "kv": Edit(lambda t: t.repeat(1, 1, 2)[..., ::2])
    },
    "indices must have axes (s_q, h_kv, topk), got shape (5, 17)": {"indices": part[:, 0]},
    "indices.shape[0] (s_q) must equal q.shape[0], 5, got 4": {"indices": part[1:]},
    "TypeError: sm_scale must be a number, got NoneType": {"sm_scale": None},
    "d_v must not exceed d_qk of q, 576, got 600": {"d_v": 600},
    "attn_sink.shape[0] (h_q) must equal q.shape[1], 3, got 4": {"attn_sink": SINK},
    "topk_length.shape[0] (s_q) must equal q.shape[0], 5, got 3": {"topk_length": COUNTS},
    "topk_length[0] must not exceed topk, 17, got 116": {"topk_length": Edit(lambda t: t + 99)},
    "indexer_topk must be at least 0, got -1": {"indexer_topk": -1},
    "out.shape[2] (d_v) must equal d_v, 512, got 500": {"out": torch.empty(5, 3, 500).bfloat16()},
    "UnsupportedError: kv must not require grad, for there is no backward; call it ...": {
        "kv": REQUIRES_GRAD
    },
}


WRONG_VARLEN: WrongCalls = {
    "UnsupportedError: dropout_p must be 0.0, got 0.1": {"dropout_p": 0.1},
    "UnsupportedError: q must not require grad, for there is no backward; call it ...": {
        "q": REQUIRES_GRAD
    },
    "UnsupportedError: k must not require grad, for there is no backward; call it ...": {
        "k": REQUIRES_GRAD
    },
    "k.shape[2] (d_qk) must equal q.shape[2], 192, got 191": {"k": shortened(2)},
    "d_v must be at least 1, got 0": {"v": part[..., :0]},
    "d_qk must be at least 1, got 0": {"q": part[..., :0], "k": part[..., :0]},
    "v.shape[0] (total_kv) must equal k.shape[0], 40, got 39": {"v": shortened(0)},
    "TypeError: v must be bfloat16, got float16": {"v": of(torch.float16)},
    "h_q must be a multiple of h_kv, 2, got 3": {"q": shortened(1)},
    "k must have a contiguous last axis, got strides (384, 1, 2)": {"k": COLUMNS_FIRST},
    "cu_seqlens_qo[0] must be 0, got 1": {"cu_seqlens_qo": Edit(lambda t: t + 1)},
    "cu_seqlens_kv[-1] must equal total_kv, 40, got 18": lambda a: {
        "cu_seqlens_kv": a["cu_seqlens_qo"]
    },
    "cu_seqlens_kv.shape[0] (batch + 1) must equal cu_seqlens_qo.shape[0], 3, got 2": {
        "cu_seqlens_kv": part[1:]
    },
    "TypeError: cu_seqlens_kv must be a tensor, got NoneType": {"cu_seqlens_kv": None},
    "TypeError: softmax_scale must be a number, got str": {"softmax_scale": "1"},
}


def dense_keywords() -> dict[str, Any]:
    return as_keywords(dense_problem(page=4))


def prefill_keywords() -> dict[str, Any]:
    problem = PrefillCase(5, 50, 17, 3, has_length=True).make("cpu")
    names = ("q", "kv", "indices", "topk_length")
    return {**{name: getattr(problem, name) for name in names}, "sm_scale": 0.5}


def varlen_keywords() -> dict[str, Any]:
    problem = VarlenCase(9, 20, varlen=False, h=4, h_k=2).make("cpu")
    names = inspect.signature(flash_attn_varlen_func).parameters
    return dict(zip(names, problem.arguments, strict=False))


TABLES = (
    (flash_mla_with_kvcache, dense_keywords, WRONG_DECODE),
    (flash_mla_sparse_fwd, prefill_keywords, WRONG_PREFILL),
    (flash_attn_varlen_func, varlen_keywords, WRONG_VARLEN),
)


@pytest.mark.parametrize(
    ("function", "keywords", "wrong"),
    [(function, keywords, wrong) for function, keywords, table in TABLES for wrong in rows(table)],
    ids=name_of,
)
def test_a_wrong_call_says_what_is_wrong(function, keywords, wrong):
    given = keywords()
    with pytest.raises(wrong.error) as refusal:
        function(**{**given, **wrong.of(given)})
    wrong.assert_is(refusal.value, function.__name__)


@pytest.mark.parametrize(("function", "keywords", "_"), TABLES)
def test_the_calls_that_the_tables_spoil_pass(function, keywords, _):
    function(**keywords())


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
