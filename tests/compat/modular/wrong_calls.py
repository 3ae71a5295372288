"""What the tables of wrong calls are written in: rows, phrases of messages, rows of many functions.

A row of a table takes a call that passes and spoils one thing in it. It gives the message that must
come of it (... stands for any text).
"""

from __future__ import annotations

import torch

from mlakit.compat.modular import KVCollection
from tests.compat.modular.calls import KEYS, LAYER, LAYERS, PAGE, PAGES, Call, cache_parts
from tests.spoiling import EXPANDED, ON_META, RANK_BELOW, STRIDED, Wrong, of, shortened

NO_DATA = "must be on a device that holds data, got a meta tensor"
LAST_AXIS = "must have a contiguous last axis, got strides"
STRIDE_0 = "must be writable, got stride 0 on axis 0 (an expanded tensor)"
INTEGERS = "must be int32 or int64 or uint32"
ONE_MORE = "(batch + 1) must equal one more than the 3 requests, 4"
A_PAGE = f"must be a page id in [0, {PAGES})"
FIT = "must fit the lookup_table's 2 pages of 4"
A_COLLECTION = KVCollection(**cache_parts())
A_KEY_CACHE = A_COLLECTION.get_key_cache(LAYER)
TABLE_OF_ZEROS = torch.zeros(len(KEYS), 2, dtype=torch.int32)
SCALES = torch.ones(PAGES, 1, LAYERS, PAGE, 1, 1)


def a_layer() -> list[Wrong]:
    """Of every function that takes a `layer_idx`."""
    return [
        Wrong("layer_idx must be below the 2 layers, got 2", layer_idx=LAYERS),
        Wrong("layer_idx must be at least 0, got -1", layer_idx=-1),
        Wrong("TypeError: layer_idx must be an integer, got bool", layer_idx=True),
        Wrong("TypeError: layer_idx must be an integer, got float", layer_idx=1.5),
        Wrong("TypeError: layer_idx must be an integer, got NoneType", layer_idx=None),
        Wrong("TypeError: layer_idx must be an integer, got Tensor", layer_idx=torch.tensor(1.5)),
    ]


def an_output(name: str, call: Call, heads: str) -> list[Wrong]:
    """Of every function that writes `name`; `heads` is where its number of heads comes from."""
    output = call.arguments[name]
    shape, strides = tuple(output.shape), STRIDED.changed(output).stride()
    stride_0 = "stride 0 on axis 0 (an expanded tensor)"
    axis = f"{name}.shape[{output.ndim - 2}] (heads)"
    return [
        Wrong(f"TypeError: {name} must be a tensor, got list", **{name: [0.0]}),
        Wrong(f"{name} must have axes ..., got shape {shape[1:]}", **{name: RANK_BELOW}),
        Wrong(f"TypeError: {name} must be bfloat16..., got float16", **{name: of(torch.float16)}),
        Wrong(f"{name} {NO_DATA}", **{name: ON_META}),
        Wrong(f"{name} must be writable, got {stride_0}", **{name: EXPANDED}),
        Wrong(f"{name} {LAST_AXIS} {strides}", **{name: STRIDED}),
        Wrong(f"{axis} must equal {heads}, 2, got 1", **{name: shortened(-2)}),
    ]
