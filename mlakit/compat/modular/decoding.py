"""`flare_mla_decoding`: absorbed attention over a paged or contiguous cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mlakit.cache import CacheLayer, PagedLatentCache, token_requests
from mlakit.cache.layouts import bits
from mlakit.compat.modular.arguments import (
    check_key_cache,
    check_row_offsets,
    check_used_pages,
    step_lengths,
)
from mlakit.compat.modular.collection import KeyCache
from mlakit.dispatch.checks import E4M3, FLOATS, INTEGERS, Dims, as_signed
from mlakit.model.geometry import RowShape
from mlakit.model.masks import Mask
from mlakit.ops import mla_decode
from mlakit.ops._refusals import refuse_grad
from mlakit.plan import EvenSplit

NAME = "flare_mla_decoding"
CONTIGUOUS_ROW = RowShape(512, 64)  # the contiguous overload is documented for 576 / 512 only


@dataclass(frozen=True)
class MLAConfig:
    """The heads and depth that a caller expects; checked against q."""

    num_heads: int
    depth: int


def flare_mla_decoding(output: Tensor, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Attention of the newest tokens of each request over its cached rows, in two overloads.

    Paged cache::

        flare_mla_decoding(output, q, k, mask_functor, valid_length, scale, scalar_args_buf=None, *,
            q_max_seq_len=None, kv_input_row_offsets=None, num_partitions=None, q_scale=None,
            config=None, ragged=False, decoding_warp_split_k=False,
            per_token_scale_rope_aware=False)

    Contiguous cache::

        flare_mla_decoding(output, q, k_tensor, mask_functor, scale, scalar_args_buf=None, *,
            num_partitions=None, config=None, decoding_warp_split_k=False)

    output        [tokens, heads, D_C] if ragged, else [batch, q_len, heads, D_C]; q's dtype,
                  or bf16 for float8_e4m3fn q; written
    q             [..., heads, D_C + D_R], absorbed and rotated; float8_e4m3fn rows of D_C + 2·D_R
                  bytes with `per_token_scale_rope_aware`
    k             a KeyCache that already holds the new tokens, with or without scales
    k_tensor      [batch, keys, 1, 576], the new tokens last
    mask_functor  a mask of this package
    valid_length  ragged: row offsets [batch + 1]; else new tokens [batch] of each request; further
                  rows of q are not read, and those of output not written
    scale         softmax scale
    q_scale       [tokens] float32, multiplies q (rope-aware rows only; None means 1)

    The keys are split into `num_partitions` splits (default: the third number of
    `scalar_args_buf`). Neither this nor `decoding_warp_split_k` changes a result beyond float32
    rounding. A query that sees no key gives zeros. Returns `output`.
    """
    if "k_tensor" in kwargs:
        return _contiguous(output, q, *args, **kwargs)
    k = args[0] if args else kwargs.get("k")
    if not isinstance(k, Tensor):
        return _paged(output, q, *args, **kwargs)
    if "k" in kwargs:
        kwargs["k_tensor"] = kwargs.pop("k")
    return _contiguous(output, q, *args, **kwargs)


def _paged(
    output: Tensor,
    q: Tensor,
    k: KeyCache,
    mask_functor: Mask,
    valid_length: Tensor,
    scale: float,
    scalar_args_buf: Tensor | None = None,
    *,
    q_max_seq_len: int | None = None,
    kv_input_row_offsets: Tensor | None = None,
    num_partitions: int | None = None,
    q_scale: Tensor | None = None,
    config: MLAConfig | None = None,
    ragged: bool = False,
    decoding_warp_split_k: bool = False,
    per_token_scale_rope_aware: bool = False,
) -> Tensor:
    dims = Dims(NAME)
    cache = check_key_cache(dims, "k", k)
    _check_rows(dims, cache, per_token_scale_rope_aware)
    axes = ("tokens", "heads") if ragged else ("batch", "q_len", "heads")
    depth = cache.layer.payload.shape[-1] if cache.is_rope_aware else cache.row.width
    _check_query(dims, output, q, axes, depth, cache.row.v_width, cache.layer)
    scale = _check_common(dims, mask_functor, scale, config, cache.row.width)
    if ragged:
        offsets = check_row_offsets(dims, "valid_length", valid_length, dims["tokens"])
    else:
        offsets = _padded_offsets(dims, valid_length)
    if kv_input_row_offsets is not None:
        check_row_offsets(dims, "kv_input_row_offsets", kv_input_row_offsets, None)
    _check_q_scale(dims, q_scale, ragged, per_token_scale_rope_aware)
    longest = _check_lengths(dims, cache, offsets, mask_functor)
    if q_max_seq_len is not None:
        _check_longest(dims, "q_max_seq_len", q_max_seq_len, longest)
    splits = _num_splits(dims, num_partitions, scalar_args_buf, longest)
    if dims["batch"] == 0 or q.shape[0] == 0:
        return output

    kv_lens = cache.kv_lens(offsets)
    first = mask_functor.first_visible_keys_on_device(cache.cache_lengths, kv_lens)
    layer = cache.with_scales_by_page(first, kv_lens).layer
    step = _Step(q, q_scale, cache.lookup_table, offsets, kv_lens)
    if ragged:
        _decode(output, step, layer, mask_functor, scale, splits)
        return output
    packed, rows, is_valid = _packed(step)
    results = output.new_empty(len(packed.q), *output.shape[2:])
    _decode(results, packed, layer, mask_functor, scale, splits)
    output.copy_(torch.where(is_valid[..., None, None], results[rows], output))
    return output


def _contiguous(
    output: Tensor,
    q: Tensor,
    k_tensor: Tensor,
    mask_functor: Mask,
    scale: float,
    scalar_args_buf: Tensor | None = None,
    *,
    num_partitions: int | None = None,
    config: MLAConfig | None = None,
    decoding_warp_split_k: bool = False,
) -> Tensor:
    dims = Dims(NAME)
    row = CONTIGUOUS_ROW
    dims.bind("kv_heads", 1, "the one KV head of MLA")
    dims.bind("depth", row.width, "the documented depth")
    axes = ("batch", "keys", "kv_heads", "depth")
    dims.match("k_tensor", k_tensor, *axes, dtypes=[*FLOATS, E4M3])
    dims.rows_contiguous("k_tensor", k_tensor)
    layer = PagedLatentCache.wrap(k_tensor, row).layer(0) if dims["keys"] else None
    _check_query(dims, output, q, ("batch", "q_len", "heads"), row.width, row.v_width, layer)
    scale = _check_common(dims, mask_functor, scale, config, row.width)
    batch, q_len, keys = dims["batch"], dims["q_len"], dims["keys"]
    dims.require(keys >= q_len, "k_tensor", f"include the {q_len} new tokens", f"{keys} keys")
    splits = _num_splits(dims, num_partitions, scalar_args_buf, q_len)
    if batch == 0 or q_len == 0 or layer is None:
        return output

    offsets = torch.arange(batch + 1, device=q.device) * q_len
    table = torch.arange(batch, device=q.device)[:, None]
    kv_lens = torch.full((batch,), keys, dtype=torch.int64, device=q.device)
    results = output.new_empty(batch * q_len, *output.shape[2:])
    step = _Step(q.flatten(0, 1), None, table, offsets, kv_lens)
    _decode(results, step, layer, mask_functor, scale, splits)
    output.copy_(results.unflatten(0, (batch, q_len)))
    return output


for _overload in (_paged, _contiguous):
    # Python's own errors about missing and unknown arguments use this name
    _overload.__name__ = _overload.__qualname__ = NAME


def _check_rows(dims: Dims, cache: KeyCache, rope_aware: bool) -> None:
    dims.require(
        not rope_aware or cache.is_rope_aware,
        "k",
        "hold float8 rows with one scale per token and bf16 rope columns for "
        "per_token_scale_rope_aware",
        f"format {cache.layer.codec.name}",
    )
    dims.require(
        rope_aware or not cache.is_rope_aware,
        "per_token_scale_rope_aware",
        "be True for a cache with one scale per token and bf16 rope columns",
        rope_aware,
    )


def _check_query(
    dims: Dims,
    output: Tensor,
    q: Tensor,
    axes: tuple[str, ...],
    depth: int,
    v_width: int,
    layer: CacheLayer | None,
) -> None:
    dims.bind("depth", depth, "the row width of the cache")
    dims.match("q", q, *axes, "depth")
    refuse_grad(dims.op, q=q)  # padded queries are packed as bytes, without derivatives
    rope_aware = layer is not None and layer.codec.name == "fp8_token"
    stored = layer.payload.dtype if layer is not None else E4M3
    float_dtypes = FLOATS if stored not in FLOATS else (stored,)
    dims.dtype("q", q, *(() if rope_aware else float_dtypes), E4M3)
    dims.rows_contiguous("q", q)
    dims.bind("v_width", v_width, "the value width of the cache")
    result = torch.bfloat16 if q.dtype == E4M3 else q.dtype
    dims.match("output", output, *axes, "v_width", dtypes=[result])
    dims.writable("output", output)


def _check_common(
    dims: Dims, mask_functor: Mask, scale: float, config: MLAConfig | None, depth: int
) -> float:
    if not isinstance(mask_functor, Mask):
        got = type(mask_functor).__name__
        raise TypeError(f"{dims.op}: mask_functor must be a mask object, got {got}")
    if config is not None:
        if not isinstance(config, MLAConfig):
            got = type(config).__name__
            raise TypeError(f"{dims.op}: config must be an MLAConfig, got {got}")
        heads = dims["heads"]
        dims.require(
            config.num_heads == heads, "config.num_heads", f"equal q's, {heads}", config.num_heads
        )
        dims.require(
            config.depth == depth, "config.depth", f"equal the row width, {depth}", config.depth
        )
    return dims.finite("scale", scale)


def _check_q_scale(dims: Dims, q_scale: Tensor | None, ragged: bool, rope_aware: bool) -> None:
    if q_scale is None:
        return
    dims.require(rope_aware, "q_scale", "be None without per_token_scale_rope_aware", "a tensor")
    if not ragged:
        tokens = dims["batch"] * dims["q_len"]
        dims.bind("tokens", tokens, "batch · q_len")
    dims.match("q_scale", q_scale, "tokens", dtypes=[torch.float32])


def _check_lengths(dims: Dims, cache: KeyCache, offsets: Tensor, mask: Mask) -> int | None:
    """The largest number of new tokens of a request; None if not `values_visible`."""
    lengths = step_lengths(dims, cache, offsets)
    if lengths is None:
        return None
    before, after = lengths
    first = mask.first_visible_keys(before, after)
    check_used_pages(dims, cache, first, after, "cache_lengths + new tokens")
    return max((high - low for low, high in zip(before, after, strict=True)), default=0)


def _padded_offsets(dims: Dims, valid_length: Tensor) -> Tensor:
    dims.match("valid_length", valid_length, "batch", dtypes=INTEGERS)
    dims.lengths("valid_length", valid_length, dims["q_len"], "q's rows per request")
    counts = as_signed(valid_length)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0).to(counts.dtype)])


def _check_longest(dims: Dims, arg: str, bound: int, longest: int | None) -> None:
    dims.integer(arg, bound, 0)
    dims.require(
        longest is None or longest <= bound,
        arg,
        f"not be below the longest request, {longest}",
        bound,
    )


def _num_splits(
    dims: Dims, num_partitions: int | None, scalar_args_buf: Tensor | None, longest: int | None
) -> int:
    """`num_partitions`, else the buffer's third number if it is on the CPU, else 1."""
    splits = 1 if scalar_args_buf is None else _check_scalars(dims, scalar_args_buf, longest)
    if num_partitions is not None:
        return dims.integer("num_partitions", num_partitions, 1)
    return splits


def _check_scalars(dims: Dims, scalar_args_buf: Tensor, longest: int | None) -> int:
    name = "scalar_args_buf"
    dims.tensor(name, scalar_args_buf)
    dims.dtype(name, scalar_args_buf, torch.int64)
    shape = tuple(scalar_args_buf.shape)
    dims.require(shape == (3,), name, "have 3 entries", f"shape {shape}")
    # not `same_device`: the buffer is made on the CPU
    where = scalar_args_buf.device.type
    dims.require(where != "meta", name, "be on a device that holds data", "a meta tensor")
    if where != "cpu":
        return 1
    batch, q_max_seq_len, splits = scalar_args_buf.tolist()
    dims.require(batch == dims["batch"], f"{name}[0]", f"equal the batch, {dims['batch']}", batch)
    _check_longest(dims, f"{name}[1]", q_max_seq_len, longest)
    return dims.integer(f"{name}[2]", splits, 1)


class _Step(NamedTuple):
    """The queries and keys of a call; q is [tokens, …], or padded [batch, q_len, …]."""

    q: Tensor
    q_scale: Tensor | None
    page_table: Tensor
    q_starts: Tensor
    kv_lens: Tensor


def _packed(step: _Step) -> tuple[_Step, Tensor, Tensor]:
    """Return (ragged step, rows [batch, q_len], is_valid [batch, q_len]) of a padded step.

    The valid tokens are packed; `rows` is the packed row of each token of q. The host may not know
    how many tokens are valid: the padding tokens become one more request, without keys.
    """
    q, q_scale, table, starts, kv_lens = step
    batch, q_len = q.shape[:2]
    column = torch.arange(q_len, device=q.device)
    is_valid = column < starts.diff()[:, None]
    rows = torch.where(is_valid, starts[:-1, None] + column, 0)
    ends = torch.cat([starts, starts.new_full((1,), batch * q_len)])
    request, index = token_requests(ends, batch * q_len)
    # the queries of the request without keys do not matter: take the first token
    source = torch.where(request < batch, request * q_len + index, 0)
    return (
        _Step(
            bits(q).flatten(0, 1)[source].view(q.dtype),
            None if q_scale is None else q_scale[source],
            torch.cat([table, table.new_zeros(1, table.shape[1])]),
            ends,
            torch.cat([kv_lens, kv_lens.new_zeros(1)]),
        ),
        rows,
        is_valid,
    )


def _split_query(q: Tensor, layer: CacheLayer) -> tuple[Tensor, Tensor]:
    """q's latent and rope columns; rope-aware rows have bf16 rope columns."""
    latent, rope = q[..., : layer.codec.row.kv_lora_rank], q[..., layer.codec.row.kv_lora_rank :]
    if layer.codec.name == "fp8_token":
        rope = rope.contiguous().view(torch.bfloat16)
    return latent, rope


def _decode(
    output: Tensor, step: _Step, layer: CacheLayer, mask: Mask, scale: float, num_splits: int
) -> None:
    q_latent, q_rope = _split_query(step.q, layer)
    mla_decode(
        q_latent,
        layer.as_pool,
        step.page_table,
        step.kv_lens,
        softmax_scale=scale,
        q_rope=q_rope,
        q_scale=step.q_scale,
        q_starts=step.q_starts,
        mask=mask,
        plan=EvenSplit(num_splits),
        out=output,
    )
