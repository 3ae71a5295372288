"""Which products the portable backend leaves to the library, and what its configurations allow."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from mlakit.kernels.launch import SHARED_BYTES
from mlakit.kernels.triton import configs, fp8, fp8_small_m, indexer_configs
from mlakit.kernels.triton.fp8 import library_refuses as scaled_mm_refuses
from mlakit.kernels.triton.fp8_small_m_configs import pick_few_rows_config
from mlakit.kernels.triton.matmul import library_refuses as bmm_refuses
from mlakit.tools.workloads.fp8 import ScaledMatmulCase

E4M3 = torch.float8_e4m3fn


def scaled_operands(m=64, n=256, k=512, dtype=torch.bfloat16, columns=None):
    return {
        "a": torch.empty(m, k, dtype=E4M3),
        "a_scale": torch.empty(k // 128, m if columns is None else columns),
        "b": torch.empty(n, k, dtype=E4M3),
        "b_scale": torch.empty(-(-n // 128), k // 128),
        "out": torch.empty(m, n, dtype=dtype),
    }


def refusal(operands, *, n_group=128, k_group=128, arch=90):
    return scaled_mm_refuses(**operands, n_group=n_group, k_group=k_group, arch=arch)


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(fp8, "_library_has_scaled_mm", lambda: True)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("sizes", [(64, 256, 512), (4096, 32768, 512), (4, 16, 7168)])
def test_the_library_takes_blocks_of_128(sizes):
    with torch.device("meta"):
        operands = scaled_operands(*sizes)
    assert refusal(operands) is None


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arch": 100}, "sm_90, got sm_100"),
        ({"arch": 0}, "sm_90, got sm_0"),
        ({"n_group": 64}, "groups of 128, got 64 and 128"),
        ({"k_group": 64}, "groups of 128, got 128 and 64"),
    ],
)
def test_the_library_refuses_other_problems(change, reason):
    assert reason in refusal(scaled_operands(), **change)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"m": 6}, "M % 4"),
        ({"m": 0}, "none 0"),
        ({"n": 24}, "N % 16"),
        ({"k": 640}, "K % 512"),
        ({"dtype": torch.float16}, "bfloat16 result"),
        ({"columns": 68}, "one column of a_scale per row"),
    ],
)
def test_the_library_refuses_other_shapes(sizes, reason):
    assert reason in refusal(scaled_operands(**sizes))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("name", ["a", "a_scale", "b", "b_scale", "out"])
def test_the_library_refuses_what_it_would_copy(name):
    operands = scaled_operands()
    shape = operands[name].shape
    wider = operands[name].new_empty(shape[0], shape[1] + 16)
    assert f"aligned {name}" in refusal({**operands, name: wider[:, : shape[1]]})


def test_the_library_may_be_too_old(monkeypatch):
    monkeypatch.setattr(fp8, "_library_has_scaled_mm", lambda: False)
    assert "torch with scaled_mm" in refusal(scaled_operands())


@pytest.mark.usefixtures("library")
def test_the_library_refuses_a_batch():
    operands = {name: tensor[None] for name, tensor in scaled_operands().items()}
    assert "no batch" in refusal(operands)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((1, 128, 128), None),
        ((32, 16, 16), None),
        ((0, 128, 128), "1 to 32 rows, got 0"),
        ((33, 128, 128), "1 to 32 rows, got 33"),
        ((1, 24, 128), "groups of N in 16s, got 24"),
        ((1, 128, 48), "powers of two from 16 to 128, got 48"),
        ((1, 128, 256), "powers of two from 16 to 128, got 256"),
    ],
)
def test_the_kernel_of_few_rows_refuses_other_groups(sizes, reason):
    got = fp8_small_m.refuses(*sizes)
    assert got is None if reason is None else reason in got


@pytest.mark.parametrize("shared", sorted(set(SHARED_BYTES.values())))
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("n_group", [16, 64, 128])
@pytest.mark.parametrize("columns", [576, 24576])
def test_tiles_of_few_rows_fit_shared_memory(shared, rows, n_group, columns):
    for k_groups in (1, 2, 3, 56):
        config = pick_few_rows_config(
            batch=1,
            rows=rows,
            columns=columns,
            n_group=n_group,
            k_group=128,
            k_groups=k_groups,
            num_sms=132,
            shared_bytes=shared,
            has_fp8=True,
        )
        assert config.shared_bytes(128) <= shared
        assert n_group % config.block_n == 0  # one scale of the weights per tile and group of K
        assert config.lanes <= 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        ScaledMatmulCase(m=1, n=40, k=16 * 9, n_group=16, k_group=16),
        ScaledMatmulCase(m=17, n=70, k=16 * 4, n_group=32, k_group=16, batch=2),
        ScaledMatmulCase(m=32, n=144, k=128 * 5, n_group=128, k_group=128, padded=True),
        ScaledMatmulCase(m=2, n=128, k=130, n_group=64, k_group=64, out_dtype="e4m3"),
        ScaledMatmulCase(m=3, n=48, k=20, n_group=16, k_group=16, batch=3, out_dtype="fp32"),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_sms", [1, 12, 1000], ids=["wide tiles", "tiles of 8", "narrow tiles"])
@pytest.mark.usefixtures("no_replay")
def test_products_of_few_rows_match_the_oracle(case, num_sms, device, monkeypatch):
    taken = []

    def pick(**sizes):
        taken.append(pick_few_rows_config(**{**sizes, "num_sms": num_sms}))
        return taken[-1]

    monkeypatch.setattr(fp8, "pick_few_rows_config", pick)
    case.run(device, "triton")
    assert taken


def bmm_operands(dtype=torch.bfloat16, out_dtype=None):
    """The absorb step: slices of [tokens, heads, ...] tensors."""
    a = torch.empty(6, 4, 192, dtype=dtype)[..., :128].transpose(0, 1)
    b = torch.empty(4, 128, 512, dtype=dtype).mT
    out = torch.empty(6, 4, 576, dtype=out_dtype or dtype)[..., :512].transpose(0, 1)
    return a, b, out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bmm_takes_slices_of_16_bit_matrices(dtype):
    assert bmm_refuses(*bmm_operands(dtype)) is None


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.float32, None), (torch.bfloat16, torch.float32), (torch.bfloat16, E4M3)],
)
def test_bmm_takes_16_bit_matrices_of_one_dtype_only(dtype, out_dtype):
    assert "16-bit matrices of one dtype" in bmm_refuses(*bmm_operands(dtype, out_dtype))


def test_bmm_refuses_what_it_would_copy():
    a, b, out = bmm_operands()
    assert "needs a with" in bmm_refuses(a[..., ::2], b[..., ::2], out)
    assert "needs out with" in bmm_refuses(a, b, out.mT.contiguous().mT)
    assert "needs b with" in bmm_refuses(a, b[:1, :1].expand(4, 512, 128), out)
    assert "not empty" in bmm_refuses(a[:, :0], b, out[:, :0])


@pytest.mark.parametrize("shared", sorted(set(SHARED_BYTES.values())))
@pytest.mark.parametrize("rows", [1, 16, 100, 4096])
def test_matmul_tiles_fit_shared_memory(shared, rows):
    for k_group in (16, 64, 128, 512):
        config = configs.pick_scaled_matmul_config(
            rows=rows, columns=7168, k_group=k_group, shared_bytes=shared
        )
        assert config.shared_bytes(itemsize=1) <= shared
    config = configs.pick_matmul_config(
        rows=rows, columns=512, depth=128, itemsize=2, shared_bytes=shared
    )
    assert config.shared_bytes(itemsize=2) <= shared


@pytest.mark.parametrize("shared", sorted(set(SHARED_BYTES.values())))
@pytest.mark.parametrize("heads", [1, 16, 64, 128])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("tokens", [8, 16, 4096])
def test_indexer_tiles_fit_shared_memory(shared, heads, itemsize, tokens):
    for width in (128, 576):
        config = indexer_configs.pick_indexer_config(
            heads=heads,
            padded_width=width,
            itemsize=itemsize,
            is_dequantised=width == 576,
            tokens=tokens,
            batch=8,
            columns=8192,
            arch=90,
            num_sms=132,
            shared_bytes=shared,
        )
        assert config.shared_bytes(heads, width, itemsize) <= shared


@pytest.mark.parametrize(
    ("batch", "q_len", "columns", "tile", "tiles"),
    [
        (1, 1, 4096, (1, 128, 4), 1),
        (1, 1, 131072, (1, 128, 4), 4),
        (64, 1, 8192, (1, 128, 4), 11),
        (128, 2, 32768, (2, 128, 4), 32),
        (1, 2048, 32768, (4, 64, 4), 32),
    ],
)
def test_indexer_programs_fill_the_sms(batch, q_len, columns, tile, tiles):
    config = indexer_configs.pick_indexer_config(
        heads=64,
        padded_width=128,
        itemsize=1,
        is_dequantised=False,
        tokens=batch * q_len,
        batch=batch,
        columns=columns,
        arch=90,
        num_sms=132,
        shared_bytes=SHARED_BYTES[90],
    )
    assert (config.queries, config.keys, config.num_warps) == tile
    assert config.tiles == tiles
