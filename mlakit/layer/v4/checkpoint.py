"""A layer of DeepSeek-V4 from a checkpoint's folder: config.json and safetensors files.

Tensors have the names of transformers, `layers.N.self_attn.q_a_proj.weight`, or those of the
releases, `layers.N.attn.wq_a.weight`, whose scales end in `.scale`.
"""

from __future__ import annotations

import os
import re
from typing import TypeVar

import torch
from torch import Tensor, nn

from mlakit.dispatch.checks import E4M3, FLOATS, Dims
from mlakit.layer.checkpoint import TensorFiles, stored_dtype
from mlakit.layer.linear import SCALE, frozen
from mlakit.layer.v4.attention import V4Attention
from mlakit.model.v4 import V4Config
from mlakit.steps.weights import BLOCK

NAME = "V4Attention.load_safetensors"
ALWAYS_THERE = {"self_attn": "q_a_proj.weight", "attn": "wq_a.weight"}
# the names of the releases, by the last parts of the layer's; the first that fits
_RELEASED = (
    (r"^compressor\.indexer\.scorer\.weights_proj", "indexer.weights_proj"),
    (r"^compressor\.indexer\.q_b_proj", "indexer.wq_b"),
    (r"^compressor\.indexer\.", "indexer.compressor."),
)
_RELEASED_PARTS = {
    "q_a_proj": "wq_a",
    "q_a_norm": "q_norm",
    "q_b_proj": "wq_b",
    "kv_proj": "wkv",
    "gate_proj": "wgate",
    "o_a_proj": "wo_a",
    "o_b_proj": "wo_b",
    "sinks": "attn_sink",
    "position_bias": "ape",
}
# kept in float32 whatever the layer's dtype
_FLOAT32 = ("sinks", "position_bias")

Layer = TypeVar("Layer", bound=V4Attention)


def load_v4_layer(
    cls: type[Layer],
    folder: str | os.PathLike[str],
    layer: int,
    prefix: str | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Layer:
    """The body of `V4Attention.load_safetensors`."""
    Dims(NAME).integer("layer", layer, 0)
    files = TensorFiles(folder)
    config = V4Config.from_config(str(files.folder))
    prefix = _found_prefix(files, layer) if prefix is None else prefix
    is_released = prefix + ALWAYS_THERE["attn"] in files.file_of
    if dtype is None:
        dtype = stored_dtype(files, prefix, ["q_norm.weight" if is_released else "q_a_norm.weight"])
    elif dtype not in FLOATS:
        raise TypeError(f"{NAME}: dtype must be bfloat16, float16 or float32, got {dtype}")
    made = cls(config, layer, device="meta", dtype=dtype)
    reader = _Reader(files, prefix, dtype, device, is_released)
    for name, part in made.named_modules():
        for own, parameter in list(part._parameters.items()):
            if parameter is not None:
                reader.fill(part, f"{name}.{own}".lstrip("."), own, parameter)
    reader.refuse_others()
    return made


def released_name(name: str) -> str:
    """The name in the releases of a parameter of a layer."""
    for pattern, other in _RELEASED:
        name = re.sub(pattern, other, name)
    parts = [_RELEASED_PARTS.get(part, part) for part in name.split(".")]
    if "compressor" in parts and "kv_norm" in parts:
        parts[parts.index("kv_norm")] = "norm"
    return ".".join(parts)


def _found_prefix(files: TensorFiles, layer: int) -> str:
    """`model.layers.N.self_attn.` or `layers.N.attn.`."""
    found = set()
    for folder, name in ALWAYS_THERE.items():
        pattern = re.compile(rf"((?:.*\.)?layers\.{layer}\.{folder}\.){re.escape(name)}")
        found |= {match[1] for match in map(pattern.fullmatch, files.file_of) if match}
    if len(found) == 1:
        return found.pop()
    if found:
        raise ValueError(f"{NAME}: prefix must be given, got {', '.join(sorted(found))}")
    names = " or ".join(f"layers.{layer}.{each}.{n}" for each, n in ALWAYS_THERE.items())
    raise KeyError(f"{NAME}: {files.folder} has no tensor {names}")


class _Reader:
    """Fills the parameters of a layer from the tensors under a prefix."""

    def __init__(
        self,
        files: TensorFiles,
        prefix: str,
        dtype: torch.dtype,
        device: torch.device,
        is_released: bool,
    ) -> None:
        self._files, self._prefix, self._dtype, self._device = files, prefix, dtype, device
        self._is_released = is_released
        self._read: set[str] = set()

    def fill(self, part: nn.Module, name: str, own: str, known: nn.Parameter) -> None:
        """Replace the meta parameter `own` of `part`, which is called `name` in the layer."""
        stored = self._stored(name)
        dims = Dims(NAME)
        shape = self._files.shape(stored)
        dims.require(shape == tuple(known.shape), stored, f"have shape {tuple(known.shape)}", shape)
        tensor = self._take(stored)
        scale = self._scale(name, shape) if tensor.dtype == E4M3 else None
        if scale is None:
            dims.dtype(stored, tensor, *FLOATS)
            dtype = torch.float32 if own in _FLOAT32 else self._dtype
            part._parameters[own] = frozen(tensor.to(self._device, dtype))
        elif SCALE in part._parameters:
            part._parameters[own] = frozen(tensor.to(self._device))
            part._parameters[SCALE] = frozen(scale.to(self._device))
        else:  # the matrices of groups are multiplied in the layer's dtype
            values = tensor.float() * spread(scale, shape)
            part._parameters[own] = frozen(values.to(self._device, self._dtype))

    def refuse_others(self) -> None:
        """A tensor that the layer has no use for means that the model computes something else."""
        stored = {name for name in self._files.file_of if name.startswith(self._prefix)}
        unknown = sorted(name[len(self._prefix) :] for name in stored - self._read)
        if unknown:
            shown = ", ".join(unknown[:6])
            must = f"have only tensors of {V4Attention.__name__}"
            raise ValueError(f"{NAME}: {self._prefix} must {must}, got also {shown}")

    def _stored(self, name: str) -> str:
        return self._prefix + (released_name(name) if self._is_released else name)

    def _take(self, stored: str) -> Tensor:
        self._read.add(stored)
        return self._files.read(stored)

    def _scale(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The scales of the blocks of an e4m3 matrix, float32."""
        matrix = self._stored(name)
        stored = matrix.removesuffix("weight") + ("scale" if self._is_released else SCALE)
        blocks = tuple(-(-size // BLOCK) for size in shape)
        found = self._files.shape(stored)
        must = f"have shape {blocks}, one scale per {BLOCK} × {BLOCK} block"
        Dims(NAME).require(found == blocks, stored, must, found)
        return self._take(stored).float()  # the releases have powers of two, e8m0


def spread(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The scale of each element of a matrix that has one per block."""
    rows = scale.repeat_interleave(BLOCK, 0)[: shape[0]]
    return rows.repeat_interleave(BLOCK, 1)[:, : shape[1]]
