"""Calls of every public op in the forms it takes, small, for tests of what holds for all of them.

A call has shuffled pages, poison in every row that no request has, a request without queries, one
without keys, and a last page of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mlakit import ops, reference
from mlakit.cache import PagedLatentCache, PageTable, request_slots
from mlakit.cache.layouts import bits
from mlakit.formats import row_codec
from mlakit.model import masks
from mlakit.model.geometry import RowShape
from mlakit.ops._library import OPS, Op
from mlakit.plan import EvenSplit, plan_decode
from mlakit.tools.testing import poison, shuffled_pages
from tests.transplant import Transplant

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
ROW = RowShape(32, 8)
INDEX_ROW = RowShape(16, 0)
HEADS = 3
PAGE_SIZE = 4
LAYERS = 2
SCALE = 0.21
Q_LENS = (2, 0, 3, 1, 1)  # new tokens of each request
KV_LENS = (5, 6, 9, 1, 4)  # tokens after the step
TOKENS = sum(Q_LENS)


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths: Sequence[int]) -> Tensor:
    return int32([0, *accumulate(lengths)])


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def strided(tensor: Tensor) -> Tensor:
    """The same numbers with poison between the rows and between the planes."""
    *leading, rows, columns = tensor.shape
    room = tensor.new_empty(*leading, rows + 1, columns + 3)
    poison(room)
    view = room[..., :rows, :columns]
    bits(view).copy_(bits(tensor))
    return view


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a public op, its arguments by name."""

    function: Callable[..., Any]
    arguments: dict[str, Any]

    def run(self, **others: Any) -> tuple[Tensor, ...]:
        """The results, always as a tuple."""
        results = self.function(**{**self.arguments, **others})
        if results is None:
            return ()
        return results if isinstance(results, tuple) else (results,)

    def but(self, **others: Any) -> Call:
        """The same call with other arguments."""
        return replace(self, arguments={**self.arguments, **others})

    def on(self, device: torch.device | str) -> Call:
        """The same call on copies on a device, as strided and shared as they are here."""
        there = Transplant(device)
        moved = {name: there.moved(value) for name, value in self.arguments.items()}
        return replace(self, arguments=moved)

    def packed(self) -> tuple[Op, list[Any]]:
        """The op behind the function, and the arguments as `torch.ops.mlakit` takes them."""
        seen: list[tuple[Op, Any]] = []

        def note(op: Op, arguments: Any, results: Sequence[Tensor | None]) -> Any:
            seen.append((op, arguments))
            return results

        with ExitStack() as patched:
            for op in OPS.values():
                patched.enter_context(mock.patch.object(op._calls, "call", partial(note, op)))
            self.function(**self.arguments)
        ((op, arguments),) = seen
        return op, op.pack(arguments)

    @property
    def results(self) -> Sequence[str]:
        """The keywords that take tensors to write to."""
        return self.packed()[0].results

    def empty_results(self, make: Callable[[Tensor], Tensor] = torch.empty_like) -> list[Tensor]:
        """Tensors to write to, in the order of `results`; `make` gives one like the result."""
        op, flat = self.packed()
        return [make(tensor) for tensor in op.fake(op._unpack(flat))]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor the call can reach, pools included, by name."""
        for name, value in self.arguments.items():
            yield from _reachable(name, value)


def _reachable(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, PagedLatentCache):
        parts = {"payload": value.payload, "beside": value.beside, "scale": value.tensor_scale}
        for part, tensor in parts.items():
            yield from _reachable(f"{name}.{part}", tensor)
    elif isinstance(value, (list, tuple)):
        for i, each in enumerate(value):
            yield from _reachable(f"{name}[{i}]", each)


def make_cache(
    generator: torch.Generator,
    kv_lens: Sequence[int],
    *,
    format: str = "bf16",
    row: RowShape = ROW,
    tensor_scale: float | Tensor = 1.0,
    num_pages: int | None = None,
    padded: bool = False,
    room: Sequence[int] | None = None,
) -> tuple[PagedLatentCache, Tensor]:
    """(pool, page table): `kv_lens` random tokens per request in every layer, the rest poison.

    room  tokens that the pages of each request hold, if more than `kv_lens`
    """
    counts = [-(-tokens // PAGE_SIZE) for tokens in (room or kv_lens)]
    num_pages = num_pages or sum(counts) + 3
    table = shuffled_pages(len(counts), counts, num_pages, generator)
    cache = PagedLatentCache.allocate(
        row,
        format,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_layers=LAYERS,
        tensor_scale=tensor_scale,
    )
    if padded:
        codec = row_codec(format, row)
        payload = strided(cache.payload)
        side = None if cache.scales is None else strided(cache.scales)
        cache = PagedLatentCache(codec, payload, side, tensor_scale)
    poison(cache.payload)
    if cache.scales is not None:
        poison(cache.scales)
    for layer in map(cache.layer, range(LAYERS)):
        for request, kv_len in enumerate(kv_lens):
            slots = request_slots(table, PAGE_SIZE, request, 0, kv_len)
            layer.write(slots, normal(generator, kv_len, row.width))
    return cache, table


def flat_table(table: Tensor, tokens: Sequence[int]) -> PageTable:
    """The same rows as one flat list."""
    slots = [request_slots(table, PAGE_SIZE, b, 0, n) for b, n in enumerate(tokens)]
    return starts(tokens), torch.cat(slots).int()


def decode_call(format: str = "bf16", *, flat: bool = False, **options: Any) -> Call:
    generator = torch.Generator().manual_seed(1)
    tensor_scale, padded = options.pop("tensor_scale", 1.0), options.pop("padded", False)
    cache, table = make_cache(
        generator, KV_LENS, format=format, tensor_scale=tensor_scale, padded=padded
    )
    dtype = BF16 if format != "fp32" else F32
    arguments = {
        "q": normal(generator, TOKENS, HEADS, ROW.width, dtype=dtype),
        "cache": cache,
        "page_table": flat_table(table, KV_LENS) if flat else table,
        "kv_lens": int32(KV_LENS),
        "q_starts": starts(Q_LENS),
        "softmax_scale": SCALE,
        "layer": 1,
    }
    return Call(ops.mla_decode, {**arguments, **options})


def decode_apart() -> Call:
    """e4m3 queries in two tensors, with a scale for each token."""
    generator = torch.Generator().manual_seed(2)
    q = normal(generator, TOKENS, HEADS, ROW.width)
    return decode_call("fp8_token").but(
        q=strided(q[..., : ROW.kv_lora_rank].to(E4M3)),
        q_rope=strided(q[..., ROW.kv_lora_rank :]),
        q_scale=torch.rand(TOKENS, generator=generator) + 0.5,
        sink=normal(generator, HEADS, dtype=F32),
    )


def decode_one_each() -> Call:
    """No `q_starts`: one query per request."""
    call = decode_call("fp32", mask=masks.chunked_causal(3))
    return call.but(q=call.arguments["q"][: len(KV_LENS)], q_starts=None, kv_lens=int32(KV_LENS))


def decode_shard() -> Call:
    """Rank 1 of 2: the pages of a request hold fewer tokens than its length."""
    return decode_call(kv_shard=(1, 2, 2), kv_lens=int32(KV_LENS).long())


def append_call(format: str = "bf16", *, flat: bool = False, **options: Any) -> Call:
    generator = torch.Generator().manual_seed(3)
    before = [kv_len - q_len for kv_len, q_len in zip(KV_LENS, Q_LENS, strict=True)]
    tensor_scale = options.pop("tensor_scale", 1.0)
    cache, table = make_cache(
        generator, before, format=format, tensor_scale=tensor_scale, room=KV_LENS
    )
    arguments = {
        "q_rope": normal(generator, TOKENS, HEADS, ROW.qk_rope_head_dim),
        "kv": strided(normal(generator, TOKENS, ROW.width)),
        "freqs": normal(generator, max(KV_LENS), ROW.qk_rope_head_dim, dtype=F32),
        "gamma": normal(generator, ROW.kv_lora_rank),
        "cache": cache,
        "page_table": flat_table(table, KV_LENS) if flat else table,
        "kv_lens": int32(KV_LENS),
        "q_starts": starts(Q_LENS),
        "epsilon": 1e-5,
        "layer": 1,
    }
    return Call(ops.norm_rope_quant_append, {**arguments, **options})


def append_by_slots(format: str = "fp8_block128") -> Call:
    """Rows and positions token by token; two tokens are padding, one of them at no position."""
    call = append_call(format)
    arguments = dict(call.arguments)
    table = arguments.pop("page_table")
    del arguments["kv_lens"], arguments["q_starts"]
    lengths = enumerate(zip(KV_LENS, Q_LENS, strict=True))
    slots = torch.cat(
        [request_slots(table, PAGE_SIZE, b, kv - new, kv) for b, (kv, new) in lengths]
    )
    positions = int32(reference.append_positions(KV_LENS, Q_LENS))
    slots[3], slots[5], positions[5] = -1, -1, 10_000
    return Call(call.function, {**arguments, "slots": slots, "positions": positions})


def append_rows_call(format: str = "bf16", *, row: RowShape = ROW, **options: Any) -> Call:
    """Finished rows at rows of the pool in any order; two tokens are padding, with poison."""
    generator = torch.Generator().manual_seed(14)
    tensor_scale = options.pop("tensor_scale", 1.0)
    cache, _ = make_cache(generator, [0], format=format, row=row, tensor_scale=tensor_scale)
    slots = torch.randperm(cache.layer(0).num_slots, generator=generator)[:TOKENS]
    latent = strided(normal(generator, TOKENS, row.kv_lora_rank))
    k_rope = normal(generator, TOKENS, row.qk_rope_head_dim, dtype=F32)
    for padding in (2, 5):
        slots[padding], latent[padding], k_rope[padding] = -1, torch.nan, torch.nan
    arguments = {
        "latent": latent,
        "k_rope": k_rope if row.qk_rope_head_dim else None,
        "cache": cache,
        "slots": slots.int(),
        "layer": 1,
    }
    return Call(ops.append_rows, {**arguments, **options})


def compress_call(format: str = "bf16", *, flat: bool = False, **options: Any) -> Call:
    """Overlapping windows of two tokens; one request completes none."""
    generator = torch.Generator().manual_seed(15)
    before = [kv_len - q_len for kv_len, q_len in zip(KV_LENS, Q_LENS, strict=True)]
    windows = [kv_len // 2 for kv_len in KV_LENS]
    cache, table = make_cache(generator, [0] * len(KV_LENS), format=format, room=windows)
    columns = 2 * ROW.width
    state_row = RowShape(2 * columns, 0)
    state, state_table = make_cache(generator, before, format="fp32", row=state_row, room=KV_LENS)
    arguments = {
        "kv": strided(normal(generator, TOKENS, columns)),
        "gate": normal(generator, TOKENS, columns),
        "bias": normal(generator, 2, columns, dtype=F32),
        "gamma": normal(generator, ROW.width, dtype=F32),
        "freqs": normal(generator, max(KV_LENS), ROW.qk_rope_head_dim, dtype=F32),
        "cache": cache,
        "page_table": flat_table(table, windows) if flat else table,
        "state_cache": state,
        "state_table": flat_table(state_table, KV_LENS) if flat else state_table,
        "kv_lens": int32(KV_LENS),
        "q_starts": starts(Q_LENS),
        "rate": 2,
        "overlap": True,
        "epsilon": 1e-5,
        "layer": 1,
        "state_layer": 1,
    }
    return Call(ops.compress_rows, {**arguments, **options})


def append_transposed() -> Call:
    """Queries that lie head by head in memory."""
    call = append_call("fp8_block64", rope="half")
    q_rope = call.arguments["q_rope"].transpose(0, 1).contiguous().transpose(0, 1)
    return call.but(q_rope=q_rope)


def prefill_call(**options: Any) -> Call:
    generator = torch.Generator().manual_seed(4)
    d_n, d_r, d_v, keys = 6, 4, 5, sum(KV_LENS)
    arguments = {
        "q": normal(generator, TOKENS, HEADS, d_n + d_r),
        "k_nope": normal(generator, keys, HEADS, d_n),
        "k_rope": normal(generator, keys, d_r),
        "v": normal(generator, keys, HEADS, d_v),
        "q_starts": starts(Q_LENS),
        "kv_starts": starts(KV_LENS),
        "softmax_scale": SCALE,
    }
    return Call(ops.mla_prefill, {**arguments, **options})


def prefill_strided() -> Call:
    """Keys and values as an up-projection leaves them: two slices of one tensor."""
    call, generator = prefill_call(mask=masks.sliding_window_causal(3)), torch.Generator()
    joint = normal(generator.manual_seed(5), sum(KV_LENS), HEADS, 6 + 5)
    return call.but(
        q=strided(call.arguments["q"]),
        k_nope=joint[..., :6],
        v=joint[..., 6:],
        k_rope=strided(call.arguments["k_rope"]),
        alibi_slopes=normal(generator, HEADS, dtype=F32),
        sink=normal(generator, HEADS, dtype=F32),
    )


def prefill_e4m3() -> Call:
    """e4m3 with scales, and values whose keys are contiguous."""
    call, generator = prefill_call(), torch.Generator().manual_seed(7)
    tensors = {name: call.arguments[name].to(E4M3) for name in ("q", "k_nope", "k_rope")}
    by_head = call.arguments["v"].permute(1, 2, 0).contiguous().to(E4M3)
    keys = sum(KV_LENS)
    return call.but(
        **tensors,
        v=by_head.permute(2, 0, 1),
        q_scale=normal(generator, TOKENS, HEADS, dtype=F32).exp(),
        k_scale=normal(generator, keys, dtype=F32).exp(),
        v_scale=normal(generator, keys, HEADS, dtype=F32).exp(),
    )


def sparse_call(format: str = "bf16", **options: Any) -> Call:
    generator = torch.Generator().manual_seed(6)
    cache, table = make_cache(generator, KV_LENS, format=format)
    arguments = {
        "q": normal(generator, TOKENS, HEADS, ROW.width),
        "cache": cache,
        "rows": row_lists(generator, table, topk=7),
        "softmax_scale": SCALE,
        "layer": 1,
    }
    return Call(ops.sparse_mla, {**arguments, **options})


def sparse_apart() -> Call:
    """e4m3 queries in two tensors, with a scale for each token."""
    generator = torch.Generator().manual_seed(16)
    q = normal(generator, TOKENS, HEADS, ROW.width)
    return sparse_call("fp8_token").but(
        q=strided(q[..., : ROW.kv_lora_rank].to(E4M3)),
        q_rope=strided(q[..., ROW.kv_lora_rank :]),
        q_scale=torch.rand(TOKENS, generator=generator) + 0.5,
    )


def row_lists(generator: torch.Generator, table: Tensor, *, topk: int) -> Tensor:
    """Rows that hold tokens, some twice, with numbers among them that are no rows."""
    _, slots = flat_table(table, KV_LENS)
    chosen = slots[torch.randint(len(slots), (TOKENS, topk), generator=generator)]
    chosen[:, 2], chosen[1:3, 4], chosen[3] = -1, torch.iinfo(torch.int32).max, -5
    return chosen


def sparse_extra() -> Call:
    """A second cache of another format and page count, lengths for both lists, a sink, a split."""
    generator = torch.Generator().manual_seed(7)
    cache, table = make_cache(generator, KV_LENS, format="fp8_block128")
    lens = int32([3, 0, 5, 5, 1, 2, 5])
    extra = ops.ExtraRows(cache, row_lists(generator, table, topk=5), lens, 1)
    call = sparse_call("fp8_token", extra=extra, plan=EvenSplit(2))
    return call.but(
        q=strided(call.arguments["q"]),
        topk_lens=int32([7, 2, 0, 7, 1, 6, 3]),
        sink=normal(generator, HEADS, dtype=F32),
    )


def logits_call(format: str = "fp8_token", *, flat: bool = False, **options: Any) -> Call:
    generator = torch.Generator().manual_seed(8)
    cache, table = make_cache(generator, KV_LENS, format=format, row=INDEX_ROW)
    arguments = {
        "q": normal(generator, TOKENS, 2, INDEX_ROW.width),
        "weights": normal(generator, TOKENS, 2, dtype=F32),
        "cache": cache,
        "page_table": flat_table(table, KV_LENS) if flat else table,
        "kv_lens": int32(KV_LENS),
        "q_starts": starts(Q_LENS),
    }
    return Call(ops.indexer_logits, {**arguments, **options})


def select_call(format: str = "fp8_token", *, flat: bool = False, **options: Any) -> Call:
    """Scores of two queries fit the limit: some blocks have queries of two requests."""
    call = logits_call(format, flat=flat)
    limit = {"k": 4, "max_kv_len": 10, "max_score_bytes": 2 * 12 * 4}
    return Call(ops.indexer_select, {**call.arguments, **limit, **options})


def physical_rows_call(*, flat: bool = False, **options: Any) -> Call:
    """Two queries follow those of all requests."""
    generator = torch.Generator().manual_seed(15)
    _, table = make_cache(generator, KV_LENS)
    tokens = torch.randint(-2, 9, (TOKENS + 2, 5), generator=generator)
    tokens[1, 2], tokens[4, 0] = 10_000, -(2**31)
    arguments = {
        "tokens": tokens.int(),
        "page_table": flat_table(table, KV_LENS) if flat else table.where(table < 1000, -1),
        "page_size": PAGE_SIZE,
        "q_starts": starts(Q_LENS),
    }
    return Call(ops.physical_rows, {**arguments, **options})


def topk_call(**options: Any) -> Call:
    generator = torch.Generator().manual_seed(9)
    logits = normal(generator, TOKENS, 11, dtype=F32)
    logits[2], logits[3, 4] = -torch.inf, logits[3, 5]
    return Call(ops.indexer_topk, {"logits": logits, "k": 4, **options})


def merge_call(parts: int, **options: Any) -> Call:
    generator = torch.Generator().manual_seed(10)
    outs = [strided(normal(generator, TOKENS, HEADS, 6)) for _ in range(parts)]
    lses = [normal(generator, TOKENS, HEADS, dtype=F32) for _ in range(parts)]
    for out, lse in zip(outs, lses, strict=True):
        lse[1], out[1] = -torch.inf, torch.nan
    return Call(ops.merge_states, {"outs": outs, "lses": lses, **options})


def merge_transposed() -> Call:
    """Parts that lie head by head in memory."""
    call = merge_call(2)
    outs = [out.transpose(0, 1).contiguous().transpose(0, 1) for out in call.arguments["outs"]]
    lses = [lse.T.contiguous().T for lse in call.arguments["lses"]]
    return call.but(outs=outs, lses=lses)


def quantize_call(*batch: int, **options: Any) -> Call:
    x = normal(torch.Generator().manual_seed(11), *batch, 5, 20)
    return Call(ops.quantize_fp8, {"x": strided(x), "group": 8, "scale_ub": 1.5, **options})


def scaled_mm_call(*batch: int, **options: Any) -> Call:
    generator = torch.Generator().manual_seed(12)
    a, a_scale = ops.quantize_fp8(normal(generator, *batch, 5, 20), 8, backend="cpu")
    arguments = {
        "a": strided(a),
        "a_scale": a_scale,
        "b": normal(generator, *batch, 7, 20).to(E4M3),
        "b_scale": torch.rand(*batch, 2, 3, generator=generator) + 0.5,
        "n_group": 4,
        "k_group": 8,
    }
    return Call(ops.scaled_mm_fp8, {**arguments, **options})


def matmul_call() -> Call:
    """Weights as absorbing takes them: a transposed view."""
    generator = torch.Generator().manual_seed(13)
    a, b = normal(generator, 5, HEADS, 8), normal(generator, HEADS, 8, 6)
    return Call(ops.batched_matmul, {"a": a.transpose(0, 1), "b": b.transpose(1, 2)})


CALLS: dict[str, Callable[[], Call]] = {
    "decode": decode_call,
    "decode-apart-e4m3": decode_apart,
    "decode-one-each-fp32": decode_one_each,
    "decode-shard": decode_shard,
    "decode-padded-window": lambda: decode_call(padded=True, mask=masks.sliding_window_causal(2)),
    "decode-fp8-plan": lambda: decode_call(
        "fp8", tensor_scale=0.7, plan=plan_decode(KV_LENS, num_ctas=3, tile=2)
    ),
    "decode-fp8-scale-tensor-flat": lambda: decode_call(
        "fp8", tensor_scale=torch.tensor([0.7]), flat=True, mask=masks.NULL
    ),
    "decode-block128-split": lambda: decode_call("fp8_block128", plan=EvenSplit(3)),
    "decode-block64-fixed-plan": lambda: decode_call(
        "fp8_block64", plan=plan_decode(KV_LENS, num_ctas=2, tile=2, fixed_split=4).tensors()
    ),
    "append": append_call,
    "append-fp8-flat": lambda: append_call("fp8", flat=True, tensor_scale=0.02),
    "append-fp8-scale-tensor": lambda: append_call("fp8", tensor_scale=torch.tensor(0.02)),
    "append-token-power-of-two": lambda: append_call("fp8_token", power_of_two_scales=True),
    "append-shard-positions": lambda: append_call(
        "fp8_token", kv_shard=(1, 2, 2), positions=int32([0, 8, 3, 3, 1, 7, 2])
    ),
    "append-block128": lambda: append_call("fp8_block128"),
    "append-block64-transposed": append_transposed,
    "append-slots": append_by_slots,
    "append-rows": append_rows_call,
    "append-rows-fp8-scale-tensor": lambda: append_rows_call(
        "fp8", tensor_scale=torch.tensor(0.02)
    ),
    "append-rows-block128": lambda: append_rows_call("fp8_block128"),
    "append-rows-index-keys": lambda: append_rows_call(
        "fp8_token", row=INDEX_ROW, power_of_two_scales=True
    ),
    "compress": compress_call,
    "compress-flat-block128-keep": lambda: compress_call("fp8_block128", flat=True, keep=2),
    "prefill": prefill_call,
    "prefill-strided-window-alibi-sink": prefill_strided,
    "prefill-e4m3": prefill_e4m3,
    "sparse": sparse_call,
    "sparse-extra": sparse_extra,
    "sparse-apart-e4m3": sparse_apart,
    "logits": logits_call,
    "logits-flat-null-max": lambda: logits_call("bf16", flat=True, mask=masks.NULL, max_kv_len=10),
    "select": select_call,
    "select-always": lambda: select_call(init_tokens=1, local_tokens=2),
    "select-flat-null-whole": lambda: select_call(
        "bf16", flat=True, mask=masks.NULL, max_kv_len=None, max_score_bytes=2**20
    ),
    "physical-rows": physical_rows_call,
    "physical-rows-flat": lambda: physical_rows_call(flat=True),
    "topk": topk_call,
    "topk-ranges": lambda: topk_call(
        row_starts=int32([0, 3, 0, 2, 11, 4, 5]), row_ends=int32([11, 4, 11, 9, 11, 4, 11])
    ),
    "merge": lambda: merge_call(3, sink=torch.tensor([0.3, -torch.inf, 2.0])),
    "merge-one": lambda: merge_call(1),
    "merge-transposed": merge_transposed,
    "quantize": quantize_call,
    "quantize-batch": lambda: quantize_call(2),
    "scaled-mm": scaled_mm_call,
    "scaled-mm-batch-e4m3": lambda: scaled_mm_call(2, out_dtype=E4M3),
    "matmul": matmul_call,
}
