"""The folder of scripts/hub.py in the library `kernels`, and in transformers' KernelConfig."""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, KernelConfig
from transformers.monkey_patching import clear_patch_mapping
from transformers.utils import kernel_config

from mlakit.integrations.transformers import patch
from tests.integrations.models import build, left_padding, prompts
from tests.integrations.test_generate import TOLERANCE, generate
from tests.project.test_hub import hub

kernels = pytest.importorskip("kernels", reason="`make test-hub` installs kernels")
REPOSITORY = "mlakit/mlakit"
NAME = "DeepseekV3Attention"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("hub") / "mlakit"
    hub.build(made)
    return made


@pytest.fixture
def published(folder, monkeypatch):
    """`get_kernel` finds the folder without the network; the machine seems to have a GPU."""
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPOSITORY}={folder}")
    # the config refuses the device cpu, by its name; with another there is no kernel for a model
    # on the CPU, and the class that replaces transformers' keeps its own forward
    monkeypatch.setattr(kernel_config, "infer_device", lambda model: "cuda")
    for name, module in list(sys.modules.items()):
        try:  # transformers 5.17 looks into all of them, and those of images need torchvision
            dir(module)
        except ModuleNotFoundError:
            monkeypatch.delitem(sys.modules, name)
    yield
    clear_patch_mapping()


def rows_of(cache: DynamicCache) -> Any:
    return cache.layers[0].pool.cache


def test_it_is_loaded_and_computes(folder):
    kernel = kernels.get_local_kernel(folder)
    x = torch.full((2, 128), 448.0)  # its scale is 1
    out, scales = kernel.quantize_fp8(x, 128)
    assert torch.equal(out.float() * scales[0, :2, None], x)
    assert kernel.__name__ != "mlakit"
    (known,) = (each for each in kernels.get_loaded_kernels() if each.module is kernel)
    assert str(known.metadata.name) == "mlakit"


def test_a_kernel_config_gives_a_model_the_latent_cache(published, tmp_path):
    model, ids, mask = build("DeepseekV3"), prompts(), left_padding()
    how = {"return_dict_in_generate": True}
    expected, eager = generate(model, ids, mask, **how), model(ids, attention_mask=mask).logits
    model.save_pretrained(tmp_path)
    repository = (f"{REPOSITORY}:{NAME}", {"revision": "main", "trust_remote_code": True})
    made = type(model).from_pretrained(tmp_path, kernel_config=KernelConfig({NAME: repository}))
    made.eval().requires_grad_(False)
    ours = generate(made, ids, mask, **how)
    assert torch.equal(ours.sequences, expected.sequences)
    assert (made(ids, attention_mask=mask).logits - eager)[mask.bool()].abs().max() < TOLERANCE
    patch(model)
    theirs = generate(model, ids, mask, **how)
    own, patched = rows_of(ours.past_key_values), rows_of(theirs.past_key_values)
    assert type(own).__module__.startswith("_mlakit_")
    assert own.nbytes == patched.nbytes > 0
    assert own.format == patched.format == "fp32"


@pytest.mark.filterwarnings(r"ignore:\s*No kernel mapping found for layer:UserWarning")
def test_kernels_takes_the_layer_on_a_device_that_it_has_one_for(published, folder):
    layers = kernels.get_local_kernel(folder).layers
    model, ids = build("DeepseekV3"), prompts()
    expected = model(ids).logits
    config = deepcopy(model.config)
    made = type(model)(config)
    for index, layer in enumerate(made.model.layers):
        layer.self_attn = getattr(layers, f"{NAME}Layout")(config, index)
        type(layer.self_attn).kernel_layer_name = NAME
    made.load_state_dict(model.state_dict())
    made.eval().requires_grad_(False)
    repository = kernels.LocalLayerRepository(folder, layer_name=NAME)
    with kernels.use_kernel_mapping({NAME: {"cpu": repository}}, inherit_mapping=False):
        kernels.kernelize(made, mode=kernels.Mode.INFERENCE, device="cpu")
    assert made.model.layers[0].self_attn.forward.__func__ is getattr(layers, NAME).forward
    assert (made(ids).logits - expected).abs().max() < TOLERANCE
