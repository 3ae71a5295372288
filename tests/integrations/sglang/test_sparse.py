"""The sparse backend and the selection of its indexer, compared with the oracles."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import mlakit
from mlakit import UnsupportedError, reference
from mlakit.tools.testing import assert_matches, assert_same_bits
from tests.integrations.sglang.driver import (
    HEADS,
    INDEX_HEADS,
    INDEX_WIDTH,
    ROW,
    SCALE,
    TOPK,
    Engine,
    parts,
    queries,
)
from tests.integrations.sglang.fake_engine import AttnForwardMethod, ForwardMode, Settings

CPU = torch.device("cpu")
LENGTHS = [70, 300, 1, 129]
SPARSE = {"cache": "fp8_e4m3 of DSA", "index_topk": TOPK}


def index_queries(tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """e4m3 queries, and weights with an axis of one more, as SGLang has them."""
    torch.manual_seed(12)
    q = torch.randn(tokens, INDEX_HEADS, INDEX_WIDTH, device=device).to(torch.float8_e4m3fn)
    return q, torch.rand(tokens, INDEX_HEADS, 1, device=device)


def select(engine: Engine, batch: SimpleNamespace, q: Tensor, weights: Tensor) -> Tensor:
    """As the indexer calls it: paged for decode, ragged for prefill."""
    indexer = engine.names["Indexer"](TOPK)
    metadata = engine.backend.get_indexer_metadata(1, batch)
    if batch.forward_mode.is_decode() or batch.forward_mode.is_target_verify():
        return indexer._get_topk_paged(batch, 1, q, weights, metadata)
    return indexer._get_topk_ragged(False, batch, 1, q, weights, metadata)


def check_selection(engine: Engine, rows: Tensor, q: Tensor, weights: Tensor, keys, q_lens) -> None:
    """The k best of every query, up to rounding; each once, and visible."""
    held = [
        keys.layer(0).read(engine.slots(i, length), torch.float64).cpu()
        for i, length in enumerate(LENGTHS)
    ]
    logits = reference.indexer_logits(q.cpu().double(), weights.squeeze(-1).cpu(), held, q_lens)
    token = 0
    for request, count in enumerate(q_lens):
        position = {s: i for i, s in enumerate(engine.slots(request, LENGTHS[request]).tolist())}
        for _ in range(count):
            found = [position[row] for row in rows[token].tolist() if row >= 0]
            own = logits[token]
            assert len(found) == min(TOPK, int(own.isfinite().sum()))
            assert len(set(found)) == len(found)
            best = own.topk(len(found)).values
            chosen = own[found].sort(descending=True).values
            torch.testing.assert_close(chosen, best, rtol=0, atol=0.6)
            token += 1


def check_attention(engine: Engine, out: Tensor, q: Tensor, rows: Tensor, **named) -> None:
    everything = torch.zeros(len(engine.pool.rows[1]), ROW.width).double()
    for request, held in enumerate(engine.oracle_rows(LENGTHS)):
        everything[engine.slots(request, LENGTHS[request]).cpu()] = held
    exact, naive = (
        reference.sparse_mla(
            q.cpu(), everything, rows.cpu(), softmax_scale=SCALE, v_width=512, dtype=dtype, **named
        )
        for dtype in (torch.float64, torch.float32)
    )
    assert_matches("out", out.view(-1, HEADS, 512).cpu(), exact[0], naive[0])


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["bfloat16", "fp8_e4m3 of DSA"])
@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [3, 40, 1, 129]])
def test_tokens_attend_to_the_rows_that_the_indexer_selects(cache, q_lens, device, monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, device, **SPARSE | {"cache": cache})
    mode = ForwardMode.DECODE if sum(q_lens) == 4 else ForwardMode.EXTEND
    batch, keys, tokens = engine.batch(mode, q_lens), engine.index_keys(), sum(q_lens)
    before = engine.pool.index_keys[1].clone()
    engine.backend.init_forward_metadata(batch)
    q_index, weights = index_queries(tokens + 5, device)  # the last rows are padding
    rows = select(engine, batch, q_index, weights)
    assert bool((rows[tokens:] == -1).all())
    check_selection(engine, rows, q_index[:tokens], weights[:tokens], keys, q_lens)
    assert_same_bits("index keys", engine.pool.index_keys[1], before)
    q = queries(tokens, device)
    sink = torch.randn(HEADS, device=device)
    out = engine.backend.forward(
        k=None, v=None, layer=engine.layer, forward_batch=batch, topk_indices=rows,
        attn_sink=sink, **parts(q),
    )  # fmt: skip
    check_attention(engine, out, q, rows[:tokens], sink=sink.cpu())


@pytest.mark.parametrize("q_lens", [[1, 1, 1, 1], [3, 40, 1, 129]])
def test_longcats_first_and_last_tokens_are_always_selected(q_lens, device, monkeypatch):
    always = {"index_init_tokens": 2, "index_local_tokens": 5}
    engine = Engine(monkeypatch, LENGTHS, device, **SPARSE | always)
    mode = ForwardMode.DECODE if sum(q_lens) == 4 else ForwardMode.EXTEND
    batch, keys = engine.batch(mode, q_lens), engine.index_keys()
    engine.backend.init_forward_metadata(batch)
    q, weights = index_queries(sum(q_lens), device)
    rows = select(engine, batch, q, weights).tolist()
    token = 0
    for request, (length, count) in enumerate(zip(LENGTHS, q_lens, strict=True)):
        slots = engine.slots(request, length).tolist()
        for position in range(length - count, length):
            seen = slots[: position + 1]
            found = [row for row in rows[token] if row >= 0]
            assert len(found) == len(set(found)) == min(TOPK, len(seen))
            assert {*seen[:2], *seen[-5:]} <= set(found) <= set(seen)
            token += 1
    assert keys.page_size == 64


@pytest.mark.parametrize("cache", ["bfloat16", "fp8_e4m3 of DSA"])
def test_queries_are_not_copied(cache, monkeypatch):
    """The tokens of a head lie together, which sparse kernels take."""
    engine = Engine(monkeypatch, LENGTHS, CPU, **SPARSE | {"cache": cache})
    batch, seen = engine.batch(ForwardMode.DECODE), []
    given = parts(queries(4, CPU))
    assert not given["q"].is_contiguous()

    def attend(q, *others, **named):
        seen.append(q)
        return q.contiguous(), None, None

    monkeypatch.setattr(mlakit, "sparse_mla", attend)
    engine.backend.init_forward_metadata(batch)
    rows = torch.zeros(4, TOPK, dtype=torch.int32)
    engine.backend.forward(
        k=None, v=None, layer=engine.layer, forward_batch=batch, topk_indices=rows, **given
    )
    assert [(q.data_ptr(), q.stride()) for q in seen] == [
        (given["q"].data_ptr(), given["q"].stride())
    ]


@pytest.mark.parametrize("cache", ["bfloat16", "fp8_e4m3 of DSA"])
def test_a_verification_step_selects_for_every_draft(cache, device, monkeypatch):
    drafts = 3
    settings = Settings(speculative_num_draft_tokens=drafts, speculative_eagle_topk=1)
    lengths, q_lens = [70, 300, 3, 129], [drafts] * 4
    monkeypatch.setattr(sys.modules[__name__], "LENGTHS", lengths)
    engine = Engine(monkeypatch, lengths, device, settings=settings, **SPARSE | {"cache": cache})
    batch, keys, tokens = engine.batch(ForwardMode.TARGET_VERIFY, q_lens), engine.index_keys(), 12
    batch.seq_lens = batch.seq_lens - drafts  # they do not count the drafts
    batch.seq_lens_cpu = batch.seq_lens_cpu - drafts
    engine.backend.init_forward_metadata(batch)
    q_index, weights = index_queries(tokens, device)
    rows = select(engine, batch, q_index, weights)
    check_selection(engine, rows, q_index, weights, keys, q_lens)
    q = queries(tokens, device)
    out = engine.backend.forward(
        k=None, v=None, layer=engine.layer, forward_batch=batch, topk_indices=rows, **parts(q)
    )
    check_attention(engine, out, q, rows)


def test_the_result_may_have_a_buffer_of_its_own(device, monkeypatch):
    q_lens = [3, 40, 1, 129]
    engine = Engine(monkeypatch, LENGTHS, device, **SPARSE)
    batch = engine.batch(ForwardMode.EXTEND, q_lens)
    engine.index_keys()
    engine.backend.init_forward_metadata(batch)
    q, weights = index_queries(sum(q_lens) + 5, device)
    wanted = select(engine, batch, q, weights)
    buffer = torch.full_like(wanted, -1)
    metadata = engine.backend.get_indexer_metadata(1, batch)
    indexer = engine.names["Indexer"](TOPK)
    indexer._get_topk_ragged(False, batch, 1, q, weights, metadata, topk_result=buffer)
    assert_same_bits("rows", buffer, wanted)


def test_short_requests_are_selected_as_a_whole(device, monkeypatch):
    """The indexer then computes no scores, and asks for the rows of zeros."""
    lengths, q_lens = [7, 48, 30], [7, 5, 1]
    engine = Engine(monkeypatch, lengths, device, **SPARSE)
    batch = engine.batch(ForwardMode.EXTEND, q_lens)
    engine.backend.init_forward_metadata(batch)
    metadata = engine.backend.get_indexer_metadata(1, batch)
    seen = [i + 1 for i in range(7)] + [44, 45, 46, 47, 48] + [30]
    assert metadata.get_seqlens_expanded().tolist() == seen
    rows = metadata.topk_transform(torch.zeros(13, TOPK, device=device), TOPK)
    request = [0] * 7 + [1] * 5 + [2]
    for token, (own, length) in enumerate(zip(request, seen, strict=True)):
        wanted = engine.slots(own, length).tolist() + [-1] * (TOPK - length)
        assert rows[token].tolist() == wanted
    assert metadata.topk_transform(torch.zeros(13, TOPK, device=device), TOPK) is rows


def test_a_decode_step_has_its_lengths_and_pages(monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, CPU, **SPARSE)
    batch = engine.batch(ForwardMode.DECODE)
    engine.backend.init_forward_metadata(batch)
    metadata = engine.backend.get_indexer_metadata(1, batch)
    assert metadata.get_seqlens_expanded().tolist() == LENGTHS
    assert metadata.get_seqlens_int32().dtype == torch.int32
    first = engine.everything[engine.requests, 0] // 64
    assert metadata.get_page_table_64()[:, 0].tolist() == first.tolist()


def test_indexers_of_other_backends_keep_their_own_selection(monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, CPU, **SPARSE)
    type(engine.backend)(engine.runner)  # replaces nothing twice
    indexer = engine.names["Indexer"](TOPK)
    assert indexer._get_topk_paged(None, 1, None, None, object()) == "paged"
    assert indexer._get_topk_ragged(False, None, 1, None, None, object()) == "ragged"


@pytest.mark.parametrize("rule", AttnForwardMethod)
@pytest.mark.parametrize(
    ("lengths", "q_lens", "is_whole"),
    [([48, 7], [48, 7], True), ([49, 7], [49, 7], False), ([48, 7], [47, 7], False)],
)
def test_short_prompts_are_attended_to_as_a_whole(rule, lengths, q_lens, is_whole, monkeypatch):
    engine = Engine(monkeypatch, lengths, CPU, **SPARSE)
    batch = engine.batch(ForwardMode.EXTEND, q_lens)
    batch.rule = rule
    handler = engine.names["AttentionBackendRegistry"].get_handler("mlakit")
    assert handler(None, batch) is (rule if is_whole else AttnForwardMethod.MLA)


def test_a_layer_without_a_selection_is_an_error(monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, CPU, **SPARSE)
    batch = engine.batch(ForwardMode.DECODE)
    engine.backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="topk_indices must be given"):
        engine.backend.forward(queries(4, CPU), None, None, engine.layer, batch)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"page": 1}, "page_size must be 64 with an indexer, got 1"),
        ({"index_kpool": 4}, "index_kpool must be 1"),
        (
            {"index_local_tokens": TOPK, "index_init_tokens": 1},
            f"index_local_tokens together must be at most index_topk, {TOPK}, got {TOPK + 1}",
        ),
        ({"settings": Settings(prefill_cp=True)}, "enable_prefill_cp must be off"),
    ],
)
def test_sparse_models_and_options_that_are_refused(given, message, monkeypatch):
    with pytest.raises(UnsupportedError, match=message):
        Engine(monkeypatch, LENGTHS, CPU, **SPARSE | given)


@pytest.mark.gpu
def test_a_graph_selects_and_attends_with_other_lengths(monkeypatch):
    device = torch.device("cuda")
    engine = Engine(monkeypatch, LENGTHS, device, **SPARSE)
    engine.index_keys()
    batch = engine.batch(ForwardMode.DECODE)
    q, (q_index, weights) = queries(4, device), index_queries(4, device)
    backend = engine.backend
    backend.init_cuda_graph_state(4, 4)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def step() -> tuple[Tensor, Tensor]:
        backend.init_forward_metadata_in_graph(batch)
        rows = select(engine, batch, q_index, weights)
        out = backend.forward(
            k=None, v=None, layer=engine.layer, forward_batch=batch, topk_indices=rows, **parts(q)
        )
        return rows, out

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # the inputs are written there
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, out = step()
    for lengths in (LENGTHS, [20, 250, 1, 100]):
        batch.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        for request, length in enumerate(lengths):
            own = rows[request][rows[request] >= 0].tolist()
            assert len(own) == min(TOPK, length)
            assert set(own) <= set(engine.slots(request, length).tolist())
        check_attention(engine, out, q, rows)
