"""The model of the demo: random words, one attention layer of full size, a sampled next word.

    x = embedding[word]                                        [tokens, hidden]
    q = q_b(norm(q_a(x)))      kv = kv_a(x)                    what the branches take
    y = o_proj(attention)      next word = sample(y · embedding)

The weights preserve unit variance through every product. Scores then have a standard deviation of
about 2: a query attends to about ten of 300 keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import layer_norm, rms_norm

from mlakit.model.geometry import MLAGeometry
from mlakit.model.rope import rope_table
from mlakit.steps import LayerWeights
from mlakit.steps.weights import UpProjection

VOCABULARY = 1024
TEMPERATURE = 0.25
FEW_TOKENS = 4  # on a CPU up to this many tokens are faster one by one than as a matmul


@dataclass(frozen=True, eq=False)
class IndexInputs:
    """The indexer's inputs for a step's new tokens; the keys are also cached."""

    q: Tensor  # [tokens, index_heads, D]
    keys: Tensor  # [tokens, D]
    weights: Tensor  # [tokens, index_heads] float32


@dataclass(frozen=True, eq=False)
class Indexer:
    """The projections of DeepSeek-V3.2's lightning indexer."""

    q_b: Tensor  # [index_heads · D, query inputs]
    k: Tensor  # [D, hidden]
    head_weights: Tensor  # [index_heads, hidden]

    def project(self, query_input: Tensor, x: Tensor, cos_sin: Tensor) -> IndexInputs:
        width, heads = self.k.shape[0], self.head_weights.shape[0]
        q = linear(query_input, self.q_b).unflatten(-1, (heads, width))
        keys = layer_norm(linear(x, self.k), (width,))
        weights = linear(x, self.head_weights).float() / sqrt(heads * width)
        return IndexInputs(rotated(q, cos_sin[:, None]), rotated(keys, cos_sin), weights)


@dataclass(frozen=True, eq=False)
class Projected:
    """A step's new tokens, projected for the branches and the indexer."""

    q: Tensor  # [tokens, heads, D_N + D_R], not rotated
    kv: Tensor  # [tokens, D_C + D_R] raw latents
    index: IndexInputs | None


@dataclass(frozen=True, eq=False)
class RandomModel:
    """Weights of the layer; the weights of the branches are in `dtype`, like the activations."""

    geometry: MLAGeometry
    dtype: torch.dtype
    embedding: Tensor  # [VOCABULARY, hidden]
    q_a: Tensor | None  # [q_lora_rank, hidden]
    q_b: Tensor  # [heads · (D_N + D_R), q_lora_rank], or of hidden where there is no q_a
    kv_a: Tensor  # [D_C + D_R, hidden]
    kv_b: Tensor  # [heads · (D_N + D_V), D_C]
    o_proj: Tensor  # [hidden, heads · D_V]
    layer: LayerWeights
    indexer: Indexer | None

    @property
    def num_weights(self) -> int:
        """Weights of the attention layer, without the embedding."""
        indexer = () if self.indexer is None else vars(self.indexer).values()
        matrices = (self.q_a, self.q_b, self.kv_a, self.kv_b, self.o_proj, *indexer)
        return sum(matrix.numel() for matrix in matrices if matrix is not None)

    def project(self, words: Tensor, positions: Tensor) -> Projected:
        """Project words [tokens] at positions [tokens]."""
        x = self.embedding[words]
        query_input = x
        if self.q_a is not None:
            latent = linear(x, self.q_a)
            query_input = rms_norm(latent, latent.shape[-1:], eps=self.layer.epsilon)
        q = linear(query_input, self.q_b).unflatten(-1, (self.geometry.num_heads, -1))
        index = None
        if self.indexer is not None:
            index = self.indexer.project(query_input, x, self.layer.freqs[positions])
            index = IndexInputs(index.q.to(self.dtype), index.keys, index.weights)
        return Projected(q.to(self.dtype), linear(x, self.kv_a).to(self.dtype), index)

    def next_words(self, attended: Tensor, last: list[int], generator: torch.Generator) -> Tensor:
        """o_proj of attended [tokens, heads, D_V], then a word [len(last)] for each of `last`."""
        y = linear(attended.flatten(1).to(self.o_proj.dtype), self.o_proj)[last]
        logits = linear(rms_norm(y, y.shape[-1:]), self.embedding) / sqrt(y.shape[-1])
        noise = -torch.empty(logits.shape).exponential_(generator=generator).log()
        # Gumbel-max sampling; argmax does not raise on NaN, so the check reports it
        return (logits.float() / TEMPERATURE + noise.to(logits.device)).argmax(-1)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [tokens, inputs] @ weightᵀ [inputs, outputs]."""
    if x.device.type != "cpu" or len(x) > FEW_TOKENS:
        return functional.linear(x, weight)
    # 0.07 s instead of 0.24 s for 2 tokens times 7168 × 16384 (Neoverse-N1, torch 2.13)
    return torch.stack([functional.linear(token, weight) for token in x])


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x [..., D] with its first columns rotated by cos_sin [..., D_R], pair by pair."""
    rope = x[..., : cos_sin.shape[-1]].float().unflatten(-1, (-1, 2))
    turned = torch.view_as_complex(rope.contiguous()) * torch.view_as_complex(
        cos_sin.unflatten(-1, (-1, 2))
    )
    rest = x[..., cos_sin.shape[-1] :]
    return torch.cat([torch.view_as_real(turned).flatten(-2).to(x.dtype), rest], dim=-1)


def make_model(
    geometry: MLAGeometry,
    *,
    positions: int,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator,
) -> RandomModel:
    """A layer of `geometry` with room for `positions` tokens."""
    # on a CPU without bf16 matrix units torch's bf16 matmuls are a hundred times slower
    projection_dtype = torch.float32 if device.type == "cpu" else dtype

    def matrix(outputs: int, inputs: int, dtype: torch.dtype = projection_dtype) -> Tensor:
        bound = sqrt(3 / inputs)  # of uniform numbers with variance 1 / inputs
        weight = torch.empty(outputs, inputs).uniform_(-bound, bound, generator=generator)
        return weight.to(device, dtype)

    g = geometry
    query_inputs = g.q_lora_rank or g.hidden_size
    kv_b = matrix(g.num_heads * (g.qk_nope_head_dim + g.v_head_dim), g.kv_lora_rank, dtype)
    gamma = 1 + 0.1 * torch.randn(g.kv_lora_rank, generator=generator)
    return RandomModel(
        geometry=g,
        dtype=dtype,
        embedding=matrix(VOCABULARY, g.hidden_size) * sqrt(g.hidden_size),
        q_a=matrix(g.q_lora_rank, g.hidden_size) if g.q_lora_rank else None,
        q_b=matrix(g.num_heads * g.qk_head_dim, query_inputs),
        kv_a=matrix(g.row.width, g.hidden_size),
        kv_b=kv_b,
        o_proj=matrix(g.hidden_size, g.num_heads * g.v_head_dim),
        layer=LayerWeights(
            up=UpProjection.from_checkpoint(kv_b, g),
            gamma=gamma.to(device, dtype),
            freqs=rope_table(g, positions, device=device),
            softmax_scale=g.softmax_scale,
            rope=g.rope,
        ),
        indexer=Indexer(
            q_b=matrix(g.index_n_heads * g.index_head_dim, query_inputs),
            k=matrix(g.index_head_dim, g.hidden_size),
            head_weights=matrix(g.index_n_heads, g.hidden_size),
        )
        if g.has_indexer
        else None,
    )
