"""One layer from a checkpoint's folder: config.json and safetensors files, nothing pickled.

Tensors are found by name under `layers.N.self_attn.`: in model.safetensors, else in the files that
the index names, as in transformers, else in all safetensors files of the folder. Only those of the
layer are read, and of a tensor-parallel rank only the rows or columns of its heads.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from mlakit.dispatch.checks import E4M3, FLOATS, Dims
from mlakit.layer.attention import MLAAttention
from mlakit.layer.config import LayerConfig
from mlakit.layer.indexer import KeyNorm
from mlakit.layer.linear import SCALE, Float32Linear, frozen
from mlakit.model.config import read_config
from mlakit.model.releases import download_hint
from mlakit.steps.weights import BLOCK

NAME = "load_safetensors"
MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ALWAYS_THERE = "kv_a_proj_with_mqa.weight"
# angles that some old checkpoints store; they follow from the config
UNUSED = ("rotary_emb.inv_freq",)
# names of Hy4's release, and those that transformers gives them
RELEASED = {"linear_gate": "gate_proj", "learnable_sink_param": "sinks"}

Layer = TypeVar("Layer", bound=MLAAttention)


class TensorFiles:
    """The tensors of a folder by name, each read when it is asked for."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.expanduser(folder))
        if not self.folder.is_dir():
            name = os.fspath(folder)
            raise FileNotFoundError(f"{NAME}: there is no folder {name!r}{download_hint(name)}")
        self._stored: dict[str, str] = {}  # names in the files that are not those of the layer
        self.file_of = self._renamed(self._index())
        self._open: dict[str, Any] = {}

    def _index(self) -> dict[str, str]:
        if (self.folder / MODEL_FILE).is_file():
            return self._names_in([MODEL_FILE])
        index = self.folder / INDEX_FILE
        if index.is_file():
            return _weight_map(index)
        files = sorted(file.name for file in self.folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{NAME}: there is no safetensors file in {self.folder}")
        return self._names_in(files)

    def _renamed(self, file_of: dict[str, str]) -> dict[str, str]:
        """The files by the names that the layer has."""
        pattern = re.compile(rf"\.self_attn\.({'|'.join(RELEASED)})(?=\.|$)")
        found = {}
        for stored, file in file_of.items():
            name = pattern.sub(lambda match: f".self_attn.{RELEASED[match[1]]}", stored)
            self._stored[name] = stored
            found[name] = file
        return found

    def _names_in(self, files: Sequence[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for file in files:
            for name in _safe_open(self.folder / file).keys():  # noqa: SIM118  it is no dict
                other = found.setdefault(name, file)
                if other != file:
                    raise ValueError(
                        f"{NAME}: {self.folder} has {name} in {other} and in {file}, and no "
                        f"{INDEX_FILE} that names one of them"
                    )
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, axis: int = 0, rows: slice = slice(None)) -> Tensor:
        """A tensor, or some of its rows or columns."""
        found = self._slice(name)
        shape = tuple(found.get_shape())
        if len(shape) <= axis:
            raise ValueError(f"{NAME}: {name} must have {axis + 1} axes or more, got shape {shape}")
        part: Tensor = found[:, rows] if axis == 1 else found[rows]
        return part.clone(memory_format=torch.contiguous_format)  # the file may change or go

    def _slice(self, name: str) -> Any:
        file = self.file_of.get(name)
        if file is None:
            raise KeyError(f"{NAME}: {self.folder} has no tensor {name}")
        if file not in self._open:
            path = self.folder / file
            if not path.is_file():
                raise FileNotFoundError(f"{NAME}: {name} should be in {path}, which does not exist")
            self._open[file] = _safe_open(path)
        try:
            return self._open[file].get_slice(self._stored[name])
        except Exception as error:
            raise KeyError(f"{NAME}: {self.folder / file} has no tensor {name}") from error


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index has it."""
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{NAME}: {index} has no weight_map: {error!r}") from None
    if not isinstance(files, dict):
        got = type(files).__name__
        raise ValueError(f"{NAME}: weight_map of {index} must be a JSON object, got a {got}")
    for file in files.values():
        # the index may come from anywhere: it names no file outside of the folder
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{NAME}: {index} names a file outside of it, {file!r}")
    return files


def _safe_open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError(
            f"{NAME} needs the package safetensors: pip install safetensors"
        ) from None
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{NAME}: {path} is not a whole safetensors file: {error}") from None


def load_layer(
    cls: type[Layer],
    folder: str | os.PathLike[str],
    layer: int,
    *,
    tp_rank: int,
    tp_size: int,
    prefix: str | None,
    max_positions: int | None,
    epsilon: float | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Layer:
    """The body of `MLAAttention.load_safetensors`."""
    dims = Dims(NAME)
    dims.integer("layer", layer, 0)
    size, rank = dims.integer("tp_size", tp_size, 1), dims.integer("tp_rank", tp_rank, 0)
    dims.require(rank < size, "tp_rank", f"be below tp_size, {size}", rank)
    files = TensorFiles(folder)
    whole = LayerConfig.from_config(str(files.folder), layer)
    heads = whole.geometry.num_heads
    dims.require(heads % size == 0, "tp_size", f"divide the {heads} heads", size)
    prefix = _found_prefix(files, layer) if prefix is None else prefix
    if whole.selection is not None and re.search(r"\.self_attn\.\d+\.$", prefix):
        # one of a layer's attentions, whose number among all of them is not the layer's
        has_indexer = any(name.startswith(f"{prefix}indexer.") for name in files.file_of)
        whole = replace(whole, selection="own" if has_indexer else "shared")
    if dtype is None:
        dtype = stored_dtype(files, prefix, ["o_proj.weight", "kv_a_layernorm.weight"])
    elif dtype not in FLOATS:
        raise TypeError(f"{NAME}: dtype must be bfloat16, float16 or float32, got {dtype}")
    config = whole.with_heads(heads // size)
    if epsilon is not None:
        config = replace(config, epsilon=dims.finite("epsilon", epsilon))
    made = cls(config, max_positions=max_positions, device="meta", dtype=dtype)
    _refuse_unknown(made, files, prefix)
    heads_of = range(rank * config.geometry.num_heads, (rank + 1) * config.geometry.num_heads)
    for name, part in _leaves(made):
        reader = _Reader(dims, files, f"{prefix}{name}.", dtype, device)
        if "weight" in part._parameters:
            is_whole = name != "o_proj" or rank == 0
            reader.fill(part, _cut(whole, name, heads_of), whole_bias=is_whole)
        else:
            for own, known in list(part.named_parameters(recurse=False)):
                setattr(part, own, reader.numbers(own, tuple(known.shape)))
    if made.sinks is not None:
        reader = _Reader(dims, files, prefix, torch.float32, device)
        made.sinks = reader.numbers("sinks", (heads,), slice(heads_of.start, heads_of.stop))
    return made


def _found_prefix(files: TensorFiles, layer: int) -> str:
    """`model.layers.N.self_attn.`, or the same under `language_model.` and the like."""
    pattern = re.compile(rf"((?:.*\.)?layers\.{layer}\.self_attn\.){re.escape(ALWAYS_THERE)}")
    found = [match[1] for match in map(pattern.fullmatch, files.file_of) if match]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{NAME}: prefix must be given, got {', '.join(sorted(found))}")
    attention = re.compile(rf"(?:.*\.)?layers\.{layer}\.(?:self_)?attn.*")
    others = sorted(filter(attention.fullmatch, files.file_of))[:4]
    raise KeyError(
        f"{NAME}: {files.folder} has no tensor layers.{layer}.self_attn.{ALWAYS_THERE}; "
        f"attention tensors of this layer: {', '.join(others) or 'none'}"
    )


def stored_dtype(files: TensorFiles, prefix: str, names: Sequence[str]) -> torch.dtype:
    """The config's dtype, or that of the first of these tensors that is float."""
    fields = read_config(str(files.folder))
    named = fields.get("dtype", fields.get("torch_dtype"))
    known = {str(each).removeprefix("torch."): each for each in FLOATS}
    if named in known:
        return known[named]
    for name in names:
        stored = files.read(prefix + name, rows=slice(0, 1)).dtype
        if stored in FLOATS:
            return stored
    return torch.bfloat16


def _leaves(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have parameters, by name."""
    for name, part in layer.named_modules():
        if name and part._parameters:
            yield name, part


def _refuse_unknown(layer: nn.Module, files: TensorFiles, prefix: str) -> None:
    """A tensor that the layer has no use for means that the model computes something else."""
    known = {f"{name}.{own}" for name, part in _leaves(layer) for own in part._parameters}
    known |= set(layer._parameters)
    known -= {"kv_b_proj.bias"}
    stored = {name[len(prefix) :] for name in files.file_of if name.startswith(prefix)}
    unknown = sorted(name for name in stored - known if not name.endswith(UNUSED))
    if unknown:
        shown = ", ".join(unknown[:6])
        raise ValueError(f"{NAME}: {prefix} has tensors that no MLA layer has: {shown}")


class _Cut(NamedTuple):
    """The rows (axis 0) or columns (axis 1) of a matrix that belong to a rank."""

    axis: int = 0
    rows: slice = slice(None)
    total: int | None = None  # rows or columns of the whole matrix; None: ranks share all of it


def _cut(whole: LayerConfig, name: str, heads: range) -> _Cut:
    """Return the part of a matrix that belongs to the heads of a rank.

    whole  the layer with all heads
    """
    g = whole.geometry
    per_head: dict[str | None, tuple[int, int]] = {
        "q_proj": (0, g.qk_head_dim),
        "q_b_proj": (0, g.qk_head_dim),
        "kv_b_proj": (0, g.qk_nope_head_dim + g.v_head_dim),
        "o_proj": (1, g.v_head_dim),
        whole.gate: (0, g.v_head_dim),
    }
    if name not in per_head:
        return _Cut()
    axis, width = per_head[name]
    return _Cut(axis, slice(heads.start * width, heads.stop * width), g.num_heads * width)


class _Reader:
    """Fills one module from the tensors under a prefix."""

    def __init__(
        self, dims: Dims, files: TensorFiles, prefix: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dims, self._files, self._prefix = dims, files, prefix
        self._dtype, self._device = dtype, device

    def fill(self, part: nn.Module, cut: _Cut, *, whole_bias: bool) -> None:
        """Replace the meta parameters of `part`."""
        known = part._parameters["weight"]
        assert known is not None
        shape = list(known.shape)
        if cut.total is not None:
            shape[cut.axis] = cut.total
        self._require_shape("weight", tuple(shape), "for this config")
        dtype = torch.float32 if isinstance(part, Float32Linear | KeyNorm) else self._dtype
        weight = self._read("weight", cut)
        takes_fp8 = SCALE in part._parameters
        if weight.dtype == E4M3 and takes_fp8:
            part.weight_scale_inv = self._put(self._scales(cut), torch.float32)
            dtype = E4M3
        else:
            self._require_float("weight", weight, *([E4M3] if takes_fp8 else []))
            if self._has(SCALE):
                must = f"be there for float8_e4m3fn weights only, got one for {weight.dtype}"
                raise ValueError(f"{NAME}: {self._prefix}{SCALE} must {must}")
        part.weight = self._put(weight, dtype)
        if part._parameters.get("bias") is not None or self._has("bias"):
            part.bias = self._bias(shape[0], cut, dtype, is_zero=not whole_bias)

    def numbers(self, name: str, shape: tuple[int, ...], own: slice = slice(None)) -> nn.Parameter:
        """Some of the rows, or numbers, of a parameter that no module of its own has."""
        self._require_shape(name, shape, "for this config")
        found = self._read(name, _Cut(rows=own))
        self._require_float(name, found)
        return self._put(found, self._dtype)

    def _bias(self, size: int, cut: _Cut, dtype: torch.dtype, *, is_zero: bool) -> nn.Parameter:
        """The bias of a module with `size` outputs.

        is_zero  the outputs of the ranks are added up, and another rank has the bias
        """
        self._require_shape("bias", (size,), "for this config")
        bias = self._read("bias", _Cut() if cut.axis else cut)
        self._require_float("bias", bias)
        if is_zero:
            bias = torch.zeros_like(bias)
        return self._put(bias, torch.float32 if dtype == torch.float32 else self._dtype)

    def _require_shape(self, name: str, shape: tuple[int, ...], why: str) -> None:
        stored = self._files.shape(self._prefix + name)
        must = f"have shape {shape} {why}"
        self._dims.require(stored == shape, self._prefix + name, must, stored)

    def _require_float(self, name: str, tensor: Tensor, *more: torch.dtype) -> None:
        self._dims.dtype(self._prefix + name, tensor, *FLOATS, *more)

    def _has(self, name: str) -> bool:
        return self._prefix + name in self._files.file_of

    def _read(self, name: str, cut: _Cut) -> Tensor:
        return self._files.read(self._prefix + name, cut.axis, cut.rows)

    def _scales(self, cut: _Cut) -> Tensor:
        """The scales of the blocks of a rank's rows or columns, which must be whole blocks."""
        shape = self._files.shape(f"{self._prefix}weight")
        blocks = tuple(-(-size // BLOCK) for size in shape)
        self._require_shape(SCALE, blocks, f"one per {BLOCK} × {BLOCK} block")
        rows = cut.rows
        if rows != slice(None):
            for edge in (rows.start, rows.stop):
                self._dims.require(
                    edge % BLOCK == 0 or edge == shape[cut.axis],
                    "tp_size",
                    f"cut {self._prefix}weight between its blocks of {BLOCK}",
                    f"a cut at {edge}",
                )
            rows = slice(rows.start // BLOCK, -(-rows.stop // BLOCK))
        scales = self._read(SCALE, cut._replace(rows=rows))
        self._require_float(SCALE, scales)
        return scales

    def _put(self, tensor: Tensor, dtype: torch.dtype) -> nn.Parameter:
        return frozen(tensor.to(self._device, dtype))
