"""The suite `transformers-v4`: a decode step of DeepSeek-V4 of transformers, patched and not.

Model    4 layers of DeepSeek-V4-Flash with random bf16 weights and 64 heads, two that select (CSA)
         and two that compress heavily (HCA), with hyper-connections, 32 experts and a vocabulary of
         4096
Context  the patched model reads the prompts, in chunks. The other caches get the rows that it
         cached: window, compressed rows, index keys, and the overlap of the last window
Time     wall clock of one forward with its launches and the argmax, synchronised. The token is
         taken back after each call, by `crop`, or by the tensors that the cache had before. So
         torch.compile sees one shape only: it need not compile again as a context grows
Bytes    weights, window and compressed rows that a query sees, index keys once
Check    attention outputs of every layer and logits of one step against eager's, over the same
         context
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mlakit import V4Cache
from mlakit.formats import Format, row_codec
from mlakit.integrations.transformers import patch
from mlakit.model.geometry import RowShape
from mlakit.model.v4 import CSA, HCA, V4Config
from mlakit.tools.bench import gpu
from mlakit.tools.bench.report import MLAKIT
from mlakit.tools.bench.shapes import Batch, Shape
from mlakit.tools.bench.suite import Baseline, BenchmarkCase, Workload
from mlakit.tools.bench.transformers import (
    EAGER,
    VOCABULARY,
    Decoder,
    sharing_weights,
    synchronize,
    without_grad,
)

KINDS = (CSA, HCA, CSA, HCA)
COMPILED = "torch.compile"
CHUNK_TOKENS = 4096  # of all requests in a step of the prompt
ACTIVE_EXPERTS = 6
MAX_ERROR = 0.1  # of attention outputs and logits, relative, in the 2-norm: FP8 selects other keys
YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32,
    "beta_slow": 1,
}


@dataclass(eq=False)
class V4Decoder(Decoder):
    """A decoder whose cache is as before after each timed step."""

    take_back: Callable[[], None] = field(default=lambda: None)

    def synchronised_step(self) -> None:
        """A step, which is taken back."""
        self.step()
        synchronize()
        self.take_back()
        self.length -= 1


@dataclass(frozen=True)
class V4DecodeStep(Workload):
    """A decode step of a stack of layers.

    batch     requests of one length, with one new token each
    is_small  smaller hidden states, experts and selections
    """

    batch: Batch
    heads: int = 64
    format: Format = "fp8_block64"
    page_size: int = 64
    is_small: bool = False

    op = "generate"
    target_baseline = EAGER
    budget_s = 8.0
    max_rounds = 12

    @property
    def name(self) -> str:
        rows = f"-{self.format}-rows" if self.format != "fp8_block64" else ""
        page = f"-page{self.page_size}" if self.page_size != 64 else ""
        return f"transformers-v4-{self.batch.label(self.heads)}{rows}{page}"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the config."""
        released = {
            "model_type": "deepseek_v4",
            "vocab_size": VOCABULARY,
            "hidden_size": 4096,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": len(KINDS),
            "layer_types": list(KINDS),
            "mlp_layer_types": ["moe"] * len(KINDS),
            "num_attention_heads": self.heads,
            "q_lora_rank": 1024,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "n_routed_experts": 32,
            "num_experts_per_tok": ACTIVE_EXPERTS,
            "index_topk": 512,
            "rope_parameters": YARN,
            "pad_token_id": None,
        }
        small = {
            "hidden_size": 256,
            "moe_intermediate_size": 64,
            "q_lora_rank": 128,
            "o_groups": 2,
            "o_lora_rank": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "index_topk": 16,
            "max_position_embeddings": 4096,
        }
        return released | (small if self.is_small else {})

    @property
    def config(self) -> V4Config:
        return V4Config.from_config(self.fields)

    @property
    def context(self) -> int:
        """Cached tokens before the step: windows are complete, which the copies of rows need."""
        rate = self.config.hca_rate
        return max(self.batch.kv_lens[0] // rate, 1) * rate

    @property
    def min_speedup(self) -> float:
        return 3.0

    @property
    def flops(self) -> int:
        c = self.config
        attended = sum(self._attended(kind) for kind in KINDS)
        scored = KINDS.count(CSA) * (self.context // c.csa_rate) * c.index_n_heads
        products = 4 * self.heads * attended * c.head_dim + 2 * scored * c.index_head_dim
        return self.batch.size * (2 * self._weights(1) + products)

    @property
    def bytes(self) -> int:
        c = self.config
        row = row_codec(self.format, c.row).bytes_per_token
        key = row_codec(self._index_format, RowShape(c.index_head_dim, 0)).bytes_per_token
        rows = row * sum(self._attended(kind) for kind in KINDS)
        keys = key * KINDS.count(CSA) * (self.context // c.csa_rate)
        return 2 * self._weights(self.batch.size) + self.batch.size * (rows + keys)

    @property
    def small(self) -> Workload:
        return replace(self, batch=self.batch.small, heads=min(self.heads, 4), is_small=True)

    @property
    def _index_format(self) -> str:
        return "fp8_token" if self.format.startswith("fp8") else self.format

    def _attended(self, kind: str) -> int:
        c = self.config
        selected = min(c.index_topk, self.context // c.csa_rate)
        return c.sliding_window + (selected if kind == CSA else self.context // c.hca_rate)

    def _weights(self, batch: int) -> int:
        """Weights of the matrix products that so many tokens read; the least number of experts."""
        c, fields = self.config, self.fields
        width = c.num_heads * c.head_dim
        layer = c.hidden_size * (c.q_lora_rank + c.head_dim) + c.q_lora_rank * width
        layer += c.o_lora_rank * width + c.o_groups * c.o_lora_rank * c.hidden_size
        experts = 1 + min(int(fields["num_experts_per_tok"]), int(fields["n_routed_experts"]))
        layer += 3 * c.hidden_size * int(fields["moe_intermediate_size"]) * experts
        layer += c.hidden_size * int(fields["n_routed_experts"])
        csa = 4 * c.hidden_size * (c.head_dim + c.index_head_dim)
        csa += c.index_n_heads * (c.q_lora_rank * c.index_head_dim + c.hidden_size)
        own = KINDS.count(CSA) * csa + KINDS.count(HCA) * 2 * c.hidden_size * c.head_dim
        return len(KINDS) * layer + own + c.hidden_size * VOCABULARY

    def build_case(self) -> BenchmarkCase:
        with torch.no_grad():
            decoders = self._decoders()

        def check() -> None:
            with torch.no_grad():
                self._check(decoders)

        calls = {name: without_grad(each.synchronised_step) for name, each in decoders.items()}
        return BenchmarkCase(
            calls[MLAKIT],
            [Baseline(EAGER, calls[EAGER])],
            check=check,
            peers=[Baseline(COMPILED, calls[COMPILED])],
        )

    def _decoders(self) -> dict[str, V4Decoder]:
        """Make a decoder of each implementation, all with the same context."""
        from transformers import DynamicCache

        eager = self._model()
        ours, compiled = sharing_weights(eager), sharing_weights(eager)
        patch(ours, format=self.format, page_size=self.page_size)
        cache: Any = DynamicCache(config=ours.config)
        token = self._prefill(ours, cache)
        found = {
            MLAKIT: V4Decoder(
                ours, cache, token.clone(), None, self.context, lambda: cache.crop(-1)
            )
        }
        compiled.forward = torch.compile(compiled.forward)
        for name, model in ((EAGER, eager), (COMPILED, compiled)):
            own = DynamicCache(config=model.config)
            copy_context(cache.layers[0].pool, own, self.context)
            take_back = restorer(own)
            found[name] = V4Decoder(model, own, token.clone(), None, self.context, take_back)
        return found

    def _model(self) -> Any:
        """Random weights; eager attention."""
        from transformers import AutoModelForCausalLM, DeepseekV4Config

        fields = {key: value for key, value in self.fields.items() if key != "model_type"}
        with torch.random.fork_rng(), gpu.DEVICE:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                DeepseekV4Config(**fields), dtype=torch.bfloat16, attn_implementation=EAGER
            )
        return model.to(gpu.DEVICE, torch.bfloat16).eval().requires_grad_(False)

    def _prefill(self, model: Any, cache: Any) -> Tensor:
        """Read random prompts, a chunk at a time; the token [batch, 1] after them."""
        shape = (self.batch.size, self.context)
        ids = torch.randint(VOCABULARY, shape, generator=gpu.generator(), device=gpu.DEVICE)
        for chunk in ids.split(max(CHUNK_TOKENS // self.batch.size, 1), 1):
            logits = model(chunk, past_key_values=cache, logits_to_keep=1).logits
        token: Tensor = logits[:, -1].argmax(-1, keepdim=True)
        return token

    def _check(self, decoders: Mapping[str, V4Decoder]) -> None:
        """One step of each over the same context, where the attention modules read eager's."""
        expected = decoders[EAGER].observed_step()
        found = decoders[MLAKIT].observed_step(expected.inputs)
        for decoder in (decoders[EAGER], decoders[MLAKIT]):
            decoder.take_back()
            decoder.length -= 1
        for i, (ours, eager) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
            label = "logits" if i == len(KINDS) else f"attention output of layer {i}"
            error = float((ours.float() - eager.float()).norm() / eager.float().norm())
            assert error <= MAX_ERROR, (
                f"{MLAKIT}: {label} differs from eager by {error:.2e}, want at most {MAX_ERROR}"
            )
        for decoder in decoders.values():
            decoder.token.copy_(decoders[EAGER].token)  # all read the same tokens


def copy_context(pool: Any, target: Any, length: int) -> None:
    """Fill an empty cache of transformers with the rows of a pool, where windows are complete."""
    cache: V4Cache = pool.cache
    config, tables = cache.config, pool.step.tokens.tables

    def read(lane: str, name: str, number: int, first: int, last: int) -> Tensor:
        position = torch.arange(first, last, device=gpu.DEVICE)
        page = cache.lanes[lane].page_size
        slots = tables[lane].long()[:, position // page] * page + position % page
        return cache.cache(lane, name).layer(number).read(slots, torch.bfloat16)

    first = max(length - config.sliding_window + 1, 0)
    for layer, own in enumerate(target.layers):
        rows = read("window", "rows", cache.number(layer), first, length)[:, None]
        own.lazy_initialization(rows, rows)
        own.keys = own.values = rows
        own.is_initialized, own.cumulative_length = True, length
        kind, number = cache.kinds[layer], cache.number_in_kind(layer)
        lane, rate = ("csa", config.csa_rate) if kind == CSA else ("hca", config.hca_rate)
        names = {"compressor": "rows"} | ({"indexer": "index"} if kind == CSA else {})
        for theirs, name in names.items():
            own.compressed_kv[theirs] = read(lane, name, number, 0, length // rate)
            own.entry_count[theirs] = length // rate
            if kind == CSA:
                state = read("csa_state", name, number, length - rate, length)
                kv, gate = state.chunk(2, -1)
                width = kv.shape[-1] // 2
                own.overlap_kv[theirs] = kv[..., :width].contiguous()
                own.overlap_gate[theirs] = gate[..., :width].contiguous()


def restorer(cache: Any) -> Callable[[], None]:
    """Return a function that gives a cache of transformers the tensors that it has now."""
    kept = [
        {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in vars(each).items()
        }
        for each in cache.layers
    ]

    def restore() -> None:
        for layer, state in zip(cache.layers, kept, strict=True):
            for key, value in state.items():
                setattr(layer, key, dict(value) if isinstance(value, dict) else value)

    return restore


def of_shape(shape: Shape) -> tuple[Workload, ...]:
    given = shape.accept("transformers-v4", "heads", "format", "page_size")
    batch = shape.batch
    if set(batch.q_lens) != {1} or len(set(batch.kv_lens)) != 1 or batch.kv_lens[0] < 128:
        raise ValueError(
            "--shape must have one new token per request and one length of at least 128 for "
            f"transformers-v4, such as 16q1s32k, got {shape.text!r}"
        )
    return (V4DecodeStep(batch, **given),)  # type: ignore[arg-type]  # checked by options


WORKLOADS: tuple[Workload, ...] = tuple(
    V4DecodeStep(Batch.of(size, 1, 32 << 10)) for size in (1, 16)
)
