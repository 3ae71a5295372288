"""`MLAAttention` over a cache that the ranks share, dense and sparse, against one process."""

from __future__ import annotations

import pytest
import torch

from mlakit import MLAAttention, plan_step
from tests.layer.checkpoints import HY4, INDEX, LONGCAT, SMALL, tensors, write_checkpoint
from tests.layer.serving import Server
from tests.parallel import layers
from tests.parallel.ranks import WORLDS

worlds = pytest.mark.parametrize("world", WORLDS)
KINDS = {
    "dense": SMALL,
    "sparse": SMALL | INDEX | {"index_topk": 6},
    "gate and sinks": SMALL | HY4 | {"index_topk": 6},
    "always selected": SMALL
    | LONGCAT
    | {"index_topk": 6, "index_init_tokens": 1, "index_local_tokens": 3},
}


@pytest.fixture(params=KINDS)
def folder(request, tmp_path):
    config = KINDS[request.param]
    write_checkpoint(tmp_path, config, {0: tensors(config)})
    return str(tmp_path)


@pytest.mark.slow
@worlds
@pytest.mark.parametrize("is_head_sharded", [False, True], ids=["all heads", "sharded heads"])
def test_a_layer_is_that_of_one_process(ranks, folder, world, is_head_sharded):
    ranks.run(world, layers.check_layer, folder, 1, is_head_sharded=is_head_sharded)


@pytest.mark.slow
def test_interleave_and_splits(ranks, folder):
    ranks.run(2, layers.check_layer, folder, 4, is_head_sharded=False, splits=2)


@pytest.fixture
def sparse_folder(tmp_path):
    config = KINDS["sparse"]
    write_checkpoint(tmp_path, config, {0: tensors(config)})
    return str(tmp_path)


@pytest.mark.slow
def test_a_layer_attends_to_the_selection_of_another(ranks, sparse_folder):
    ranks.run(2, layers.check_shared_selection, sparse_folder)


@pytest.mark.slow
def test_the_earliest_tokens_among_equal_scores(ranks, sparse_folder):
    ranks.run(4, layers.check_equal_scores, sparse_folder)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_of_a_step_is_refused(kind):
    layer = MLAAttention(KINDS[kind], cp_group=object())
    server = Server(layer, [4])
    said = "plan must be (an EvenSplit|a plan of mla_decode) with a cp_group, got StepPlan"
    with pytest.raises(ValueError, match=said):
        layer(
            torch.zeros(4, 256),
            server.batch([4]),
            plan=plan_step([4], [4]),
            index_cache=server.index_cache,
        )
