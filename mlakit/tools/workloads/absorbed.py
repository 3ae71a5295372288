"""What cases of absorbed attention share: queries in one or two parts, and results to write to."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from mlakit.tools.workloads.case import BatchedCase
from mlakit.tools.workloads.inputs import DTYPES, Inputs
from mlakit.tools.workloads.paged import PagedCase


@dataclass(frozen=True, eq=False)
class Query:
    """The query arguments, and the same numbers for the oracle."""

    arguments: dict[str, Any]
    exact: Tensor  # [tokens, heads, width] float64, scaled by q_scale
    stored: Tensor  # the same, not scaled
    sink: Tensor | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class AbsorbedCase(BatchedCase, PagedCase):
    """A case of absorbed attention.

    dtype          of q
    q_rope_dtype   of a separate q_rope; "": q has all columns
    q_scaled       pass a q_scale
    sharpness      standard deviation of the scores of a head of average magnitude; negative for a
                   negative softmax_scale
    sink           "", "finite" or "mixed" (with ±inf)
    given_results  pass tensors for the results
    """

    heads: int = 4
    dtype: str = "bf16"
    q_rope_dtype: str = ""
    q_scaled: bool = False
    sharpness: float = 2.0
    sink: str = ""
    given_results: bool = False

    @property
    def softmax_scale(self) -> float:
        """Gives the scores a standard deviation of `sharpness`."""
        return self.sharpness / sqrt(self.row.width)

    def query(self, inputs: Inputs, tokens: int) -> Query:
        """Draw the queries of a call, without a sink."""
        values, row = inputs.queries(tokens, self.heads, self.row.width), self.row
        if self.q_rope_dtype:
            latent, rope = values.split([row.kv_lora_rank, row.qk_rope_head_dim], dim=-1)
            arguments = {
                "q": inputs.place("q", latent, self.dtype),
                "q_rope": inputs.place("q_rope", rope, self.q_rope_dtype),
            }
        else:
            arguments = {"q": inputs.place("q", values, self.dtype)}
        parts = [each.to(inputs.drawn_on).double() for each in arguments.values()]
        exact = stored = torch.cat(parts, dim=-1)
        if self.q_scaled:
            q_scale = inputs.place("q_scale", inputs.uniform(0.5, 1.5, tokens))
            arguments["q_scale"] = q_scale
            exact = stored * q_scale.to(stored.device).double()[:, None, None]
        return Query(arguments, exact, stored)

    def results(
        self, inputs: Inputs, tokens: int, *numbers: str, of: str = ""
    ) -> dict[str, Tensor]:
        """Tensors for out and the float32 results named `numbers`; none without given_results."""
        if not self.given_results:
            return {}
        dtype = torch.bfloat16 if self.dtype == "e4m3" else DTYPES[self.dtype]
        shape = (tokens, self.heads)
        return {"out": inputs.result(f"out{of}", (*shape, self.row.v_width), dtype)} | {
            name: inputs.result(f"{name}{of}", shape, torch.float32) for name in numbers
        }
