"""The suite `transformers`: a decode step of a model of transformers, patched and not.

Model    4 layers of DeepSeek-V3 or V3.2 with random bf16 weights and 128 heads. All have a dense
         MLP of 18432 columns, as the first three layers of DeepSeek-V3; a vocabulary of 4096
Context  the patched model reads the prompts. The other caches get the rows that it cached, so all
         decode over the same context: prefill is not timed, and eager's score matrix not needed
Time     wall clock of one forward with its launches and the argmax, synchronised. Every call
         appends a token, and has a mask of ones, as in generate()
Graph    the patched model with a StaticLatentCache in a CUDA graph
Memory   peak: weights, cache, and the most that three steps add to them
Bytes    weights, visible or selected rows, index keys once
Check    attention outputs of every layer and logits of one step against eager's, over the same
         context; the cache has at most 1/50 of the bytes of expanded K and V
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mlakit.formats import Format, row_codec
from mlakit.integrations.transformers import patch
from mlakit.integrations.transformers.generation import cache_bytes
from mlakit.model.geometry import MLAGeometry
from mlakit.tools.bench import gpu, gpu_timers
from mlakit.tools.bench.report import MLAKIT, MemoryUse
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload

LAYERS = 4
VOCABULARY = 4096
INTERMEDIATE = 18432
EAGER, SDPA, GRAPH = "eager", "sdpa", f"{MLAKIT}, CUDA graph"
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
SPARSE_CHUNK, DENSE_CHUNK = 128, 512  # columns of a prefill step; scores of all index heads fit
MAX_STEPS = 256  # that a static cache has memory for
MAX_ERROR = 0.03  # of bf16 attention outputs and logits, relative, in the 2-norm
MIN_SAVING = 50  # bytes of expanded K and V / bytes of the cache

Model = Literal["v3", "v3.2"]


class Observed(NamedTuple):
    """What each attention module of a step read; what each made, then the logits."""

    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass(eq=False)
class Decoder:
    """A model, a cache of one context, and the token that comes next."""

    model: Any
    cache: Any
    token: Tensor  # [batch, 1]
    mask: Tensor | None  # [batch, columns] ones for the longest context; None: no mask is given
    length: int

    def step(self) -> Tensor:
        """Append the token; the logits [batch, vocabulary] choose the next one."""
        given: dict[str, Any] = {"past_key_values": self.cache}
        if self.mask is not None:
            given["attention_mask"] = self.mask[:, : self.length + 1]
        logits: Tensor = self.model(self.token, **given).logits[:, -1]
        self.token.copy_(logits.argmax(-1, keepdim=True))
        self.length += 1
        return logits

    def synchronised_step(self) -> None:
        self.step()
        synchronize()

    def observed_step(self, inputs: Sequence[Tensor] | None = None) -> Observed:
        """A step. Its attention modules read `inputs`, if given, in the place of their own."""
        read: list[Tensor] = []
        made: list[Tensor] = []

        def before(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            given = args[0] if args else kwargs.pop("hidden_states")
            own = given if inputs is None else inputs[len(read)]
            read.append(own)
            return (own, *args[1:]), kwargs

        with ExitStack() as hooks:
            for layer in self.model.model.layers:
                module = layer.self_attn
                begin = module.register_forward_pre_hook(before, with_kwargs=True)
                end = module.register_forward_hook(lambda _, args, out: made.append(out[0]))
                hooks.callback(begin.remove)
                hooks.callback(end.remove)
            logits = self.step()
        return Observed(read, [*made, logits])


@dataclass(frozen=True)
class DecodeStep(Workload):
    """A decode step of a stack of layers.

    batch     requests of one length, with one new token each
    is_small  smaller MLPs, hidden states and selections
    """

    model: Model
    batch: Batch
    heads: int = 128
    format: Format = "bf16"
    page_size: int = 64
    is_small: bool = False

    op = "generate"
    target_baseline = EAGER
    budget_s = 8.0
    max_rounds = 12

    @property
    def name(self) -> str:
        rows = f"-{self.format}-rows" if self.format != "bf16" else ""
        page = f"-page{self.page_size}" if self.page_size != 64 else ""
        return f"transformers-{self.model}-{self.batch.label(self.heads)}{rows}{page}"

    @property
    def geometry(self) -> MLAGeometry:
        known = MLAGeometry.preset(f"deepseek-{self.model}").with_heads(self.heads)
        if self.is_small:
            topk = min(known.index_topk, 64)
            known = replace(known, index_topk=topk, hidden_size=256, q_lora_rank=256)
        return known

    @property
    def intermediate(self) -> int:
        return 512 if self.is_small else INTERMEDIATE

    @property
    def context(self) -> int:
        return self.batch.kv_lens[0]

    @property
    def min_speedup(self) -> float:
        return 5.0

    @property
    def flops(self) -> int:
        row = self.geometry.row
        attended = min(self.context, self.geometry.index_topk or self.context)
        attention = 2 * self.heads * attended * (row.width + row.v_width)
        return self.batch.size * (2 * self._weights + LAYERS * attention)

    @property
    def bytes(self) -> int:
        g = self.geometry
        attended = min(self.context, g.index_topk or self.context)
        rows = attended * row_codec(self.format, g.row).bytes_per_token
        keys = 2 * self.context * g.index_head_dim if g.index_topk else 0
        return 2 * self._weights + self.batch.size * LAYERS * (rows + keys)

    @property
    def expanded_bytes(self) -> int:
        """K and V of all heads in bf16."""
        g = self.geometry
        columns = g.qk_head_dim + g.v_head_dim
        return 2 * LAYERS * self.batch.size * self.context * self.heads * columns

    @property
    def small(self) -> Workload:
        heads = min(self.heads, 4)
        return replace(self, batch=self.batch.small, heads=heads, is_small=True)

    @property
    def _weights(self) -> int:
        """Weights of the matrix products, the head's included."""
        g = self.geometry
        assert g.q_lora_rank is not None
        layer = g.hidden_size * (g.q_lora_rank + g.row.width + g.num_heads * g.v_head_dim)
        layer += g.q_lora_rank * g.num_heads * g.qk_head_dim
        layer += g.kv_lora_rank * g.num_heads * (g.qk_nope_head_dim + g.v_head_dim)
        layer += 3 * g.hidden_size * self.intermediate
        if g.index_topk:
            layer += g.q_lora_rank * g.index_n_heads * g.index_head_dim
            layer += g.hidden_size * (g.index_head_dim + g.index_n_heads)
        return LAYERS * layer + g.hidden_size * VOCABULARY

    def build_case(self) -> BenchmarkCase:
        with torch.no_grad():
            decoders = self._decoders()
        memory: dict[str, MemoryUse] = {}

        def graph() -> object:
            """Captured at the first call: a failed capture leaves out this implementation only."""
            if GRAPH not in replays:
                replays[GRAPH] = gpu_timers.captured(without_grad(decoders[GRAPH].step))
            replays[GRAPH]()
            synchronize()
            return None

        replays: dict[str, Callable[[], object]] = {}

        def check() -> None:
            with torch.no_grad():
                self._check(decoders)
                memory.update(self._memory(decoders))

        calls = {
            name: without_grad(each.synchronised_step)
            for name, each in decoders.items()
            if name != GRAPH
        }
        own = calls.pop(MLAKIT)
        return BenchmarkCase(
            own,
            [Baseline(name, call) for name, call in calls.items()],
            check=check,
            peers=[Baseline(GRAPH, graph)],
            memory=memory,
        )

    def _decoders(self) -> dict[str, Decoder]:
        """Make a decoder of each implementation, all with the same context."""
        from transformers import DynamicCache

        from mlakit.integrations.transformers.static_cache import StaticLatentCache

        eager = self._model()
        models = {EAGER: eager, SDPA: sharing_weights(eager), MLAKIT: sharing_weights(eager)}
        models[SDPA].set_attn_implementation(SDPA)
        patch(models[MLAKIT], format=self.format, page_size=self.page_size)
        size, prompt = self.batch.size, self.context - 1
        mask = torch.ones(size, self.context + MAX_STEPS, dtype=torch.int64, device=gpu.DEVICE)
        cache = DynamicCache(config=models[MLAKIT].config)
        token = self._prefill(models[MLAKIT], cache)
        decoders = {}
        for name, model in models.items():
            own = cache if name == MLAKIT else DynamicCache(config=model.config)
            if name != MLAKIT:
                self._copy_context(cache, own, model)
            decoders[name] = Decoder(model, own, token.clone(), mask, prompt)
        static = StaticLatentCache(
            models[MLAKIT],
            batch_size=size,
            max_length=self.context + MAX_STEPS,
            format=self.format,
            page_size=self.page_size,
        )
        self._copy_context(cache, static, None)
        decoders[GRAPH] = Decoder(models[MLAKIT], static, token.clone(), None, prompt)
        return decoders

    def _model(self) -> Any:
        """Random weights; eager attention."""
        from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV32Config

        g = self.geometry
        fields: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "hidden_size": g.hidden_size,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": g.num_heads,
            "num_key_value_heads": g.num_heads,
            "q_lora_rank": g.q_lora_rank,
            "kv_lora_rank": g.kv_lora_rank,
            "qk_nope_head_dim": g.qk_nope_head_dim,
            "qk_rope_head_dim": g.qk_rope_head_dim,
            "v_head_dim": g.v_head_dim,
            "max_position_embeddings": 163840,
            "rope_parameters": YARN,
            "tie_word_embeddings": False,
        }
        config: Any
        if g.index_topk:
            fields |= {"index_n_heads": g.index_n_heads, "index_head_dim": g.index_head_dim}
            fields |= {"index_topk": g.index_topk, "mlp_layer_types": ["dense"] * LAYERS}
            config = DeepseekV32Config(**fields)
        else:
            config = DeepseekV3Config(**fields, first_k_dense_replace=LAYERS)
        with torch.random.fork_rng(), gpu.DEVICE:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=EAGER
            )
        return model.to(gpu.DEVICE).eval().requires_grad_(False)

    def _prefill(self, model: Any, cache: Any) -> Tensor:
        """Read random prompts, a chunk at a time; the token [batch, 1] after them."""
        shape = (self.batch.size, self.context - 1)
        generator = gpu.generator()
        ids = torch.randint(VOCABULARY, shape, generator=generator, device=gpu.DEVICE)
        for chunk in ids.split(SPARSE_CHUNK if self.geometry.index_topk else DENSE_CHUNK, 1):
            logits = model(chunk, past_key_values=cache, logits_to_keep=1).logits
        token: Tensor = logits[:, -1].argmax(-1, keepdim=True)
        return token

    def _copy_context(self, source: Any, target: Any, model: Any) -> None:
        """Fill an empty cache with the rows of a pool; an unpatched sparse model caches K and V.

        model  the unpatched model; None for a cache of rows
        """
        pool = source.layers[0].pool
        prompt, page = self.context - 1, self.page_size
        position = torch.arange(prompt, device=gpu.DEVICE)
        slots = pool.step.page_table.long()[:, position // page] * page + position % page
        for i, layer in enumerate(source.layers):
            rows = pool.cache.layer(i).read(slots, torch.bfloat16)[:, None]
            parts = rows.split([self.geometry.kv_lora_rank, self.geometry.qk_rope_head_dim], -1)
            is_sparse = self.geometry.index_topk > 0
            if model is not None and is_sparse:
                parts = model.model.layers[i].self_attn.expand_kv(*parts)
            target.update(*parts, i)
            if is_sparse:
                target.update_indexer(layer.indexer_keys, i)

    def _check(self, decoders: Mapping[str, Decoder]) -> None:
        """One step of each over the same context.

        The attention modules read eager's hidden states: a difference of one rounding would select
        other tokens.
        """
        expected = decoders[EAGER].observed_step()
        for name, decoder in decoders.items():
            if name == EAGER:
                continue
            found = decoder.observed_step(expected.inputs)
            for i, (ours, eager) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
                label = "logits" if i == LAYERS else f"attention output of layer {i}"
                error = float((ours.float() - eager.float()).norm() / eager.float().norm())
                assert error <= MAX_ERROR, (
                    f"{name}: {label} differs from eager by {error:.2e}, want at most {MAX_ERROR}"
                )
            decoder.token.copy_(decoders[EAGER].token)  # all read the same tokens
        cached = cache_bytes(decoders[MLAKIT].cache)
        assert self.is_small or MIN_SAVING * cached <= self.expanded_bytes, (
            f"the cache has {cached} bytes, more than 1/{MIN_SAVING} of {self.expanded_bytes}"
        )

    def _memory(self, decoders: Mapping[str, Decoder]) -> dict[str, MemoryUse]:
        if gpu.DEVICE.type != "cuda":
            return {}
        found = {}
        parameters = decoders[EAGER].model.parameters()
        weights = sum(each.numel() * each.element_size() for each in parameters)
        for name, decoder in decoders.items():
            if name == GRAPH:
                continue
            torch.cuda.reset_peak_memory_stats()
            before, cached = torch.cuda.memory_allocated(), cache_bytes(decoder.cache)
            for _ in range(3):
                decoder.step()
            step = torch.cuda.max_memory_allocated() - before
            found[name] = MemoryUse(weights=weights, cache=cached, step=step)
        return found


def sharing_weights(model: Any) -> Any:
    """A copy with the same parameters."""
    return deepcopy(model, {id(each): each for each in model.parameters()})


def without_grad(call: Callable[[], object]) -> Callable[[], object]:
    def without_grad() -> object:
        with torch.no_grad():
            return call()

    return without_grad


def synchronize() -> None:
    if gpu.DEVICE.type == "cuda":
        torch.cuda.synchronize()


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    given = shape.accept("transformers", "heads", "format", "page_size")
    batch = shape.batch
    if set(batch.q_lens) != {1} or len(set(batch.kv_lens)) != 1 or batch.kv_lens[0] < 2:
        raise ValueError(
            "--shape must have one new token per request and one length of at least 2 for "
            f"transformers, such as 8q1s8k, got {shape.text!r}"
        )
    return tuple(
        DecodeStep(model, batch, **given)  # type: ignore[arg-type]  # checked by options
        for model in MODELS
    )


MODELS: tuple[Model, ...] = ("v3", "v3.2")
WORKLOADS: tuple[Workload, ...] = tuple(
    DecodeStep(model, Batch.of(8, 1, 8 << 10)) for model in MODELS
)
