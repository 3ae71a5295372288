"""Draft models on our backends: the steps of their decode, and what takes in verified tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.integrations.releases import Releases
from tests.integrations.sglang import test_sparse
from tests.integrations.sglang.driver import CONTEXT, ROW, Engine, check, parts, queries
from tests.integrations.sglang.fake_engine import ForwardMode, Settings
from tests.integrations.sglang.test_sparse import (
    SPARSE,
    check_attention,
    check_selection,
    index_queries,
    select,
)

CPU = torch.device("cpu")
STEPS, WIDTH = 4, 3  # the last step takes no attention
LENGTHS = [70, 300, 4, 129]  # with the tokens of all steps
SETTINGS = Settings(speculative_num_draft_tokens=WIDTH, speculative_eagle_topk=1)


def factory_of(engine: Engine, steps: int = STEPS, backend: str = "mlakit") -> Any:
    return engine.names["DraftBackendFactory"](engine.runner, 1, steps, backend)


def before_drafts(batch: SimpleNamespace) -> SimpleNamespace:
    """The batch of all steps of a draft model's decode: its lengths count none of their tokens."""
    batch.seq_lens = batch.seq_lens - WIDTH
    batch.seq_lens_cpu = batch.seq_lens_cpu - WIDTH
    return batch


def window(engine: Engine, device: torch.device) -> SimpleNamespace:
    batch = engine.batch(ForwardMode.DRAFT_EXTEND_V2, [WIDTH] * 4)
    batch.input_ids = torch.zeros(4 * WIDTH, dtype=torch.int64, device=device)
    return batch


def attend(engine: Engine, backend: Any, batch: SimpleNamespace, q: Tensor, **named: Any) -> Tensor:
    out: Tensor = backend.forward(
        k=None, v=None, layer=engine.layer, forward_batch=batch, **parts(q), **named
    )
    return out


def test_each_step_sees_the_tokens_of_those_before_it(device, monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, device, settings=SETTINGS)
    made = factory_of(engine).create_decode_backend()
    assert not made.needs_cpu_seq_lens
    batch = before_drafts(engine.batch(ForwardMode.DECODE))
    made.init_cuda_graph_state(4, 4)
    made.init_forward_metadata(batch)
    q, rows = queries(4, device), engine.oracle_rows(LENGTHS)
    for step, backend in enumerate(made.attn_backends):
        out = attend(engine, backend, batch, q)
        check(out, q, [row[: len(row) - WIDTH + step + 1] for row in rows], [1] * 4)
    assert step == STEPS - 2


def test_verified_tokens_are_taken_in_by_a_window_of_each_request(device, monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, device, settings=SETTINGS)
    backend = factory_of(engine).create_draft_extend_backend()
    batch, q = window(engine, device), queries(4 * WIDTH, device)
    batch.extend_seq_lens_cpu = None  # the host does not know it on every path
    backend.init_forward_metadata(batch)
    out = attend(engine, backend, batch, q)
    check(out, q, engine.oracle_rows(LENGTHS), [WIDTH] * 4)


@pytest.mark.parametrize("cache", ["bfloat16", "fp8_e4m3 of DSA"])
@pytest.mark.parametrize("step", [None, 0, STEPS - 2])
def test_the_indexer_selects_among_them(cache, step, device, monkeypatch):
    """step None: of the tokens that a window takes in"""
    given = SPARSE | {"cache": cache}
    engine = Engine(monkeypatch, LENGTHS, device, settings=SETTINGS, **given)
    keys, factory = engine.index_keys(), factory_of(engine)
    lengths, q_lens = LENGTHS, [WIDTH] * 4
    if step is None:
        engine.backend = factory.create_draft_extend_backend()
        batch = window(engine, device)
        engine.backend.init_forward_metadata(batch)
    else:
        made = factory.create_decode_backend()
        batch = before_drafts(engine.batch(ForwardMode.DECODE))
        made.init_forward_metadata(batch)
        engine.backend = made.attn_backends[step]
        lengths, q_lens = [n - WIDTH + step + 1 for n in LENGTHS], [1] * 4
    monkeypatch.setattr(test_sparse, "LENGTHS", lengths)
    tokens = sum(q_lens)
    q_index, weights = index_queries(tokens, device)
    rows = select(engine, batch, q_index, weights)
    check_selection(engine, rows, q_index, weights, keys, q_lens)
    q = queries(tokens, device)
    check_attention(engine, attend(engine, engine.backend, batch, q, topk_indices=rows), q, rows)


def test_other_draft_backends_are_as_before(monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, CPU, settings=SETTINGS)
    type(engine.backend)(engine.runner)  # replaces nothing twice
    assert factory_of(engine, backend="fa3").create_decode_backend() == "decode"
    assert factory_of(engine, backend="fa3").create_draft_extend_backend() == "prefill"
    assert factory_of(engine, steps=1).create_decode_backend() is None
    with pytest.raises(ValueError, match="no other"):
        factory_of(engine, backend="other").create_decode_backend()


@pytest.mark.parametrize("is_named", [True, False])
def test_a_backend_comes_with_its_name_from_the_release_on_that_asks_for_it(is_named, monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, CPU, settings=SETTINGS)
    has = Releases.has
    monkeypatch.setattr(
        Releases,
        "has",
        lambda self, name: is_named if name == "named_draft_backends" else has(self, name),
    )
    factory = factory_of(engine)
    if is_named:
        factory.create_decode_backend()
        assert factory.name == "mlakit"
    else:  # SGLang 0.5.17, which the fake one is not
        with pytest.raises(TypeError, match="cannot unpack"):
            factory.create_decode_backend()


@pytest.mark.gpu
@pytest.mark.parametrize("is_decode", [True, False])
def test_a_graph_of_all_steps_has_other_requests_than_it_was_captured_with(is_decode, monkeypatch):
    device = torch.device("cuda")
    engine = Engine(monkeypatch, [257, 300, 64, 190], device, settings=SETTINGS)
    factory = factory_of(engine)
    q = queries(4 if is_decode else 4 * WIDTH, device)
    if is_decode:
        made = factory.create_decode_backend()
        batch, backends = before_drafts(engine.batch(ForwardMode.DECODE)), made.attn_backends
    else:
        made = factory.create_draft_extend_backend()
        batch, backends = window(engine, device), [made]
    made.init_cuda_graph_state(4, len(q))
    made.init_forward_metadata_out_graph(batch, in_capture=True)

    def run() -> list[Tensor]:
        made.init_forward_metadata_in_graph(batch)
        return [attend(engine, backend, batch, q) for backend in backends]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # the inputs are written there
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    engine.req_to_token.copy_(engine.everything)  # requests grow
    engine.rows.layer(0).write(
        torch.cat([engine.slots(i, CONTEXT) for i in range(4)]),
        torch.randn(4 * CONTEXT, ROW.width, device=device),
    )
    for lengths in ([257, 300, 64, 190], [70, 399, 5, 129]):
        batch.seq_lens.copy_(torch.tensor(lengths) - (WIDTH if is_decode else 0))
        made.init_forward_metadata_out_graph(batch)
        graph.replay()
        rows = engine.oracle_rows(lengths)
        for step, out in enumerate(results):
            seen = [row[: len(row) - WIDTH + step + 1] for row in rows] if is_decode else rows
            check(out, q, seen, [1 if is_decode else WIDTH] * 4)
