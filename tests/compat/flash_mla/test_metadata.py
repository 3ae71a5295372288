"""The drop-in for FlashMLA takes metadata of every version, and a schedule serves later calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mlakit.compat.flash_mla import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata
from mlakit.tools.testing import assert_same_bits
from tests.compat.flash_mla.dense_cases import (
    FEW_DENSE,
    DenseCase,
    DenseProblem,
    as_keywords,
    dense_problem,
)
from tests.compat.flash_mla.running import check, run_dense
from tests.compat.flash_mla.sparse_cases import FEW_SPARSE


def test_metadata_takes_arguments_of_every_version():
    lengths = torch.tensor([3, 4], dtype=torch.int32)
    for made in (
        get_mla_metadata(),
        get_mla_metadata(lengths, 128, 1),
        get_mla_metadata(lengths, 128, 1, num_heads_q=128, is_fp8_kvcache=True, topk=2048),
        get_mla_metadata(cache_seqlens=lengths, num_q_tokens_per_head_k=1, num_heads_k=1),
    ):
        schedule, num_splits = made
        assert schedule == FlashMLASchedMeta()
        assert not schedule.have_initialized
        assert num_splits is None


OLD_METADATA = (torch.full((132, 8), -7, dtype=torch.int32), torch.full((4,), 99).int())


@pytest.mark.parametrize("metadata", [(None, None), OLD_METADATA, (OLD_METADATA[0], None)])
def test_old_metadata_is_accepted_whatever_is_in_it(metadata):
    problem = dense_problem()
    keywords = {**as_keywords(problem)}
    keywords.pop("tile_scheduler_metadata")
    got = flash_mla_with_kvcache(*keywords.values(), *metadata)
    assert_same_bits("out", got[0], run_dense(problem)[0])


def test_metadata_of_another_package_is_accepted():
    class Foreign:
        have_initialized = True

    problem = dense_problem()
    keywords = {**as_keywords(problem), "tile_scheduler_metadata": Foreign()}
    assert_same_bits("out", flash_mla_with_kvcache(**keywords)[0], run_dense(problem)[0])


@pytest.mark.slow
def test_a_schedule_remembers_the_call():
    schedule, _ = get_mla_metadata()
    problem = dense_problem(h_kv=2, page=16, causal=True)
    keywords = {**as_keywords(problem), "tile_scheduler_metadata": schedule}
    flash_mla_with_kvcache(**keywords, causal=True)
    assert schedule.have_initialized
    assert schedule.config == FlashMLASchedMeta.Config(3, 2, 4, 16, 2, True, False, *[None] * 3)
    sparse = FEW_SPARSE[8].make("cpu")
    flash_mla_with_kvcache(
        sparse.q, sparse.main.cache, None, None, 512, schedule, None, *sparse.arguments
    )
    assert schedule.config == FlashMLASchedMeta.Config(3, 2, 3, 5, 1, False, True, 20, 61, 17)


@pytest.mark.slow
def test_a_schedule_serves_lengths_that_grow_and_shrink(device):
    """FlashMLA's own object would be stale: it is made from the lengths of the first call."""
    schedule, _ = get_mla_metadata()
    grown = DenseCase(4, 2, 300, causal=True, h_q=4).make(device)
    for lengths in ([3, 5, 2, 4], [300, 0, 257, 64], [1, 300, 0, 2]):
        ends = torch.tensor(lengths, dtype=torch.int32, device=device)
        problem = DenseProblem(grown.case, grown.q, grown.k_cache, grown.block_table, ends)
        got = flash_mla_with_kvcache(
            problem.q, problem.k_cache, problem.block_table, ends, 512, schedule, causal=True
        )
        check(problem, got)


@pytest.mark.slow
def test_a_schedule_serves_other_shapes(device):
    schedule, _ = get_mla_metadata()
    for case in FEW_DENSE[:6]:
        problem = case.make(device)
        got = flash_mla_with_kvcache(
            *(problem.q, problem.k_cache, problem.block_table, problem.cache_seqlens),
            *(case.d_v, schedule),
            causal=case.causal,
        )
        check(problem, got)


@pytest.mark.gpu
def test_a_graph_is_replayed_with_new_lengths(device):
    problem = DenseCase(4, 2, 300, causal=True, h_q=4, h_kv=2).make(device)
    ends = problem.cache_seqlens.clone()
    schedule, _ = get_mla_metadata()

    def run() -> tuple[Tensor, Tensor]:
        return flash_mla_with_kvcache(
            problem.q, problem.k_cache, problem.block_table, ends, 512, schedule, causal=True
        )

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for lengths in ([300, 0, 257, 64], [1, 300, 0, 2]):
        ends.copy_(torch.tensor(lengths))
        graph.replay()
        changed = DenseProblem(problem.case, problem.q, problem.k_cache, problem.block_table, ends)
        check(changed, got)
