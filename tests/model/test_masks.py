"""One mask, three readings: the interval, the boolean, and the definition written out."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mlakit.compat import modular
from mlakit.model import masks
from mlakit.model.masks import CAUSAL, KINDS, NULL, WINDOWED, Mask
from tests.seen_keys import SEES, sees

WINDOWS = [1, 2, 3, 5, 8, 100]
MASKS = [NULL, CAUSAL, *(Mask(kind, window) for kind in WINDOWED for window in WINDOWS)]


def seen(mask: Mask, q: int, num_keys: int) -> list[int]:
    return [k for k in range(num_keys) if sees(mask, q, k)]


def test_every_kind_has_a_definition():
    assert set(SEES) == set(KINDS)
    assert {mask.kind for mask in MASKS} == set(KINDS)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"{mask.kind}-{mask.window}")
def test_interval_is_the_definition(mask):
    for num_keys in (0, 1, 2, 5, 13):
        # before the first key (more queries than keys) and beyond the last one too
        for q in range(-4, num_keys + 12):
            first, last = mask.interval(q, num_keys)
            assert list(range(first, last)) == seen(mask, q, num_keys), (q, num_keys)
            assert 0 <= first <= last
            assert last <= num_keys or first == last


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"{mask.kind}-{mask.window}")
def test_the_first_key_that_new_tokens_see_is_the_same_on_the_device(mask):
    before, after = [0, 0, 3, 8, 12, 12, 40], [0, 5, 4, 20, 12, 13, 41]
    want = mask.first_visible_keys(before, after)
    assert want[1:3] == [min(seen(mask, q, 100), default=0) for q in (0, 3)]
    there = mask.first_visible_keys_on_device(torch.tensor(before), torch.tensor(after))
    assert there.tolist() == want


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"{mask.kind}-{mask.window}")
def test_visible_is_the_definition(mask):
    num_keys = 13
    positions = torch.arange(-4, num_keys + 12)
    visible = mask.visible(positions, torch.arange(num_keys))
    assert visible.dtype == torch.bool
    assert visible.shape == (len(positions), num_keys)
    for row, q in zip(visible, positions.tolist(), strict=True):
        assert row.nonzero().flatten().tolist() == seen(mask, q, num_keys), q


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: f"{mask.kind}-{mask.window}")
def test_visible_goes_by_the_positions_it_is_given(mask):
    positions, keys = torch.tensor([9, 3, 3, 0]), torch.tensor([4, 0, -1, 9, 4])
    expected = [[k >= 0 and sees(mask, q, k) for k in keys.tolist()] for q in positions.tolist()]
    assert mask.visible(positions, keys).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_is_causal_says_whether_the_future_is_hidden(kind):
    mask = Mask(kind, 4 if kind in WINDOWED else 0)
    sees_the_future = any(max(seen(mask, q, 9), default=0) > q for q in range(9))
    assert mask.is_causal is not sees_the_future


def test_visible_of_nothing():
    nothing = torch.arange(0)
    assert CAUSAL.visible(nothing, torch.arange(3)).shape == (0, 3)
    assert CAUSAL.visible(torch.arange(3), nothing).shape == (3, 0)


def test_constructors_by_name():
    for kind in WINDOWED:
        assert getattr(masks, kind)(7) == Mask(kind, 7)
    assert Mask("null") == NULL
    assert Mask("causal") == CAUSAL


@pytest.mark.parametrize(
    ("kind", "window", "message"),
    [
        ("casual", 0, "mask kind must be one of null, causal, .*, got 'casual'"),
        ("chunked", 0, "mask chunked: window must be at least 1, got 0"),
        ("sliding_window_causal", -1, "mask .*: window must be at least 1, got -1"),
        ("causal", 4, "mask causal: window must be 0, got 4"),
    ],
)
def test_a_mask_that_makes_no_sense_is_refused(kind, window, message):
    with pytest.raises(ValueError, match=message):
        Mask(kind, window)


MAX_MASKS = {
    modular.CausalMask(): CAUSAL,
    modular.NullMask(): NULL,
    modular.SlidingWindowCausalMask(3): masks.sliding_window_causal(3),
    modular.SlidingWindowNonCausalMask(3): masks.sliding_window_noncausal(3),
    modular.ChunkedMask(3): masks.chunked(3),
    modular.ChunkedCausalMask(3): masks.chunked_causal(3),
}


@pytest.mark.parametrize(("of_max", "own"), MAX_MASKS.items(), ids=lambda mask: mask.kind)
def test_masks_of_max_equal_those_of_the_same_kind_and_window(of_max, own):
    assert of_max == own
    assert own == of_max
    assert {of_max, own} == {own}
    assert [mask for mask in MASKS if mask == of_max] == [own]


def test_a_mask_is_not_its_name():
    assert CAUSAL != "causal"
    assert CAUSAL != ("causal", 0)


def test_masks_are_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        CAUSAL.window = 3  # type: ignore[misc]
    assert len({Mask("chunked", 3), Mask("chunked", 3), Mask("chunked", 4)}) == 2
