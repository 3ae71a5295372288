"""The layer on a GPU: against the float64 oracle, with rows of 448 + 64 columns, chunk by chunk."""

from __future__ import annotations

import pytest
import torch

from mlakit import V4Attention
from tests.layer.v4.models import CONFIGS, KINDS, inputs, weights
from tests.layer.v4.oracle import V4Oracle
from tests.layer.v4.serving import Server, serve

pytestmark = pytest.mark.gpu

FIELDS = CONFIGS["rows of 448 + 64"] | {
    "hidden_size": 256,
    "num_attention_heads": 64,
    "q_lora_rank": 128,
    "o_groups": 8,
    "index_n_heads": 64,
    "compress_rates": {KINDS[1]: 4, KINDS[2]: 128},
    "sliding_window": 128,
    "index_topk": 32,
    "max_position_embeddings": 4096,
}


def layer_of(layer: int, dtype: torch.dtype) -> V4Attention:
    made = V4Attention(FIELDS, layer)
    made.load_state_dict(weights(FIELDS, layer))
    return made.to(dtype).cuda()


@pytest.mark.parametrize(("format", "limit"), [("bf16", 0.03), ("fp8_block64", 0.12)])
@pytest.mark.parametrize("layer", range(3), ids=KINDS)
def test_the_layer_on_a_gpu_is_the_oracle(layer, format, limit):
    made = layer_of(layer, torch.bfloat16)
    x = [each.bfloat16().cuda() for each in inputs(300, 140, hidden=256)]
    oracle = V4Oracle(made.config, layer, dict(made.named_parameters()))
    exact = torch.cat([oracle.run(each) for each in x])
    chunks = [(120, 0), (11, 130), (4, 1), *[(1, 1)] * 5]
    found = torch.cat(serve(made, x, chunks, format=format, page_size=64)).double().cpu()
    assert found.isfinite().all()
    error = (found - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert float(error) < limit


@pytest.mark.parametrize("layer", range(3), ids=KINDS)
def test_float32_layers_on_a_gpu_are_the_oracle(layer):
    made = layer_of(layer, torch.float32)
    x = [each.cuda() for each in inputs(300, 140, hidden=256)]
    oracle = V4Oracle(made.config, layer, dict(made.named_parameters()))
    exact = torch.cat([oracle.run(each) for each in x])
    found = torch.cat(serve(made, x, [(120, 130), (1, 1)], page_size=64)).double().cpu()
    assert float((found - exact).abs().max()) < 2e-4 * float(exact.abs().max())


@pytest.mark.parametrize("layer", range(3), ids=KINDS)
def test_a_step_does_not_synchronise(layer):
    made = layer_of(layer, torch.bfloat16)
    server = Server(made, format="fp8_block64", page_size=64)
    sequence = server.new()
    x = inputs(302, hidden=256)[0].bfloat16().cuda()
    server.step([sequence], [x[:300]])
    server.step([sequence], [x[300:301]])
    batch = server.begin([sequence], [1])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made(x[301:], batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
