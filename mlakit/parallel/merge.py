"""`merge_over_ranks`: the attention over all keys, from every rank's attention over its own."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor
from torch import distributed as dist

from mlakit.dispatch.checks import FLOATS, Dims
from mlakit.dispatch.knobs import Backend
from mlakit.ops import merge_states
from mlakit.ops._refusals import refuse_grad
from mlakit.parallel.buffers import Partials
from mlakit.parallel.groups import gather_over_ranks, group_rank

NAME = "merge_over_ranks"
MergeMethod = Literal["all_gather", "all_to_all", "all_reduce"]


def merge_over_ranks(
    out: Tensor,
    lse: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    method: MergeMethod = "all_gather",
    sink: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The attention over the keys of all ranks, from each rank's attention over its own.

        lse = log Σ_r exp lse_r        out = Σ_r exp(lse_r − lse) out_r

    out     [tokens, heads, v_width] of this rank's keys, as `mla_decode` and `decode_attend` give
            it; not read where lse is −inf, which is where this rank has no key of the request
    lse     [tokens, heads] float32, natural log
    group   of the ranks that share the keys; None: the default group
    method  "all_gather"  one collective; every rank gets all heads, with the same bits
            "all_to_all"  one collective; every rank gets its heads / world heads, rank 0 the first
                          ones. For layers whose heads are sharded over the same group
            "all_reduce"  a maximum of lse and a float32 sum; every rank gets all heads. Sends fewer
                          bytes than all_gather over more than 4 ranks with 16-bit `out`
    sink    [heads of the result] float32 logit that joins out's denominator only. Give it here,
            not to the ranks' attention, so that it counts once

    Shapes, dtypes and options are the same on all ranks. Results of functional collectives are
    waited for. Does not synchronise with the host.

    Returns out in its dtype, and lse float32; 0 and −inf where no rank has a key.
    """
    dims = Dims(NAME)
    dims.match("out", out, "tokens", "heads", "v_width", dtypes=FLOATS)
    dims.match("lse", lse, "tokens", "heads", dtypes=[torch.float32])
    heads = dims["heads"]
    _, world = group_rank(NAME, group)
    check_method(dims, method)
    if method == "all_to_all":
        check_divided_heads(dims, "out", heads, world)
        heads //= world
    if sink is not None:
        dims.bind("heads of the result", heads, f"those of {method}")
        dims.match("sink", sink, "heads of the result", dtypes=[torch.float32])
    refuse_grad(NAME, out=out, lse=lse)
    if world == 1 or out.numel() == 0:
        mine = slice(heads)  # without tokens all ranks have the same
        return merge_states([out[:, mine]], [lse[:, mine]], sink=sink, backend=backend)
    if method == "all_reduce":
        return _reduced(out, lse, group, sink)
    exchange = _exchanged if method == "all_to_all" else _gathered
    partials = exchange(out, lse, group, world)
    return merge_states(partials.outs, partials.lses, sink=sink, backend=backend)


def check_method(dims: Dims, method: str) -> None:
    known = get_args(MergeMethod)
    dims.require(method in known, "method", f"be one of {', '.join(known)}", method)


def check_divided_heads(dims: Dims, arg: str, heads: int, world: int) -> None:
    must = f"have heads that all_to_all can divide over {world} ranks"
    dims.require(heads % world == 0, arg, must, heads)


def _gathered(out: Tensor, lse: Tensor, group: dist.ProcessGroup | None, world: int) -> Partials:
    """The partials of all ranks, for all heads."""
    heads = out.shape[1]
    mine, received = Partials.allocate(1, out, heads), Partials.allocate(world, out, heads)
    mine.outs[0].copy_(out)
    mine.lses[0].copy_(lse)
    gather_over_ranks(received.buffer, mine.buffer, group)
    return received


def _exchanged(out: Tensor, lse: Tensor, group: dist.ProcessGroup | None, world: int) -> Partials:
    """The partials of all ranks, for the heads of this rank."""
    heads = out.shape[1] // world
    sent, received = (Partials.allocate(world, out, heads) for _ in range(2))
    for rank in range(world):
        of_rank = slice(rank * heads, (rank + 1) * heads)
        sent.outs[rank].copy_(out[:, of_rank])
        sent.lses[rank].copy_(lse[:, of_rank])
    dist.all_to_all_single(received.buffer, sent.buffer, group=group)
    return received


def _reduced(
    out: Tensor, lse: Tensor, group: dist.ProcessGroup | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Numerator and denominator as float32 sums over the ranks, rounded once."""
    row_max = torch.empty_like(lse, memory_format=torch.contiguous_format).copy_(lse)
    dist.all_reduce(row_max, dist.ReduceOp.MAX, group=group)
    row_max = row_max.masked_fill(row_max.isneginf(), 0.0)  # −inf − (−inf) is NaN
    weight = (lse - row_max).exp()
    # the last column is the weight itself
    sums = torch.empty(*out.shape[:2], out.shape[2] + 1, dtype=torch.float32, device=out.device)
    sums[..., :-1] = (out.float() * weight[..., None]).masked_fill(weight[..., None] == 0, 0.0)
    sums[..., -1] = weight
    dist.all_reduce(sums, group=group)
    row_sum = sums[..., -1]
    divisor = row_sum if sink is None else row_sum + (sink - row_max).exp()
    merged = sums[..., :-1] / divisor.masked_fill(divisor == 0, 1.0)[..., None]
    return merged.to(out.dtype), row_max + row_sum.log()
