"""The layer on a GPU: against the float64 oracle, without a synchronisation, in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import CachedBatch, MLAAttention, plan_mla_decode, plan_step
from mlakit.tools.testing import assert_matches, assert_same_bits
from tests.layer.checkpoints import INDEX, SMALL, quantised, tensors
from tests.layer.oracle import Oracle
from tests.layer.selections import check_selection, selected_by
from tests.layer.serving import Server, serve

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
# rows, heads and widths of DeepSeek-V3, one rank of eight; the hidden size is smaller
DENSE = SMALL | {
    "hidden_size": 512,
    "num_attention_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 1024,
}
SPARSE = DENSE | INDEX | {"index_n_heads": 64, "index_topk": 64}
PAGE = 64


def layer_of(config: dict[str, Any], *, is_fp8: bool = False) -> MLAAttention:
    layer = MLAAttention(config, is_fp8=is_fp8, dtype=BF16)
    stored = tensors(config)
    layer.load_state_dict(quantised(stored) if is_fp8 else stored)
    return layer.cuda()


def inputs(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n, 512, generator=generator).to(BF16).cuda() for n in lengths]


def oracles(layer: MLAAttention) -> tuple[Oracle, Oracle]:
    parameters = dict(layer.named_parameters())
    return Oracle(layer.config, parameters), Oracle(layer.config, parameters, stored=BF16)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_dense_layer_against_the_oracle():
    layer = layer_of(DENSE)
    x = inputs(150, 75)
    chunks = [(100, 1), (1, 70), (48, 3), (1, 1)]
    found = torch.cat(serve(layer, x, chunks, format="bf16", page_size=PAGE))
    exact, naive = (torch.cat([o.run(each) for each in x]) for o in oracles(layer))
    assert_matches("out", found.cpu(), exact, naive)


@pytest.mark.parametrize("index_format", ["bf16", "fp8_token"])
def test_a_sparse_layer_against_the_oracle(index_format):
    layer = layer_of(SPARSE)
    (x,) = inputs(200)
    found, chosen = selected_by(
        layer, x, [150, 1, 4, 45], format="bf16", index_format=index_format, page_size=PAGE
    )
    oracle, naive = oracles(layer)
    scores = oracle.index_scores(x)
    spread = float(scores[scores.isfinite()].std())
    check_selection(scores, chosen, 64, spread * (0.05 if index_format == "bf16" else 0.15))
    assert_matches("out", found.cpu(), oracle.run(x, chosen), naive.run(x, chosen))


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_fp8_weights_are_near_those_of_the_cpu(config):
    """Activations near the middle of two codes may be rounded differently."""
    layer = layer_of(config, is_fp8=True)
    x = inputs(50, 21)
    chunks = [(40, 20), (10, 1)]
    options = {"format": "fp8_block128", "index_format": "fp8_token", "page_size": PAGE}
    found = torch.cat(serve(layer, x, chunks, **options)).cpu().double()
    want = torch.cat(serve(layer.cpu(), [each.cpu() for each in x], chunks, **options)).double()
    assert float((found - want).norm() / want.norm()) < 0.03


class Decode:
    """Requests in the cache, and one step of `q_len` new tokens each, repeated by `run`."""

    def __init__(self, config: dict[str, Any], q_len: int = 1, **options: Any) -> None:
        self.layer = layer_of(config, **options)
        self.x = inputs(190, 140, 70)
        lengths = [len(each) for each in self.x]
        self.server = Server(
            self.layer, lengths, format="bf16", index_format="fp8_token", page_size=PAGE
        )
        self.q_len = q_len
        new = [100, 60, 1]
        self.feed(new)

    def feed(self, new: list[int]) -> None:
        at = self.server.kv_lens
        part = torch.cat([x[a : a + n] for x, a, n in zip(self.x, at, new, strict=True)])
        batch = self.server.batch(new)
        plan = plan_step(self.server.kv_lens, new)
        self.layer(part, batch, plan=plan, index_cache=self.server.index_cache)

    def step(self) -> tuple[Tensor, CachedBatch]:
        """The next tokens of every request."""
        at = self.server.kv_lens
        part = torch.cat([x[a : a + self.q_len] for x, a in zip(self.x, at, strict=True)])
        return part, self.server.batch([self.q_len] * 3)

    def run(self, x: Tensor, batch: CachedBatch) -> Tensor:
        plan = None
        if self.q_len > 1 and self.layer.indexer is None:
            heads = self.layer.config.geometry.num_heads
            plan = plan_mla_decode(
                batch.cache,
                batch.page_table,
                batch.kv_lens,
                heads=heads,
                num_tokens=len(x),
                q_starts=batch.q_starts,
            )
        return self.layer(x, batch, plan=plan, index_cache=self.server.index_cache)


CASES: dict[str, Callable[[], Decode]] = {
    "dense": lambda: Decode(DENSE),
    "dense, two tokens": lambda: Decode(DENSE, 2),
    "sparse": lambda: Decode(SPARSE),
    "sparse, two tokens": lambda: Decode(SPARSE, 2),
    "dense, fp8 weights": lambda: Decode(DENSE, is_fp8=True),
    "sparse, fp8 weights": lambda: Decode(SPARSE, is_fp8=True),
}


@pytest.mark.parametrize("name", CASES)
def test_a_decode_step_does_not_synchronise(name):
    case = CASES[name]()
    x, batch = case.step()
    want = case.run(x, batch)
    with no_synchronisation():
        found = case.run(x, batch)
    assert_same_bits("out", found.cpu(), want.cpu())


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_a_mixed_step_with_a_plan_does_not_synchronise(config):
    layer = layer_of(config)
    x = torch.cat(inputs(90, 1))
    server = Server(layer, [90, 1], format="bf16", index_format="fp8_token", page_size=PAGE)
    batch = server.batch([90, 1])
    plan = plan_step([90, 1], [90, 1])
    want = layer(x, batch, plan=plan, index_cache=server.index_cache)
    with no_synchronisation():
        found = layer(x, batch, plan=plan, index_cache=server.index_cache)
    assert_same_bits("out", found.cpu(), want.cpu())


@pytest.mark.parametrize("name", CASES)
def test_a_graph_is_replayed_with_new_lengths(name):
    eager, graphed = CASES[name](), CASES[name]()
    x, batch = graphed.step()
    eager_x, eager_batch = eager.step()
    graphed.run(x, batch)  # compiles and prepares
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = graphed.run(x, batch)
    for _ in range(3):
        graph.replay()
        want = eager.run(eager_x, eager_batch)
        assert_same_bits("out", out.cpu(), want.cpu())
        eager_x, eager_batch = eager.step()
        new_x, new_batch = graphed.step()
        x.copy_(new_x)
        batch.kv_lens.copy_(new_batch.kv_lens)


def test_weights_follow_the_device():
    layer = layer_of(DENSE)
    (x,) = inputs(20)
    on_gpu = serve(layer, [x], [(20,)], format="bf16")[0]
    moved = serve(layer.cpu(), [x.cpu()], [(20,)], format="bf16")[0]
    assert moved.device.type == "cpu"
    back = serve(layer.cuda(), [x], [(20,)], format="bf16")[0]
    assert_same_bits("out", back.cpu(), on_gpu.cpu())
