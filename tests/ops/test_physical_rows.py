"""`physical_rows` against the oracle: pages, flat tables, padding, entries that name no row."""

from __future__ import annotations

import pytest
import torch

from mlakit import physical_rows
from mlakit.dispatch import selection
from mlakit.tools.workloads import PhysicalRowsCase
from tests.ops.random_cases import problems_of

MANY = {"kv_lens": (20, 3, 0, 70, 9) * 30, "q_lens": (0, 1, 3, 0, 1) * 30}


@pytest.mark.parametrize("spec", selection.specs("physical_rows"), ids=str)
@pytest.mark.parametrize("flat", [False, True], ids=["pages", "flat"])
@pytest.mark.parametrize(
    "case",
    [
        {"padding": 3, "padded": True},
        {"kv_lens": (5, 1), "q_lens": (1, 1), "implicit_starts": True, "wide_indices": True},
        {"topk": 0},
        {"kv_lens": (), "q_lens": (), "padding": 2},
        {"page_size": 1, "topk": 33, "given_results": True},
        {**MANY, "topk": 5, "padding": 1},
    ],
    ids=["padding", "one query each", "empty lists", "only padding", "page 1", "many requests"],
)
def test_rows(case, flat, spec, device):
    if spec.backend == "cpu" and device.type != "cpu":
        pytest.skip("the CPU kernels take CPU tensors only")
    PhysicalRowsCase(flat_table=flat, **case).run(device, spec.backend)


@pytest.mark.gpu
def test_a_graph_maps_the_positions_of_its_replay():
    table = torch.tensor([[4, 7], [1, -1]], dtype=torch.int32, device="cuda")
    tokens = torch.tensor([[0, 65, -1], [0, 64, 63]], dtype=torch.int32, device="cuda")
    physical_rows(tokens, table, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = physical_rows(tokens, table, 64)
    tokens.copy_(torch.tensor([[64, 1, 200], [5, -9, 64]]))
    graph.replay()
    assert rows.tolist() == [[448, 257, -1], [69, -1, -1]]


@pytest.mark.slow
@problems_of("physical_rows")
def test_problems_match_the_oracle(problem, device, pytestconfig):
    problem(device, pytestconfig.getoption("--hypothesis-seed"))
