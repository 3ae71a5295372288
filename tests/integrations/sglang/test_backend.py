"""The dense backend under SGLang's conventions, compared with the oracles."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from mlakit import CAUSAL, NULL, UnsupportedError, reference
from mlakit.integrations import announce, steps
from mlakit.integrations.sglang import calls
from mlakit.tools.testing import assert_matches
from tests.integrations.sglang import fake_engine
from tests.integrations.sglang.driver import (
    CACHES,
    CONTEXT,
    HEADS,
    NOPE,
    ROW,
    SCALE,
    TOPK,
    V_WIDTH,
    Engine,
    check,
    parts,
    queries,
)
from tests.integrations.sglang.fake_engine import AttnForwardMethod, ForwardMode, Settings

CPU = torch.device("cpu")
LENGTHS = [70, 300, 1, 129]
PAGES = (64, 7, 1)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("page", PAGES)
def test_a_decode_step_stores_its_tokens_and_attends(cache, page, device, monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, device, cache=cache, page=page)
    q, batch = queries(4, device), engine.batch(ForwardMode.DECODE)
    k = torch.randn(4, 1, ROW.width, device=device).bfloat16()
    saves = CACHES[cache][1] == 576  # the fake pool has no quantiser of 656 bytes
    engine.backend.init_forward_metadata(batch)
    out = engine.backend.forward(
        k=k[..., :512], v=k[..., :512], k_rope=k[..., 512:], layer=engine.layer,
        forward_batch=batch, save_kv_cache=saves, **parts(q),
    )  # fmt: skip
    rows = engine.oracle_rows(LENGTHS)
    if saves:
        assert engine.pool.written == [(1, (4, 1, 576))]
        stored = torch.stack([each[-1] for each in rows]).float()
        torch.testing.assert_close(stored, k[:, 0].float().cpu(), rtol=0.07, atol=0.01)
    check(out, q, rows, [1] * 4)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_new_tokens_behind_a_prefix_attend_to_the_cache(page, device, monkeypatch):
    q_lens = [3, 40, 1, 129]
    engine = Engine(monkeypatch, LENGTHS, device, page=page)
    q, batch = queries(sum(q_lens), device), engine.batch(ForwardMode.EXTEND, q_lens)
    engine.backend.init_forward_metadata(batch)
    out = engine.backend.forward(
        k=None, v=None, layer=engine.layer, forward_batch=batch, **parts(q)
    )
    check(out, q, engine.oracle_rows(LENGTHS), q_lens)


def test_queries_and_rows_may_come_in_one_piece(device, monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, device)
    q, batch = queries(4, device), engine.batch(ForwardMode.DECODE)
    k = torch.randn(4, 1, ROW.width, device=device).bfloat16()
    engine.backend.init_forward_metadata(batch)
    out = engine.backend.forward(q, k, k[..., :512], engine.layer, batch)
    check(out, q, engine.oracle_rows(LENGTHS), [1] * 4)
    stored = torch.stack([each[-1] for each in engine.oracle_rows(LENGTHS)])
    assert torch.equal(stored.bfloat16(), k[:, 0].cpu())


def test_queries_are_not_copied(monkeypatch):
    """The tokens of a head lie together, which decode kernels take."""
    engine = Engine(monkeypatch, LENGTHS, CPU)
    batch, seen = engine.batch(ForwardMode.DECODE), []
    given = parts(queries(4, CPU))
    assert not given["q"].is_contiguous()

    def decode(q, *others, **named):
        seen.append(q)
        return q[0].contiguous(), None

    monkeypatch.setattr(steps, "decode", decode)
    engine.backend.init_forward_metadata(batch)
    engine.backend.forward(k=None, v=None, layer=engine.layer, forward_batch=batch, **given)
    assert [latent.data_ptr() for latent, _ in seen] == [given["q"].data_ptr()]


@pytest.mark.parametrize("index_topk", [None, TOPK])
def test_a_line_of_the_log_says_what_serves(index_topk, caplog, monkeypatch):
    monkeypatch.setattr(announce, "_ANNOUNCED", set())
    config = {} if index_topk is None else {"index_topk": index_topk}
    engine = Engine(monkeypatch, LENGTHS, CPU, **config)
    batch, q = engine.batch(ForwardMode.DECODE), parts(queries(4, CPU))
    if index_topk is not None:
        q["topk_indices"] = torch.full((4, TOPK), -1, dtype=torch.int32)
    engine.backend.init_forward_metadata(batch)
    with caplog.at_level(logging.INFO, logger="sglang.mlakit"):
        for _ in range(2):
            engine.backend.forward(k=None, v=None, layer=engine.layer, forward_batch=batch, **q)
    (message,) = caplog.messages
    op = "mla_decode" if index_topk is None else "sparse_mla"
    assert message.startswith(f"mlakit: {op} by ")
    assert message.endswith(" over rows of bf16, 1152 bytes a token, 64 tokens a page")


def test_a_verification_step_has_a_chain_of_drafts(device, monkeypatch):
    drafts = 3
    settings = Settings(speculative_num_draft_tokens=drafts, speculative_eagle_topk=1)
    engine = Engine(monkeypatch, LENGTHS, device, settings=settings)
    q, batch = queries(4 * drafts, device), engine.batch(ForwardMode.TARGET_VERIFY, [drafts] * 4)
    batch.seq_lens = batch.seq_lens - drafts  # they do not count the drafts
    batch.seq_lens_cpu = batch.seq_lens_cpu - drafts
    keep = [0, 1, 3]  # request 2 has fewer tokens than drafts
    batch.req_pool_indices = batch.req_pool_indices[keep]
    batch.seq_lens, batch.seq_lens_cpu = batch.seq_lens[keep], batch.seq_lens_cpu[keep]
    q = q[: 3 * drafts]
    engine.backend.init_forward_metadata(batch)
    out = engine.backend.forward(
        k=None, v=None, layer=engine.layer, forward_batch=batch, **parts(q)
    )
    rows = engine.oracle_rows(LENGTHS)
    check(out, q, [rows[i] for i in keep], [drafts] * 3)


def test_a_sink_is_honoured(device, monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, device)
    q, batch = queries(4, device), engine.batch(ForwardMode.DECODE)
    sink = torch.randn(HEADS, device=device)
    engine.backend.init_forward_metadata(batch)
    out = engine.backend.forward(
        k=None, v=None, layer=engine.layer, forward_batch=batch, attn_sink=sink, **parts(q)
    )
    check(out, q, engine.oracle_rows(LENGTHS), [1] * 4, sink=sink.cpu())


def expanded(tokens: int, device: torch.device) -> tuple[Any, Any, Any, Any]:
    """(k, v, k_nope, k_rope): k as SGLang concatenates it, v as a view of kv_b_proj's result."""
    kv = torch.randn(tokens, HEADS, NOPE + V_WIDTH, device=device).bfloat16()
    k_rope = torch.randn(tokens, 1, 64, device=device).bfloat16()
    k = torch.cat([kv[..., :NOPE], k_rope.expand(-1, HEADS, -1)], -1)
    return k, kv[..., NOPE:], kv[..., :NOPE].cpu(), k_rope[:, 0].cpu()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["new tokens", "one shot", "chunk of the prefix"])
def test_expanded_attention(phase, device, monkeypatch):
    q_lens = [3, 40, 1, 129]
    engine = Engine(monkeypatch, LENGTHS, device)
    batch = engine.batch(ForwardMode.EXTEND, q_lens)
    torch.manual_seed(3)
    q = torch.randn(sum(q_lens), HEADS, NOPE + 64, device=device).bfloat16()
    kv_lens = q_lens
    batch.attn_attend_prefix_cache = phase == "chunk of the prefix"
    if phase == "one shot":
        kv_lens, batch.mha_one_shot = LENGTHS, True
    if phase == "chunk of the prefix":
        kv_lens = [60, 100, 0, 0]
        sums = torch.tensor([0, *kv_lens], device=device).cumsum(0).to(torch.int32)
        batch.prefix_chunk_cu_seq_lens, batch.prefix_chunk_idx = [None, sums], 1
    batch.mha_return_lse = phase != "one shot"
    k, v, k_nope, k_rope = expanded(sum(kv_lens), device)
    layer = fake_engine.layer_of(
        HEADS, ROW, SCALE, tp_k_head_num=HEADS, qk_head_dim=NOPE + 64, v_head_dim=V_WIDTH
    )
    engine.backend.init_forward_metadata(batch)
    result = engine.backend.forward(q, k, v, layer, batch, save_kv_cache=False)
    out, lse = (result, None) if phase == "one shot" else result
    starts = [torch.tensor([0, *each]).cumsum(0).tolist() for each in (q_lens, kv_lens)]
    exact, naive = (
        reference.mla_prefill(
            q.cpu(), k_nope, k_rope, v.cpu(), *starts, softmax_scale=SCALE, dtype=dtype,
            mask=NULL if batch.attn_attend_prefix_cache else CAUSAL,
            weights_dtype=torch.bfloat16 if dtype == torch.float32 else None,
        )
        for dtype in (torch.float64, torch.float32)
    )  # fmt: skip
    assert_matches("out", out.cpu(), exact[0], naive[0])
    if lse is not None:
        torch.testing.assert_close(lse.cpu().double(), exact[1], rtol=0, atol=2e-3)


def test_an_idle_step_reads_nothing(monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, CPU)
    batch = engine.batch(ForwardMode.IDLE)
    for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu"):
        setattr(batch, name, getattr(batch, name)[:0])
    engine.backend.init_forward_metadata(batch)
    out = engine.backend.forward(queries(2, CPU), None, None, engine.layer, batch)
    assert out.shape == (2, HEADS * 512)


def test_a_graph_gets_pages_for_the_longest_context(monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, CPU)
    batch = engine.batch(ForwardMode.DECODE)
    backend = engine.backend
    backend.init_cuda_graph_state(8, 8)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    assert backend.forward_metadata is None  # all of it is inside of the graph
    backend.init_forward_metadata_in_graph(batch)
    assert backend.forward_metadata.batch.block_table.shape == (4, -(-CONTEXT // 64))
    assert backend.forward_metadata.batch.plan is None  # made by the first layer in the graph
    backend.init_forward_metadata(batch)
    assert backend.forward_metadata.batch.block_table.shape == (4, -(-max(LENGTHS) // 64))


def test_full_graphs_of_prefill_are_refused(monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, CPU)
    batch = engine.batch(ForwardMode.EXTEND, [1, 1, 1, 1])
    with pytest.raises(UnsupportedError, match="must not be 'full'"):
        engine.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    engine.backend.init_forward_metadata_out_graph(batch)
    assert engine.backend.forward_metadata.num_tokens == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(attn_dcp_size=2), "dcp_size must be 1, got 2"),
        (Settings(speculative_eagle_topk=4), "speculative_eagle_topk must be 1"),
    ],
)
def test_options_that_are_refused(settings, message, monkeypatch):
    with pytest.raises(UnsupportedError, match=message):
        Engine(monkeypatch, LENGTHS, CPU, settings=settings)


def test_models_that_are_refused(monkeypatch):
    with pytest.raises(UnsupportedError, match="llama_4_scaling must be absent"):
        Engine(monkeypatch, LENGTHS, CPU, llama_4_scaling={"beta": 0.1})
    engine = Engine(monkeypatch, LENGTHS, CPU)
    engine.runner.kv_cache_dtype = torch.float8_e5m2
    with pytest.raises(UnsupportedError, match="kv_cache_dtype must be one of"):
        type(engine.backend)(engine.runner)
    engine.runner.use_mla_backend = False
    with pytest.raises(UnsupportedError, match="the model must have latent attention"):
        type(engine.backend)(engine.runner)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_cap", 30.0),
        ("sliding_window_size", 128),
        ("is_cross_attention", True),
        ("k_scale_float", 0.5),
    ],
)
def test_layers_that_are_refused(field, value, monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, CPU)
    batch = engine.batch(ForwardMode.DECODE)
    setattr(engine.layer, field, value)
    engine.backend.init_forward_metadata(batch)
    with pytest.raises(UnsupportedError, match=field.removesuffix("_float")):
        engine.backend.forward(queries(4, CPU), None, None, engine.layer, batch)


@pytest.mark.parametrize("name", ["cos_sin_cache", "topk_indices"])
def test_arguments_that_are_refused(name, monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, CPU)
    batch = engine.batch(ForwardMode.DECODE)
    engine.backend.init_forward_metadata(batch)
    given = {name: torch.zeros(4, 8, dtype=torch.int32)}
    with pytest.raises(UnsupportedError, match=f"{name} must be None"):
        engine.backend.forward(queries(4, CPU), None, None, engine.layer, batch, **given)


@pytest.mark.parametrize("rule", AttnForwardMethod)
def test_dense_models_follow_the_rules_of_fa3(rule, monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, CPU)
    batch = engine.batch(ForwardMode.EXTEND)
    batch.rule = rule
    handler = engine.names["AttentionBackendRegistry"].get_handler("mlakit")
    assert handler(None, batch) is rule
    assert engine.names["FORWARD_ABSORB_CORE_ATTENTION_BACKENDS"] == ["fa3", "mlakit"]
    type(engine.backend)(engine.runner)  # such as that of a draft model
    assert engine.names["FORWARD_ABSORB_CORE_ATTENTION_BACKENDS"] == ["fa3", "mlakit"]


def test_pages_of_requests(device):
    tokens = torch.arange(20 * 3, dtype=torch.int32).view(3, 20).flip(0).to(device)
    table = calls.page_table(tokens, torch.tensor([2, 0], device=device), 4, 9)
    assert table.tolist() == [[0, 1, 2], [10, 11, 12]]
    assert calls.page_table(tokens, torch.tensor([1], device=device), 1, 2).tolist() == [[20, 21]]


@pytest.mark.gpu
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("drafts", [1, 3])
def test_a_graph_decodes_with_other_requests_than_it_was_captured_with(cache, drafts, monkeypatch):
    device = torch.device("cuda")
    settings = Settings(speculative_num_draft_tokens=drafts) if drafts > 1 else None
    engine = Engine(monkeypatch, [257, 300, 64, 190], device, cache=cache, settings=settings)
    backend, tokens = engine.backend, 4 * drafts
    mode = ForwardMode.DECODE if drafts == 1 else ForwardMode.TARGET_VERIFY
    batch = engine.batch(mode, [drafts] * 4)
    if drafts > 1:  # lengths do not count drafts
        batch.seq_lens -= drafts
    static_q = queries(tokens, device)
    backend.init_cuda_graph_state(4, tokens)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def step() -> list[torch.Tensor]:
        backend.init_forward_metadata_in_graph(batch)
        # two layers of one step
        return [
            backend.forward(
                k=None, v=None, layer=engine.layer, forward_batch=batch, **parts(static_q)
            )
            for _ in range(2)
        ]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # the inputs are written there
    with torch.cuda.stream(side):
        step()  # compiles; SGLang, too, runs a step before it captures one
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    engine.req_to_token.copy_(engine.everything)  # requests grow
    engine.rows.layer(0).write(
        torch.cat([engine.slots(i, CONTEXT) for i in range(4)]),
        torch.randn(4 * CONTEXT, ROW.width, device=device),
    )
    order = [0, 1, 2, 3]
    for lengths in ([257, 300, 64, 190], [70, 399, 5, 129], [40, 1, 1, 380]):
        order = order[1:] + order[:1]
        lengths = [max(length, drafts) for length in lengths]
        counted = lengths if drafts == 1 else [length - drafts for length in lengths]
        static_q.copy_(torch.randn(static_q.shape, device=device))
        batch.seq_lens.copy_(torch.tensor(counted))
        batch.req_pool_indices.copy_(engine.requests[order])
        graph.replay()
        layer = engine.rows.layer(0)
        slots = engine.everything[batch.req_pool_indices.cpu()].long().to(device)
        rows = [
            layer.read(slots[i, :length], torch.float64).cpu() for i, length in enumerate(lengths)
        ]
        for out in results:
            check(out, static_q, rows, [drafts] * 4)


@pytest.mark.parametrize("cache", CACHES)
def test_the_deployment_that_is_compiled_for_is_found_in_the_engine(cache, monkeypatch):
    engine = Engine(monkeypatch, LENGTHS, CPU, cache=cache)
    given = engine.backend._deployment(engine.runner.model_config)
    assert given.pop("model") is engine.runner.model_config.hf_config
    assert given == {
        "heads": 16,
        "format": engine.rows.format,
        "page_size": 64,
        "dtype": "bf16",
        "max_context": CONTEXT,
    }
