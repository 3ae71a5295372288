"""Wrong calls of the public ops: each is refused in one sentence, and nothing is written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import checks, masks, ops
from mlakit.cache import PagedLatentCache
from mlakit.checks import Dims
from mlakit.geometry import RowShape
from mlakit.ops._arguments import check_query_starts
from mlakit.plan import plan_context, plan_decode
from mlakit.testing import NEVER_A_PAGE, assert_same_bits, assert_unchanged, snapshot
from tests.ops.cases import (
    BF16,
    CALLS,
    E4M3,
    HEADS,
    PAGE_SIZE,
    Q_LENS,
    TOKENS,
    append_call,
    decode_call,
    int32,
    sparse_call,
    starts,
    strided,
)

OTHER_ROWS = PagedLatentCache.allocate(RowShape(40, 8), num_pages=2, page_size=4)


def changed(tensor: Tensor, index: Any, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def columns_first(tensor: Tensor) -> Tensor:
    """The same numbers, strided along the last axis."""
    return tensor.mT.contiguous().mT


# by call, what to change in it and what is then said, the name of the op aside; `a` has the
# arguments as they should be, tensors for the results among them
WRONG: dict[str, list[tuple[Callable[[dict[str, Any]], dict[str, Any]], str]]] = {
    "decode": [
        (lambda a: {"q": [1.0]}, "TypeError: q must be a tensor, got list"),
        (
            lambda a: {"q": a["q"][0]},
            "ValueError: q must have axes (tokens, heads, width), got shape (3, 40)",
        ),
        (
            lambda a: {"q": a["q"][..., :-1]},
            "ValueError: q.shape[2] (width) must equal the row width of the cache, 40, got 39",
        ),
        (
            lambda a: {"q": a["q"].half()},
            "TypeError: q must be bfloat16 or float8_e4m3fn, got float16",
        ),
        (
            lambda a: {"q": a["q"].to("meta")},
            "ValueError: q must be on a device that holds data, got a meta tensor",
        ),
        (
            lambda a: {"q": columns_first(a["q"])},
            "ValueError: q must have a contiguous last axis, got strides (120, 1, 3)",
        ),
        (
            lambda a: {"cache": a["cache"].payload},
            "TypeError: cache must be a PagedLatentCache, got Tensor",
        ),
        (lambda a: {"layer": 2}, "ValueError: layer must be below the cache's 2 layers, got 2"),
        (lambda a: {"layer": -1}, "ValueError: layer must be at least 0, got -1"),
        (lambda a: {"layer": 1.0}, "TypeError: layer must be an integer, got float"),
        (lambda a: {"layer": True}, "TypeError: layer must be an integer, got bool"),
        (
            lambda a: {"kv_lens": a["kv_lens"].float()},
            "TypeError: kv_lens must be int32 or int64, got float32",
        ),
        (
            lambda a: {"kv_lens": a["kv_lens"][None]},
            "ValueError: kv_lens must have axes (batch), got shape (1, 5)",
        ),
        (
            lambda a: {"kv_lens": changed(a["kv_lens"], 2, -1)},
            "ValueError: kv_lens[2] must not be negative, got -1",
        ),
        (
            lambda a: {"kv_lens": changed(a["kv_lens"], 2, 13)},
            "ValueError: kv_lens[2] must not exceed the 12 tokens its page table holds, got 13",
        ),
        (
            lambda a: {"kv_lens": a["kv_lens"].to("meta")},
            "ValueError: kv_lens must be on a device that holds data, got a meta tensor",
        ),
        (
            lambda a: {"q_starts": a["q_starts"][:-1]},
            "ValueError: q_starts.shape[0] (batch + 1) must equal one more than the batch, 6, "
            "got 5",
        ),
        (lambda a: {"q_starts": a["q_starts"] + 1}, "ValueError: q_starts[0] must be 0, got 1"),
        (
            lambda a: {"q_starts": changed(a["q_starts"], 2, 1)},
            "ValueError: q_starts[2] must not be below q_starts[1] = 2, got 1",
        ),
        (
            lambda a: {"q_starts": changed(a["q_starts"], -1, 6)},
            "ValueError: q_starts[-1] must equal the number of query tokens, 7, got 6",
        ),
        (
            lambda a: {"q_starts": None},
            "ValueError: q_starts must be given for 7 query tokens of 5 requests, got None",
        ),
        (
            lambda a: {"q_starts": a["q_starts"].short()},
            "TypeError: q_starts must be int32 or int64, got int16",
        ),
        (
            lambda a: {"page_table": a["page_table"].float()},
            "TypeError: page_table must be int32 or int64, got float32",
        ),
        (
            lambda a: {"page_table": a["page_table"][1:]},
            "ValueError: page_table.shape[0] (batch) must equal kv_lens.shape[0], 5, got 4",
        ),
        (
            lambda a: {"page_table": a["page_table"].tolist()},
            "TypeError: page_table must be a tensor, got list",
        ),
        (
            lambda a: {"page_table": (a["page_table"],) * 3},
            "ValueError: page_table must be a tensor or (kv_starts, slots), got a tuple of 3",
        ),
        (
            lambda a: {"page_table": changed(a["page_table"], (2, 1), 99)},
            "ValueError: page_table[2, 1] must be in [0, 12), got 99",
        ),
        (
            lambda a: {"page_table": changed(a["page_table"], (2, 1), -1)},
            "ValueError: page_table[2, 1] must be in [0, 12), got -1",
        ),
        (
            lambda a: {"softmax_scale": float("nan")},
            "ValueError: softmax_scale must be finite, got nan",
        ),
        (
            lambda a: {"softmax_scale": torch.tensor(0.1)},
            "TypeError: softmax_scale must be a number, got Tensor",
        ),
        (lambda a: {"softmax_scale": True}, "TypeError: softmax_scale must be a number, got bool"),
        (
            lambda a: {"sink": torch.zeros(2)},
            "ValueError: sink.shape[0] (heads) must equal q.shape[1], 3, got 2",
        ),
        (
            lambda a: {"sink": torch.zeros(3, dtype=BF16)},
            "TypeError: sink must be float32, got bfloat16",
        ),
        (
            lambda a: {"q": a["q"][..., :32], "q_rope": a["q"][..., :7]},
            "ValueError: q_rope.shape[2] (rope) must equal the cache's qk_rope_head_dim, 8, got 7",
        ),
        (
            lambda a: {"q_rope": a["q"][..., :8]},
            "ValueError: q.shape[2] (latent) must equal the cache's kv_lora_rank, 32, got 40",
        ),
        (
            lambda a: {"q_scale": torch.ones(TOKENS, 1)},
            "ValueError: q_scale must have axes (tokens), got shape (7, 1)",
        ),
        (
            lambda a: {"q_scale": torch.ones(TOKENS, dtype=BF16)},
            "TypeError: q_scale must be float32, got bfloat16",
        ),
        (
            lambda a: {"kv_shard": (2, 2, 1)},
            "ValueError: kv_shard rank must be below world, 2, got 2",
        ),
        (lambda a: {"kv_shard": (0, 0, 1)}, "ValueError: kv_shard world must be at least 1, got 0"),
        (
            lambda a: {"kv_shard": (0, 1, 0)},
            "ValueError: kv_shard interleave must be at least 1, got 0",
        ),
        (
            lambda a: {"kv_shard": (0,)},
            "TypeError: kv_shard must be (rank, world, interleave), got (0,)",
        ),
        (
            lambda a: {"plan": plan_decode((5, 6, 8, 1, 4), num_ctas=2, tile=2)},
            "ValueError: plan must be made for kv_lens[2] = 9 keys, got 8",
        ),
        (
            lambda a: {"plan": plan_decode((5, 6, 9, 1, 4, 2), num_ctas=2, tile=2)},
            "ValueError: plan must be made for this batch, got another batch size",
        ),
        (
            lambda a: {"plan": plan_context((5,), (1,))},
            "TypeError: plan must be a DecodePlan, its tensors or an EvenSplit, got ContextPlan",
        ),
        (lambda a: {"mask": "causal"}, "TypeError: mask must be a Mask, got str"),
        (lambda a: {"out": a["out"].float()}, "TypeError: out must be bfloat16, got float32"),
        (
            lambda a: {"out": a["out"][:-1]},
            "ValueError: out.shape[0] (tokens) must equal q.shape[0], 7, got 6",
        ),
        (
            lambda a: {"out": torch.empty(TOKENS, HEADS, 40, dtype=BF16)},
            "ValueError: out.shape[2] (v_width) must equal the cache's value width, 32, got 40",
        ),
        (
            lambda a: {"out": a["out"][:1].expand(TOKENS, HEADS, 32)},
            "ValueError: out must be writable, got stride 0 on axis 0 (an expanded tensor)",
        ),
        (
            lambda a: {"out": columns_first(a["out"])},
            "ValueError: out must have a contiguous last axis, got strides (96, 1, 3)",
        ),
        (lambda a: {"lse": a["lse"].double()}, "TypeError: lse must be float32, got float64"),
        (lambda a: {"lse": a["lse"].numpy()}, "TypeError: lse must be a tensor, got ndarray"),
    ],
    "decode-fp8-scale-tensor-flat": [
        (
            lambda a: {"page_table": (changed(a["page_table"][0], 2, 1), a["page_table"][1])},
            "ValueError: page_table[0][2] must not be below page_table[0][1] = 5, got 1",
        ),
        (
            lambda a: {"page_table": (a["page_table"][0], changed(a["page_table"][1], 3, -2))},
            "ValueError: page_table[1][3] must be in [0, 48), got -2",
        ),
        (
            lambda a: {"page_table": (a["page_table"][0], a["page_table"][1][:-1])},
            "ValueError: page_table[0][-1] must not exceed the 24 slots of page_table[1], got 25",
        ),
        (
            lambda a: {"kv_lens": changed(a["kv_lens"], 0, 6)},
            "ValueError: kv_lens[0] must not exceed the 5 tokens its page table holds, got 6",
        ),
    ],
    "append": [
        (
            lambda a: {"q_rope": a["q_rope"][..., :6]},
            "ValueError: q_rope.shape[2] (rope) must equal the cache's qk_rope_head_dim, 8, got 6",
        ),
        (
            lambda a: {"q_rope": a["q_rope"].to(E4M3)},
            "TypeError: q_rope must be bfloat16 or float16 or float32, got float8_e4m3fn",
        ),
        (
            lambda a: {"kv": a["kv"][:, :-2]},
            "ValueError: kv.shape[1] (width) must equal the row width of the cache, 40, got 38",
        ),
        (
            lambda a: {"kv": a["kv"][:-1]},
            "ValueError: kv.shape[0] (tokens) must equal q_rope.shape[0], 7, got 6",
        ),
        (
            lambda a: {"freqs": a["freqs"][:, :6]},
            "ValueError: freqs.shape[1] (rope) must equal the cache's qk_rope_head_dim, 8, got 6",
        ),
        (
            lambda a: {"freqs": a["freqs"][:8]},
            "ValueError: freqs must have a row for position 8 of request 2, got 8 rows",
        ),
        (
            lambda a: {"freqs": a["freqs"].double()},
            "TypeError: freqs must be bfloat16 or float16 or float32, got float64",
        ),
        (
            lambda a: {"gamma": a["gamma"][1:]},
            "ValueError: gamma.shape[0] (latent) must equal the cache's kv_lora_rank, 32, got 31",
        ),
        (lambda a: {"epsilon": -1e-6}, "ValueError: epsilon must not be negative, got -1e-06"),
        (lambda a: {"epsilon": float("nan")}, "ValueError: epsilon must be finite, got nan"),
        (lambda a: {"epsilon": "1e-6"}, "TypeError: epsilon must be a number, got str"),
        (
            lambda a: {"rope": "neox"},
            "ValueError: rope must be one of interleaved, half, got 'neox'",
        ),
        (
            lambda a: {"kv_lens": changed(a["kv_lens"], 0, 9)},
            "ValueError: page_table[0, 2] must be in [0, 12), got 2147483647",
        ),
        (
            lambda a: {"page_table": changed(a["page_table"], (2, 2), -1)},
            "ValueError: page_table[2, 2] must be in [0, 12), got -1",
        ),
        (
            lambda a: {"q_starts": None},
            "ValueError: q_starts must be given for 7 query tokens of 5 requests, got None",
        ),
        (
            lambda a: {"q_rope_out": a["q_rope_out"].half()},
            "TypeError: q_rope_out must be bfloat16 or float8_e4m3fn, got float16",
        ),
        (
            lambda a: {"q_rope_out": a["q_rope_out"][:, :2]},
            "ValueError: q_rope_out.shape[1] (heads) must equal q_rope.shape[1], 3, got 2",
        ),
        (
            lambda a: {"q_rope_out": a["q_rope_out"][:, :1].expand(TOKENS, HEADS, 8)},
            "ValueError: q_rope_out must be writable, got stride 0 on axis 1 (an expanded tensor)",
        ),
        (
            lambda a: {"kv": columns_first(a["kv"])},
            "ValueError: kv must have a contiguous last axis, got strides (1, 7)",
        ),
        (
            lambda a: {"kv_lens": changed(a["kv_lens"], 2, 2)},
            "ValueError: kv_lens[2] must include the 3 new tokens of the request, got 2",
        ),
        (
            lambda a: {"slots": int32(range(7)), "positions": int32(range(7))},
            "TypeError: page_table must be None where slots and positions are given, got Tensor",
        ),
        (
            lambda a: {"slots": int32(range(7)), "page_table": None},
            "TypeError: kv_lens must be None where slots and positions are given, got Tensor",
        ),
        (
            lambda a: {"positions": int32(range(7)), "page_table": None, "kv_lens": None},
            "TypeError: q_starts must be None where slots and positions are given, got Tensor",
        ),
        (
            lambda a: {"page_table": None},
            "TypeError: page_table must be given with kv_lens and q_starts, got None",
        ),
        (
            lambda a: {"kv_lens": None, "q_starts": None},
            "TypeError: kv_lens must be given with page_table, got None",
        ),
        (
            lambda a: dict.fromkeys(("page_table", "kv_lens", "q_starts")),
            "TypeError: page_table must be given with kv_lens, or slots with positions, got None",
        ),
    ],
    "append-slots": [
        (
            lambda a: {"positions": None},
            "TypeError: positions must be given with slots, got None",
        ),
        (
            lambda a: {"slots": None},
            "TypeError: slots must be given with positions, got None",
        ),
        (
            lambda a: {"q_starts": starts(Q_LENS)},
            "TypeError: q_starts must be None where slots and positions are given, got Tensor",
        ),
        (
            lambda a: {"slots": a["slots"].float()},
            "TypeError: slots must be int32 or int64, got float32",
        ),
        (
            lambda a: {"slots": a["slots"].tolist()},
            "TypeError: slots must be a tensor, got list",
        ),
        (
            lambda a: {"positions": a["positions"] > 0},
            "TypeError: positions must be int32 or int64, got bool",
        ),
        (
            lambda a: {"slots": a["slots"][1:]},
            "ValueError: slots.shape[0] (tokens) must equal q_rope.shape[0], 7, got 6",
        ),
        (
            lambda a: {"positions": a["positions"][:, None]},
            "ValueError: positions must have axes (tokens), got shape (7, 1)",
        ),
        (
            lambda a: {"slots": changed(a["slots"], 4, 48)},
            "ValueError: slots[4] must be -1 or in [0, 48), got 48",
        ),
        (
            lambda a: {"slots": changed(a["slots"], 4, -2)},
            "ValueError: slots[4] must be -1 or in [0, 48), got -2",
        ),
        (
            lambda a: {"positions": changed(a["positions"], 4, 9)},
            "ValueError: positions[4] must be in [0, 9), the rows of freqs, or its slot -1, got 9",
        ),
        (
            lambda a: {"positions": changed(a["positions"], 4, -1)},
            "ValueError: positions[4] must be in [0, 9), the rows of freqs, or its slot -1, got -1",
        ),
        (
            lambda a: {"positions": a["positions"].to("meta")},
            "ValueError: positions must be on a device that holds data, got a meta tensor",
        ),
    ],
    "prefill": [
        (
            lambda a: {"q": a["q"][..., 1:]},
            "ValueError: q.shape[2] must equal the widths of k_nope and k_rope together, 10, got 9",
        ),
        (
            lambda a: {"k_nope": a["k_nope"][:, 1:]},
            "ValueError: k_nope.shape[1] (heads) must equal q.shape[1], 3, got 2",
        ),
        (
            lambda a: {"k_nope": a["k_nope"].half()},
            "TypeError: k_nope must be bfloat16, got float16",
        ),
        (
            lambda a: {"v": a["v"][1:]},
            "ValueError: v.shape[0] (keys) must equal k_nope.shape[0], 25, got 24",
        ),
        (
            lambda a: {"k_rope": a["k_rope"][:, None]},
            "ValueError: k_rope must have axes (keys, D_R), got shape (25, 1, 4)",
        ),
        (
            lambda a: {"kv_starts": a["kv_starts"][:-1]},
            "ValueError: kv_starts.shape[0] (batch + 1) must equal q_starts.shape[0], 6, got 5",
        ),
        (
            lambda a: {"kv_starts": changed(a["kv_starts"], -1, 26)},
            "ValueError: kv_starts[-1] must equal the number of keys, 25, got 26",
        ),
        (
            lambda a: {"kv_starts": changed(a["kv_starts"], 1, 12)},
            "ValueError: kv_starts[2] must not be below kv_starts[1] = 12, got 11",
        ),
        (
            lambda a: {"kv_starts": a["kv_starts"][:0], "q_starts": a["q_starts"][:0]},
            "ValueError: q_starts must have batch + 1 entries, got none",
        ),
        (
            lambda a: {"alibi_slopes": torch.ones(3, dtype=BF16)},
            "TypeError: alibi_slopes must be float32, got bfloat16",
        ),
        (
            lambda a: {"sink": torch.ones(4)},
            "ValueError: sink.shape[0] (heads) must equal q.shape[1], 3, got 4",
        ),
        (
            lambda a: {"v": columns_first(a["v"])},
            "ValueError: v must have a contiguous last axis, got strides (15, 1, 3)",
        ),
        (lambda a: {"mask": None}, "TypeError: mask must be a Mask, got NoneType"),
        (
            lambda a: {"softmax_scale": float("inf")},
            "ValueError: softmax_scale must be finite, got inf",
        ),
        (
            lambda a: {"q": a["q"].to(E4M3)},
            "TypeError: q must be bfloat16 or float16 or float32, got float8_e4m3fn",
        ),
    ],
    "sparse": [
        (
            lambda a: {"rows": a["rows"][1:]},
            "ValueError: rows.shape[0] (tokens) must equal q.shape[0], 7, got 6",
        ),
        (
            lambda a: {"rows": a["rows"].float()},
            "TypeError: rows must be int32 or int64, got float32",
        ),
        (
            lambda a: {"topk_lens": int32([7, 7, 7, 8, 7, 7, 7])},
            "ValueError: topk_lens[3] must not exceed the entries of rows, 7, got 8",
        ),
        (
            lambda a: {"topk_lens": int32([7, -1, 7, 7, 7, 7, 7])},
            "ValueError: topk_lens[1] must not be negative, got -1",
        ),
        (
            lambda a: {"topk_lens": int32([7])},
            "ValueError: topk_lens.shape[0] (tokens) must equal q.shape[0], 7, got 1",
        ),
        (
            lambda a: {"extra": (OTHER_ROWS, a["rows"])},
            "ValueError: extra.cache must have rows like the cache's, "
            "RowShape(kv_lora_rank=32, qk_rope_head_dim=8, v_width=32), "
            "got RowShape(kv_lora_rank=40, qk_rope_head_dim=8, v_width=40)",
        ),
        (
            lambda a: {"extra": (a["cache"], a["rows"][1:])},
            "ValueError: extra.rows.shape[0] (tokens) must equal q.shape[0], 7, got 6",
        ),
        (
            lambda a: {"extra": (a["cache"], a["rows"], int32([8] * 7))},
            "ValueError: extra.topk_lens[0] must not exceed the entries of extra.rows, 7, got 8",
        ),
        (
            lambda a: {"extra": (a["cache"], a["rows"], None, 2)},
            "ValueError: extra.layer must be below the cache's 2 layers, got 2",
        ),
        (
            lambda a: {"extra": a["cache"]},
            "TypeError: extra must be ExtraRows or (cache, rows, …), got PagedLatentCache",
        ),
        (
            lambda a: {"extra": (a["cache"], None)},
            "TypeError: extra.rows must be a tensor, got NoneType",
        ),
        (
            lambda a: {"plan": plan_decode((5,), num_ctas=1)},
            "TypeError: plan must be an EvenSplit, got DecodePlan",
        ),
        (
            lambda a: {"max_logits": a["max_logits"].bfloat16()},
            "TypeError: max_logits must be float32, got bfloat16",
        ),
        (
            lambda a: {"softmax_scale": None},
            "TypeError: softmax_scale must be a number, got NoneType",
        ),
    ],
    "sparse-extra": [
        (
            lambda a: {"q": a["q"].double()},
            "TypeError: q must be bfloat16 or float16 or float32 or float8_e4m3fn, got float64",
        ),
    ],
    "logits": [
        (
            lambda a: {"weights": a["weights"].bfloat16()},
            "TypeError: weights must be float32, got bfloat16",
        ),
        (
            lambda a: {"weights": a["weights"][:, :1]},
            "ValueError: weights.shape[1] (index_heads) must equal q.shape[1], 2, got 1",
        ),
        (
            lambda a: {"q": a["q"][..., :8]},
            "ValueError: q.shape[2] (D) must equal the row width of the cache, 16, got 8",
        ),
        (
            lambda a: {"max_kv_len": 8},
            "ValueError: kv_lens[2] must not exceed max_kv_len, 8, got 9",
        ),
        (lambda a: {"max_kv_len": -1}, "ValueError: max_kv_len must be at least 0, got -1"),
        (
            lambda a: {"kv_lens": changed(a["kv_lens"], 2, 13)},
            "ValueError: kv_lens[2] must not exceed max_kv_len, 12, got 13",
        ),
        (
            lambda a: {"out": a["out"][:, :-1]},
            "ValueError: out.shape[1] (columns) must equal max_kv_len, 12, got 11",
        ),
        (lambda a: {"page_table": [[0]]}, "TypeError: page_table must be a tensor, got list"),
        (
            lambda a: {"page_table": a["page_table"][0]},
            "ValueError: page_table must have axes (batch, max_pages), got shape (3,)",
        ),
        (lambda a: {"cache": None}, "TypeError: cache must be a PagedLatentCache, got NoneType"),
        (
            lambda a: {"q_starts": None},
            "ValueError: q_starts must be given for 7 query tokens of 5 requests, got None",
        ),
    ],
    "topk": [
        (lambda a: {"k": 0}, "ValueError: k must be at least 1, got 0"),
        (lambda a: {"k": 2.0}, "TypeError: k must be an integer, got float"),
        (
            lambda a: {"logits": a["logits"].bfloat16()},
            "TypeError: logits must be float32, got bfloat16",
        ),
        (
            lambda a: {"logits": a["logits"][0]},
            "ValueError: logits must have axes (tokens, columns), got shape (11,)",
        ),
        (
            lambda a: {"row_starts": int32([0])},
            "ValueError: row_starts.shape[0] (tokens) must equal logits.shape[0], 7, got 1",
        ),
        (
            lambda a: {"row_ends": int32([1, 2, 3, 12, 5, 6, 7])},
            "ValueError: row_ends[3] must not exceed the columns of logits, 11, got 12",
        ),
        (
            lambda a: {"row_starts": int32([0, 0, 0, 0, 0, 0, -1])},
            "ValueError: row_starts[6] must not be negative, got -1",
        ),
        (lambda a: {"out": a["out"].long()}, "TypeError: out must be int32, got int64"),
        (
            lambda a: {"logits": columns_first(a["logits"])},
            "ValueError: logits must have a contiguous last axis, got strides (1, 7)",
        ),
    ],
    "merge": [
        (lambda a: {"outs": [], "lses": []}, "ValueError: outs must hold at least one part, got 0"),
        (lambda a: {"lses": a["lses"][1:]}, "ValueError: lses must hold one per part, 3, got 2"),
        (
            lambda a: {"outs": [*a["outs"][:2], a["outs"][2][:-1]]},
            "ValueError: outs[2].shape[0] (tokens) must equal outs[0].shape[0], 7, got 6",
        ),
        (
            lambda a: {"outs": [*a["outs"][:2], a["outs"][2].float()]},
            "TypeError: outs[2] must be bfloat16, got float32",
        ),
        (
            lambda a: {"lses": [*a["lses"][:2], a["lses"][2].bfloat16()]},
            "TypeError: lses[2] must be float32, got bfloat16",
        ),
        (
            lambda a: {"lses": [*a["lses"][:2], a["lses"][2].T]},
            "ValueError: lses[2].shape[0] (tokens) must equal outs[0].shape[0], 7, got 3",
        ),
        (
            lambda a: {"sink": torch.zeros(1)},
            "ValueError: sink.shape[0] (heads) must equal outs[0].shape[1], 3, got 1",
        ),
        (lambda a: {"outs": [1, 2, 3]}, "TypeError: outs[0] must be a tensor, got int"),
        (lambda a: {"out": a["out"].float()}, "TypeError: out must be bfloat16, got float32"),
    ],
    "quantize": [
        (lambda a: {"x": a["x"][0]}, "ValueError: x must have 2 axes, or 3 with a batch, got 1"),
        (lambda a: {"group": 0}, "ValueError: group must be at least 1, got 0"),
        (lambda a: {"group": True}, "TypeError: group must be an integer, got bool"),
        (lambda a: {"scale_ub": 0.0}, "ValueError: scale_ub must be positive, got 0.0"),
        (lambda a: {"scale_ub": float("nan")}, "ValueError: scale_ub must be positive, got nan"),
        (lambda a: {"scale_ub": "1"}, "TypeError: scale_ub must be a number, got str"),
        (
            lambda a: {"x": a["x"].int()},
            "TypeError: x must be bfloat16 or float16 or float32, got int32",
        ),
        (
            lambda a: {"x": columns_first(a["x"])},
            "ValueError: x must have a contiguous last axis, got strides (1, 5)",
        ),
        (
            lambda a: {"out": a["out"].view(torch.uint8)},
            "TypeError: out must be float8_e4m3fn, got uint8",
        ),
        (
            lambda a: {"scales": torch.empty(3, 5)},
            "ValueError: scales.shape[1] (padded M) must equal M, rounded up to 4, 8, got 5",
        ),
    ],
    "scaled-mm": [
        (lambda a: {"a": a["a"].bfloat16()}, "TypeError: a must be float8_e4m3fn, got bfloat16"),
        (lambda a: {"a": a["a"][0]}, "ValueError: a must have 2 axes, or 3 with a batch, got 1"),
        (
            lambda a: {"b": a["b"][:, :-1]},
            "ValueError: b.shape[1] (K) must equal a.shape[1], 20, got 19",
        ),
        (
            lambda a: {"a_scale": a["a_scale"][:-1]},
            "ValueError: a_scale.shape[0] (K groups) must equal K / k_group, rounded up, 3, got 2",
        ),
        (
            lambda a: {"a_scale": a["a_scale"][:, :4]},
            "ValueError: a_scale must have a column for each of 5 rows, got 4",
        ),
        (
            lambda a: {"b_scale": a["b_scale"].T},
            "ValueError: b_scale.shape[0] (N groups) must equal N / n_group, rounded up, 2, got 3",
        ),
        (
            lambda a: {"b_scale": a["b_scale"].double()},
            "TypeError: b_scale must be float32, got float64",
        ),
        (lambda a: {"n_group": 0}, "ValueError: n_group must be at least 1, got 0"),
        (
            lambda a: {"out_dtype": torch.int32, "out": None},
            "TypeError: out_dtype must be a float or float8_e4m3fn, got int32",
        ),
        (
            lambda a: {"out": torch.empty(5, 7, dtype=torch.int32)},
            "TypeError: out must be a float or float8_e4m3fn, got int32",
        ),
        (lambda a: {"out": [1]}, "TypeError: out must be a tensor, got list"),
        (
            lambda a: {"out": a["out"][:, :-1]},
            "ValueError: out.shape[1] (N) must equal b.shape[0], 7, got 6",
        ),
        (
            lambda a: {"b": a["b"][None]},
            "ValueError: b must have axes (N, K), got shape (1, 7, 20)",
        ),
    ],
    "matmul": [
        (
            lambda a: {"a": a["a"][0]},
            "ValueError: a must have axes (batch, M, K), got shape (5, 8)",
        ),
        (
            lambda a: {"b": a["b"][..., :-1]},
            "ValueError: b.shape[2] (K) must equal a.shape[2], 8, got 7",
        ),
        (lambda a: {"b": a["b"].float()}, "TypeError: b must be bfloat16, got float32"),
        (
            lambda a: {"b": a["b"][1:]},
            "ValueError: b.shape[0] (batch) must equal a.shape[0], 3, got 2",
        ),
        (
            lambda a: {"out": a["out"].double()},
            "TypeError: out must be bfloat16 or float16 or float32 or float8_e4m3fn, got float64",
        ),
        (
            lambda a: {"out": a["out"][:1].expand(3, 5, 6)},
            "ValueError: out must be writable, got stride 0 on axis 0 (an expanded tensor)",
        ),
    ],
}
ROWS = [(call, *row) for call, rows in WRONG.items() for row in rows]


@pytest.mark.parametrize(
    ("name", "change", "message"), ROWS, ids=[f"{name} {message}" for name, _, message in ROWS]
)
def test_a_wrong_call_is_refused_and_writes_nothing(name, change, message):
    call = CALLS[name]()
    given = dict(zip(call.results, call.empty_results(strided), strict=True))
    call = call.but(**given)
    call = call.but(**change(call.arguments))
    tensors = {name: tensor for name, tensor in call.tensors() if tensor.device.type != "meta"}
    before = snapshot(**{**given, **tensors})
    kind, _, said = message.partition(": ")
    with pytest.raises((TypeError, ValueError)) as refusal:
        call.run()
    assert type(refusal.value).__name__ == kind
    assert str(refusal.value) == f"{call.function.__name__}: {said}"
    assert_unchanged(before)


def test_every_op_is_called_wrongly():
    counts = Counter(CALLS[name]().function.__name__ for name, _, _ in ROWS)
    functions = [getattr(ops, name) for name in ops.__all__]
    assert set(counts) == {f.__name__ for f in functions if not isinstance(f, type)}
    assert min(counts.values()) >= 5
    assert all(re.fullmatch(r"(Type|Value)Error: \S.* must \S.*, got .+", row[2]) for row in ROWS)


def test_the_registered_op_says_the_same():
    call = decode_call()
    op, flat = call.but(kv_lens=changed(call.arguments["kv_lens"], 2, -1)).packed()
    with pytest.raises(
        ValueError, match=r"^mla_decode: kv_lens\[2\] must not be negative, got -1$"
    ):
        op.functional(*flat)


@pytest.mark.parametrize("unused", [-1, -(2**31), NEVER_A_PAGE])
def test_what_a_page_table_holds_past_the_last_page_is_nobodys_business(unused):
    """Nor are the pages of a request without queries, nor those before a window."""
    for make, request in ((decode_call, 1), (append_call, 1)):
        call = make()
        table = call.arguments["page_table"].clone()
        table[table == NEVER_A_PAGE] = unused
        table[request] = unused
        for result, want in zip(call.run(page_table=table), make().run(), strict=True):
            assert_same_bits("result", result, want)
    mask = masks.sliding_window_causal(2)
    want = decode_call(mask=mask).run()
    call = decode_call(mask=mask)
    table = call.arguments["page_table"].clone()
    first_seen = 9 - 3 - 2 + 1  # of request 2: nine tokens, three of them queries
    assert first_seen // PAGE_SIZE == 1
    table[2, 0] = unused
    for result, expected in zip(call.run(page_table=table), want, strict=True):
        assert_same_bits("result", result, expected)


def test_queries_of_no_request_are_refused_where_lengths_are_not_read(monkeypatch):
    monkeypatch.setattr(checks, "values_visible", lambda tensor: False)
    starts = int32([0])
    wanted = "op: q_starts must have a request for 5 query tokens, got none"
    with pytest.raises(ValueError, match=wanted):
        check_query_starts(Dims("op"), starts, 5, 0)
    assert check_query_starts(Dims("op"), starts, 0, 0) is starts


def test_slots_past_the_flat_list_may_be_anything():
    call = CALLS["decode-fp8-scale-tensor-flat"]()
    starts, slots = call.arguments["page_table"]
    longer = torch.cat([slots, int32([-1, NEVER_A_PAGE])])
    for result, want in zip(call.run(page_table=(starts, longer)), call.run(), strict=True):
        assert_same_bits("result", result, want)


def test_rows_that_are_none_do_not_count():
    """Unlike a page id, a listed row may be anything: top-k fills its lists with -1."""
    call = sparse_call()
    rows = call.arguments["rows"]
    assert (rows < 0).any()
    assert (rows > 10_000).any()
    want = call.run()
    others = torch.where((rows < 0) | (rows > 10_000), -(2**31), rows)
    for result, expected in zip(call.run(rows=others), want, strict=True):
        assert_same_bits("result", result, expected)
