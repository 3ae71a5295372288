"""Wrong arguments of the paged cache: the error names them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, tensor
from torch._subclasses import FakeTensorMode

from mlakit.cache import PagedLatentCache
from mlakit.model.geometry import RowShape
from tests.cache.cache_rows import V3, V4
from tests.spoiling import Wrong

BF16, BYTES = torch.bfloat16, torch.uint8
NORMAL = "positive and a normal float32"
ONES = torch.ones(4, 3, 1)


def wrap(*shape: int, dtype: torch.dtype = BF16, **options: Any) -> Callable[[], object]:
    return partial(PagedLatentCache.wrap, torch.zeros(shape, dtype=dtype), V3, **options)


def wrapped(blocks: Any, row: RowShape = V3) -> Callable[[], object]:
    return partial(PagedLatentCache.wrap, blocks, row)


def scaled(scales: Any) -> Callable[[], object]:
    return wrap(4, 3, 640, dtype=BYTES, scales=scales)


def with_tensor_scale(scale: float | Tensor) -> Callable[[], object]:
    return wrap(4, 3, 576, dtype=BYTES, tensor_scale=scale)


def allocate(**options: Any) -> Callable[[], Any]:
    return partial(PagedLatentCache.allocate, **{"geometry": V3, "num_pages": 2, **options})


def layer(index: Any) -> Callable[[], object]:
    return lambda: allocate(num_layers=3)().layer(index)


# by function, the message of each call
REFUSALS: list[tuple[str, dict[str, Callable[[], object]]]] = [
    (
        "PagedLatentCache.wrap",
        {
            "blocks must have rows of 576 (format bf16 of RowShape(kv_lora_rank=512, "
            "qk_rope_head_dim=64, v_width=512)), got shape (4, 3, 575)": wrap(4, 3, 575),
            "blocks must have rows of 576 (fp8) or 640 (fp8_token) or 656 (fp8_block128) or 648 "
            "(fp8_block64) or 400 (mxfp4_block32) bytes for RowShape(...), got 600": wrap(
                4, 3, 600, dtype=BYTES
            ),
            "blocks must have rows of 656 (format fp8_block128 of ...": wrap(
                4, 3, 640, dtype=BYTES, format="fp8_block128"
            ),
            "blocks must have rows of 648 (format fp8_block64 of ...": wrap(
                4, 3, 584, dtype=BYTES, format="fp8_block64"
            ),
            "TypeError: blocks must be bfloat16 or float16 or float32 or uint8 or int8 or "
            "float8_e4m3fn, got int32": wrap(4, 3, 576, dtype=torch.int32),
            "TypeError: blocks must be float8_e4m3fn, got bfloat16": wrap(4, 3, 576, format="fp8"),
            "TypeError: blocks must be bfloat16, got uint8": wrap(
                4, 3, 576, dtype=BYTES, format="bf16"
            ),
            "TypeError: blocks must be a tensor, got list": wrapped([[0.0]]),
            **{
                f"blocks must have 3, 4 or 6 axes (see ...), got {len(shape)}": wrap(*shape)
                for shape in [(), (576,), (3, 576), (4, 1, 3, 1, 576)]
            },
            "blocks.shape[2] must be one KV head, got 2": wrap(4, 3, 2, 576),
            "blocks.shape[1] must be 1, got 2": wrap(4, 2, 1, 3, 1, 576),
            "blocks.shape[4] must be 1, got 8": wrap(4, 1, 1, 3, 8, 576),
            "blocks must have a page size of at least 1, got 0": wrap(4, 0, 576),
            "blocks must have a contiguous last axis, got strides (3456, 1152, 2)": wrapped(
                torch.zeros(4, 3, 1152)[..., ::2]
            ),
            "blocks must have a contiguous last axis, got strides (3504, 1168, 2)": wrapped(
                torch.zeros(4, 3, 1168, dtype=BYTES)[..., ::2], V4
            ),
            "blocks must have contiguous pages, row stride 584, got row stride 600": wrapped(
                torch.zeros(4, 3, 600, dtype=BYTES)[..., :584], V4
            ),
            "blocks must be on a device that holds data, got a meta tensor": wrapped(
                torch.zeros(4, 3, 576, device="meta")
            ),
            "scales must be given for format fp8_token, got None": scaled(None),
            **{
                f"scales must be None for format {format}, which has no separate scales tensor, "
                "got a tensor": wrap(4, 3, width, dtype=dtype, format=format, scales=ONES)
                for format, dtype, width in [
                    ("bf16", BF16, 576),
                    ("fp8", BYTES, 576),
                    ("fp8_block128", BYTES, 656),
                    ("fp8_block64", BYTES, 648),
                ]
            },
            "TypeError: scales must be float32, got float16": scaled(ONES.half()),
            "TypeError: scales must be a tensor, got float": scaled(1.0),
            "scales must have 3, 4 or 6 axes (see ...), got 2": scaled(torch.ones(4, 3)),
            "scales.shape[1] (pages) must equal blocks.shape[1], 4, got 5": scaled(
                torch.ones(5, 3, 1)
            ),
            "scales.shape[3] (scale) must equal the scales of format fp8_token, 1, got 2": scaled(
                torch.ones(4, 3, 2)
            ),
            **{
                f"tensor_scale must be {rule}, got {scale}": with_tensor_scale(scale)
                for scale, rule in [
                    *((scale, NORMAL) for scale in (0.0, -1.0, 1e39, 1e-45)),
                    (float("nan"), "finite"),
                ]
            },
            "tensor_scale must have one element, got shape (2,)": with_tensor_scale(torch.ones(2)),
            "tensor_scale must be left at 1.0 for format bf16, got 2.0": wrap(
                4, 3, 576, tensor_scale=2.0
            ),
        },
    ),
    (
        "PagedLatentCache.wrap",
        {
            f"tensor_scale must be {rule}, got {scale}": with_tensor_scale(tensor(scale))
            for scale, rule in [
                *((scale, NORMAL) for scale in (0.0, -1.0, 2.0**-140)),
                *((scale, "finite") for scale in (float("nan"), float("inf"))),
            ]
        },
    ),
    (
        "PagedLatentCache.allocate",
        {
            **{
                f"TypeError: tensor_scale must be bfloat16 or ... or float64, got {name}": allocate(
                    format="fp8", tensor_scale=tensor(1).to(getattr(torch, name))
                )
                for name in ("bool", "uint8", "int32", "float8_e8m0fnu")  # the byte 127 is not 127
            },
            "tensor_scale must be left at 1.0 for format fp8_block128, got 2.0": allocate(
                format="fp8_block128", tensor_scale=2.0
            ),
            **{
                f"{name} must be at least 1, got 0": allocate(**{name: 0})
                for name in ("num_pages", "page_size", "num_layers")
            },
            "TypeError: page_size must be an integer, got float": allocate(page_size=2.5),
            **{
                f"TypeError: geometry must be an MLAGeometry or a RowShape, got {kind}": allocate(
                    geometry=geometry
                )
                for kind, geometry in (("NoneType", None), ("tuple", (64, 16)))
            },
        },
    ),
    (
        "fp8_block64",
        {
            "kv_lora_rank must not exceed 512 ..., got 576": allocate(
                geometry=RowShape(576, 64), format="fp8_block64"
            ),
        },
    ),
    (
        "PagedLatentCache.layer",
        {
            **{f"index must be in [0, 3), got {index}": layer(index) for index in (-1, 3)},
            **{
                f"TypeError: index must be an integer, got {type(index).__name__}": layer(index)
                for index in ("a", 0.0, False)
            },
        },
    ),
]


@pytest.mark.parametrize(
    ("function", "message", "refused"),
    [(function, *each) for function, table in REFUSALS for each in table.items()],
)
def test_a_wrong_argument_is_named(function, message, refused):
    wrong = Wrong(message)
    with pytest.raises(wrong.error) as refusal:
        refused()
    wrong.assert_is(refusal.value, function)


@pytest.mark.parametrize("refused", [wrap(4, 3, 576, format="fp9"), allocate(format="fp9")])
def test_an_unknown_format_is_named(refused):
    with pytest.raises(ValueError, match=r"^unknown cache format 'fp9'; choose from bf16, "):
        refused()


def test_the_value_of_a_fake_scale_is_not_read():
    with FakeTensorMode():
        assert allocate(format="fp8", tensor_scale=torch.zeros(1))() is not None
