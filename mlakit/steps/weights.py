"""The latent up-projection W_UK, W_UV of one layer, in the layouts that the two branches use.

A checkpoint has one matrix `kv_b_proj` [heads · (D_N + D_V), D_C]: per head D_N rows of W_UK, then
D_V rows of W_UV. It is used as

    expanded   k_nope = c W_UKᵀ,  v = c W_UVᵀ                      [tokens, heads, D_N | D_V]
    absorbed   q_latent = q_nope W_UK,   out = latent_out W_UVᵀ    [tokens, heads, D_C | D_V]

An e4m3 matrix has one float32 scale per 128 × 128 block; activations are quantised per token and
group of columns before the product. The blocks cover the whole matrix. If a block crosses the
boundary of a head, the matrices of the heads get smaller blocks with the same values.

A bf16 or fp16 matrix on the CPU has a float32 copy for the CPU kernels, unless the CPU multiplies
bf16 matrices: most CPUs multiply float32 matrices fastest, and converting a layer's weights takes
longer than a decode step. W_UK of an e4m3 matrix has a transposed copy. `weight_copies` keeps them
current.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd

import torch
from torch import Tensor

from mlakit.dispatch import selection
from mlakit.dispatch.checks import E4M3, FLOATS, Dims
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.reprs import shapes_repr
from mlakit.dispatch.specs import Problem, device_facts
from mlakit.kernels.cpu.matmul import multiplies_bf16
from mlakit.model.geometry import MLAGeometry
from mlakit.ops import batched_matmul, quantize_fp8, scaled_mm_fp8
from mlakit.ops._refusals import refuse_grad
from mlakit.steps.weight_copies import WeightCopies, WeightCopy

BLOCK = 128  # rows and columns per scale of an e4m3 checkpoint
SCALE_UB = 1200.0  # upper bound of an activation group's amax; larger entries saturate


@dataclass(frozen=True, eq=False)
class HeadMatrices:
    """One matrix per head, [heads, outputs, inputs]; e4m3 has one scale per `group`² block."""

    weight: Tensor
    scale: Tensor | None = None  # [heads, ceil(outputs / group), ceil(inputs / group)] float32
    group: int = 0
    float32: Tensor | None = field(default=None, repr=False)  # a copy for the CPU kernels
    # what keeps `float32`, or an e4m3 `weight` and `scale`, equal to the checkpoint's matrix
    copies: WeightCopies | None = field(default=None, repr=False)

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
                assert self.copies is not None
                refuse_grad("UpProjection", kv_b_proj=self.weight)  # the copy has no derivative
                self.copies.ensure_current()
                by_head, weight = by_head.float(), self.float32
            batched_matmul(by_head, weight, out=out_by_head, backend=backend)
            return out
        if self.copies is not None:
            self.copies.ensure_current()
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
    """Return whether a CPU kernel multiplies `x`; torch.compile graphs use the original weights."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    problem = Problem(*device_facts(x.device), dtype=str(x.dtype))
    return selection.select("batched_matmul", problem, backend).backend == "cpu"


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

    def refresh_weights(self) -> None:
        """Make the copies of the matrix again, after writes that torch does not count.

        These are writes through `.data`, and to tensors that were made in inference mode. Without
        this call a sample of the matrix is compared with the copies at each use, and a use after
        such a write raises RuntimeError once a sample differs (`mlakit.steps.weight_copies`).
        """
        if self.w_uk_t.copies is not None:
            self.w_uk_t.copies.refresh()

    def expand(
        self,
        latent: Tensor,
        *,
        heads: slice | None = None,
        buffer: Tensor | None = None,
        backend: Backend = "auto",
    ) -> tuple[Tensor, Tensor]:
        """Return (k_nope [tokens, heads, D_N], v [tokens, heads, D_V]) of latent [tokens, D_C].

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
        """Make the projection from the checkpoint's matrix [heads · (D_N + D_V), D_C].

        scale  [ceil(rows / 128), ceil(D_C / 128)] float32 of an e4m3 matrix: value = stored · scale
               (`weight_scale_inv` in checkpoints)

        A float matrix is viewed. On a CPU a bf16 or fp16 matrix is also copied to float32, for the
        CPU kernels: 4 bytes per weight, 67 MB for a layer of DeepSeek-V3. A bf16 matrix is not,
        if the CPU multiplies such matrices. W_UK of an e4m3 matrix is copied, transposed. Writes to
        the matrix refresh the copies, or need `refresh_weights`.
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
        return cls(g, *_fp8_matrices(kv_b_proj, scale, g))


def _by_head(kv_b_proj: Tensor, g: MLAGeometry) -> tuple[Tensor, Tensor, Tensor]:
    """Views: the matrix as a batch of one, W_UKᵀ by head, W_UV by head."""
    by_head = kv_b_proj.unflatten(0, (g.num_heads, g.qk_nope_head_dim + g.v_head_dim))
    w_uk, w_uv = by_head.split([g.qk_nope_head_dim, g.v_head_dim], dim=1)
    return kv_b_proj[None], w_uk.transpose(1, 2), w_uv


def _float_matrices(kv_b_proj: Tensor, g: MLAGeometry) -> list[HeadMatrices]:
    """The views, each with a view of one float32 copy if the CPU kernels need it."""
    views = _by_head(kv_b_proj, g)
    if not _needs_float32_copy(kv_b_proj):
        return [HeadMatrices(view) for view in views]
    copy = WeightCopy("kv_b_proj", kv_b_proj.detach(), dtype=torch.float32)
    watched = WeightCopies("UpProjection", [copy])
    return [
        HeadMatrices(view, float32=values, copies=watched)
        for view, values in zip(views, _by_head(copy.values, g), strict=True)
    ]


def _needs_float32_copy(kv_b_proj: Tensor) -> bool:
    """Return whether CPU kernels multiply a copy; torch.compile graphs use the weights."""
    if torch.compiler.is_compiling() or kv_b_proj.device.type != "cpu":
        return False
    return kv_b_proj.dtype != torch.float32 and not multiplies_bf16(kv_b_proj.dtype)


def _fp8_matrices(kv_b_proj: Tensor, scale: Tensor, g: MLAGeometry) -> list[HeadMatrices]:
    """The matrix and W_UV as views, W_UKᵀ as a copy, and the scales of each head's blocks."""
    group = _head_group(g)
    matrix, w_uk_t, w_uv = _by_head(kv_b_proj, g)
    scales = scale.detach()
    rows, columns = _head_blocks(g, 0, g.qk_nope_head_dim, group, scale.device)
    transposed = WeightCopy("kv_b_proj", w_uk_t.detach())
    w_uk_t_scale = WeightCopy("scale", scales, index=(rows[:, None], columns[:, None]))
    rows, columns = _head_blocks(g, g.qk_nope_head_dim, g.v_head_dim, group, scale.device)
    w_uv_scale = WeightCopy("scale", scales, index=(rows[..., None], columns))
    watched = None
    if not torch.compiler.is_compiling():
        watched = WeightCopies("UpProjection", [transposed, w_uk_t_scale, w_uv_scale])
    return [
        HeadMatrices(matrix, scale[None], BLOCK),
        HeadMatrices(transposed.values, w_uk_t_scale.values, group, copies=watched),
        HeadMatrices(w_uv, w_uv_scale.values, group, copies=watched),
    ]


def _head_group(g: MLAGeometry) -> int:
    """The largest block that crosses no head boundary: 128, or 64 for GLM's 192 + 256."""
    return gcd(g.qk_nope_head_dim, g.v_head_dim, BLOCK)


def _head_blocks(
    g: MLAGeometry, first_row: int, rows: int, group: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The checkpoint's blocks that hold the blocks of `group`² of `rows` rows of each head.

    Returns their rows [heads, rows / group] and columns [ceil(D_C / group)].
    """
    head = torch.arange(g.num_heads, device=device)[:, None]
    row = torch.arange(0, rows, group, device=device)
    first = head * (g.qk_nope_head_dim + g.v_head_dim) + first_row
    return (first + row) // BLOCK, torch.arange(0, g.kv_lora_rank, group, device=device) // BLOCK
