"""The latent up-projection W_UK, W_UV of one layer, in the forms the two branches use.

A checkpoint has one matrix `kv_b_proj` [heads · (D_N + D_V), D_C]: per head D_N rows of W_UK, then
D_V rows of W_UV. Its products are

    expanded   k_nope = c W_UKᵀ,  v = c W_UVᵀ                         [tokens, heads, D_N | D_V]
    absorbed   q_latent = q_nope W_UK,   result = latent_out W_UVᵀ    [tokens, heads, D_C | D_V]

An e4m3 matrix comes with one float32 scale per 128 × 128 block; activations are then quantised per
token and group of columns before the product. Blocks are laid over the whole matrix: where a head
does not begin or end on one, its own matrices have smaller blocks, and the same values.

A bf16 or fp16 matrix on the CPU has a float32 copy, which the CPU kernels multiply with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

import torch
from torch import Tensor

from mlakit import dispatch
from mlakit.checks import E4M3, FLOATS, Dims
from mlakit.geometry import MLAGeometry
from mlakit.kernels.cpu.workers import on_one_thread
from mlakit.knobs import Backend
from mlakit.ops import batched_matmul, quantize_fp8, scaled_mm_fp8
from mlakit.reprs import shapes_repr, summary
from mlakit.specs import Problem, device_facts

BLOCK = 128  # rows and columns of a checkpoint's e4m3 matrix that share a scale
SCALE_UB = 1200.0  # bound on the amax of an activation group; entries above it saturate


class _Float32Copy:
    """A float32 copy of a half-precision matrix on the CPU, made once and kept up to date.

    Most CPUs multiply float32 matrices fastest, and widening a layer's weights takes longer than a
    decode step. Writing to the matrix makes the copy be filled anew at its next use. Writes to a
    tensor made in inference mode are not counted by torch, and are not seen.
    """

    def __init__(self, source: Tensor, values: Tensor) -> None:
        """`values` are those of `source`, in float32."""
        self._source, self._values, self._version = source, values, _version(source)

    def __repr__(self) -> str:
        return summary(self._values)

    def current(self) -> Tensor:
        """The copy, with what `source` holds now."""
        version = _version(self._source)
        if version != self._version:
            self._values.copy_(self._source)
            self._version = version
        return self._values


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, eq=False)
class HeadMatrices:
    """One matrix per head, [heads, outputs, inputs]; e4m3 ones with a scale per `group`² block."""

    weight: Tensor
    scale: Tensor | None = None  # [heads, ceil(outputs / group), ceil(inputs / group)] float32
    group: int = 0
    float32: _Float32Copy | None = field(default=None, repr=False)  # for the CPU kernels

    __repr__ = shapes_repr

    def apply(self, x: Tensor, *, out: Tensor, backend: Backend = "auto") -> Tensor:
        """x [tokens, heads, inputs] → out [tokens, heads, outputs], written through its strides."""
        by_head, out_by_head = x.transpose(0, 1), out.transpose(0, 1)
        if self.scale is None:
            weight = self.weight
            if self.float32 is not None and _on_cpu_kernels(x, backend):
                by_head, weight = on_one_thread(by_head.float, x.device), self.float32.current()
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
    """Is a product with `x` that of the CPU kernels? A graph that is compiled takes the weights."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    problem = Problem(*device_facts(x.device), dtype=str(x.dtype))
    return dispatch.select("batched_matmul", problem, backend).backend == "cpu"


@dataclass(frozen=True, eq=False)
class UpProjection:
    """`kv_b_proj` of one layer, cut up once for expanding and absorbing."""

    geometry: MLAGeometry
    joint: HeadMatrices  # all of it as one matrix, [1, heads · (D_N + D_V), D_C]
    absorb: HeadMatrices  # W_UKᵀ by head, [heads, D_C, D_N]: takes q_nope to the latent
    values: HeadMatrices  # W_UV by head, [heads, D_V, D_C]: takes the latent result to the value

    __repr__ = shapes_repr

    @property
    def is_fp8(self) -> bool:
        """Are the matrices e4m3 with block scales?"""
        return self.joint.scale is not None

    def expand(self, latent: Tensor, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
        """(k_nope [tokens, heads, D_N], v [tokens, heads, D_V]) of latent [tokens, D_C]."""
        g = self.geometry
        out = latent.new_empty(len(latent), 1, self.joint.weight.shape[1])
        self.joint.apply(latent[:, None], out=out, backend=backend)
        by_head = out.view(len(latent), g.num_heads, g.qk_nope_head_dim + g.v_head_dim)
        k_nope, v = by_head.split([g.qk_nope_head_dim, g.v_head_dim], dim=-1)
        return k_nope, v

    @classmethod
    def from_checkpoint(
        cls, kv_b_proj: Tensor, geometry: MLAGeometry, scale: Tensor | None = None
    ) -> UpProjection:
        """Of the checkpoint's matrix [heads · (D_N + D_V), D_C].

        scale  [ceil(rows / 128), ceil(D_C / 128)] float32 of an e4m3 matrix: value = stored · scale
               (checkpoints call it `weight_scale_inv` all the same)

        A float matrix is viewed. On a CPU a bf16 or fp16 one is also copied to float32 once, here,
        since the CPU kernels multiply in float32: 4 bytes per weight, 67 MB for a layer of
        DeepSeek-V3. An e4m3 matrix is transposed for absorbing once, here.
        """
        dims = Dims("UpProjection.from_checkpoint")
        g = geometry
        per_head = g.qk_nope_head_dim + g.v_head_dim
        dims.bind("heads · (D_N + D_V)", g.num_heads * per_head, "what the geometry needs")
        dims.bind("D_C", g.kv_lora_rank, "the geometry's kv_lora_rank")
        axes = ("heads · (D_N + D_V)", "D_C")
        dims.match("kv_b_proj", kv_b_proj, *axes, dtypes=[*FLOATS, E4M3])
        if kv_b_proj.dtype != E4M3:
            dims.require(scale is None, "scale", "be None for a matrix that is not e4m3", "one")
            return cls(g, *_float_matrices(kv_b_proj, g))
        if scale is None:
            dims.fail("scale", "be given for an e4m3 matrix", None)
        dims.rows_contiguous("kv_b_proj", kv_b_proj)
        dims.bind("row blocks", -(-kv_b_proj.shape[0] // BLOCK), "the rows of kv_b_proj / 128")
        dims.bind("column blocks", -(-g.kv_lora_rank // BLOCK), "kv_lora_rank / 128")
        dims.match("scale", scale, "row blocks", "column blocks", dtypes=[torch.float32])
        group = _head_group(g)
        key_scale = _head_scales(scale, g, 0, g.qk_nope_head_dim, group)
        value_scale = _head_scales(scale, g, g.qk_nope_head_dim, g.v_head_dim, group)
        joint, absorb, values = _cut(kv_b_proj, g)
        absorb_scale = key_scale.transpose(1, 2).contiguous()
        return cls(
            g,
            HeadMatrices(joint, scale[None], BLOCK),
            HeadMatrices(absorb.contiguous(), absorb_scale, group),
            HeadMatrices(values, value_scale, group),
        )


def _cut(kv_b_proj: Tensor, g: MLAGeometry) -> tuple[Tensor, Tensor, Tensor]:
    """Views of it: as a batch of one, W_UKᵀ by head, W_UV by head."""
    by_head = kv_b_proj.unflatten(0, (g.num_heads, g.qk_nope_head_dim + g.v_head_dim))
    keys, values = by_head.split([g.qk_nope_head_dim, g.v_head_dim], dim=1)
    return kv_b_proj[None], keys.transpose(1, 2), values


def _float_matrices(kv_b_proj: Tensor, g: MLAGeometry) -> list[HeadMatrices]:
    """Its views, each with its part of one float32 copy where the CPU kernels have a use for it."""
    views = _cut(kv_b_proj, g)
    if kv_b_proj.device.type != "cpu" or kv_b_proj.dtype == torch.float32:
        return [HeadMatrices(view) for view in views]
    copies = _cut(kv_b_proj.detach().float(), g)
    return [
        HeadMatrices(view, float32=_Float32Copy(view, copy))
        for view, copy in zip(views, copies, strict=True)
    ]


def _head_group(g: MLAGeometry) -> int:
    """The largest block that no boundary of a head cuts: 128, or 64 for GLM's 192 + 256."""
    return gcd(g.qk_nope_head_dim, g.v_head_dim, BLOCK)


def _head_scales(scale: Tensor, g: MLAGeometry, first_row: int, rows: int, group: int) -> Tensor:
    """Scales [heads, rows / group, ceil(D_C / group)] of `rows` rows of each head's block."""
    per_head = g.qk_nope_head_dim + g.v_head_dim
    head = torch.arange(g.num_heads, device=scale.device)[:, None]
    row = torch.arange(0, rows, group, device=scale.device)
    by_row = scale[(head * per_head + first_row + row) // BLOCK]
    columns = -(-g.kv_lora_rank // group)
    return by_row.repeat_interleave(BLOCK // group, dim=-1)[..., :columns].contiguous()
