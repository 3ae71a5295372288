"""Windows of tokens pooled to one row each, normalised, rotated, quantised and stored.

Maths      pooled[c] = Σ_j softmax_j(z[j, c]) · x[j, c]
           row = R(pooled · rsqrt(mean pooled² + ε) · γ)
Numbers    float32; the order of each sum is that of the window, however a prompt is split
Work       a few operations for each block of windows, which torch shares out among its threads
Memory     reads kv and gate of new tokens and the states of older ones; writes one row per window
           that the step completes, and the states of tokens that later windows read
Lineage    own design; ideas: the compressor of DeepSeek-V4, and its layout of states in vLLM
"""

from __future__ import annotations

import torch
from torch import Tensor

from mlakit.cache import token_positions, token_requests, token_slots
from mlakit.kernels.arguments import CompressArguments, filled
from mlakit.kernels.cpu.norm_rope_quant import rms_norm, rotate
from mlakit.kernels.cpu.workspace import row_blocks


def compress_rows(a: CompressArguments) -> None:
    kv_lens, starts = a.kv_lens.long(), filled(a.q_starts).long()
    before = kv_lens - starts.diff()
    first = before // a.rate
    window_starts = torch.nn.functional.pad((kv_lens // a.rate - first).cumsum(0), (1, 0))
    request, index = token_requests(window_starts, int(window_starts[-1]))
    window = first[request] + index
    elements = a.rate * (1 + a.overlap) * a.kv.shape[1]
    # states of all tokens of a window, and about two values more for each
    for block in row_blocks(len(window), elements, 4 * 6 * elements):
        _write_windows(a, request[block], window[block], before, starts)
    _store_states(a, kv_lens, starts)


def _write_windows(
    a: CompressArguments, request: Tensor, window: Tensor, before: Tensor, starts: Tensor
) -> None:
    """Rows of some windows, by int64 request and window."""
    rate, d_row = a.rate, a.layer.codec.row.width
    slot = torch.arange(rate * (1 + a.overlap), device=window.device)
    token = (window - int(a.overlap))[:, None] * rate + slot
    exists = token >= 0  # window 0 has no window before it
    is_new = exists & (token >= before[request][:, None])
    states = a.kv.new_zeros(*token.shape, 2 * a.kv.shape[1], dtype=torch.float32)
    row = (starts[request] - before[request])[:, None] + token
    states[is_new] = _states(a, row[is_new], token[is_new])
    is_old = exists & ~is_new
    if bool(is_old.any()):
        owner = request[:, None].expand_as(token)[is_old]
        slots = token_slots(a.state_table, a.state.page_size, owner, token[is_old])
        states[is_old] = a.state.read_unchecked(slots)
    x, z = states.chunk(2, dim=-1)
    if a.overlap:  # earlier tokens have the first columns of a row, own tokens the last
        x, z = (
            torch.cat([part[:, :rate, :d_row], part[:, rate:, d_row:]], dim=1) for part in (x, z)
        )
    weights = z.masked_fill(~exists[..., None], -torch.inf).softmax(dim=1)
    rows = (x * weights).sum(dim=1)
    if a.gamma is not None:
        rows = rms_norm(rows, a.gamma.float(), a.epsilon)
    if a.freqs is not None:
        d_r = a.freqs.shape[1]
        rows[:, d_row - d_r :] = rotate(
            rows[:, d_row - d_r :], a.freqs[window * rate].float(), rope="interleaved"
        )
    slots = token_slots(a.page_table, a.layer.page_size, request, window)
    a.layer.write_unchecked(slots, rows, power_of_two_scales=a.power_of_two_scales)


def _store_states(a: CompressArguments, kv_lens: Tensor, starts: Tensor) -> None:
    """States of new tokens that a later window reads, after `keep` tokens are taken back too."""
    request, position = token_positions(kv_lens, starts, int(starts[-1]))
    needed_from = ((kv_lens - a.keep) // a.rate - int(a.overlap)) * a.rate
    is_kept = position >= needed_from[request]
    slots = token_slots(a.state_table, a.state.page_size, request[is_kept], position[is_kept])
    a.state.write_unchecked(slots, _states(a, is_kept.nonzero().flatten(), position[is_kept]))


def _states(a: CompressArguments, row: Tensor, position: Tensor) -> Tensor:
    """float32 [kv | gate + bias] of rows of kv and gate, at these positions."""
    gate = a.gate[row].float() + a.bias[position % a.rate].float()
    return torch.cat([a.kv[row].float(), gate], dim=-1)
