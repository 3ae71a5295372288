"""`trtllm_batch_decode_with_kv_cache_mla` against the oracle, with FlashInfer's conventions."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import reference
from mlakit.cache import PagedLatentCache
from mlakit.compat.flashinfer import merge_states, trtllm_batch_decode_with_kv_cache_mla
from mlakit.dispatch.checks import UnsupportedError
from mlakit.model.geometry import RowShape
from mlakit.tools.testing import MERGED_ROUNDINGS, assert_matches, assert_same_bits, poison
from tests.compat.flashinfer.inputs import E4M3, LOG2_E, Case, Problem


def table_of(problem: Problem) -> Tensor:
    """block_tables [batch, columns]; entries past a request's last page exist nowhere."""
    counts = problem.kv_indptr.diff().tolist()
    table = torch.full((len(counts), max(counts) + 2), 2**31 - 1, dtype=torch.int32)
    listed = problem.kv_indices.cpu().split([*counts, len(problem.kv_indices) - sum(counts)])
    for row, pages in zip(table, listed, strict=False):
        row[: len(pages)] = pages
    return table.to(problem.ckv.device)


def arguments_of(problem: Problem, **changed: Any) -> dict[str, Any]:
    """A call with as many queries for each request, or with cum_seq_lens_q."""
    case = problem.case
    query = torch.cat([problem.q_nope, problem.q_pe], dim=-1)
    lengths: dict[str, Any] = {"cum_seq_lens_q": problem.qo_indptr}
    if len(set(case.q_lens)) == 1:
        query = query.view(len(case.q_lens), -1, *query.shape[1:])
        lengths = {}
    columns = torch.cat([each.view(torch.uint8) for each in (problem.ckv, problem.kpe)], dim=-1)
    return {
        "query": query,
        "kv_cache": columns.view(problem.ckv.dtype),
        "workspace_buffer": None,
        "qk_nope_head_dim": 128,
        "kv_lora_rank": case.ckv,
        "qk_rope_head_dim": case.kpe,
        "block_tables": table_of(problem),
        "seq_lens": problem.kv_len_arr,
        "max_seq_len": max(case.kv_lens),
        "bmm1_scale": case.sm_scale,
        **lengths,
        **changed,
    }


def attend(problem: Problem, **changed: Any) -> tuple[Tensor, Tensor]:
    arguments = arguments_of(problem, return_lse=True, **changed)
    got = trtllm_batch_decode_with_kv_cache_mla(**arguments)
    assert isinstance(got, tuple)
    out, lse = got
    assert out.shape == (*arguments["query"].shape[:-1], problem.case.ckv)
    return out.reshape(-1, *out.shape[-2:]), lse.reshape(-1, lse.shape[-1])


EQUAL = Case(kv_lens=(37, 2, 5, 64), q_lens=(2, 2, 2, 2), causal=True)
RAGGED = Case(causal=True)
FP8 = Case(kv_lens=(37, 9), q_lens=(1, 1), causal=True, ckv_scale=0.25, kpe_scale=0.25)


@pytest.mark.parametrize("case", [EQUAL, RAGGED], ids=["equal", "ragged"])
@pytest.mark.parametrize("heads_axis", [False, True])
def test_it_matches_the_oracle(case, heads_axis, device):
    problem = case.make(device)
    cache = arguments_of(problem)["kv_cache"]
    problem.check(*attend(problem, kv_cache=cache.unsqueeze(1) if heads_axis else cache))


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_the_scales_of_both_products(is_tensor, factor, device):
    problem = EQUAL.make(device)
    scales = {"bmm1_scale": EQUAL.sm_scale, "bmm2_scale": factor}
    if is_tensor:
        scales = {name: torch.tensor([value], device=device) for name, value in scales.items()}
    out, lse = attend(problem, **scales)
    problem.check(out / factor, lse)


@pytest.mark.parametrize("is_tensor", [False, True])
def test_scales_of_e4m3_rows(is_tensor, device):
    """bmm1_scale has K's scale, bmm2_scale V's."""
    problem = FP8.make(device)
    scales = {"bmm1_scale": FP8.sm_scale * 0.25, "bmm2_scale": 0.25}
    if is_tensor:
        scales = {name: torch.tensor(value, device=device) for name, value in scales.items()}
    problem.check(*attend(problem, **scales))


def test_sinks_join_the_denominator(device):
    problem = EQUAL.make(device)
    sink = torch.tensor([0.5, -torch.inf, 2.0], device=device)
    for given in (sink, [sink]):
        problem.check(*attend(problem, sinks=given), sink=sink.cpu())


def test_the_base_of_lse_is_that_of_the_backend(device):
    problem = EQUAL.make(device)
    for backend in ("auto", "xqa", "trtllm-gen"):
        problem.check(*attend(problem, backend=backend))
    problem.check(*attend(problem, backend="cute-dsl"), base=1.0)


@pytest.mark.parametrize("shape", [(4, 2, 3), (8, 3)])
def test_results_are_written_to_what_is_given(shape, device):
    problem = EQUAL.make(device)
    want = attend(problem)
    out = poison(torch.empty(4, 2, 3, 64, dtype=torch.bfloat16, device=device))
    lse = poison(torch.empty(shape, device=device))
    arguments = arguments_of(problem, out=out, lse=lse)
    assert trtllm_batch_decode_with_kv_cache_mla(**arguments) is out
    got = trtllm_batch_decode_with_kv_cache_mla(**arguments, return_lse=True)
    assert got[0] is out
    assert got[1] is lse
    assert_same_bits("out", out.flatten(0, 1), want[0])
    assert_same_bits("lse", lse.view(8, 3), want[1])


def listed_rows(problem: Problem, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    """Rows [tokens, 9] of each query with −1 at some places, and the same rows in float64."""
    case, rows, seen = problem.case, [], []
    indices, indptr = problem.kv_indices.cpu(), problem.kv_indptr.cpu()
    for request, q_len in enumerate(case.q_lens):
        for _ in range(q_len):
            token = torch.randperm(case.kv_lens[request], generator=generator)[:9]
            page = indices[indptr[request] + token // case.page_size]
            slot = page * case.page_size + token % case.page_size
            rows.append(torch.cat([slot, slot.new_full((9 - len(slot),), -1)])[torch.randperm(9)])
            seen.append(problem.rows[request][token])
    return torch.stack(rows).int(), seen


def sparse_answer(
    problem: Problem, seen: list[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    out, lse = reference.mla_decode(
        problem.exact,
        seen,
        [1] * len(seen),
        softmax_scale=problem.case.sm_scale,
        v_width=problem.case.ckv,
        dtype=dtype,
    )
    return out, lse * LOG2_E


@pytest.mark.parametrize("case", [EQUAL, RAGGED], ids=["equal", "ragged"])
def test_sparse_attention_over_the_rows_listed(case, device):
    problem = case.make(device)
    rows, seen = listed_rows(problem, torch.Generator().manual_seed(5))
    shape = (4, 2, 9) if case is EQUAL else (len(seen), 9)
    out, lse = attend(
        problem, block_tables=rows.view(shape).to(device), sparse_mla_top_k=9, backend="trtllm-gen"
    )
    exact, naive = (sparse_answer(problem, seen, each) for each in (torch.float64, torch.float32))
    assert_matches("out", out.cpu(), exact[0], naive[0])
    assert_matches("lse", lse.cpu(), exact[1], naive[1])


def test_entries_past_the_lengths_of_lists_do_not_count(device):
    problem = EQUAL.make(device)
    rows, _ = listed_rows(problem, torch.Generator().manual_seed(5))
    lens = torch.tensor([0, 1, 9, 3, 4, 5, 6, 7], dtype=torch.int32)
    cut = torch.where(torch.arange(9) < lens[:, None], rows, -1)
    sparse = {"sparse_mla_top_k": 9}
    want = attend(problem, block_tables=cut.view(4, 2, 9).to(device), **sparse)
    got = attend(
        problem,
        block_tables=rows.view(4, 2, 9).to(device),
        sparse_mla_top_k_lens=lens.to(device),
        **sparse,
    )
    for name, mine, other in zip(("out", "lse"), got, want, strict=True):
        assert_same_bits(name, mine, other)


@pytest.mark.slow
def test_rows_of_656_bytes_and_lengths_of_their_lists(device):
    row = RowShape(512, 64)
    generator = torch.Generator().manual_seed(2)
    pool = PagedLatentCache.allocate(row, "fp8_block128", num_pages=4, page_size=16, device=device)
    pool.layer(0).write(
        torch.arange(64, device=device), torch.randn(64, 576, generator=generator).to(device)
    )
    query = torch.randn(2, 1, 3, 576, generator=generator).bfloat16()
    rows = torch.randint(0, 64, (2, 1, 8), generator=generator).int()
    lens = torch.tensor([[8], [3]], dtype=torch.int32)
    for seq_lens in (lens, lens.flatten(), None):
        got = trtllm_batch_decode_with_kv_cache_mla(
            query.to(device),
            pool.payload[0],
            None,
            128,
            512,
            64,
            rows.to(device),
            None if seq_lens is None else seq_lens.to(device),
            64,
            8,
            bmm1_scale=0.05,
            backend="sparse",
            return_lse=True,
        )
        counts = [8, 8] if seq_lens is None else [8, 3]
        seen = [
            pool.layer(0).read(rows[i, 0, :n].to(device), torch.float64).cpu()
            for i, n in enumerate(counts)
        ]
        exact, naive = (
            reference.mla_decode(
                query[:, 0].double(), seen, [1, 1], softmax_scale=0.05, v_width=512, dtype=dtype
            )
            for dtype in (torch.float64, torch.float32)
        )
        assert_matches("out", got[0][:, 0].cpu(), exact[0], naive[0])
        assert_matches("lse", got[1].cpu(), exact[1] * LOG2_E, naive[1] * LOG2_E)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_of_context_parallel_decode_merge(world, device):
    case = Case(kv_lens=(37, 4), q_lens=(2, 2), page_size=4, causal=True)
    problem = case.make(device)
    states = []
    for rank in range(world):
        kept = [rows[rank::world] for rows in problem.rows]
        part = Case(kv_lens=tuple(map(len, kept)), q_lens=(2, 2), page_size=4).make(device)
        cache = torch.cat([part.ckv, part.kpe], dim=-1)
        for request, rows in enumerate(kept):
            for token, row in enumerate(rows):
                page = part.kv_indices[part.kv_indptr[request] + token // 4]
                cache[page, token % 4] = row.to(cache)
        local = {"kv_cache": cache, "block_tables": table_of(part), "seq_lens": part.kv_len_arr}
        states.append(
            attend(
                problem,
                **local,
                enable_dcp=True,
                cp_world=world,
                cp_rank=rank,
                causal_seqlens_kv_global=problem.kv_len_arr,
            )
        )
    outs, lses = zip(*states, strict=True)
    merged = merge_states(torch.stack(outs, 1), torch.stack(lses, 1))
    problem.check(*merged, roundings=MERGED_ROUNDINGS)


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"seq_lens": None}, TypeError, "seq_lens must be a tensor, got NoneType"),
        ({"backend": "fa3"}, ValueError, "backend must be one of auto, xqa, trtllm-gen, cute-dsl"),
        ({"kv_scale_format": "e8m0"}, ValueError, "kv_scale_format must be one of auto, pow2_fp32"),
        ({"skip_softmax_threshold_scale_factor": 1.0}, UnsupportedError, "skip_softmax_threshold_"),
        ({"uses_shared_paged_kv_idx": False}, UnsupportedError, "uses_shared_paged_kv_idx must be"),
        ({"use_fp16_softmax": True}, UnsupportedError, "use_fp16_softmax must be False, got True"),
        ({"kv_lora_rank": 48}, ValueError, r"query.shape\[3\] \(row width\) must equal kv_lora_ra"),
        ({"bmm1_scale": torch.ones(2)}, ValueError, "bmm1_scale must have one element"),
        ({"bmm2_scale": torch.ones(1).half()}, TypeError, "bmm2_scale must be float32"),
        ({"bmm1_scale": log(0.5) * torch.inf}, ValueError, "bmm1_scale must be finite"),
        ({"cp_world": 2}, ValueError, "cp_world must be 1 without enable_dcp, got 2"),
        ({"enable_dcp": True}, ValueError, "return_lse must be True with enable_dcp"),
        (
            {"causal_seqlens_kv_global": torch.zeros(4)},
            UnsupportedError,
            "causal_seqlens_kv_global must be None, got a tensor",
        ),
        (
            {"sparse_mla_top_k_lens": torch.zeros(8)},
            UnsupportedError,
            "sparse_mla_top_k_lens must be None, got a tensor",
        ),
        ({"sparse_mla_top_k": 4}, ValueError, "block_tables must have axes"),
        ({"sinks": [torch.zeros(3)] * 2}, ValueError, "sinks must be one tensor, got 2 tensors"),
        ({"out": torch.zeros(8, 3, 64)}, ValueError, r"out must have shape \(4, 2, 3, 64\)"),
        ({"lse": torch.zeros(4, 6)}, ValueError, r"lse must have shape \(8, 3\), got \(4, 6\)"),
        ({"o_scale": 1.0}, TypeError, "unexpected keyword argument 'o_scale'"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(changed, kind, message):
    with pytest.raises(kind, match=message):
        trtllm_batch_decode_with_kv_cache_mla(**arguments_of(EQUAL.make(), **changed))


def test_e4m3_queries_give_bf16():
    problem = FP8.make()
    query = arguments_of(problem)["query"].to(E4M3)
    arguments = arguments_of(problem, query=query, bmm2_scale=0.25)
    assert trtllm_batch_decode_with_kv_cache_mla(**arguments).dtype == torch.bfloat16
