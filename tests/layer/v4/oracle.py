"""One layer of DeepSeek-V4 in float64, over a whole sequence, token by token.

Written from `modeling_deepseek_v4.py` of transformers 5.17.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mlakit import rope_table
from mlakit.model.v4 import CSA, HCA, SLIDING, V4Config


class V4Oracle:
    """The layer of a config and of parameters by their names in the layer."""

    def __init__(self, config: V4Config, layer: int, parameters: Mapping[str, Tensor]) -> None:
        self.config, self.kind = config, config.kinds[layer]
        self.weights = {name: each.detach().cpu().double() for name, each in parameters.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def rms_norm(self, x: Tensor, name: str | None = None) -> Tensor:
        normed = x * (x.square().mean(-1, keepdim=True) + self.config.epsilon).rsqrt()
        return normed if name is None else normed * self.weights[f"{name}.weight"]

    def rotated(self, x: Tensor, position: int, sign: float = 1.0) -> Tensor:
        """The last columns of x [..., D] rotated by the angles of a position."""
        table = rope_table(self.config.geometry(self.kind), torch.tensor([position]))[0].double()
        columns = self.config.qk_rope_head_dim
        cos, sin = table[::2], table[1::2] * sign
        a, b = x[..., -columns::2], x[..., -columns + 1 :: 2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return torch.cat([x[..., :-columns], turned], -1)

    def pooled(self, x: Tensor, name: str) -> list[Tensor]:
        """The rows of all complete windows of a compressor or an indexer."""
        rate = self.config.rate(self.kind)
        kv, gate = (self.linear(f"{name}.{each}", x) for each in ("kv_proj", "gate_proj"))
        bias = self.weights[f"{name}.position_bias"]
        width, rows = len(self.weights[f"{name}.kv_norm.weight"]), []
        for window in range(len(x) // rate):
            own = range(window * rate, (window + 1) * rate)
            parts = [(kv[t, -width:], (gate[t] + bias[t % rate])[-width:]) for t in own]
            if self.kind == CSA and window:
                earlier = range((window - 1) * rate, window * rate)
                parts += [(kv[t, :width], (gate[t] + bias[t % rate])[:width]) for t in earlier]
            values, gates = (torch.stack(each) for each in zip(*parts, strict=True))
            row = self.rms_norm((gates.softmax(0) * values).sum(0), f"{name}.kv_norm")
            rows.append(self.rotated(row, window * rate))
        return rows

    def selected(self, x: Tensor, residual: Tensor, t: int, keys: list[Tensor]) -> list[int]:
        """The entries that the query of token t attends to; the lower one of equal scores."""
        c, count = self.config, (t + 1) // self.config.csa_rate
        q = self.linear("compressor.indexer.q_b_proj", residual[t]).view(c.index_n_heads, -1)
        q = self.rotated(q, t)
        w = self.linear("compressor.indexer.scorer.weights_proj", x[t])
        scores = [float((w * (q @ keys[entry]).relu()).sum()) for entry in range(count)]
        return sorted(range(count), key=lambda entry: (-scores[entry], entry))[: c.index_topk]

    def run(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden] float64."""
        c, x = self.config, x.cpu().double()
        residual = self.rms_norm(self.linear("q_a_proj", x), "q_a_norm")
        q = self.rms_norm(self.linear("q_b_proj", residual).view(len(x), c.num_heads, -1))
        kv = self.rms_norm(self.linear("kv_proj", x), "kv_norm")
        kv = torch.stack([self.rotated(row, t) for t, row in enumerate(kv)])
        entries = [] if self.kind == SLIDING else self.pooled(x, "compressor")
        keys = self.pooled(x, "compressor.indexer") if self.kind == CSA else []
        results = []
        for t in range(len(x)):
            rows = list(kv[max(t - c.sliding_window + 1, 0) : t + 1])
            if self.kind == HCA:
                rows += entries[: (t + 1) // c.hca_rate]
            elif self.kind == CSA:
                rows += [entries[each] for each in self.selected(x, residual, t, keys)]
            seen = torch.stack(rows)
            scores = self.rotated(q[t], t) @ seen.T * c.head_dim**-0.5
            scores = torch.cat([scores, self.weights["sinks"][:, None]], 1)
            out = self.rotated(scores.softmax(1)[:, :-1] @ seen, t, -1.0)
            groups = out.reshape(c.o_groups, -1)
            matrices = self.weights["o_a_proj.weight"].view(c.o_groups, c.o_lora_rank, -1)
            low = torch.einsum("gk,grk->gr", groups, matrices).flatten()
            results.append(self.linear("o_b_proj", low))
        return torch.stack(results)
