"""`MLAAttention`: one attention layer from hidden states to hidden states."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from mlakit.cache import PagedLatentCache, token_positions
from mlakit.dispatch.autocast import without_autocast
from mlakit.dispatch.checks import E4M3, FLOATS, Dims, values_visible
from mlakit.dispatch.knobs import Backend
from mlakit.formats import Format
from mlakit.layer.config import LayerConfig
from mlakit.layer.indexer import IndexCache, LightningIndexer
from mlakit.layer.linear import Activations, Linear, RMSNorm, frozen, keep_dtype
from mlakit.layer.prepared import PreparedWeights
from mlakit.layer.rotary import RopeTable
from mlakit.parallel import (
    context_parallel_decode,
    context_parallel_sparse_step,
    sum_over_ranks,
)
from mlakit.parallel.groups import are_heads_sharded, group_rank
from mlakit.plan import DecodePlan, DecodePlanTensors, EvenSplit
from mlakit.steps import (
    CachedBatch,
    IndexInputs,
    LayerWeights,
    PooledKeyCache,
    StepPlan,
    decode_branch,
    mla_step,
    plan_step,
    sparse_step,
)
from mlakit.steps.side_stream import MAX_SIDE_TOKENS, SideStreams

NAME = "MLAAttention"
AnyPlan = StepPlan | DecodePlan | DecodePlanTensors | EvenSplit


class Projected(NamedTuple):
    """The projections of a step's hidden states."""

    q: Tensor  # [tokens, heads, D_N + D_R], not rotated
    kv: Tensor  # [tokens, D_C + D_R], raw latents
    scored: IndexInputs | None
    gate: Tensor | None  # [tokens, heads · D_V], before the sigmoid


class MLAAttention(nn.Module):
    """The attention of one layer, for inference: projections, norms, cache, attention.

    Parameters are named as in the checkpoints of DeepSeek, Kimi and GLM: q_a_proj, q_a_layernorm,
    q_b_proj (or q_proj), kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj, o_proj, and `indexer` for
    DeepSeek Sparse Attention. Hy4 has gate_proj and `sinks`, Kimi K3 g_proj. `load_safetensors`
    reads them from a checkpoint's folder, `from_hf` takes those of a module of transformers.

    `tp_group` is the process group of a tensor-parallel layer, or None: each rank has some of the
    heads, and the layer's result is summed over the ranks. `cp_group` is the process group of a
    context-parallel layer, or None: each rank caches some of the tokens of every request, as
    `context_parallel_decode` does. They are the same group, or have only this rank in common.

    The absorbed matrices are made at the first call, and again after the weights, their dtype or
    their device changed. After writes to weights through `.data` call `refresh_weights`.
    """

    def __init__(
        self,
        config: Any,
        *,
        layer: int = 0,
        is_fp8: bool = False,
        max_positions: int | None = None,
        cp_group: dist.ProcessGroup | None = None,
        cp_interleave: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """A layer with random weights.

        config         a `LayerConfig`, or what `MLAGeometry.from_config` takes
        layer          the layer's number: in some models only certain layers have an indexer
        is_fp8         block-FP8 weights, one scale per 128 × 128
        max_positions  rows of the RoPE table; None: the config's max_position_embeddings
        cp_group       of the ranks that share the cached tokens; None: this process caches all
        cp_interleave  consecutive tokens that one rank caches
        """
        super().__init__()
        self.config = LayerConfig.from_config(config, layer)
        g, has_bias = self.config.geometry, self.config.has_bias
        self.rope_table = RopeTable.shared(g, self.config.positions(max_positions))
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        weights: dict[str, Any] = {"is_fp8": is_fp8, **where}
        q_width = g.num_heads * g.qk_head_dim
        if g.q_lora_rank is None:
            self.q_proj = Linear(g.hidden_size, q_width, **weights)
        else:
            self.q_a_proj = Linear(g.hidden_size, g.q_lora_rank, bias=has_bias, **weights)
            self.q_a_layernorm = RMSNorm(g.q_lora_rank, self.config.epsilon, **where)
            self.q_b_proj = Linear(g.q_lora_rank, q_width, **weights)
        self.kv_a_proj_with_mqa = Linear(g.hidden_size, g.row.width, bias=has_bias, **weights)
        self.kv_a_layernorm = RMSNorm(g.kv_lora_rank, self.config.epsilon, **where)
        up_width = g.num_heads * (g.qk_nope_head_dim + g.v_head_dim)
        self.kv_b_proj = Linear(g.kv_lora_rank, up_width, **weights)
        self.o_proj = Linear(g.num_heads * g.v_head_dim, g.hidden_size, bias=has_bias, **weights)
        if self.config.gate is not None:
            gate = Linear(g.hidden_size, g.num_heads * g.v_head_dim, **weights)
            self.add_module(self.config.gate, gate)
        self.sinks: nn.Parameter | None = None
        if self.config.has_sinks:
            self.sinks = frozen(torch.zeros(g.num_heads, dtype=torch.float32, device=device))
        self.indexer: LightningIndexer | None = None
        if self.config.selection == "own":
            self.indexer = LightningIndexer(self.config, max_positions=max_positions, **weights)
        self.tp_group: dist.ProcessGroup | None = None
        self.cp_group, self.cp_interleave = cp_group, cp_interleave
        self._prepared = PreparedWeights()

    @classmethod
    def load_safetensors(
        cls,
        folder: str | os.PathLike[str],
        layer: int,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        tp_group: dist.ProcessGroup | None = None,
        cp_group: dist.ProcessGroup | None = None,
        cp_interleave: int = 1,
        prefix: str | None = None,
        max_positions: int | None = None,
        epsilon: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> MLAAttention:
        """The layer of this number from a checkpoint's folder: config.json and safetensors files.

        layer             number of the layer in the checkpoint
        tp_rank, tp_size  the heads of one tensor-parallel rank: rows of q_b_proj (q_proj) and
                          kv_b_proj, columns of o_proj, their gates and sinks. The outputs of the
                          ranks add up to the layer's; only rank 0 has the bias of o_proj
        tp_group          instead of them: rank and size are those of this process in the group, and
                          `forward` sums the outputs over it
        cp_group, cp_interleave   as in the constructor
        prefix            of the tensors' names; None finds `layers.N.self_attn.` under any model
        max_positions     rows of the RoPE table; None: the config's max_position_embeddings
        epsilon           of the norms of the latents; None: 1e-6, as DeepSeek's code and
                          transformers have it, whatever the config's rms_norm_eps
        dtype             of the float weights; None: the config's. e4m3 weights keep their blocks

        Only the layer's own tensors are read. A missing tensor is a KeyError with its name.
        """
        from mlakit.layer.checkpoint import load_layer

        if tp_group is not None:
            if (tp_rank, tp_size) != (0, 1):
                raise TypeError("load_safetensors takes tp_group, or tp_rank and tp_size")
            tp_rank, tp_size = group_rank("load_safetensors", tp_group)
        layer_of_rank = load_layer(
            cls,
            folder,
            layer,
            tp_rank=tp_rank,
            tp_size=tp_size,
            prefix=prefix,
            max_positions=max_positions,
            epsilon=epsilon,
            dtype=dtype,
            device=torch.device(device),
        )
        layer_of_rank.tp_group, layer_of_rank.cp_group = tp_group, cp_group
        layer_of_rank.cp_interleave = cp_interleave
        return layer_of_rank

    @classmethod
    def from_hf(cls, module: nn.Module, *, max_positions: int | None = None) -> MLAAttention:
        """The layer of an attention module of transformers; it shares the module's parameters.

        Scale, ε and factors are the module's own. A module with parameters that this layer has no
        use for is refused.
        """
        from mlakit.layer.from_hf import layer_of

        return layer_of(cls, module, max_positions)

    def allocate_cache(
        self,
        format: Format = "bf16",
        *,
        num_pages: int,
        page_size: int = 64,
        num_layers: int = 1,
        device: torch.device | str | None = None,
    ) -> PagedLatentCache:
        """A latent cache for layers like this, on the layer's device."""
        return PagedLatentCache.allocate(
            self.config.geometry,
            format,
            num_pages=num_pages,
            page_size=page_size,
            num_layers=num_layers,
            device=self.kv_b_proj.weight.device if device is None else device,
        )

    @without_autocast
    def forward(
        self,
        x: Tensor,
        batch: CachedBatch,
        *,
        plan: AnyPlan | None = None,
        index_cache: IndexCache | None = None,
        index_layer: int | None = None,
        rows: Tensor | None = None,
        positions: Tensor | None = None,
        max_kv_len: int | None = None,
        backend: Backend = "auto",
    ) -> Tensor:
        """One causal step: the new tokens are appended to the cache and attend to it.

        x            [tokens, hidden] of the batch's new tokens, request after request
        batch        the requests, their cache, and this layer's number in it
        plan         `plan_step` of the step, shared by all layers; on a GPU required for more than
                     one new token per request. A plan of `mla_decode` (`plan_mla_decode`, an
                     `EvenSplit`) makes all requests decode. In a CUDA graph a `StepPlan` would keep
                     the lengths of the capture
        index_cache  the indexer's cache of keys, in pages like the batch's cache: what its
                     `allocate_index_cache` returns, or a cache like it; None for a layer without an
                     indexer
        index_layer  this layer's number in it; None: that of the batch
        rows         [tokens, index_topk] int32. A layer with an indexer writes its selection here;
                     a layer that shares the selection of another reads it. Where index keys are
                     pooled, it has `PooledKeys.listed` columns
        positions    [tokens] of the new tokens, which the indexer and Mistral 4 need; None: from
                     the batch's lengths, with some kernels that layers can save by sharing them
        max_kv_len   at least every kv_len, for the indexer; None: the plan's, or what the page
                     table can hold

        A layer with an indexer attends to all cached tokens where the host knows that no request
        has more than index_topk, unless `rows` is given.

        With a `cp_group`, caches and page table hold this rank's tokens, `KVShard.local_count` of a
        request's; kv_lens, positions and max_kv_len are those of whole requests; `plan` is one of
        `mla_decode` for this rank's lengths; `rows` are this rank's. Prompts are attended to by the
        absorbed form, like decode steps.

        Returns [tokens, hidden] in x's dtype. On a GPU it does not synchronise.
        """
        dims = Dims(NAME)
        dims.bind("hidden", self.config.geometry.hidden_size, "the config's hidden_size")
        dims.match("x", x, "tokens", "hidden")
        self._check_dtype(dims, x)
        dims.instance("batch", batch, CachedBatch)
        weights = self.weights(x.device)
        plan = self._checked_plan(dims, plan, batch, rows)
        index = self._checked_keys(dims, index_cache, batch)
        at = batch.layer if index_layer is None else index_layer
        if positions is None and self._needs_positions:
            positions = token_positions(batch.kv_lens, batch.q_starts, len(x))[1]
        states = Activations(x, backend)
        is_dense = self.cp_group is None and self._is_dense(plan, rows)
        q, kv, scored, gate = self._project(
            states, positions, None if is_dense else index, at, backend=backend
        )
        split = plan if isinstance(plan, EvenSplit) else None
        if self.cp_group is not None:
            out = self._context_parallel(
                *(q, kv, weights, batch),
                scored,
                plan=plan,
                rows=rows,
                max_kv_len=max_kv_len,
                backend=backend,
            )
        elif self.config.selection is None or is_dense:
            out = _attend(q, kv, weights, batch, plan, backend)
            if self.indexer is not None:
                assert positions is not None
                assert index is not None
                self.indexer.append_keys(
                    states, positions, index, at, weights, batch, backend=backend
                )
        elif self.indexer is None:
            if rows is None:
                dims.fail("rows", "be given to a layer that shares another's selection", None)
            out = decode_branch(q, kv, weights, batch, rows=rows, plan=split, backend=backend)
        else:
            assert scored is not None
            if max_kv_len is None and isinstance(plan, StepPlan):
                max_kv_len = max(plan.kv_lens, default=0)
            out = sparse_step(
                q,
                kv,
                weights,
                batch,
                scored,
                self.indexer.topk,
                max_kv_len=max_kv_len,
                plan=split,
                rows=rows,
                backend=backend,
            )
        heads = out.flatten(1)
        if gate is not None:
            heads = heads.mul_(gate.sigmoid_())
        result: Tensor = self.o_proj(heads, backend)
        return result if self.tp_group is None else sum_over_ranks(result, self.tp_group)

    def weights(self, device: torch.device) -> LayerWeights:
        """The weights of the layer's branches on `device`, made again after any of them changed."""
        return self._prepared.of(self, device)

    def refresh_weights(self) -> None:
        """Make what is derived of the weights again, after writes that torch does not count.

        Call it after writes through `.data`, or to weights made in inference mode. Other writes,
        new parameters, `load_state_dict` and `to` are seen without it. The derived tensors stay
        where they are: a CUDA graph of the layer has the new values at its next replay.
        """
        self._prepared.refresh()

    def _context_parallel(
        self,
        q: Tensor,
        kv: Tensor,
        weights: LayerWeights,
        batch: CachedBatch,
        index: IndexInputs | None,
        *,
        plan: AnyPlan | None,
        rows: Tensor | None,
        max_kv_len: int | None,
        backend: Backend,
    ) -> Tensor:
        """Attention over the tokens of all ranks, [tokens, heads, D_V]."""
        assert self.cp_group is not None
        options: dict[str, Any] = {
            "interleave": self.cp_interleave,
            "is_head_sharded": are_heads_sharded(NAME, self.tp_group, self.cp_group),
            "plan": plan,
            "rows": None if self.config.selection is None else rows,
            "backend": backend,
        }
        if index is None:
            return context_parallel_decode(q, kv, weights, batch, self.cp_group, **options)
        return context_parallel_sparse_step(
            *(q, kv, weights, batch, index, self.config.geometry.index_topk, self.cp_group),
            max_kv_len=max_kv_len,
            **options,
        )

    def _project(
        self,
        x: Activations,
        positions: Tensor | None,
        index: IndexCache | None,
        index_layer: int,
        *,
        backend: Backend,
    ) -> Projected:
        """The projections of x.

        index  the indexer's cache; None: its inputs are not needed

        What q does not need is computed beside it: products of few tokens leave SMs idle.
        """
        indexer = None if index is None else self.indexer
        side_streams = SideStreams(x.x.device, is_worthwhile=len(x.x) <= MAX_SIDE_TOKENS)
        x.prepare(self.kv_a_proj_with_mqa, *([] if indexer is None else [indexer.wk]))
        scored = gate = None
        with side_streams.stream(0):
            kv = self.kv_a_proj_with_mqa(x, backend)
            if self.config.gate is not None:
                gate = self.get_submodule(self.config.gate)(x, backend)
        if indexer is not None:
            assert positions is not None
            with side_streams.stream(1):
                of_states = indexer.of_states(x, positions, backend=backend)
        residual = x
        if self.config.geometry.q_lora_rank is not None:
            latent = self.q_a_layernorm(self.q_a_proj(x, backend))
            residual = Activations(latent, backend)
        if indexer is not None:
            assert positions is not None
            assert index is not None
            residual.prepare(indexer.wq_b)
            with side_streams.stream(0):
                of_queries = indexer.of_queries(residual, positions, index, backend=backend)
            with side_streams.stream(0, after=1):
                scored = indexer.joined(of_states, of_queries, index, index_layer)
        q = self._queries(residual, positions, backend)
        side_streams.join()
        return Projected(q, kv, scored, gate)

    def _queries(self, x: Activations, positions: Tensor | None, backend: Backend) -> Tensor:
        """q [tokens, heads, D_N + D_R], not rotated, of hidden states or the query's latent."""
        g = self.config.geometry
        q: Tensor = self.q_proj(x, backend) if g.q_lora_rank is None else self.q_b_proj(x, backend)
        q = q.unflatten(-1, (g.num_heads, g.qk_head_dim))
        scale = self.config.query_scale
        if scale is not None:
            assert positions is not None
            steps = torch.div(positions, scale.original, rounding_mode="floor")
            factor = 1 + scale.beta * torch.log1p(steps.float())
            q = q * factor.to(q.dtype)[:, None, None]
        return q

    def _checked_plan(
        self, dims: Dims, plan: AnyPlan | None, batch: CachedBatch, rows: Tensor | None
    ) -> AnyPlan | None:
        is_sparse = self.config.selection is not None
        if self.cp_group is None:
            return _sparse_plan(dims, plan, batch) if is_sparse else plan
        if is_sparse and self.indexer is None and rows is None:
            dims.fail("rows", "be given to a layer that shares another's selection", None)
        taken = (EvenSplit,) if is_sparse else (EvenSplit, DecodePlan, DecodePlanTensors)
        if plan is not None and not isinstance(plan, taken):
            kinds = "an EvenSplit" if is_sparse else "a plan of mla_decode"
            dims.fail("plan", f"be {kinds} with a cp_group", type(plan).__name__)
        return plan

    @property
    def _needs_positions(self) -> bool:
        return self.indexer is not None or self.config.query_scale is not None

    def _is_dense(self, plan: AnyPlan | None, rows: Tensor | None) -> bool:
        """Return whether no query sees more than index_topk keys, and so may attend to all."""
        if rows is not None or not isinstance(plan, StepPlan):
            return False
        if self.config.index_pool > 1 and not self.config.selects_tail:
            return False  # a query sees more than it may attend to
        return max(plan.kv_lens, default=0) <= self.config.geometry.index_topk

    def _checked_keys(
        self, dims: Dims, cache: IndexCache | None, batch: CachedBatch
    ) -> IndexCache | None:
        """The indexer's cache: its pages are those of the batch's cache. None: no indexer."""
        if self.indexer is None:
            must = "be None for a layer without an indexer"
            dims.require(cache is None, "index_cache", must, type(cache).__name__)
            return None
        kind = PagedLatentCache if self.config.index_pool == 1 else PooledKeyCache
        if not isinstance(cache, kind):
            got = type(cache).__name__
            raise TypeError(f"{NAME}: index_cache must be a {kind.__name__}, got {got}")
        width, pages = self.config.geometry.index_head_dim, batch.cache.page_size
        row = cache.row
        must = f"have rows of {width} columns without rope columns"
        dims.require((row.width, row.qk_rope_head_dim) == (width, 0), "index_cache", must, row)
        must = f"have pages of {pages} tokens, like the latent cache"
        keys = cache.keys if isinstance(cache, PooledKeyCache) else cache
        tokens = keys.page_size * self.config.index_pool
        dims.require(tokens == pages, "index_cache", must, tokens)
        return cache

    def _check_dtype(self, dims: Dims, x: Tensor) -> None:
        dtype = self.kv_a_layernorm.weight.dtype
        dims.dtype("x", x, dtype)
        dims.same_device("the layer", self.kv_b_proj.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._prepared = PreparedWeights()  # releases the old memory
        sinks = self.sinks

        def applied(tensor: Tensor) -> Tensor:
            return keep_dtype(fn, tensor) if tensor is sinks else fn(tensor)

        return super()._apply(applied, recurse)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # torch would convert e4m3 codes to their values without scales, and integers to floats
        for name, own in self.named_parameters():
            given = state_dict.get(prefix + name)
            if isinstance(given, Tensor):
                dtypes = (E4M3,) if own.dtype == E4M3 else (*FLOATS, torch.float64)
                Dims(NAME).dtype(name, given, *dtypes)
        # torch does not count writes to inference tensors
        self._prepared = PreparedWeights()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": PreparedWeights()}


def _attend(
    q: Tensor,
    kv: Tensor,
    weights: LayerWeights,
    batch: CachedBatch,
    plan: AnyPlan | None,
    backend: Backend,
) -> Tensor:
    """Attention to all cached tokens, [tokens, heads, D_V]."""
    one_token_each = plan is None and len(q) == len(batch.kv_lens)
    if isinstance(plan, StepPlan) or (plan is None and not one_token_each):
        return mla_step(q, kv, weights, batch, plan=plan, overwrite_q=True, backend=backend)
    # also right where the tokens are distributed in another way
    return decode_branch(q, kv, weights, batch, plan=plan, backend=backend)


def _sparse_plan(dims: Dims, plan: AnyPlan | None, batch: CachedBatch) -> AnyPlan | None:
    """The plan of a sparse layer; made here if the host may read the lengths."""
    if isinstance(plan, (DecodePlan, DecodePlanTensors)):
        must = "be a StepPlan or an EvenSplit for a layer that attends to a selection"
        dims.fail("plan", must, type(plan).__name__)
    if plan is not None or not (values_visible(batch.kv_lens) and values_visible(batch.q_starts)):
        return plan
    return plan_step(batch.kv_lens.tolist(), batch.q_starts.diff().tolist())
