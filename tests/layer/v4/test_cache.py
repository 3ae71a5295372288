"""Sequences of a V4Cache: forks, drafts taken back, steps rolled back, freed pages, errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlakit import V4Attention, V4Cache
from mlakit.model.v4 import V4Config
from tests.layer.v4.models import CONFIGS, KINDS, SIZES, inputs, weights
from tests.layer.v4.oracle import V4Oracle
from tests.layer.v4.serving import Server

TOLERANCE = 2e-5


def layer_of(layer: int, name: str = "small") -> V4Attention:
    made = V4Attention(CONFIGS[name], layer)
    made.load_state_dict(weights(CONFIGS[name], layer))
    return made


def exact(layer: V4Attention, x: Tensor) -> Tensor:
    return V4Oracle(layer.config, layer.layer, dict(layer.named_parameters())).run(x)


def error(found: Tensor, right: Tensor) -> float:
    return float((found - right).abs().max())


@pytest.mark.parametrize("name", ["small", "odd"])
@pytest.mark.parametrize("layer", range(3), ids=KINDS)
def test_forks_share_pages_and_write_their_own(layer, name):
    """Three forks, as beams: one is dropped, one is forked again, all grow in the same steps."""
    made = layer_of(layer, name)
    server = Server(made)
    prefix, *tails = inputs(37, 30, 30, 30)
    root = server.new()
    server.step([root], [prefix[:30]])
    server.step([root], [prefix[30:]])
    pages = server.cache.pages_in_use
    forks = [root, server.fork(root), server.fork(root)]
    assert server.cache.pages_in_use == pages
    found: list[list[Tensor]] = [[], [], []]
    for at in range(0, 30, 3):
        if at == 15:  # the third beam ends; the second one goes on as two
            server.free(forks[2])
            forks[2] = server.fork(forks[1])
            tails[2] = torch.cat([tails[1][:15], tails[2][15:]])
            found[2] = list(found[1])
        parts = [tail[at : at + 3] for tail in tails]
        for own, part in zip(found, server.step(forks, parts), strict=True):
            own.append(part)
    for tail, own in zip(tails, found, strict=True):
        right = exact(made, torch.cat([prefix, tail]))[37:]
        assert error(torch.cat(own), right) < TOLERANCE
    for fork in forks:
        server.free(fork)
    assert set(server.cache.pages_in_use.values()) == {0}


@pytest.mark.parametrize("name", ["small", "odd"])
@pytest.mark.parametrize("layer", range(3), ids=KINDS)
def test_rejected_drafts_are_taken_back(layer, name):
    """After every right token come 1 to 4 wrong ones, which may complete windows."""
    made = layer_of(layer, name)
    server = Server(made, keep=4)
    x, wrong = inputs(70, 300)
    right = exact(made, x)
    sequence = server.new()
    found = [server.step([sequence], [x[:33]])[0]]
    for at in range(33, 70):
        drafts = 1 + at % 4
        part = torch.cat([x[at : at + 1], wrong[4 * at : 4 * at + drafts]])
        found.append(server.step([sequence], [part])[0][:1])
        server.cache.truncate(sequence, at + 1)
    assert error(torch.cat(found), right) < TOLERANCE


@pytest.mark.parametrize("layer", range(3), ids=KINDS)
def test_a_step_that_failed_is_rolled_back(layer):
    made = layer_of(layer)
    server = Server(made)  # keep is 0: a roll back needs none
    x, wrong = inputs(90, 90)
    right, found = exact(made, x), []
    sequence, other = server.new(), server.new()
    server.step([other], [wrong[:9]])
    for first, last in ((0, 32), (32, 33), (33, 50), (50, 51), (51, 64), (64, 90)):
        batch = server.begin([sequence, other], [40, 3])
        made(torch.cat([wrong[:40], wrong[9:12]]), batch)
        server.cache.roll_back(batch)
        assert (sequence.length, other.length) == (first, 9)
        found += server.step([sequence], [x[first:last]])
    assert error(torch.cat(found), right) < TOLERANCE
    assert error(server.step([other], [wrong[9:30]])[0], exact(made, wrong[:30])[9:]) < TOLERANCE


def test_rows_are_freed_as_they_leave_the_window():
    config = V4Config.from_config(SIZES | {"num_hidden_layers": 3})
    cache = V4Cache(config, "fp32", page_size=8)
    sequence = cache.reserve()
    cache.append_batch([sequence], [400])
    # the prompt's window rows are read in its own step; its states are stored for the last tokens
    assert cache.pages_in_use == {"window": 50, "csa": 13, "hca": 4, "csa_state": 1, "hca_state": 1}
    for _ in range(9):
        cache.append_batch([sequence], [1])
    assert cache.pages_in_use == {"window": 3, "csa": 13, "hca": 4, "csa_state": 2, "hca_state": 2}
    assert (sequence.length, sequence.floor) == (409, 409)
    assert repr(cache) == f"V4Cache(fp32, 3 layers, {cache.nbytes} bytes)"


def test_a_cache_holds_some_layers():
    cache = V4Cache(SIZES, "fp8_block128", layers=[2, 0], page_size=8)
    assert (cache.layers, [*cache.lanes]) == ((0, 2), ["window", "hca", "hca_state"])
    assert (cache.number(2), cache.number_in_kind(2)) == (1, 0)
    cache = V4Cache(SIZES, "fp8_token")
    assert cache.cache("csa", "index").format == "fp8_token"
    assert cache.cache("csa_state", "index").format == "fp32"


def test_wrong_calls_name_the_argument():
    cache, other = V4Cache(SIZES, "fp32", keep=2), V4Cache(SIZES, "fp32")
    sequence = cache.reserve()
    cache.append_batch([sequence], [20])
    before = cache.pages_in_use
    with pytest.raises(ValueError, match=r"truncate: length must be 0 or in \[18, 20\], got 17"):
        cache.truncate(sequence, 17)
    with pytest.raises(ValueError, match=r"append_batch: sequences\[1\] must appear once"):
        cache.append_batch([sequence, sequence], [1, 1])
    with pytest.raises(ValueError, match=r"append_batch: counts must have one entry per sequence"):
        cache.append_batch([sequence], [1, 1])
    with pytest.raises(ValueError, match=r"append_batch: counts\[0\] must be at least 0, got -1"):
        cache.append_batch([sequence], [-1])
    with pytest.raises(ValueError, match="fork: sequence must belong to this cache"):
        other.fork(sequence)
    with pytest.raises(TypeError, match="free: sequence must be V4Sequence, got int"):
        cache.free(3)
    with pytest.raises(ValueError, match=r"layers must be numbers of the model's 3 layers, got 3"):
        V4Cache(SIZES, layers=[3])
    with pytest.raises(ValueError, match="keep must be at least 0"):
        V4Cache(SIZES, keep=-1)
    assert (cache.pages_in_use, sequence.length) == (before, 20)
    cache.truncate(sequence, 18)
    cache.truncate(sequence, 0)
    assert set(cache.pages_in_use.values()) == {0}
    cache.free(sequence)
    with pytest.raises(ValueError, match="truncate: sequence must be live, got a freed sequence"):
        cache.truncate(sequence, 0)
