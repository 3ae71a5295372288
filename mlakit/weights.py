"""The latent up-projection W_UK, W_UV of one layer, in the layouts that the two branches use.

A checkpoint has one matrix `kv_b_proj` [heads · (D_N + D_V), D_C]: per head D_N rows of W_UK, then
D_V rows of W_UV. It is used as

    expanded   k_nope = c W_UKᵀ,  v = c W_UVᵀ                      [tokens, heads, D_N | D_V]
    absorbed   q_latent = q_nope W_UK,   out = latent_out W_UVᵀ    [tokens, heads, D_C | D_V]

An e4m3 matrix has one float32 scale per 128 × 128 block; activations are quantised per token and
group of columns before the product. The blocks cover the whole matrix. If a block crosses the
boundary of a head, the matrices of the heads get smaller blocks with the same values.

A bf16 or fp16 matrix on the CPU has a float32 copy for the CPU kernels, unless the CPU multiplies
bf16 matrices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

import torch
from torch import Tensor

from mlakit import dispatch
from mlakit.checks import E4M3, FLOATS, Dims
from mlakit.geometry import MLAGeometry
from mlakit.kernels.cpu.matmul import multiplies_bf16
from mlakit.knobs import Backend
from mlakit.ops import batched_matmul, quantize_fp8, scaled_mm_fp8
from mlakit.reprs import shapes_repr, summary
from mlakit.specs import Problem, device_facts

BLOCK = 128  # rows and columns per scale of an e4m3 checkpoint
SCALE_UB = 1200.0  # upper bound of an activation group's amax; larger entries saturate


class _Float32Copy:
    """A float32 copy of a 16-bit matrix on the CPU, made once and refreshed after writes.

    Most CPUs multiply float32 matrices fastest, and converting a layer's weights takes longer than
    a decode step. The next use after a write to the matrix refreshes the copy. Torch does not count
    writes to a tensor made in inference mode: these are missed.
    """

    def __init__(self, source: Tensor, values: Tensor) -> None:
        """values  `source` in float32"""
        self._source, self._values, self._version = source, values, _version(source)

    def __repr__(self) -> str:
        return summary(self._values)

    def current(self) -> Tensor:
        """The copy, equal to `source`."""
        version = _version(self._source)
        if version != self._version:
            self._values.copy_(self._source)
            self._version = version
        return self._values


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, eq=False)
class HeadMatrices:
    """One matrix per head, [heads, outputs, inputs]; e4m3 has one scale per `group`² block."""

    weight: Tensor
    scale: Tensor | None = None  # [heads, ceil(outputs / group), ceil(inputs / group)] float32
    group: int = 0
    float32: _Float32Copy | None = field(default=None, repr=False)  # for the CPU kernels

    __repr__ = shapes_repr

    def of_rows(self, first: int, last: int) -> HeadMatrices:
        """The rows [first, last) of each matrix; e4m3 in whole blocks. Not of float32 copies."""
        if self.scale is None:
            return HeadMatrices(self.weight[:, first:last])
        assert first % self.group == 0
        blocks = slice(first // self.group, -(-last // self.group))
        return HeadMatrices(self.weight[:, first:last], self.scale[:, blocks], self.group)

    def apply(self, x: Tensor, *, out: Tensor, backend: Backend = "auto") -> Tensor:
        """x [tokens, heads, inputs] → out [tokens, heads, outputs], written through its strides."""
        by_head, out_by_head = x.transpose(0, 1), out.transpose(0, 1)
        if self.scale is None:
            weight = self.weight
            if self.float32 is not None and _on_cpu_kernels(x, backend):
                by_head, weight = by_head.float(), self.float32.current()
            batched_matmul(by_head, weight, out=out_by_head, backend=backend)
            return out
        quantised, scales = quantize_fp8(by_head, self.group, scale_ub=SCALE_UB, backend=backend)
        scaled_mm_fp8(
            quantised,
            scales,
            self.weight,
            self.scale,
            n_group=self.group,
            k_group=self.group,
            out=out_by_head,
            backend=backend,
        )
        return out


def _on_cpu_kernels(x: Tensor, backend: str) -> bool:
    """Whether a CPU kernel multiplies `x`; torch.compile graphs use the original weights."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    problem = Problem(*device_facts(x.device), dtype=str(x.dtype))
    return dispatch.select("batched_matmul", problem, backend).backend == "cpu"


@dataclass(frozen=True, eq=False)
class UpProjection:
    """`kv_b_proj` of one layer, and W_UK and W_UV by head."""

    geometry: MLAGeometry
    kv_b_proj: HeadMatrices  # one matrix, [1, heads · (D_N + D_V), D_C]: expands c to k_nope and v
    w_uk_t: HeadMatrices  # W_UKᵀ by head, [heads, D_C, D_N]: absorbed into q_nope
    w_uv: HeadMatrices  # W_UV by head, [heads, D_V, D_C]: projects the latent output to D_V

    __repr__ = shapes_repr

    @property
    def is_fp8(self) -> bool:
        """Whether the matrices are e4m3 with block scales."""
        return self.kv_b_proj.scale is not None

    @property
    def head_group(self) -> int:
        """Heads that `expand` cannot separate: blocks of an e4m3 matrix may have rows of several,
        and a float32 copy is used whole."""
        if self.kv_b_proj.float32 is not None:
            return self.geometry.num_heads
        columns = self.geometry.qk_nope_head_dim + self.geometry.v_head_dim
        return BLOCK // gcd(columns, BLOCK) if self.is_fp8 else 1

    def expand(
        self,
        latent: Tensor,
        *,
        heads: slice | None = None,
        buffer: Tensor | None = None,
        backend: Backend = "auto",
    ) -> tuple[Tensor, Tensor]:
        """(k_nope [tokens, heads, D_N], v [tokens, heads, D_V]) of latent [tokens, D_C].

        heads   some of them, in whole `head_group`s; None: all
        buffer  contiguous memory of both results; None, or too small: new memory
        """
        g = self.geometry
        columns = g.qk_nope_head_dim + g.v_head_dim
        matrix, count = self.kv_b_proj, g.num_heads
        if heads is not None and heads != slice(0, g.num_heads):
            matrix = matrix.of_rows(heads.start * columns, heads.stop * columns)
            count = heads.stop - heads.start
        shape = (len(latent), 1, count * columns)
        size = len(latent) * count * columns
        if buffer is None or buffer.numel() < size:
            out = latent.new_empty(shape)
        else:
            out = buffer[:size].view(shape)
        matrix.apply(latent[:, None], out=out, backend=backend)
        by_head = out.view(len(latent), count, columns)
        k_nope, v = by_head.split([g.qk_nope_head_dim, g.v_head_dim], dim=-1)
        return k_nope, v

    @classmethod
    def from_checkpoint(
        cls, kv_b_proj: Tensor, geometry: MLAGeometry, scale: Tensor | None = None
    ) -> UpProjection:
        """From the checkpoint's matrix [heads · (D_N + D_V), D_C].

        scale  [ceil(rows / 128), ceil(D_C / 128)] float32 of an e4m3 matrix: value = stored · scale
               (`weight_scale_inv` in checkpoints)

        A float matrix is viewed. On a CPU a bf16 or fp16 matrix is also copied to float32, for the
        CPU kernels: 4 bytes per weight, 67 MB for a layer of DeepSeek-V3. A bf16 matrix is not,
        if the CPU multiplies such matrices. W_UK of an e4m3 matrix is copied, transposed.
        """
        dims = Dims("UpProjection.from_checkpoint")
        g = geometry
        per_head = g.qk_nope_head_dim + g.v_head_dim
        dims.bind("heads · (D_N + D_V)", g.num_heads * per_head, "what the geometry needs")
        dims.bind("D_C", g.kv_lora_rank, "the geometry's kv_lora_rank")
        axes = ("heads · (D_N + D_V)", "D_C")
        dims.match("kv_b_proj", kv_b_proj, *axes, dtypes=[*FLOATS, E4M3])
        if kv_b_proj.dtype != E4M3:
            dims.require(
                scale is None, "scale", "be None for a matrix that is not e4m3", "a tensor"
            )
            return cls(g, *_float_matrices(kv_b_proj, g))
        if scale is None:
            dims.fail("scale", "be given for an e4m3 matrix", None)
        dims.rows_contiguous("kv_b_proj", kv_b_proj)
        dims.bind("row blocks", -(-kv_b_proj.shape[0] // BLOCK), "the rows of kv_b_proj / 128")
        dims.bind("column blocks", -(-g.kv_lora_rank // BLOCK), "kv_lora_rank / 128")
        dims.match("scale", scale, "row blocks", "column blocks", dtypes=[torch.float32])
        group = _head_group(g)
        w_uk_scale = _head_scales(scale, g, 0, g.qk_nope_head_dim, group)
        w_uv_scale = _head_scales(scale, g, g.qk_nope_head_dim, g.v_head_dim, group)
        matrix, w_uk_t, w_uv = _by_head(kv_b_proj, g)
        w_uk_t_scale = w_uk_scale.transpose(1, 2).contiguous()
        return cls(
            g,
            HeadMatrices(matrix, scale[None], BLOCK),
            HeadMatrices(w_uk_t.contiguous(), w_uk_t_scale, group),
            HeadMatrices(w_uv, w_uv_scale, group),
        )


def _by_head(kv_b_proj: Tensor, g: MLAGeometry) -> tuple[Tensor, Tensor, Tensor]:
    """Views: the matrix as a batch of one, W_UKᵀ by head, W_UV by head."""
    by_head = kv_b_proj.unflatten(0, (g.num_heads, g.qk_nope_head_dim + g.v_head_dim))
    w_uk, w_uv = by_head.split([g.qk_nope_head_dim, g.v_head_dim], dim=1)
    return kv_b_proj[None], w_uk.transpose(1, 2), w_uv


def _float_matrices(kv_b_proj: Tensor, g: MLAGeometry) -> list[HeadMatrices]:
    """The views, each with a view of one float32 copy if the CPU kernels need it."""
    views = _by_head(kv_b_proj, g)
    is_used = kv_b_proj.dtype == torch.float32 or multiplies_bf16(kv_b_proj.dtype)
    if kv_b_proj.device.type != "cpu" or is_used:
        return [HeadMatrices(view) for view in views]
    copies = _by_head(kv_b_proj.detach().float(), g)
    return [
        HeadMatrices(view, float32=_Float32Copy(view, copy))
        for view, copy in zip(views, copies, strict=True)
    ]


def _head_group(g: MLAGeometry) -> int:
    """The largest block that crosses no head boundary: 128, or 64 for GLM's 192 + 256."""
    return gcd(g.qk_nope_head_dim, g.v_head_dim, BLOCK)


def _head_scales(scale: Tensor, g: MLAGeometry, first_row: int, rows: int, group: int) -> Tensor:
    """Scales [heads, rows / group, ceil(D_C / group)] of `rows` rows of each head."""
    per_head = g.qk_nope_head_dim + g.v_head_dim
    head = torch.arange(g.num_heads, device=scale.device)[:, None]
    row = torch.arange(0, rows, group, device=scale.device)
    by_row = scale[(head * per_head + first_row + row) // BLOCK]
    columns = -(-g.kv_lora_rank // group)
    return by_row.repeat_interleave(BLOCK // group, dim=-1)[..., :columns].contiguous()
