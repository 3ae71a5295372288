"""What tests of the documented functions are repeated over."""

from __future__ import annotations

import pytest
import torch

from tests.compat.modular.inputs import MASKS, PAGES_AND_HEADS, Step, window_of

INTEGERS = [torch.int32, torch.int64, torch.uint32]
NO_REQUESTS = Step((), ())
NO_TOKENS = Step((5, 0, 17), (0, 0, 0))

pages_and_heads = pytest.mark.parametrize(
    ("page_size", "heads"), PAGES_AND_HEADS, ids=lambda n: str(n)
)
integer_types = pytest.mark.parametrize("integer_type", INTEGERS, ids=str)
windowed_masks = pytest.mark.parametrize(
    ("mask", "window"),
    [(kind, w) for kind in MASKS for w in ([1, 6, 37] if window_of(kind, 1) else [0])],
)
