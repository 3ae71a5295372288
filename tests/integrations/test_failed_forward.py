"""A forward that fails leaves the cache as it was: a retry gives the logits of eager attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from mlakit.integrations.transformers import patch
from mlakit.integrations.transformers.static_cache import StaticLatentCache
from tests.integrations.models import build, prompts
from tests.integrations.test_generate import FEW, TOLERANCE

COLUMNS = 30
ENDS = (20, 24, 25, 30)  # of the forwards: a prompt, several tokens, one, several


def in_steps(model: Any, cache: Any, before: Callable[[int, Tensor], None] | None = None) -> Tensor:
    """Logits of all columns; `before` gets the number and the tokens of each forward."""
    ids, first, logits = prompts(COLUMNS, batch=2), 0, []
    for step, end in enumerate(ENDS):
        new = ids[:, first:end]
        if before is not None:
            before(step, new)
        logits.append(model(new, past_key_values=cache).logits)
        first = end
    return torch.cat(logits, 1)


@contextmanager
def raising(module: Any, error: type[BaseException]) -> Iterator[None]:
    """In this scope the module's forward raises."""

    def fail(*args: Any) -> None:
        raise error("on purpose")

    handle = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def fail_once(how: str, model: Any, ids: Tensor, cache: Any) -> None:
    """A forward that fails before the layers, or after the first of them has written its rows."""
    if how == "token":
        with pytest.raises(IndexError):
            model(torch.full_like(ids, 10**6), past_key_values=cache)
        return
    error = KeyboardInterrupt if how == "interrupt" else RuntimeError
    with raising(model.model.layers[1].self_attn, error), pytest.raises(error, match="on purpose"):
        model(ids, past_key_values=cache)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["token", "hook", "interrupt"])
@pytest.mark.parametrize("at", range(len(ENDS)))
@pytest.mark.parametrize("name", FEW)
def test_a_retry_is_right(name, at, how):
    model = build(name)
    eager = in_steps(model, DynamicCache(config=model.config))
    patch(model, page_size=4)
    cache = DynamicCache(config=model.config)

    def before(step: int, new: Tensor) -> None:
        if step == at:
            length = cache.get_seq_length()
            fail_once(how, model, new, cache)
            assert cache.get_seq_length() == length

    ours = in_steps(model, cache, before)
    assert (ours - eager).abs().max() < TOLERANCE
    assert cache.get_seq_length() == COLUMNS
    assert [sequence.length for sequence in cache.layers[0].pool.sequences] == [COLUMNS] * 2


CHANGES: dict[str, Callable[[Any], None]] = {
    "crop": lambda cache: cache.crop(-3),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FEW)
def test_the_cache_can_be_changed_after_an_interrupt(name, change):
    """Torch calls no hook then, so the pool itself drops the step."""
    model, ids = build(name), prompts(COLUMNS, batch=2)

    def run(is_interrupted: bool) -> Tensor:
        cache = DynamicCache(config=model.config)
        model(ids[:, :20], past_key_values=cache)
        if is_interrupted:
            fail_once("interrupt", model, ids[:, 20:22], cache)
        CHANGES[change](cache)
        batch = {"repeat": 4, "select": 1}.get(change, 2)
        return model(prompts(2, batch=batch), past_key_values=cache).logits

    eager = run(False)
    patch(model, page_size=16)
    assert (run(True) - eager).abs().max() < TOLERANCE


@pytest.mark.parametrize("how", ["hook", "interrupt"])
def test_after_a_failed_prompt_a_batch_may_have_another_size(how):
    model, ids = build("DeepseekV32"), prompts(COLUMNS)
    eager = model(ids).logits
    patch(model)
    cache = DynamicCache(config=model.config)
    fail_once(how, model, ids[:2], cache)
    assert (model(ids, past_key_values=cache).logits - eager).abs().max() < TOLERANCE


def test_a_failed_forward_gives_its_pages_back():
    model, ids = build("DeepseekV3"), prompts(COLUMNS, batch=2)
    patch(model, page_size=4)
    cache = DynamicCache(config=model.config)
    model(ids[:, :4], past_key_values=cache)
    allocator = cache.layers[0].pool.allocator
    used = allocator.num_pages - allocator.num_free_pages
    fail_once("hook", model, ids[:, 4:], cache)
    assert allocator.num_pages - allocator.num_free_pages == used


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_a_static_cache_after_a_failure_between_two_layers(name):
    model = build(name, **({"index_n_heads": 16} if name == "DeepseekV32" else {}))
    eager = in_steps(model, DynamicCache(config=model.config))
    patch(model)
    cache = StaticLatentCache(model, batch_size=2, max_length=40, page_size=8)
    ours = in_steps(model, cache, lambda step, new: fail_once("hook", model, new, cache))
    assert int(cache.get_seq_length()) == COLUMNS
    assert (ours - eager).abs().max() < TOLERANCE
