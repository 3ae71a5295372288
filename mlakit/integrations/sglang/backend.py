"""The backend `mlakit` for models whose every token attends to all tokens before it.

A step's metadata is made on the device, inside of a CUDA graph where there is one: pages and
lengths are read from SGLang's buffers at every replay, and the first layer plans from them.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch
from torch import Tensor

from mlakit import RowShape, UnsupportedError, format_of_dtype
from mlakit.integrations import steps
from mlakit.integrations.announce import announce
from mlakit.integrations.sglang import calls, plugin, seams
from mlakit.integrations.sglang.seams import AttentionBackend
from mlakit.integrations.warmup import compile_kernels

LOGGER = logging.getLogger("sglang.mlakit")
CACHE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


class DenseBackend(AttentionBackend):
    """All layers of a model; SGLang makes one per ModelRunner."""

    needs_cpu_seq_lens: ClassVar[bool] = False  # lengths on the host only narrow page tables

    forward_metadata: calls.Step | None

    def __init__(self, runner: Any, draft_step: int | None = None) -> None:
        """draft_step: of a draft model's decode; the lengths of a batch are those before step 0."""
        super().__init__()
        config = runner.model_config
        self.draft_step = draft_step
        self._require_support(runner)
        self.row = RowShape(config.kv_lora_rank, config.qk_rope_head_dim)
        self.nope_width: int = config.qk_nope_head_dim
        self.page_size: int = runner.page_size
        self.device = runner.device
        self.data_type, self.kv_cache_dtype = runner.kv_cache_dtype, runner.kv_cache_dtype
        self.req_to_token: Tensor = runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.num_draft_tokens = seams.num_draft_tokens()
        self.forward_metadata = None
        self._pools: dict[int, steps.Pools] = {}  # by layer; a layer in it has been checked
        seams.take_separate_rope(plugin.NAME)
        seams.choose_forward_method(plugin.NAME, self._index_topk(config))
        seams.add_draft_backends(plugin.NAME, plugin.create_draft_steps, plugin.create_backend)
        compile_kernels("sglang", self.device, lambda: self._deployment(config))

    def _require_support(self, runner: Any) -> None:
        """Raise for what the ops do not compute; the first names are options of SGLang."""
        ranks, dtype = seams.get_parallel().attn_dcp_size, runner.kv_cache_dtype
        trees = seams.speculative_topk()
        scaling = getattr(runner.model_config.hf_config, "llama_4_scaling", None)
        require(runner.use_mla_backend, "the model", "have latent attention", "another one")
        require(ranks == 1, "dcp_size", "be 1", ranks)
        require(dtype in CACHE_DTYPES, "kv_cache_dtype", f"be one of {CACHE_DTYPES}", dtype)
        require(trees <= 1, "speculative_eagle_topk", "be 1: drafts are a chain", trees)
        # SGLang leaves it to the kernel of such backends
        require(scaling is None, "llama_4_scaling", "be absent from the model", scaling)

    def _deployment(self, config: Any) -> dict[str, Any]:
        """Return what decides which kernels are launched, for `mlakit.warmup`."""
        pool = self.token_to_kv_pool
        rows = pool.get_key_buffer(getattr(pool, "start_layer", 0))
        return {
            "model": config.hf_config,
            "heads": config.num_attention_heads // seams.get_parallel().attn_tp_size,
            "format": steps.wrap(calls.paged(rows, self.page_size), self.row, None).format,
            "page_size": self.page_size,
            "dtype": format_of_dtype(config.dtype),
            "max_context": self._longest,
        }

    def _index_topk(self, config: Any) -> int | None:
        return None

    # metadata of a step

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare the metadata of a step that runs eagerly."""
        lens = forward_batch.seq_lens_cpu
        longest = self._longest if lens is None or not len(lens) else int(lens.max())
        self.forward_metadata = self._step(forward_batch, longest)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Decode, verification and what follows it need nothing outside of their graph."""
        if _is_decode(forward_batch.forward_mode):
            return
        if in_capture:
            raise UnsupportedError(
                f"{plugin.NAME}: the CUDA graph backend of prefill must not be 'full', got a "
                f"capture of {forward_batch.forward_mode}"
            )
        self.init_forward_metadata(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """A part of the graph: it is done again at every replay, from the values at that time."""
        if _is_decode(forward_batch.forward_mode):
            self.forward_metadata = self._step(forward_batch, self._longest)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing: the memory of a step's metadata is that of its graph."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that only fill up the batch of a graph."""
        return 1

    @property
    def _longest(self) -> int:
        return self.req_to_token.shape[1]

    def _step(self, forward_batch: Any, longest: int) -> calls.Step:
        """longest: at least every entry of seq_lens."""
        mode, lens = forward_batch.forward_mode, forward_batch.seq_lens
        of = self.req_to_token, forward_batch.req_pool_indices
        if mode.is_decode_or_idle():
            new = 0 if self.draft_step is None else self.draft_step + 1
            return calls.decode_step(*of, lens + new, self.page_size, self._bound(longest + new))
        if mode.is_target_verify():
            new = self.num_draft_tokens
            longest = self._bound(longest + new)
            return calls.window_step(*of, lens + new, self.page_size, longest, new)
        if mode.is_draft_extend_v2():
            width = forward_batch.input_ids.shape[0] // max(len(lens), 1)
            return calls.window_step(*of, lens, self.page_size, longest, width)
        extend_lens = forward_batch.extend_seq_lens
        tokens = sum(forward_batch.extend_seq_lens_cpu)
        return calls.extend_step(*of, lens, extend_lens, self.page_size, longest, tokens)

    def _bound(self, length: int) -> int:
        return min(length, self._longest)

    # attention of a layer

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        topk_indices: Tensor | None = None,
        attn_sink: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Return [tokens, heads · D_C]: one query per request, over the cache."""
        for name, value in others.items():
            require(value is None, name, "be None", type(value).__name__)
        if save_kv_cache and k is not None:
            self._store(layer, forward_batch, k, v, k_rope)
        return self._absorbed(q, q_rope, layer, topk_indices, attn_sink)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        topk_indices: Tensor | None = None,
        attn_sink: Tensor | None = None,
        **others: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Prefill and verification: over the cache, or over keys and values of every head.

        The latter has SGLang's conditions: its new tokens, causal (with their prefix in `k` for
        `mha_one_shot`), or a chunk of the prefix; [tokens, heads, D_V], and lse [tokens, heads] if
        `mha_return_lse`.
        """
        if layer.qk_head_dim == self.row.width:
            return self.forward_decode(
                q, k, v, layer, forward_batch, save_kv_cache, q_rope, k_rope, topk_indices,
                attn_sink, **others,
            )  # fmt: skip
        if k is None or v is None:
            raise ValueError(f"{plugin.NAME}: k and v must be given for expanded attention")
        require(attn_sink is None, "attn_sink", "be None with expanded attention", "a tensor")
        step, heads = self._current(), layer.tp_q_head_num
        q_starts, is_prefix = step.q_starts, bool(forward_batch.attn_attend_prefix_cache)
        kv_starts = step.kv_starts if forward_batch.mha_one_shot else q_starts
        if is_prefix:
            kv_starts = forward_batch.prefix_chunk_cu_seq_lens[forward_batch.prefix_chunk_idx]
        out, lse = steps.prefill(
            q.view(-1, heads, layer.qk_head_dim),
            k.view(-1, heads, layer.qk_head_dim).to(q.dtype),
            v.view(-1, heads, layer.v_head_dim).to(q.dtype),
            q_starts,
            kv_starts,
            self.nope_width,
            layer.scaling,
            is_causal=not is_prefix,
        )
        return (out, lse) if forward_batch.mha_return_lse else out

    def _absorbed(
        self,
        q: Tensor,
        q_rope: Tensor | None,
        layer: Any,
        topk_indices: Tensor | None,
        sink: Tensor | None,
    ) -> Tensor:
        """Return [tokens, heads · D_C] over the cache."""
        heads, latent = layer.tp_q_head_num, layer.v_head_dim
        width = layer.qk_head_dim if q_rope is None else latent
        # DeepSeek layers transpose q after its product with W_UK: q is heads-major, as kernels
        # take it
        if q.shape[1:] != (heads, width):
            q = q.contiguous()
        parts: Tensor | tuple[Tensor, Tensor] = q.view(-1, heads, width)
        if q_rope is not None:
            parts = q.view(-1, heads, latent), q_rope.view(-1, heads, layer.qk_head_dim - latent)
        out, _ = self._attend(parts, layer, topk_indices, sink)
        return out.view(-1, heads * latent)

    def _attend(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        layer: Any,
        topk_indices: Tensor | None,
        sink: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        require(topk_indices is None, "topk_indices", "be None without an indexer", "a tensor")
        pool = self._pool(layer)
        results = steps.decode(q, pool, self._current().batch, layer.scaling, sink=sink)
        announce(LOGGER, plugin.NAME, "mla_decode", pool)
        return results

    def _current(self) -> calls.Step:
        if self.forward_metadata is None:
            raise RuntimeError(f"{plugin.NAME}: init_forward_metadata must be called first")
        return self.forward_metadata

    def _pool(self, layer: Any) -> Any:
        """The cache rows of a layer."""
        if layer.layer_id not in self._pools:
            check_layer(layer)
            self._pools[layer.layer_id] = steps.Pools(self.row)
        rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        return self._pools[layer.layer_id].of(calls.paged(rows, self.page_size), None)

    def _store(
        self, layer: Any, forward_batch: Any, k: Tensor, v: Tensor | None, k_rope: Tensor | None
    ) -> None:
        """Let SGLang's pool write its rows: it knows how they are laid out, moved and shared."""
        where = seams.write_location(forward_batch)
        if k_rope is None:
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v)
        else:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, where, k, k_rope)


def _is_decode(mode: Any) -> bool:
    """Return whether a step is made inside of its CUDA graph."""
    return bool(mode.is_decode_or_idle() or mode.is_target_verify() or mode.is_draft_extend_v2())


def require(holds: bool, name: str, must: str, got: Any) -> None:
    """Raise UnsupportedError unless a condition holds."""
    if not holds:
        raise UnsupportedError(f"{plugin.NAME}: {name} must {must}, got {got}")


def check_layer(layer: Any) -> None:
    """Raise for what the ops do not compute."""
    cap, window, scale = layer.logit_cap, layer.sliding_window_size, layer.k_scale_float
    require(not cap, "logit_cap", "be 0", cap)
    require(window <= 0, "sliding_window_size", "be absent", window)
    require(not layer.is_cross_attention, "is_cross_attention", "be False", True)
    # SGLang's pool stores the rows of MLA unscaled
    require(scale in (None, 1.0), "k_scale", "be 1", scale)
