"""`V4Attention`: one attention layer of DeepSeek-V4 from hidden states to hidden states."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlakit.dispatch.autocast import without_autocast
from mlakit.dispatch.checks import Dims
from mlakit.dispatch.knobs import Backend
from mlakit.layer.linear import Activations, Linear, RMSNorm, frozen
from mlakit.layer.rotary import RopeTable
from mlakit.layer.v4.batch import V4Batch
from mlakit.layer.v4.compressor import Compressor
from mlakit.model.v4 import SLIDING, LayerKind, V4Config

NAME = "V4Attention"
MIN_POSITIONS = 4096  # of a table of angles, which doubles with the longest sequence


class GroupedLinear(nn.Module):
    """The first half of the output projection: each group of heads has a matrix of its own.

    weight  [groups · rank, heads · D / groups], the rows of one group after those of another
    """

    weight: nn.Parameter

    def __init__(
        self, inputs: int, rank: int, groups: int, *, dtype: Any = None, device: Any = None
    ) -> None:
        super().__init__()
        self.groups = groups
        weight = torch.empty(groups * rank, inputs, dtype=dtype, device=device)
        self.weight = frozen(weight if weight.is_meta else weight.normal_(std=inputs**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, heads, D] → [tokens, groups · rank]."""
        grouped = x.flatten(1).unflatten(1, (self.groups, -1)).transpose(0, 1)
        matrices = self.weight.unflatten(0, (self.groups, -1)).transpose(1, 2)
        return torch.bmm(grouped, matrices).transpose(0, 1).flatten(1)


class V4Attention(nn.Module):
    """The attention of one layer of DeepSeek-V4, for inference, over a `V4Cache`.

        q        = R(p) norm(q_b_proj(q_a_norm(q_a_proj(x))))      per head, without weight
        kv       = R(p) kv_norm(kv_proj(x))                        key and value of all heads
        out      = R(−p) attention(q, window and compressed rows, sinks)
        result   = o_b_proj(o_a_proj(out))                         o_a_proj by groups of heads

    R rotates the last columns. A CSA or HCA layer has a `compressor`, whose rows it attends to
    beside the window; that of a CSA layer has an `indexer`, which selects among them.

    Parameters are named as in transformers. `load_safetensors` reads them from a checkpoint's
    folder, also by the names of the releases; `from_hf` takes those of a module of transformers.
    """

    def __init__(
        self,
        config: Any,
        layer: int = 0,
        *,
        is_fp8: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """A layer with random weights.

        config  what `V4Config.from_config` takes
        layer   the layer's number, which says what kind it is
        is_fp8  block-FP8 weights of q_a_proj, q_b_proj, kv_proj, o_b_proj and of the indexer's
                q_b_proj, one scale per 128 × 128
        """
        super().__init__()
        c = self.config = V4Config.from_config(config)
        dims = Dims(NAME)
        number = dims.integer("layer", layer, 0)
        must = f"be the number of one of the model's {len(c.kinds)} layers"
        dims.require(number < len(c.kinds), "layer", must, number)
        self.layer, self.kind = number, c.kinds[number]
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        weights: dict[str, Any] = {"is_fp8": is_fp8, **where}
        width = c.num_heads * c.head_dim
        self.q_a_proj = Linear(c.hidden_size, c.q_lora_rank, **weights)
        self.q_a_norm = RMSNorm(c.q_lora_rank, c.epsilon, **where)
        self.q_b_proj = Linear(c.q_lora_rank, width, **weights)
        self.kv_proj = Linear(c.hidden_size, c.head_dim, **weights)
        self.kv_norm = RMSNorm(c.head_dim, c.epsilon, **where)
        self.o_a_proj = GroupedLinear(width // c.o_groups, c.o_lora_rank, c.o_groups, **where)
        self.o_b_proj = Linear(c.o_groups * c.o_lora_rank, c.hidden_size, **weights)
        self.sinks = frozen(torch.zeros(c.num_heads, dtype=torch.float32, device=device))
        self.compressor: Compressor | None = None
        if self.kind != SLIDING:
            self.compressor = Compressor(c, self.kind, weights=weights)

    @classmethod
    def load_safetensors(
        cls,
        folder: str | os.PathLike[str],
        layer: int,
        *,
        prefix: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> V4Attention:
        """The layer of this number from a checkpoint's folder: config.json and safetensors files.

        prefix  of the tensors' names; None finds `layers.N.self_attn.` and `layers.N.attn.`
        dtype   of the float weights; None: the config's. e4m3 weights keep their blocks

        Only the layer's own tensors are read. A missing tensor is a KeyError with its name.
        """
        from mlakit.layer.v4.checkpoint import load_v4_layer

        return load_v4_layer(cls, folder, layer, prefix, dtype, torch.device(device))

    @classmethod
    def from_hf(cls, module: nn.Module) -> V4Attention:
        """The layer of a `DeepseekV4Attention` of transformers; it shares the parameters."""
        from mlakit.layer.v4.from_hf import v4_layer_of

        return v4_layer_of(cls, module)

    @without_autocast
    def forward(self, x: Tensor, batch: V4Batch, *, backend: Backend = "auto") -> Tensor:
        """One step: the new tokens are stored, and attend to their windows and compressed rows.

        x      [tokens, hidden] of the batch's new tokens, sequence after sequence
        batch  of `V4Cache.append_batch`, of a cache that has this layer

        Returns [tokens, hidden] in x's dtype. On a GPU it does not synchronise.
        """
        c = self.config
        self._check(x, batch)
        rope = rope_table_for(c, self.kind, batch.max_length)
        position, columns = batch.position, c.qk_rope_head_dim
        states = Activations(x, backend)
        states.prepare(self.q_a_proj, self.kv_proj)
        residual = Activations(self.q_a_norm(self.q_a_proj(states, backend)), backend)
        q = self.q_b_proj(residual, backend).unflatten(-1, (c.num_heads, c.head_dim))
        q = F.rms_norm(q, (c.head_dim,), None, c.epsilon)
        rope.rotate(q[..., -columns:], position, "interleaved", backend=backend)
        kv = self.kv_norm(self.kv_proj(states, backend))
        rope.rotate(kv[:, None, -columns:], position, "interleaved", backend=backend)
        batch.write_window(self.layer, kv, backend=backend)
        selected = None
        if self.compressor is not None:
            selected = self.compressor(states, residual, batch, self.layer, rope, backend=backend)
        out = batch.attend(
            self.layer, q, self.sinks.float(), c.softmax_scale, selected, backend=backend
        )
        rope.rotate(out[..., -columns:], position, "interleaved", is_inverse=True, backend=backend)
        result: Tensor = self.o_b_proj(self.o_a_proj(out), backend)
        return result

    def _check(self, x: Tensor, batch: V4Batch) -> None:
        dims = Dims(NAME)
        dims.bind("hidden", self.config.hidden_size, "the config's hidden_size")
        dims.instance("batch", batch, V4Batch)
        dims.bind("tokens", len(batch.position), "the new tokens of the batch")
        dims.match("x", x, "tokens", "hidden")
        dims.dtype("x", x, self.o_a_proj.weight.dtype)
        dims.same_device("the layer", self.o_a_proj.weight)
        own = batch.cache.kinds.get(self.layer)
        must = f"be of a cache that has layer {self.layer}, {self.kind}"
        dims.require(own == self.kind, "batch", must, own)


def rope_table_for(config: V4Config, kind: LayerKind, length: int) -> RopeTable:
    """The angles of a kind of layer, for at least `length` positions."""
    positions = MIN_POSITIONS
    while positions < length:
        positions *= 2
    return RopeTable.shared(config.geometry(kind), positions)
