"""Wrong arguments of the paged cache: the error names them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import tensor
from torch._subclasses import FakeTensorMode

from mlakit.cache import PagedLatentCache
from mlakit.model.geometry import RowShape
from tests.cache.cache_rows import V3, V4


class Refusal(NamedTuple):
    name: str
    call: Callable[[], object]
    error: type[Exception]
    message: str

    def __str__(self) -> str:
        return self.name


def wrap(*shape: int, dtype: torch.dtype = torch.bfloat16, **options: object) -> object:
    return PagedLatentCache.wrap(torch.zeros(shape, dtype=dtype), V3, **options)


def allocate(**options: object) -> object:
    return PagedLatentCache.allocate(V3, **{"num_pages": 2, **options})


REFUSALS = [
    Refusal(
        "width",
        lambda: wrap(4, 3, 575),
        ValueError,
        "PagedLatentCache.wrap: blocks must have rows of 576 (format bf16 of "
        "RowShape(kv_lora_rank=512, qk_rope_head_dim=64, v_width=512)), got shape (4, 3, 575)",
    ),
    Refusal(
        "byte-width",
        lambda: wrap(4, 3, 600, dtype=torch.uint8),
        ValueError,
        "blocks must have rows of 576 (fp8) or 640 (fp8_token) or 656 (fp8_block128) or 648 "
        "(fp8_block64) or 400 (mxfp4_block32) bytes for RowShape(kv_lora_rank=512, "
        "qk_rope_head_dim=64, v_width=512), got 600",
    ),
    Refusal(
        "width-of-a-given-format",
        lambda: wrap(4, 3, 640, dtype=torch.uint8, format="fp8_block128"),
        ValueError,
        "blocks must have rows of 656 (format fp8_block128 of",
    ),
    Refusal(
        "width-of-footer-pages",
        lambda: wrap(4, 3, 584, dtype=torch.uint8, format="fp8_block64"),
        ValueError,
        "blocks must have rows of 648 (format fp8_block64 of",
    ),
    Refusal(
        "dtype",
        lambda: wrap(4, 3, 576, dtype=torch.int32),
        TypeError,
        "blocks must be bfloat16 or float16 or float32 or uint8 or int8 or float8_e4m3fn, "
        "got int32",
    ),
    Refusal(
        "dtype-of-a-given-format",
        lambda: wrap(4, 3, 576, format="fp8"),
        TypeError,
        "blocks must be float8_e4m3fn, got bfloat16",
    ),
    Refusal(
        "bytes-for-halves",
        lambda: wrap(4, 3, 576, dtype=torch.uint8, format="bf16"),
        TypeError,
        "blocks must be bfloat16, got uint8",
    ),
    Refusal("unknown-format", lambda: wrap(4, 3, 576, format="fp9"), ValueError, "'fp9'"),
    Refusal(
        "not-a-tensor",
        lambda: PagedLatentCache.wrap([[0.0]], V3),
        TypeError,
        "blocks must be a tensor, got list",
    ),
    *(
        Refusal(
            f"{len(shape)}-axes",
            lambda shape=shape: wrap(*shape),
            ValueError,
            f"blocks must have 3, 4 or 6 axes (see PagedLatentCache.wrap), got {len(shape)}",
        )
        for shape in [(), (576,), (3, 576), (4, 1, 3, 1, 576)]
    ),
    Refusal(
        "two-kv-heads",
        lambda: wrap(4, 3, 2, 576),
        ValueError,
        "blocks.shape[2] must be one KV head, got 2",
    ),
    Refusal(
        "keys-and-values",
        lambda: wrap(4, 2, 1, 3, 1, 576),
        ValueError,
        "blocks.shape[1] must be 1, got 2",
    ),
    Refusal(
        "six-axes-kv-heads",
        lambda: wrap(4, 1, 1, 3, 8, 576),
        ValueError,
        "blocks.shape[4] must be 1, got 8",
    ),
    Refusal(
        "no-page-size",
        lambda: wrap(4, 0, 576),
        ValueError,
        "blocks must have a page size of at least 1, got 0",
    ),
    Refusal(
        "strided-rows",
        lambda: PagedLatentCache.wrap(torch.zeros(4, 3, 1152)[..., ::2], V3),
        ValueError,
        "blocks must have a contiguous last axis, got strides (3456, 1152, 2)",
    ),
    Refusal(
        "strided-footer-rows",
        lambda: PagedLatentCache.wrap(torch.zeros(4, 3, 1168, dtype=torch.uint8)[..., ::2], V4),
        ValueError,
        "blocks must have a contiguous last axis, got strides (3504, 1168, 2)",
    ),
    Refusal(
        "footer-pages-with-gaps",
        lambda: PagedLatentCache.wrap(torch.zeros(4, 3, 600, dtype=torch.uint8)[..., :584], V4),
        ValueError,
        "blocks must have contiguous pages, row stride 584, got row stride 600",
    ),
    Refusal(
        "meta",
        lambda: PagedLatentCache.wrap(torch.zeros(4, 3, 576, device="meta"), V3),
        ValueError,
        "blocks must be on a device that holds data, got a meta tensor",
    ),
    Refusal(
        "scales-missing",
        lambda: wrap(4, 3, 640, dtype=torch.uint8),
        ValueError,
        "scales must be given for format fp8_token, got None",
    ),
    *(
        Refusal(
            f"scales-superfluous-{format}",
            lambda format=format, dtype=dtype, width=width: wrap(
                4, 3, width, dtype=dtype, format=format, scales=torch.ones(4, 3, 1)
            ),
            ValueError,
            f"scales must be None for format {format}, which has no separate scales tensor, "
            "got a tensor",
        )
        for format, dtype, width in [
            ("bf16", torch.bfloat16, 576),
            ("fp8", torch.uint8, 576),
            ("fp8_block128", torch.uint8, 656),
            ("fp8_block64", torch.uint8, 648),
        ]
    ),
    Refusal(
        "scales-dtype",
        lambda: wrap(4, 3, 640, dtype=torch.uint8, scales=torch.ones(4, 3, 1).half()),
        TypeError,
        "scales must be float32, got float16",
    ),
    Refusal(
        "scales-not-a-tensor",
        lambda: wrap(4, 3, 640, dtype=torch.uint8, scales=1.0),
        TypeError,
        "scales must be a tensor, got float",
    ),
    Refusal(
        "scales-axes",
        lambda: wrap(4, 3, 640, dtype=torch.uint8, scales=torch.ones(4, 3)),
        ValueError,
        "scales must have 3, 4 or 6 axes (see PagedLatentCache.wrap), got 2",
    ),
    Refusal(
        "scales-pages",
        lambda: wrap(4, 3, 640, dtype=torch.uint8, scales=torch.ones(5, 3, 1)),
        ValueError,
        "(pages) must equal blocks.shape[1], 4, got 5",
    ),
    Refusal(
        "scales-per-token",
        lambda: wrap(4, 3, 640, dtype=torch.uint8, scales=torch.ones(4, 3, 2)),
        ValueError,
        "(scale) must equal the scales of format fp8_token, 1, got 2",
    ),
    *(
        Refusal(
            f"tensor-scale-{scale}",
            lambda scale=scale: wrap(4, 3, 576, dtype=torch.uint8, tensor_scale=scale),
            ValueError,
            f"tensor_scale must be {rule}, got {scale}",
        )
        for scale, rule in [
            *((scale, "positive and a normal float32") for scale in (0.0, -1.0, 1e39, 1e-45)),
            (float("nan"), "finite"),
        ]
    ),
    *(
        Refusal(
            f"tensor-scale-tensor-{scale}",
            lambda scale=scale: wrap(4, 3, 576, dtype=torch.uint8, tensor_scale=tensor(scale)),
            ValueError,
            f"tensor_scale must be {rule}, got {tensor(scale).item()}",
        )
        for scale, rule in [
            *((scale, "positive and a normal float32") for scale in (0.0, -1.0, 1e-45)),
            *((scale, "finite") for scale in (float("nan"), float("inf"))),
        ]
    ),
    *(
        Refusal(
            f"tensor-scale-tensor-of-{name}",
            lambda name=name: allocate(
                format="fp8", tensor_scale=tensor(1).to(getattr(torch, name))
            ),
            TypeError,
            "PagedLatentCache.allocate: tensor_scale must be bfloat16 or float16 or float32 or "
            f"float64, got {name}",
        )
        for name in ("bool", "uint8", "int32", "float8_e8m0fnu")  # the byte 127 is no scale of 127
    ),
    Refusal(
        "tensor-scale-of-two",
        lambda: wrap(4, 3, 576, dtype=torch.uint8, tensor_scale=torch.ones(2)),
        ValueError,
        "tensor_scale must have one element, got shape (2,)",
    ),
    Refusal(
        "tensor-scale-of-bf16",
        lambda: wrap(4, 3, 576, tensor_scale=2.0),
        ValueError,
        "tensor_scale must be left at 1.0 for format bf16, got 2.0",
    ),
    Refusal(
        "allocated-tensor-scale",
        lambda: allocate(format="fp8_block128", tensor_scale=2.0),
        ValueError,
        "PagedLatentCache.allocate: tensor_scale must be left at 1.0 for format fp8_block128",
    ),
    *(
        Refusal(
            f"allocate-{name}",
            lambda name=name: allocate(**{name: 0}),
            ValueError,
            f"PagedLatentCache.allocate: {name} must be at least 1, got 0",
        )
        for name in ("num_pages", "page_size", "num_layers")
    ),
    Refusal(
        "allocate-half-a-page",
        lambda: allocate(page_size=2.5),
        TypeError,
        "page_size must be an integer, got float",
    ),
    Refusal("allocate-unknown", lambda: allocate(format="int4"), ValueError, "'int4'"),
    Refusal(
        "allocate-row-too-wide",
        lambda: PagedLatentCache.allocate(RowShape(576, 64), "fp8_block64", num_pages=1),
        ValueError,
        "fp8_block64: kv_lora_rank must not exceed 512",
    ),
    *(
        Refusal(
            f"layer-{index}",
            lambda index=index: allocate(num_layers=3).layer(index),
            ValueError,
            f"PagedLatentCache.layer: index must be in [0, 3), got {index}",
        )
        for index in (-1, 3)
    ),
    *(
        Refusal(
            f"layer-{index!r}",
            lambda index=index: allocate().layer(index),
            TypeError,
            f"PagedLatentCache.layer: index must be an integer, got {type(index).__name__}",
        )
        for index in ("a", 0.0, False)
    ),
    *(
        Refusal(
            f"geometry-{geometry}",
            lambda geometry=geometry: PagedLatentCache.allocate(geometry, num_pages=1),
            TypeError,
            "PagedLatentCache.allocate: geometry must be an MLAGeometry or a RowShape, got "
            f"{type(geometry).__name__}",
        )
        for geometry in (None, (64, 16))
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_a_wrong_argument_is_named(refusal):
    with pytest.raises(refusal.error, match=re.escape(refusal.message)):
        refusal.call()


def test_the_value_of_a_fake_scale_is_not_read():
    with FakeTensorMode():
        assert allocate(format="fp8", tensor_scale=torch.zeros(1)) is not None
