"""What an object with tensors shows: shapes, dtypes, devices and the format, never the numbers."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import mlakit
from mlakit.cache import CacheLayer, PagedLatentCache
from mlakit.cache.layer_views import CacheTensors
from mlakit.compat.modular import KVCollection
from mlakit.dispatch.reprs import shapes_repr
from mlakit.layer.v4.cache import V4Cache, V4Sequence
from mlakit.model.geometry import MLAGeometry
from mlakit.ops import ExtraRows
from mlakit.plan import plan_decode, plan_prefill
from mlakit.tools.testing import snapshot
from tests.cache.cache_rows import V3
from tests.compat.modular.calls import cache_parts
from tests.docs.test_reference import WHOLE_MODULES, public_names, resolved

GEOMETRY = MLAGeometry(
    num_heads=2,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    hidden_size=1,
)
NUMBER = 0.8125  # what every tensor here is full of


def full(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, NUMBER).to(dtype)


def pool(format: str = "fp8_token", **options: object) -> PagedLatentCache:
    return PagedLatentCache.allocate(V3, format, num_pages=4, page_size=3, num_layers=2, **options)


def up(dtype: torch.dtype = torch.bfloat16) -> mlakit.UpProjection:
    scale = full(4, 4) if dtype.itemsize == 1 else None
    return mlakit.UpProjection.from_checkpoint(full(512, 512, dtype=dtype), GEOMETRY, scale)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


ROW = "RowShape(kv_lora_rank=512, qk_rope_head_dim=64, v_width=512)"
SHOWN: dict[str, tuple[Callable[[], object], str]] = {
    "pool": (
        pool,
        f"PagedLatentCache(format='fp8_token', row={ROW}, payload=uint8 [2, 4, 3, 640] on cpu, "
        "scales=float32 [2, 4, 3, 1] on cpu, tensor_scale=1.0)",
    ),
    "layer": (
        lambda: pool("bf16").layer(1),
        f"CacheLayer(format='bf16', row={ROW}, payload=bfloat16 [4, 3, 576] on cpu, scales=None, "
        "tensor_scale=1.0)",
    ),
    "scale-tensor": (
        lambda: pool("fp8", tensor_scale=torch.tensor(NUMBER)).layer(0),
        f"CacheLayer(format='fp8', row={ROW}, payload=float8_e4m3fn [4, 3, 576] on cpu, "
        "scales=None, tensor_scale=float32 [] on cpu)",
    ),
    "meta": (
        lambda: pool("bf16", device="meta"),
        f"PagedLatentCache(format='bf16', row={ROW}, payload=bfloat16 [2, 4, 3, 576] on meta, "
        "scales=None, tensor_scale=1.0)",
    ),
    "matrices": (
        lambda: up(torch.float8_e4m3fn).w_uv,
        "HeadMatrices(weight=float8_e4m3fn [2, 128, 512] on cpu, "
        "scale=float32 [2, 1, 4] on cpu, group=128)",
    ),
    "up-projection": (
        up,
        f"UpProjection(geometry={GEOMETRY}, "
        "kv_b_proj=HeadMatrices(weight=bfloat16 [1, 512, 512] on cpu, scale=None, group=0), "
        "w_uk_t=HeadMatrices(weight=bfloat16 [2, 512, 128] on cpu, scale=None, group=0), "
        "w_uv=HeadMatrices(weight=bfloat16 [2, 128, 512] on cpu, scale=None, group=0))",
    ),
    "weights": (
        lambda: mlakit.LayerWeights(up(), full(512), full(9, 64), softmax_scale=0.5),
        f"LayerWeights(up={up()!r}, gamma=float32 [512] on cpu, freqs=float32 [9, 64] on cpu, "
        "softmax_scale=0.5, epsilon=1e-06, rope='interleaved', sink=None)",
    ),
    "extra": (
        lambda: ExtraRows(pool("bf16"), ints(1, 2)[None]),
        f"ExtraRows(cache={pool('bf16')!r}, rows=int32 [1, 2] on cpu, topk_lens=None, layer=0)",
    ),
    "prefill-plan": (
        lambda: plan_prefill(ints(5), 8, page_size=4),
        "PrefillPlan(buffer_row_offsets=int32 [16, 2] on cpu, cache_offsets=int32 [16, 2] on cpu, "
        "buffer_lengths=int32 [16] on cpu)",
    ),
    "plan-tensors": (
        lambda: plan_decode([5, 9], num_ctas=1, tile=16).tensors(),
        "DecodePlanTensors(items=int32 [2, 4] on cpu, cta_starts=int32 [2] on cpu, "
        "partial_starts=int32 [3] on cpu, empty_requests=int32 [0] on cpu, tile=16, "
        "max_partials=0, slot_rows=0, num_tokens=0)",
    ),
    "snapshot": (
        lambda: snapshot(q=full(2)),
        "Snapshot(tensors={'q': float32 [2] on cpu}, copies={'q': float32 [2] on cpu})",
    ),
}


@pytest.mark.parametrize(("make", "expected"), SHOWN.values(), ids=SHOWN)
def test_shapes_are_shown(make, expected):
    assert repr(make()) == expected


def test_a_batch_shows_both_forms_of_a_page_table():
    table = (ints(0, 3), ints(4, 5, 6))
    shown = repr(mlakit.CachedBatch(pool("bf16"), table, ints(2), ints(0, 1)))
    assert "page_table=(int32 [2] on cpu, int32 [3] on cpu)" in shown
    assert "q_starts=int32 [2] on cpu" in shown


def test_a_collection_shows_its_pool():
    collection = KVCollection(**cache_parts())
    assert "cache=PagedLatentCache(format='bf16'" in repr(collection)
    for shown in (repr(collection), repr(collection.get_key_cache(1))):
        assert "cache_lengths=int32 [3] on cpu" in shown
        assert "tensor(" not in shown


# imported for annotations alone, since the modules import each other
ONLY_FOR_TYPES = {"V4Cache": V4Cache, "V4Sequence": V4Sequence}


def holders() -> Iterator[type]:
    """Public classes with tensors, or objects that hold some, among their fields."""
    names = {f"{module}.{name}" for module in WHOLE_MODULES for name in public_names(module)}
    for each in {resolved(name) for name in names}:
        if inspect.isclass(each) and "__annotations__" in vars(each):
            names = {**vars(each), **ONLY_FOR_TYPES}
            hints = map(str, typing.get_type_hints(each, localns=names).values())
            types = " ".join(hint for hint in hints if "Callable" not in hint)
            if "Tensor" in types or "PagedLatentCache" in types or "HeadMatrices" in types:
                yield each


@pytest.mark.parametrize("holder", sorted(holders(), key=str), ids=lambda holder: holder.__name__)
def test_no_public_class_shows_numbers(holder):
    own = holder.__repr__
    calls = own.__code__.co_names  # a named tuple cannot be given a function
    assert own in (shapes_repr, CacheTensors.__repr__) or calls == ("shapes_repr",)


def test_the_holders_are_found():
    assert {CacheLayer, PagedLatentCache, ExtraRows, mlakit.UpProjection} <= set(holders())
