"""What the ranks do in the tests of sharded heads: every function checks its own results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from mlakit.layer import MLAAttention
from mlakit.parallel import tensor_parallel_plan
from tests.layer.models import SIZES
from tests.layer.serving import serve


def check_layer(group: dist.ProcessGroup, folder: str) -> None:
    """A layer of the rank's heads, whose result is summed, is the layer."""
    generator = torch.Generator().manual_seed(5)
    load: dict[str, Any] = {"dtype": torch.float32}
    whole = MLAAttention.load_safetensors(folder, 0, **load)
    layer = MLAAttention.load_safetensors(folder, 0, tp_group=group, **load)
    g = whole.config.geometry
    assert layer.config.geometry.num_heads == g.num_heads // group.size()
    inputs = [torch.randn(n, g.hidden_size, generator=generator) for n in (40, 20)]
    chunks = ((25, 20), (14, 0), (1, 0))
    for got, want in zip(serve(layer, inputs, chunks), serve(whole, inputs, chunks), strict=True):
        assert float(want.abs().max()) > 0.5
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


def small_model(model_type: str, **fields: Any) -> Any:
    """A model of two dense layers with random weights, the same on all ranks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {**SIZES, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 32}
    config = AutoConfig.for_model(model_type, **(sizes | fields))
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    found: Tensor = model(ids, use_cache=False).logits
    return found


def check_model(group: dist.ProcessGroup, model_type: str, fields: dict[str, Any]) -> None:
    """transformers shards the heads by the plan; the logits are those of one process."""
    from torch.distributed.device_mesh import DeviceMesh
    from transformers.distributed import DistributedConfig

    model = small_model(model_type, **fields)
    want = logits(model)
    plan = tensor_parallel_plan(model.config)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    config = DistributedConfig(tp_plan=plan, tp_size=group.size())
    model = type(model).maybe_distribute_model(model, config, mesh)
    check_sharded(model, group)
    assert float(want.std()) > 0.01
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)


def check_loaded_model(group: dist.ProcessGroup, folder: str) -> None:
    """`from_pretrained` shards the heads by the plan; the logits are those of one process, also
    those of a patched model."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from mlakit.integrations.transformers import patch

    plan = tensor_parallel_plan(AutoConfig.from_pretrained(folder))
    eager = {"attn_implementation": "eager"}
    whole = AutoModelForCausalLM.from_pretrained(folder, **eager).eval()
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_plan=plan), **eager
    ).eval()
    check_sharded(model, group)
    want = logits(whole)
    assert float(want.std()) > 0.01
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)
    patch(model)
    torch.testing.assert_close(logits(model), want, rtol=1e-4, atol=1e-5)


def check_sharded(model: Any, group: dist.ProcessGroup) -> None:
    """This rank's weights are those of its heads."""
    c, attention = model.config, model.model.layers[1].self_attn
    count = c.num_attention_heads // group.size()
    local = attention.kv_b_proj.weight.to_local()
    assert len(local) == count * (c.qk_nope_head_dim + c.v_head_dim)
    assert attention.o_proj.weight.to_local().shape[1] == count * c.v_head_dim
