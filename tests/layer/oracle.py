"""One layer in float64, over a whole sequence, in the expanded form.

The gate of Kimi K3 was written from `vllm/models/kimi_k3/nvidia/mla.py` of vLLM (commit 01b867e),
whose layer has neither positions nor a sink: out = W_o (attention ⊙ sigmoid(W_g x)). The indexer of
LongCat, with keys that are always selected, was written from the class Indexer of mlx-vlm's
`mlx_vlm/models/longcat_flash_sparse/language.py` (pull request 2063).

With `stored` every result of a projection, a norm and the attention is rounded to that dtype, and
the arithmetic is float32: what a layer of that precision loses without any mistake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mlakit import rope_table
from mlakit.layer import LayerConfig
from mlakit.model.geometry import Rope


class Oracle:
    """The layer of a config and of parameters by their names in the layer, float or float64."""

    def __init__(
        self,
        config: LayerConfig,
        parameters: Mapping[str, Tensor],
        *,
        stored: torch.dtype | None = None,
    ) -> None:
        self.config, self.stored = config, stored
        self.dtype = torch.float64 if stored is None else torch.float32
        self.parameters = {
            name: each.detach().cpu().to(self.dtype) for name, each in parameters.items()
        }

    def rounded(self, x: Tensor) -> Tensor:
        return x if self.stored is None else x.to(self.stored).to(self.dtype)

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.parameters[f"{name}.weight"].T
        bias = self.parameters.get(f"{name}.bias")
        return self.rounded(y if bias is None else y + bias)

    def rms_norm(self, name: str, x: Tensor, factor: float = 1.0) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config.epsilon).rsqrt()
        return self.rounded(x * scale * self.parameters[f"{name}.weight"] * factor)

    def rotated(self, x: Tensor, rope: Rope) -> Tensor:
        """x [tokens, ..., D_R], token t at position t."""
        table = rope_table(self.config.geometry, len(x)).to(self.dtype)
        cos, sin = table.view(len(x), *[1] * (x.ndim - 2), -1, 2).unbind(-1)
        if rope == "half":
            a, b = x.chunk(2, -1)
            return self.rounded(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))
        a, b = x[..., ::2], x[..., 1::2]
        return self.rounded(torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2))

    def latent_of_queries(self, x: Tensor) -> Tensor:
        return self.rms_norm("q_a_layernorm", self.linear("q_a_proj", x))

    def run(self, x: Tensor, selected: Sequence[Sequence[int]] | None = None) -> Tensor:
        """Of hidden states [tokens, hidden]; `selected` are the tokens each query attends to."""
        g, c = self.config.geometry, self.config
        x = x.detach().cpu().to(self.dtype)
        tokens = len(x)
        if g.q_lora_rank is None:
            q = self.linear("q_proj", x)
        else:
            q = self.linear("q_b_proj", self.latent_of_queries(x))
        q = q.view(tokens, g.num_heads, g.qk_head_dim) * c.q_factor
        q_nope, q_rope = q.split([g.qk_nope_head_dim, g.qk_rope_head_dim], -1)
        latent, k_rope = self.linear("kv_a_proj_with_mqa", x).split(
            [g.kv_lora_rank, g.qk_rope_head_dim], -1
        )
        latent = self.rms_norm("kv_a_layernorm", latent, c.latent_factor)
        q_rope, k_rope = self.rotated(q_rope, g.rope), self.rotated(k_rope, g.rope)
        k_nope, v = (
            self.linear("kv_b_proj", latent)
            .view(tokens, g.num_heads, -1)
            .split([g.qk_nope_head_dim, g.v_head_dim], -1)
        )
        scores = torch.einsum("qhd,khd->hqk", q_nope, k_nope)
        scores = (scores + torch.einsum("qhd,kd->hqk", q_rope, k_rope)) * c.scale
        hidden = self.hidden(tokens, selected)
        scores = scores.masked_fill(hidden, -torch.inf)
        if c.has_sinks:  # its value is 0
            sinks = self.parameters["sinks"][:, None, None].expand(-1, tokens, 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., :tokens]
        heads = self.rounded(torch.einsum("hqk,khd->qhd", weights, v)).flatten(1)
        if c.gate is not None:
            heads = self.rounded(heads * self.rounded(self.linear(c.gate, x).sigmoid()))
        return self.linear("o_proj", heads)

    def hidden(self, tokens: int, selected: Sequence[Sequence[int]] | None) -> Tensor:
        """bool [tokens, tokens]: the keys that a query does not attend to."""
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        if selected is not None:
            chosen = torch.zeros(tokens, tokens, dtype=torch.bool)
            for query, keys in enumerate(selected):
                chosen[query, list(keys)] = True
            hidden |= ~chosen
        return hidden

    def index_scores(self, x: Tensor) -> Tensor:
        """[tokens, tokens] scores of the lightning indexer, -inf for future tokens."""
        g, c = self.config.geometry, self.config
        x = x.detach().cpu().to(self.dtype)
        q = self.linear("indexer.wq_b", self.latent_of_queries(x))
        q = q.view(len(x), g.index_n_heads, g.index_head_dim)
        k = self.linear("indexer.wk", x)
        if c.index_rms_norm:
            k = k / (k.square().mean(-1, keepdim=True) + c.index_epsilon).sqrt()
        else:
            variance = k.var(-1, correction=0, keepdim=True)
            k = (k - k.mean(-1, keepdim=True)) / (variance + c.index_epsilon).sqrt()
        norm = self.parameters
        k = k * norm["indexer.k_norm.weight"] + norm.get("indexer.k_norm.bias", 0)
        first = g.index_head_dim - g.qk_rope_head_dim if c.index_rope_last else 0
        turned = slice(first, first + g.qk_rope_head_dim)
        for each in (q, k):
            each[..., turned] = self.rotated(each[..., turned], c.index_rope)
        weights = x @ self.parameters["indexer.weights_proj.weight"].T
        by_head = torch.einsum("qhd,kd->qhk", q, k).relu()
        scores = torch.einsum("qhk,qh->qk", by_head, weights)
        scores = scores * (g.index_n_heads * g.index_head_dim) ** -0.5
        key, query = torch.arange(len(x)), torch.arange(len(x))[:, None]
        always = (key < c.init_tokens) | (key > query - c.local_tokens)
        scores = scores.masked_fill(always, torch.inf)
        return scores.masked_fill(self.hidden(len(x), None), -torch.inf)
