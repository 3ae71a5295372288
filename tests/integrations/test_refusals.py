"""What a patched model refuses, each with an error that says why."""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from mlakit import UnsupportedError
from mlakit.integrations.transformers import checks, patch, unpatch
from tests.integrations.models import build, left_padding, prompts


@pytest.fixture
def model() -> Any:
    made = build("DeepseekV3")
    patch(made)
    return made


def kv_b_proj(model: Any) -> Any:
    return model.model.layers[1].self_attn.kv_b_proj


def test_a_model_without_mla():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=16, intermediate_size=32, **sizes)
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM has no MLA attention"):
        patch(transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize("version", ["4.57.1", "5.14.2"])
def test_an_older_transformers(version, monkeypatch):
    model = build("DeepseekV3")
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(UnsupportedError, match=f"needs transformers 5.15 or newer, got {version}"):
        patch(model)


def test_versions_that_were_not_tested_warn(monkeypatch):
    model = build("DeepseekV3")
    with pytest.warns(UserWarning, match=r"up to 5.23, got 5.24.0.dev0"):
        checks.check_version("5.24.0.dev0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for version in ("5.15.0", "5.17.0", "5.22.2", "5.23.0"):
            checks.check_version(version)
    monkeypatch.setattr("transformers.__version__", "5.24.0")
    with pytest.warns(UserWarning, match=r"up to 5.23, got 5.24.0") as warned:
        patch(model)
    assert warned[0].filename == __file__  # it names the line that calls patch


def test_no_transformers(monkeypatch):
    model = build("DeepseekV3")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'mlakit\[transformers\]'"):
        patch(model)


def test_a_patched_model_is_not_patched_again(model):
    with pytest.raises(ValueError, match="patched already"):
        patch(model)
    unpatch(model)
    with pytest.raises(ValueError, match="unpatch: the model is not patched; `with patch"):
        unpatch(model)


@pytest.mark.parametrize("how", ["left", "raised", "undone"])
def test_a_with_block_undoes_the_patch(how):
    model, ids = build("DeepseekV3"), prompts()
    eager = model(ids).logits
    with suppress(ZeroDivisionError), patch(model, page_size=16) as patched:
        assert patched is model
        assert model(ids).past_key_values.layers[0].pool.allocator.page_size == 16
        if how == "raised":
            raise ZeroDivisionError
        if how == "undone":
            unpatch(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(ids).logits, eager)
    with pytest.raises(ValueError, match="unpatch: the model is not patched; `with patch"):
        unpatch(model)


@pytest.mark.parametrize(
    ("page_size", "error"), [(0, ValueError), (-1, ValueError), (6.5, TypeError)]
)
def test_page_size(page_size, error):
    with pytest.raises(error, match="patch: page_size must"):
        patch(build("DeepseekV3"), page_size=page_size)


@pytest.mark.parametrize("format", ["bf16", "fp16"])
def test_float32_weights_over_16_bit_rows(format):
    with pytest.raises(UnsupportedError, match=f"'fp32' or an FP8 format.*got '{format}'"):
        patch(build("DeepseekV3"), format=format)


def test_an_unknown_format():
    with pytest.raises(ValueError, match="unknown cache format 'int4'"):
        patch(build("DeepseekV3"), format="int4")


def quantised(module: Any) -> None:
    module.weight = nn.Parameter(module.weight.to(torch.float8_e4m3fn), requires_grad=False)


class Adapter(nn.Module):
    """As LoRA wraps a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.weight = base, base.weight


class Wrapped(torch.Tensor):
    """As torchao stores a quantised matrix: a tensor that says it is float32."""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["float8", "adapter", "tensor subclass", "bias"])
def test_a_kv_b_proj_that_is_no_plain_matrix(kind, when):
    """Also one that becomes so after the patch."""
    model = build("DeepseekV3")
    if when == "after":
        patch(model)
        model(prompts())
    attention = model.model.layers[1].self_attn
    linear = attention.kv_b_proj
    if kind == "float8":
        quantised(linear)
    elif kind == "adapter":
        attention.kv_b_proj = Adapter(linear)
    elif kind == "tensor subclass":
        wrapped = linear.weight.detach().as_subclass(Wrapped)
        linear.weight = nn.Parameter(wrapped, requires_grad=False)
    else:
        linear.bias = nn.Parameter(torch.ones(linear.out_features), requires_grad=False)
    with pytest.raises(UnsupportedError, match="mlakit: kv_b_proj must"):
        patch(model) if when == "before" else model(prompts())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["hook", "pre-hook", "forward"])
def test_a_kv_b_proj_that_is_watched_or_replaced(kind, when):
    """The attention multiplies by the weight: what the module does besides would be left out."""
    model = build("DeepseekV3")
    if when == "after":
        patch(model)
        model(prompts())
    linear = kv_b_proj(model)
    if kind == "hook":
        linear.register_forward_hook(lambda module, args, out: out * 2)
    elif kind == "pre-hook":
        linear.register_forward_pre_hook(lambda module, args: None)
    else:
        linear.forward = lambda x: nn.functional.linear(x, linear.weight) * 2
    with pytest.raises(UnsupportedError, match="kv_b_proj must have no forward hooks and no fo"):
        patch(model) if when == "before" else model(prompts())


def test_hooks_of_other_modules_are_called():
    model, ids = build("DeepseekV3"), prompts()
    attention = model.model.layers[1].self_attn
    called = []
    for name, module in attention.named_children():
        if name != "kv_b_proj":
            module.register_forward_hook(lambda *args, name=name: called.append(name))
    attention.o_proj.register_forward_hook(lambda module, args, out: out * 3)
    eager = model(ids).logits
    expected, called[:] = list(called), []
    patch(model)
    assert (model(ids).logits - eager).abs().max() < 2e-4
    assert called == expected
    assert called


@pytest.mark.parametrize("format", ["bf16", None])
def test_another_dtype_after_the_patch(format):
    model, ids = build("DeepseekV3").bfloat16(), prompts()
    patch(model, format=format)
    cache = model(ids).past_key_values
    model.float()
    if format is None:
        with pytest.raises(UnsupportedError, match="past_key_values must have rows of 'fp32' or"):
            model(ids[:, :1], past_key_values=cache)
        model(ids)  # a new cache has rows of the new dtype
        return
    for given in (None, cache):
        with pytest.raises(UnsupportedError, match=r"format must be 'fp32' or .* got 'bf16'"):
            model(ids, past_key_values=given)


def test_a_config_shared_with_a_patched_model(model):
    """The config names the attention function of both."""
    other = type(model)(model.config).eval().requires_grad_(False)
    with pytest.raises(UnsupportedError, match=r"mlakit: the model must not share its config"):
        other(prompts())
    with pytest.raises(UnsupportedError, match=r"patch: the model must not share.*deepcopy"):
        patch(other)
    model(prompts())
    unpatch(model)
    other(prompts())


@pytest.mark.parametrize("cache", ["new", "begun"])
def test_another_attention_implementation_while_patched(model, cache):
    ids = prompts()
    given = model(ids).past_key_values if cache == "begun" else None
    model.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedError, match=r"must be 'mlakit', got 'sdpa'; call unpatch"):
        model(ids, past_key_values=given)
    unpatch(model)
    assert model.config._attn_implementation == "sdpa"
    model(ids)


def test_training(model):
    with pytest.raises(UnsupportedError, match=r"training mode; call model.eval\(\)"):
        model.train()(prompts())


def test_gradients(model):
    kv_b_proj(model).weight.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="there is no backward"):
        model(prompts())
    with torch.no_grad():
        model(prompts())
    with torch.inference_mode():
        model(prompts())


def test_gradients_of_sinks():
    model, ids = build("HYV4"), prompts(9)
    patch(model)
    model.model.layers[1].self_attn.sinks.requires_grad_(True)
    with pytest.raises(UnsupportedError, match="sink must not require grad"):
        model(ids)
    with torch.no_grad():
        model(ids)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["first", "later"])
def test_forward_mode_derivatives(model, when):
    """Of any weight of an attention, also where the up-projection was used before."""
    ids = prompts(9)
    if when == "later":
        model(ids)
    for name, weight in list(model.named_parameters()):
        if "layers.1.self_attn" not in name or "o_proj" in name:
            continue

        def logits(weight: Tensor, name: str = name) -> Tensor:
            return torch.func.functional_call(model, {name: weight}, (ids,)).logits

        with pytest.raises(UnsupportedError, match="must not have a tangent"):
            torch.func.jvp(logits, (weight,), (torch.ones_like(weight),))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("softcap", 30.0),
        ("sliding_window", 128),
        ("output_attentions", True),
        ("something_new", 1),
        ("is_causal", False),
    ],
)
def test_arguments_that_change_the_attention(model, name, value):
    with pytest.raises(UnsupportedError, match=f"mlakit: ({name}|the mask must be causal)"):
        model.model(prompts(), **{name: value})


def test_dropout(model):
    module = model.model.layers[0].self_attn
    with pytest.raises(UnsupportedError, match="training and dropout"):
        checks.check_attention_arguments(module, 0.1, {})
    module.train()  # this layer alone
    with pytest.raises(UnsupportedError, match="training and dropout"):
        model(prompts())


def test_a_mask_of_four_axes(model):
    mask = torch.ones(3, 1, 70, 70)
    with pytest.raises(ValueError, match=r"axes \(batch, columns\), got 4 axes"):
        model(prompts(), attention_mask=mask)
    with pytest.raises(ValueError, match=r"axes \(batch, columns\), got dict"):
        model(prompts(), attention_mask={"full_attention": None})


def test_a_mask_that_hides_or_shows_what_was_cached_otherwise(model):
    cache = DynamicCache(config=model.config)
    ids, mask = prompts(), left_padding()
    model(ids, attention_mask=mask, past_key_values=cache)
    one = torch.ones(3, 1, dtype=mask.dtype)
    hides, shows, moves = (torch.cat([mask, one], 1) for _ in range(3))
    hides[1, 3] = 0
    shows[0, 2] = 1
    moves[2, [0, 60]] = moves[2, [60, 0]]  # as many tokens, but others
    lengths = [sequence.length for sequence in cache.layers[0].pool.sequences]
    for wrong, row in ((hides, 1), (shows, 0), (moves, 2), (None, 0)):
        with pytest.raises(ValueError, match=f"as it did when .* row {row} differs"):
            model(ids[:, :1], attention_mask=wrong, past_key_values=cache)
    with pytest.raises(ValueError, match=r"must have shape \[3, 71\].*got \[3, 1\]"):
        model(ids[:, :1], attention_mask=one, past_key_values=cache)
    with pytest.raises(ValueError, match="has 3 sequences, got a batch of 2"):
        model(ids[:2, :1], past_key_values=cache)
    # a refused step changes nothing
    assert [sequence.length for sequence in cache.layers[0].pool.sequences] == lengths
    right = torch.cat([mask, one], 1)
    model(ids[:, :1], attention_mask=right, past_key_values=cache)


def test_packed_sequences(model):
    positions = torch.cat([torch.arange(30), torch.arange(40)])[None]
    with pytest.raises(UnsupportedError, match="packed sequences"):
        model(prompts(batch=1), position_ids=positions, use_cache=False)


def test_a_cache_that_another_attention_began():
    model = build("DeepseekV3")
    cache = model(prompts()).past_key_values
    patch(model)
    with pytest.raises(ValueError, match="must be empty or begun by a patched model"):
        model(prompts(1), past_key_values=cache)


def test_other_caches(model):
    config = model.config
    with pytest.raises(
        ValueError, match=r"must be a DynamicCache, or .* StaticLatentCache .*, got StaticCache"
    ):
        model(prompts(), past_key_values=StaticCache(config=config, max_cache_len=80))
    cache = DynamicCache(config=config)
    cache.offloading = True
    with pytest.raises(ValueError, match="must not be offloaded"):
        model(prompts(), past_key_values=cache)


def test_a_layer_outside_of_the_decoder(model):
    layer = model.model.layers[0].self_attn
    x = torch.randn(1, 4, model.config.hidden_size)
    angles = model.model.rotary_emb(x, torch.arange(4)[None])
    with pytest.raises(UnsupportedError, match="the decoder of the patched model must be called"):
        layer(x, position_embeddings=angles, attention_mask=None)
