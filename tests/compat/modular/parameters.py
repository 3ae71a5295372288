"""What tests of the documented functions are repeated over."""

from __future__ import annotations

import pytest
import torch

from tests.compat.modular.inputs import MASKS, PAGES_AND_HEADS, Step, window_of

# forms of caches with scales, as fields of a case
SCALED = {
    "rope-aware": {"has_token_scales": True},
    "row": {"scale_columns": 576},
    "group32": {"scale_columns": 32},
    "group64": {"scale_columns": 64},
    "group128": {"scale_columns": 128},
}
INTEGERS = [torch.int32, torch.int64, torch.uint32]
NO_REQUESTS = Step((), ())
NO_TOKENS = Step((5, 0, 17), (0, 0, 0))

pages_and_heads = pytest.mark.parametrize(
    ("page_size", "heads"), PAGES_AND_HEADS, ids=lambda n: str(n)
)
scale_pools = pytest.mark.parametrize(
    "has_scale_pool", [False, True], ids=["same-pages", "own-pages"]
)
scaled_rows = pytest.mark.parametrize("scaled", SCALED)
all_fp8_rows = pytest.mark.parametrize("scaled", [name for name in SCALED if name != "rope-aware"])
integer_types = pytest.mark.parametrize("integer_type", INTEGERS, ids=str)
windowed_masks = pytest.mark.parametrize(
    ("mask", "window"),
    [(kind, w) for kind in MASKS for w in ([1, 6, 37] if window_of(kind, 1) else [0])],
)
