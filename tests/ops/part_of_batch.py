"""A call with some of the requests of another call's batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mlakit import ops
from mlakit.cache import select_requests
from mlakit.plan import DecodePlan, DecodePlanTensors, plan_decode
from tests.ops.cases import KV_LENS, Q_LENS, Call, starts

PER_TOKEN = ("q", "q_rope", "q_scale", "kv", "weights", "rows", "topk_lens", "logits")
PER_TOKEN += ("row_starts", "row_ends", "x", "outs", "lses", "slots", "positions")
PER_TOKEN += ("latent", "tokens", "gate")
PER_KEY = ("k_nope", "k_rope", "v", "k_scale", "v_scale")


def tokens_of(lengths: Sequence[int], requests: Sequence[int]) -> Tensor:
    """The rows that belong to some requests of a ragged batch."""
    bounds = starts(lengths).tolist()
    ranges = [torch.arange(bounds[b], bounds[b + 1]) for b in requests]
    return torch.cat([torch.arange(0), *ranges])


def of_requests(call: Call, requests: Sequence[int]) -> Call:
    """A call with only these requests of the batch, in this order; a token may be a request."""
    a = call.arguments
    ragged = a.get("q_starts") is not None
    chosen = tokens_of(Q_LENS, requests) if ragged else torch.tensor(requests, dtype=torch.int64)
    keys = tokens_of(KV_LENS, requests) if "kv_starts" in a else None

    def part(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [part(name, each) for each in value]
        if isinstance(value, ops.ExtraRows):
            return value._replace(rows=value.rows[chosen], topk_lens=value.topk_lens[chosen])
        if isinstance(value, (DecodePlan, DecodePlanTensors)):
            kv_lens = [KV_LENS[b] for b in requests]
            return plan_decode(kv_lens, num_ctas=2, tile=2, fixed_split=4)
        if name == "kv_lens":
            return value[torch.tensor(requests, dtype=torch.int64)]
        if name in ("page_table", "state_table"):
            return select_requests(value, requests)
        if name in PER_TOKEN or (name in PER_KEY and keys is None):
            return value[chosen]
        return value[keys] if name in PER_KEY else value

    others = {name: None if value is None else part(name, value) for name, value in a.items()}
    if ragged:
        others["q_starts"] = starts([Q_LENS[b] for b in requests])
    if keys is not None:
        others["kv_starts"] = starts([KV_LENS[b] for b in requests])
    return call.but(**others)
