"""The oracle of expanded attention for one token of a prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit import reference
from mlakit.model.masks import NULL
from mlakit.tools.bench.correctness import Sample


def token_sample(
    token: int, keys: slice, q: Tensor, k_nope: Tensor, k_rope: Tensor, v: Tensor, scale: float
) -> Sample:
    """(out, lse) of `token` over its visible `keys`, which its mask has selected already."""
    own = slice(token, token + 1)

    def oracle(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return reference.mla_prefill(
            q[own],
            k_nope[keys],
            k_rope[keys],
            v[keys],
            [0, 1],
            [0, keys.stop - keys.start],
            softmax_scale=scale,
            mask=NULL,
            dtype=dtype,
        )

    return Sample.of(f"token {token}", own, oracle)
