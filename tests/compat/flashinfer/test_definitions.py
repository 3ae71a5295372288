"""The solutions of FlashInfer-Bench's definitions: against oracles, and against its references.

The folder FLASHINFER_TRACE, if it is set, has the definitions of flashinfer-trace, of which each
has a reference in plain torch. Its rule is |a − b| ≤ 0.01 + 0.01 |b| for every element.
"""

from __future__ import annotations

import inspect
import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import PagedLatentCache
from mlakit.compat.flashinfer import definitions
from mlakit.model.geometry import RowShape
from mlakit.tools.testing import assert_matches, poison
from tests.compat.flashinfer.inputs import E4M3, LOG2_E, Case, Problem, starts_of
from tests.paths import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "flashinfer_bench.py"))
TRACE = os.environ.get("FLASHINFER_TRACE", "")
RULE = 1e-2


def results(tokens: int, heads: int, width: int, device: torch.device | str) -> list[Tensor]:
    """Poisoned tensors for output and lse."""
    output = torch.empty(tokens, heads, width, dtype=torch.bfloat16, device=device)
    return [poison(output), poison(torch.empty(tokens, heads, device=device))]


def last_pages(problem: Problem) -> Tensor:
    """Tokens in the last page of each request; nonsense for a request without pages."""
    size = problem.case.page_size
    return torch.tensor([(n - 1) % size + 1 if n else 999 for n in problem.case.kv_lens])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("is_prefill", [False, True])
def test_paged_attention(page_size, is_prefill, device):
    q_lens = (2, 1, 3, 0, 1) if is_prefill else (1,) * 5
    case = Case(page_size=page_size, q_lens=q_lens, causal=True, sm_scale=192**-0.5)
    problem = case.make(device)
    given = {
        **dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), problem.tensors, strict=True)),
        "kv_indptr": problem.kv_indptr,
        "kv_indices": problem.kv_indices[: int(problem.kv_indptr[-1])],
        "sm_scale": case.sm_scale,
    }
    name = "mla_paged_prefill_causal" if is_prefill else "mla_paged_decode"
    if is_prefill:
        given["qo_indptr"] = problem.qo_indptr
    if page_size == 1:
        name += "_ps1"
    else:
        given["kv_last_page_len"] = last_pages(problem).int().to(device)
    out, lse = results(sum(q_lens), case.heads, case.ckv, device)
    getattr(definitions, name)(**given, output=out, lse=lse)
    problem.check(out, lse)


def test_ragged_attention(device):
    generator = torch.Generator().manual_seed(0)
    q_lens, kv_lens = (3, 0, 5), (7, 2, 5)
    q, k, v = (
        torch.randn(sum(lens), 2, width, generator=generator).bfloat16()
        for lens, width in ((q_lens, 192), (kv_lens, 192), (kv_lens, 128))
    )
    out, lse = results(8, 2, 128, device)
    starts = starts_of(q_lens), starts_of(kv_lens)
    on_device = [each.to(device) for each in (q, k, v, *starts)]
    definitions.mla_ragged_prefill_causal(*on_device, 192**-0.5, out, lse)
    exact, naive = (
        reference.mla_prefill(
            q.double(),
            k.double(),
            k.new_empty(len(k), 0).double(),
            v.double(),
            *(each.tolist() for each in starts),
            softmax_scale=192**-0.5,
            dtype=dtype,
        )
        for dtype in (torch.float64, torch.float32)
    )
    assert_matches("output", out.cpu(), exact[0], naive[0])
    assert_matches("lse", lse.cpu(), exact[1] * LOG2_E, naive[1] * LOG2_E)


def test_attention_over_lists_of_rows(device):
    problem = Case(kv_lens=(40, 9), q_lens=(1, 1), page_size=8).make(device)
    slots, seen = [], []
    for request, rows in enumerate(problem.rows):
        token = torch.arange(0, len(rows), 2)
        page = problem.kv_indices.cpu()[problem.kv_indptr[request].item() + token // 8]
        slots.append(torch.nn.functional.pad(page * 8 + token % 8, (0, 24 - len(token)), value=-1))
        seen.append(rows[token])
    out, lse = results(2, 3, 64, device)
    rows = torch.stack(slots).int().to(device)
    definitions.dsa_sparse_attention(*problem.tensors, rows, problem.case.sm_scale, out, lse)
    exact, naive = (
        reference.mla_decode(
            problem.exact,
            seen,
            [1, 1],
            softmax_scale=problem.case.sm_scale,
            v_width=64,
            dtype=dtype,
        )
        for dtype in (torch.float64, torch.float32)
    )
    assert_matches("output", out.cpu(), exact[0], naive[0])
    assert_matches("lse", lse.cpu(), exact[1] * LOG2_E, naive[1] * LOG2_E)


def test_selection_of_rows(device):
    generator = torch.Generator().manual_seed(0)
    keys = torch.zeros(6, 64, 1, 132, dtype=torch.int8)
    pool = PagedLatentCache.wrap_index_keys(keys)
    assert pool.row == RowShape(128, 0)
    stored = torch.randn(6 * 64, 128, generator=generator)
    pool.layer(0).write(torch.arange(6 * 64), stored)
    q = torch.randn(3, 64, 128, generator=generator).to(E4M3)
    weights = torch.randn(3, 64, generator=generator)
    lens, table = [100, 0, 5], torch.tensor([[4, 2], [9, 9], [3, 9]], dtype=torch.int32)
    selected = poison(torch.empty(3, 20, dtype=torch.int32, device=device))
    definitions.dsa_topk_indexer(
        q.to(device),
        keys.to(device),
        weights.to(device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        table.to(device),
        selected,
    )
    rows = pool.layer(0).read(torch.arange(6 * 64), torch.float64)
    for token, length in enumerate(lens):
        place = torch.arange(length)
        slots = table[token].long()[place // 64] * 64 + place % 64
        scores = (q[token].double() @ rows[slots].T).relu().T @ weights[token].double()
        best = slots[scores.topk(min(20, length)).indices].sort().values
        got = selected[token].cpu()
        assert got[got >= 0].sort().values.tolist() == best.tolist()
        assert (got[min(20, length) :] == -1).all()


def test_each_solution_is_written_in_their_format(tmp_path):
    paths = SCRIPT["write"](tmp_path)
    assert len(paths) == len(SCRIPT["SOLUTIONS"]) == 11
    for path in paths:
        written = json.loads(path.read_text(encoding="utf-8"))
        assert path.stem == written["name"] == f"mlakit_{written['definition']}"
        file, function = written["spec"]["entry_point"].split("::")
        (source,) = written["sources"]
        assert source["path"] == file
        scope: dict[str, Any] = {}
        exec(source["content"], scope)
        expected = SCRIPT["SOLUTIONS"][written["definition"]][1]
        assert scope[function] is getattr(definitions, expected)


DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int8": torch.int8,
    "float8_e4m3fn": E4M3,
}


def their_definition(name: str) -> dict[str, Any]:
    folder, _ = SCRIPT["SOLUTIONS"][name]
    text = (Path(TRACE) / "definitions" / folder / f"{name}.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def random_inputs(definition: dict[str, Any]) -> tuple[dict[str, int], dict[str, Any]]:
    """Sizes and inputs of a small problem of a definition."""
    generator = torch.Generator().manual_seed(0)
    sizes = {name: each.get("value", 0) for name, each in definition["axes"].items()}
    page, counts, q_lens = sizes.get("page_size", 1), [3, 0, 2, 70], [2, 0, 1, 1]
    if "total_q" not in sizes:
        q_lens = [1] * 4
    pages = torch.randperm(80, generator=generator)[: sum(counts)].int()
    last = torch.tensor([page, 1, 1, (page + 1) // 2], dtype=torch.int32)
    table = torch.randperm(80, generator=generator)[:40].view(1, 40).expand(4, 40).int()
    values: dict[str, Any] = {
        "kv_indptr": starts_of(counts),
        "qo_indptr": starts_of(q_lens),
        "kv_indices": pages,
        "kv_last_page_len": last,
        "seq_lens": torch.tensor([40 * 64, 0, 17, 2049], dtype=torch.int32),
        "block_table": table.contiguous(),
        "sm_scale": 192**-0.5,
    }
    sizes.update(
        batch_size=4,
        len_indptr=5,
        num_pages=80,
        num_kv_indices=75,
        total_q=sum(q_lens),
        total_kv=sum(counts),
        max_num_pages=40,
        num_tokens=4,
    )
    for name, each in definition["inputs"].items():
        if name in values:
            continue
        shape = [sizes[axis] for axis in each["shape"]]
        if name == "k_index_cache_fp8":
            keys = torch.zeros(shape, dtype=torch.int8)
            rows = torch.randn(shape[0] * page, 128, generator=generator)
            PagedLatentCache.wrap_index_keys(keys).layer(0).write(torch.arange(len(rows)), rows)
            values[name] = keys
        elif name == "sparse_indices":
            drawn = torch.randint(0, 80 * page, shape, generator=generator)
            drawn[torch.rand(shape, generator=generator) < 0.3] = -1
            drawn[1] = -1
            values[name] = drawn.int()
        else:
            values[name] = torch.randn(shape, generator=generator).to(DTYPES[each["dtype"]])
    return sizes, {name: values[name] for name in definition["inputs"]}


def largest_share_of_the_rule(name: str) -> float:
    """Run a solution and its definition's reference on a CPU: the largest error / what is allowed.

    A selection has the entries of the reference, in any order: 0, or AssertionError.
    """
    definition = their_definition(name)
    function = getattr(definitions, SCRIPT["SOLUTIONS"][name][1])
    names = [*definition["inputs"], *definition["outputs"]]
    assert list(inspect.signature(function).parameters) == names
    sizes, given = random_inputs(definition)
    scope: dict[str, Any] = {}
    exec(definition["reference"], scope)
    wanted = scope["run"](*given.values())
    got = [
        torch.empty([sizes[axis] for axis in each["shape"]], dtype=DTYPES[each["dtype"]])
        for each in definition["outputs"].values()
    ]
    function(*given.values(), *map(poison, got))
    if "topk_indices" in definition["outputs"]:
        for mine, theirs in zip(got[0], wanted[0], strict=True):
            assert mine.sort().values.tolist() == theirs.sort().values.tolist()
        return 0.0
    shares = []
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=RULE, atol=RULE)
        finite = theirs.isfinite()
        error = (mine.float() - theirs.float())[finite].abs()
        shares.append((error / (RULE + RULE * theirs[finite].abs())).max())
    return float(torch.stack(shares).max())


@pytest.mark.slow
@pytest.mark.skipif(not TRACE, reason="FLASHINFER_TRACE names no folder with definitions")
@pytest.mark.parametrize("name", SCRIPT["SOLUTIONS"])
def test_their_reference_agrees(name):
    assert largest_share_of_the_rule(name) <= 1


def test_the_record_has_every_solution():
    recorded = json.loads((ROOT / "docs" / "data" / "flashinfer-bench.json").read_text())
    assert [each["definition"] for each in recorded["solutions"]] == list(SCRIPT["SOLUTIONS"])
    assert all(0 <= each["share_of_rule"] <= 1 for each in recorded["solutions"])
