"""Reference of the compressor of DeepSeek-V4: one row for each window of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mlakit.dispatch.autocast import without_autocast
from mlakit.reference.norm_rope_quant import rms_norm, rotate


@without_autocast
def compress_rows(
    kv: Tensor,  # [tokens, columns]; columns are D, or 2·D with overlap
    gate: Tensor,  # [tokens, columns]
    bias: Tensor,  # [rate, columns]
    gamma: Tensor | None,  # [D]; None: no norm
    freqs: Tensor | None,  # [positions, D_R], rows of cos_sin; None: no rotation
    states: Sequence[Tensor],  # per request [earlier tokens, 2·columns]; only some are read
    q_lens: Sequence[int],
    *,
    rate: int,
    overlap: bool,
    epsilon: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, list[tuple[int, int]], Tensor]:
    """The rows of the windows that new tokens complete, one at a time, before quantisation.

        state[t]  = [ kv[t] | gate[t] + bias[position % rate] ]
        pooled[c] = Σ_j softmax_j(z[j, c]) · x[j, c]
        row       = rms_norm(pooled) · gamma, its last D_R columns rotated by freqs[w · rate]

    x and z are the two halves of the states of tokens [w · rate, (w + 1) · rate). With overlap the
    window also has the tokens before, [(w − 1) · rate, w · rate): their first D columns, and the
    last D columns of its own tokens. Window 0 has none before it.

    Without gamma there is no norm.

    Returns rows [windows, D], (request, window) of each row, and new states [tokens, 2·columns].
    """
    width = kv.shape[1] // (1 + overlap)
    rows, windows, new_states = [], [], []
    first = 0
    for request, (before, q_len) in enumerate(zip(states, q_lens, strict=True)):
        tokens = list(before.to(dtype))
        for token in range(first, first + q_len):
            z = gate[token].to(dtype) + bias[len(tokens) % rate].to(dtype)
            tokens.append(torch.cat([kv[token].to(dtype), z]))
            new_states.append(tokens[-1])
            if len(tokens) % rate:
                continue
            window = len(tokens) // rate - 1
            own = [state.chunk(2) for state in tokens[window * rate :]]
            parts = [(x[-width:], z[-width:]) for x, z in own]
            if overlap and window > 0:
                earlier = [state.chunk(2) for state in tokens[-2 * rate : window * rate]]
                parts = [(x[:width], z[:width]) for x, z in earlier] + parts
            x, z = (torch.stack(part) for part in zip(*parts, strict=True))
            row = (x * z.softmax(0)).sum(0)
            if gamma is not None:
                row = rms_norm(row, gamma, epsilon, dtype)
            if freqs is not None:
                d_r = freqs.shape[1]
                row[width - d_r :] = rotate(row[width - d_r :], freqs[window * rate], dtype=dtype)
            rows.append(row)
            windows.append((request, window))
        first += q_len
    return (
        torch.stack(rows) if rows else kv.new_empty(0, width, dtype=dtype),
        windows,
        torch.stack(new_states) if new_states else kv.new_empty(0, 2 * kv.shape[1], dtype=dtype),
    )
