"""The up-projection against the checkpoint's matrix, dequantised block by block in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import reference
from mlakit.dispatch.checks import UnsupportedError
from mlakit.model.geometry import MLAGeometry
from mlakit.steps import weights
from mlakit.steps.weights import SCALE_UB, HeadMatrices, UpProjection
from mlakit.tools.testing import assert_matches, assert_same_bits, poison

BF16, F32, F64, E4M3 = torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn
BLOCK = 128


def geometry(heads: int, d_n: int, d_v: int, d_c: int) -> MLAGeometry:
    return MLAGeometry(
        num_heads=heads,
        kv_lora_rank=d_c,
        qk_nope_head_dim=d_n,
        qk_rope_head_dim=8,
        v_head_dim=d_v,
        hidden_size=16,
    )


# a head of the first is two blocks of a checkpoint; heads of the others begin or end inside blocks,
# or change from keys to values there; latents end inside one in all but the first
GEOMETRIES = {
    "v3 128+128": (geometry(3, 128, 128, 256), 128),
    "glm 192+256": (geometry(3, 192, 256, 160), 64),
    "96+128": (geometry(4, 96, 128, 200), 32),
    "minicpm3 64+64": (geometry(3, 64, 64, 100), 64),
    "48+40": (geometry(5, 48, 40, 72), 8),
}
every_geometry = pytest.mark.parametrize(("g", "group"), GEOMETRIES.values(), ids=list(GEOMETRIES))


def float_matrix(generator: torch.Generator, g: MLAGeometry, dtype: torch.dtype) -> Tensor:
    rows = g.num_heads * (g.qk_nope_head_dim + g.v_head_dim)
    return torch.randn(rows, g.kv_lora_rank, generator=generator).to(dtype)


def e4m3_matrix(generator: torch.Generator, g: MLAGeometry) -> tuple[Tensor, Tensor]:
    """(matrix, scales): scales of neighbouring blocks differ by far more than e4m3 rounds."""
    matrix = float_matrix(generator, g, F32).to(E4M3)
    blocks = [-(-size // BLOCK) for size in matrix.shape]
    return matrix, 2 * torch.rand(*blocks, generator=generator) + 0.1


def dequantised(matrix: Tensor, scale: Tensor | None) -> Tensor:
    """The checkpoint's matrix in float64, one element of a block at a time."""
    if scale is None:
        return matrix.double()
    exact = matrix.double()
    for row in range(matrix.shape[0]):
        for block in range(scale.shape[1]):
            exact[row, block * BLOCK : (block + 1) * BLOCK] *= scale[row // BLOCK, block].double()
    return exact


def of_heads(exact: Tensor, g: MLAGeometry) -> tuple[Tensor, Tensor]:
    """(W_UK [heads, D_N, D_C], W_UV [heads, D_V, D_C]) of a checkpoint's matrix."""
    per_head = g.qk_nope_head_dim + g.v_head_dim
    keys, values = [], []
    for head in range(g.num_heads):
        first = head * per_head
        keys.append(exact[first : first + g.qk_nope_head_dim])
        values.append(exact[first + g.qk_nope_head_dim : first + per_head])
    return torch.stack(keys), torch.stack(values)


def head_matrices(matrices: HeadMatrices) -> Tensor:
    """What a `HeadMatrices` stands for, in float64."""
    exact = matrices.weight.double()
    if matrices.scale is None:
        return exact
    _, rows, columns = exact.shape
    scale = matrices.scale.double().repeat_interleave(matrices.group, 1)
    return exact * scale.repeat_interleave(matrices.group, 2)[:, :rows, :columns]


def as_multiplied(x: Tensor, matrices: HeadMatrices) -> Tensor:
    """Activations [tokens, heads, inputs] in float64 as they enter the product."""
    if matrices.scale is None:
        return x.double()
    by_head = []
    for head in x.unbind(1):
        q, scales = reference.quantize_fp8(head, matrices.group, scale_ub=SCALE_UB)
        by_head.append(reference.dequantize_fp8(q, scales, matrices.group))
    return torch.stack(by_head, dim=1)


def checkpoint(
    generator: torch.Generator, g: MLAGeometry, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    if dtype == E4M3:
        return e4m3_matrix(generator, g)
    return float_matrix(generator, g, dtype), None


@every_geometry
@pytest.mark.parametrize("dtype", [BF16, F32, E4M3], ids=str)
def test_the_matrices_of_heads_are_those_of_the_checkpoint(g, group, dtype, generator):
    matrix, scale = checkpoint(generator, g, dtype)
    up = UpProjection.from_checkpoint(matrix, g, scale)
    exact = dequantised(matrix, scale)
    keys, values = of_heads(exact, g)
    assert_same_bits("kv_b_proj", head_matrices(up.kv_b_proj)[0], exact)
    assert_same_bits("w_uk_t", head_matrices(up.w_uk_t), keys.transpose(1, 2).contiguous())
    assert_same_bits("w_uv", head_matrices(up.w_uv), values)
    assert up.is_fp8 == (dtype == E4M3)
    if dtype == E4M3:
        assert (up.kv_b_proj.group, up.w_uk_t.group, up.w_uv.group) == (BLOCK, group, group)


@pytest.mark.parametrize(
    ("d_n", "d_v", "group"), [(128, 128, 128), (192, 256, 64), (256, 512, 128), (64, 64, 64)]
)
def test_heads_get_the_largest_blocks_that_fit_them(d_n, d_v, group, generator):
    g = geometry(2, d_n, d_v, 16)
    assert UpProjection.from_checkpoint(*checkpoint_of(generator, g)).w_uk_t.group == group


def checkpoint_of(generator: torch.Generator, g: MLAGeometry) -> tuple[Tensor, MLAGeometry, Tensor]:
    matrix, scale = e4m3_matrix(generator, g)
    return matrix, g, scale


def test_a_float_matrix_is_not_copied(generator):
    g, _ = GEOMETRIES["glm 192+256"]
    matrix = float_matrix(generator, g, BF16)
    up = UpProjection.from_checkpoint(matrix, g)
    for part in (up.kv_b_proj, up.w_uk_t, up.w_uv):
        assert part.weight.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()
    matrix.zero_()  # weights loaded later are seen
    assert not up.w_uk_t.weight.any()


@pytest.mark.slow
@every_geometry
@pytest.mark.parametrize(
    ("dtype", "activations"), [(BF16, BF16), (F32, F32), (E4M3, BF16), (E4M3, F32)], ids=str
)
def test_expanding(g, group, dtype, activations, generator):
    matrix, scale = checkpoint(generator, g, dtype)
    up = UpProjection.from_checkpoint(matrix, g, scale)
    latent = torch.randn(5, g.kv_lora_rank + 3, generator=generator).to(activations)
    latent = latent[:, : g.kv_lora_rank]  # as the latent columns of cache rows lie
    latent[2] *= 3000  # above what one scale may stand for
    k_nope, v = up.expand(latent)

    entering = as_multiplied(latent[:, None], up.kv_b_proj)[:, 0]
    keys, values = of_heads(dequantised(matrix, scale), g)
    for name, got, weight in (("k_nope", k_nope, keys), ("v", v, values)):
        exact = torch.einsum("tc,hdc->thd", entering, weight)
        naive = torch.einsum("tc,hdc->thd", entering.float(), weight.float())
        assert got.dtype == activations
        assert_matches(name, got, exact, naive)


@pytest.mark.slow
@every_geometry
@pytest.mark.parametrize(
    ("dtype", "activations"), [(BF16, BF16), (F32, F32), (E4M3, BF16), (E4M3, F32)], ids=str
)
def test_absorbing_and_projecting_values(g, group, dtype, activations, generator):
    matrix, scale = checkpoint(generator, g, dtype)
    up = UpProjection.from_checkpoint(matrix, g, scale)
    keys, values = of_heads(dequantised(matrix, scale), g)
    for name, matrices, weight in (
        ("absorb", up.w_uk_t, keys.transpose(1, 2)),
        ("values", up.w_uv, values),
    ):
        _, outputs, inputs = weight.shape
        x = torch.randn(5, g.num_heads, inputs + 3, generator=generator).to(activations)
        x = x[..., 3:]  # as the unrotated columns of a query lie
        x[2] *= 3000
        room = poison(torch.empty(5, g.num_heads, outputs + 8, dtype=activations))
        around = room.clone()
        out = room[..., 4:-4]
        assert matrices.apply(x, out=out) is out

        entering = as_multiplied(x, matrices)
        exact = torch.einsum("thi,hoi->tho", entering, weight)
        naive = torch.einsum("thi,hoi->tho", entering.float(), weight.float())
        assert_matches(name, out, exact, naive)
        around[..., 4:-4] = out
        assert_same_bits(f"what surrounds {name}", room, around)


def test_what_lies_above_the_scale_bound_saturates(generator):
    """A group whose largest entry is above 1200 is stored as if that were 1200."""
    g = geometry(1, 128, 128, 128)
    matrix, scale = e4m3_matrix(generator, g)
    up = UpProjection.from_checkpoint(matrix, g, scale)
    latent = torch.full((1, 128), 5000.0, dtype=BF16)
    k_nope, v = up.expand(latent)
    exact = dequantised(matrix, scale).sum(1) * 1200
    assert_matches("out", torch.cat([k_nope, v], -1)[0, 0], exact, exact.float())


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_no_tokens(dtype, generator):
    g, _ = GEOMETRIES["96+128"]
    matrix, scale = checkpoint(generator, g, dtype)
    up = UpProjection.from_checkpoint(matrix, g, scale)
    k_nope, v = up.expand(torch.empty(0, g.kv_lora_rank, dtype=BF16))
    assert k_nope.shape == (0, g.num_heads, g.qk_nope_head_dim)
    assert v.shape == (0, g.num_heads, g.v_head_dim)


def error_of(**changes: Any) -> str:
    g = geometry(2, 96, 128, 200)
    generator = torch.Generator().manual_seed(0)
    matrix, scale = e4m3_matrix(generator, g)
    arguments = {"kv_b_proj": matrix, "geometry": g, "scale": scale}
    with pytest.raises((TypeError, ValueError)) as refusal:
        UpProjection.from_checkpoint(**{**arguments, **changes})
    return f"{type(refusal.value).__name__}: {refusal.value}".replace(
        "UpProjection.from_checkpoint: ", ""
    )


def test_a_matrix_without_its_scales_is_refused():
    assert error_of(scale=None) == "ValueError: scale must be given for an e4m3 matrix, got None"


def test_scales_without_an_e4m3_matrix_are_refused():
    said = error_of(kv_b_proj=torch.zeros(448, 200, dtype=BF16))
    assert said == "ValueError: scale must be None for a matrix that is not e4m3, got a tensor"


def test_a_matrix_of_other_sizes_is_refused():
    said = error_of(kv_b_proj=torch.zeros(447, 200, dtype=BF16), scale=None)
    assert said == (
        "ValueError: kv_b_proj.shape[0] (heads · (D_N + D_V)) must equal what the geometry needs, "
        "448, got 447"
    )
    said = error_of(kv_b_proj=torch.zeros(448, 199, dtype=BF16), scale=None)
    assert said == (
        "ValueError: kv_b_proj.shape[1] (D_C) must equal the geometry's kv_lora_rank, 200, got 199"
    )


def test_a_matrix_of_another_type_is_refused():
    said = error_of(kv_b_proj=torch.zeros(448, 200, dtype=torch.float64), scale=None)
    assert said.startswith("TypeError: kv_b_proj must be bfloat16 or float16 or float32 or float8")


def test_an_e4m3_matrix_strided_along_its_rows_is_refused():
    said = error_of(kv_b_proj=torch.zeros(200, 448).to(E4M3).T)
    assert said == "ValueError: kv_b_proj must have a contiguous last axis, got strides (1, 448)"


def test_scales_of_other_blocks_are_refused():
    assert error_of(scale=torch.ones(4, 1)) == (
        "ValueError: scale.shape[1] (column blocks) must equal kv_lora_rank / 128, 2, got 1"
    )
    assert error_of(scale=torch.ones(3, 2)) == (
        "ValueError: scale.shape[0] (row blocks) must equal the rows of kv_b_proj / 128, 4, got 3"
    )
    assert error_of(scale=torch.ones(4, 2, dtype=BF16)) == (
        "TypeError: scale must be float32, got bfloat16"
    )


@every_geometry
def test_a_half_matrix_on_the_cpu_has_one_float32_copy(g, group, generator, monkeypatch):
    monkeypatch.setattr(weights, "multiplies_bf16", lambda dtype: False)
    matrix = float_matrix(generator, g, BF16)
    up = UpProjection.from_checkpoint(matrix, g)
    copies = [part.float32 for part in (up.kv_b_proj, up.w_uk_t, up.w_uv)]
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1
    assert copies[0].untyped_storage().nbytes() == 4 * matrix.numel()
    for part, copy in zip((up.kv_b_proj, up.w_uk_t, up.w_uv), copies, strict=True):
        assert_same_bits("copy", copy, part.weight.float())


@pytest.mark.parametrize("dtype", [F32, E4M3, BF16], ids=str)
def test_other_matrices_have_no_copy(dtype, generator, monkeypatch):
    monkeypatch.setattr(weights, "multiplies_bf16", lambda dtype: dtype == BF16)
    g, _ = GEOMETRIES["glm 192+256"]
    matrix, scale = checkpoint(generator, g, dtype)
    up = UpProjection.from_checkpoint(matrix, g, scale)
    assert [part.float32 for part in (up.kv_b_proj, up.w_uk_t, up.w_uv)] == [None] * 3


@pytest.mark.parametrize("part", ["kv_b_proj", "w_uk_t", "w_uv"])
def test_products_with_the_copy_follow_writes_to_the_matrix(part, generator):
    g, _ = GEOMETRIES["v3 128+128"]
    matrix = float_matrix(generator, g, BF16)
    matrices: HeadMatrices = getattr(UpProjection.from_checkpoint(matrix, g), part)
    for _ in range(2):
        heads, outputs, inputs = matrices.weight.shape
        x = torch.randn(4, heads, inputs, generator=generator).to(BF16)
        out = matrices.apply(x, out=x.new_empty(4, heads, outputs))
        exact = torch.einsum("thi,hoi->tho", x.double(), matrices.weight.double())
        naive = torch.einsum("thi,hoi->tho", x.float(), matrices.weight.float()).to(BF16)
        assert_matches("out", out, exact, naive)
        matrix.copy_(float_matrix(generator, g, BF16))  # as loading another checkpoint does


def test_a_matrix_made_in_inference_mode_is_taken(generator):
    g, _ = GEOMETRIES["v3 128+128"]
    with torch.inference_mode():
        matrix = float_matrix(generator, g, BF16)
        up = UpProjection.from_checkpoint(matrix, g)
        latent = torch.randn(3, g.kv_lora_rank, generator=generator).to(BF16)
        k_nope, _ = up.expand(latent)
    assert_matches(
        "k_nope",
        k_nope,
        torch.einsum("tc,hcn->thn", latent.double(), up.w_uk_t.weight.double()),
        torch.einsum("tc,hcn->thn", latent.float(), up.w_uk_t.weight.float()).to(BF16),
    )


@pytest.mark.parametrize("part", ["expand", "w_uk_t"])
@pytest.mark.parametrize("mode", ["backward", "forward"])
def test_a_copy_hides_no_derivative_of_its_matrix(mode, part, generator, monkeypatch):
    """The copy itself has none."""
    monkeypatch.setattr(weights, "multiplies_bf16", lambda dtype: False)
    g, _ = GEOMETRIES["minicpm3 64+64"]
    matrix = float_matrix(generator, g, BF16)
    x = torch.randn(2, g.num_heads, g.qk_nope_head_dim, generator=generator).to(BF16)

    def run(matrix: Tensor) -> Tensor:
        up = UpProjection.from_checkpoint(matrix, g)
        if part == "expand":
            return up.expand(x.new_ones(2, g.kv_lora_rank))[0]
        return up.w_uk_t.apply(x, out=x.new_empty(2, g.num_heads, g.kv_lora_rank))

    if mode == "backward":
        with pytest.raises(UnsupportedError, match=r"^UpProjection: kv_b_proj must not require gr"):
            run(matrix.clone().requires_grad_())
        with torch.no_grad():
            assert_same_bits("out", run(matrix.clone().requires_grad_()), run(matrix))
    else:
        with pytest.raises(UnsupportedError, match=r"^UpProjection: kv_b_proj must not have a tan"):
            torch.func.jvp(run, (matrix,), (matrix,))
