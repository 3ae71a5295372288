"""The `vllm serve` line for a model on a number of GPUs, and the reason of each of its options.

Rules of vLLM 0.32.0: the heads must be divisible by TP, TP by DCP, and DCP is for dense models only
with mlakit's backends. Memory: weights divided by TP and PP, the cache by DCP and PP (by layers).
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from typing import Any

from mlakit.model.geometry import MLAGeometry
from mlakit.model.releases import ALIASES, HUB_IDS
from mlakit.tools.memory import memory_report
from mlakit.tools.memory.budget import CacheSize
from mlakit.tools.memory.gpus import GIB
from mlakit.tools.memory.layers import config_fields
from mlakit.tools.planner.room import Room
from mlakit.tools.planner.weights import Weights, model_weights

# names of mlakit's plugin for vLLM
DENSE, SPARSE = "MLAKIT", "MLAKIT_SPARSE"
# vLLM's cache dtypes and the format of their rows
CACHE_DTYPES = {
    "auto": "bf16",
    "bfloat16": "bf16",
    "float16": "fp16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_ds_mla": "fp8_block128",
}
# tried in this order if none is asked for
DENSE_DTYPES, SPARSE_DTYPES = ("auto", "fp8"), ("fp8_ds_mla",)
PAGE_SIZE = 64
ROW_WIDTHS = (320, 512, 576)  # of latents, that vLLM 0.32.0 takes
PACKED_ROW = (512, 64)  # of fp8_ds_mla


@dataclass(frozen=True)
class Choice:
    """An option of the serve line with its value and its reason."""

    option: str
    value: str
    reason: str


@dataclass(frozen=True)
class ServePlan:
    """How a model is served. `why_not` says in numbers why it does not fit; then no line does."""

    model: str
    tp: int
    pp: int
    dcp: int
    nodes: int
    cache_dtype: str
    context: int
    requests: int
    weight_bytes: int  # of one rank
    cache_bytes: int  # for the cache on one rank
    needed_bytes: int  # of the requests, on one rank
    max_requests: int  # of this length
    max_tokens: int  # of all requests
    choices: tuple[Choice, ...]
    notes: tuple[str, ...]
    why_not: str | None

    @property
    def arguments(self) -> list[str]:
        options = [word for each in self.choices for word in (each.option, each.value) if word]
        return ["vllm", "serve", self.model, *options]

    @property
    def lines(self) -> list[str]:
        """The command of each node. The address of the first is for the user to fill in."""
        line = shlex.join(self.arguments)
        if self.nodes == 1:
            return [line]
        spread = f"{line} --nnodes {self.nodes} --master-addr ADDRESS --node-rank"
        return [f"{spread} {i}{' --headless' if i else ''}" for i in range(self.nodes)]

    def as_json(self) -> dict[str, Any]:
        lines = self.lines if self.why_not is None else []
        return asdict(self) | {"lines": lines}


@dataclass(frozen=True)
class _Fit:
    """One cache dtype and DCP degree."""

    dtype: str
    dcp: int
    needed: int
    free: int
    max_requests: int
    max_tokens: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.free


def serve_plan(
    model: str,
    *,
    gpus: int,
    context: int,
    requests: int = 1,
    gpu_memory: str = "H200",
    cache_dtype: str | None = None,
    gpus_per_node: int = 8,
    weights_gib: float | None = None,
) -> ServePlan:
    """The line that fits, or why none does. Raises ValueError for wrong arguments.

    model        a folder with a config.json, or a known model
    gpu_memory   of one GPU: a name or GiB
    cache_dtype  vLLM's; None: bf16 rows if they fit, else fp8; fp8_ds_mla for sparse models
    weights_gib  of the whole model; None: those of the checkpoint, else by the config
    """
    counts = {
        "gpus": gpus,
        "context": context,
        "requests": requests,
        "gpus_per_node": gpus_per_node,
    }
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if cache_dtype is not None and cache_dtype not in CACHE_DTYPES:
        raise ValueError(
            f"cache_dtype must be one of {', '.join(CACHE_DTYPES)}, got {cache_dtype!r}"
        )
    weights = model_weights(model, weights_gib)
    geometry = MLAGeometry.from_config(model)
    _check_context(model, context)
    _check_row(geometry, cache_dtype)
    room = Room.of(gpu_memory)
    tp, pp, nodes = _ranks(geometry.num_heads, gpus, gpus_per_node)
    weight_bytes = -(-weights.total_bytes // (tp * pp))
    if cache_dtype is not None:
        dtypes: tuple[str, ...] = (cache_dtype,)
    else:
        dtypes = SPARSE_DTYPES if geometry.has_indexer else DENSE_DTYPES
    fit = _best_fit(model, geometry, dtypes, room, weight_bytes, tp, pp, context, requests)
    is_sparse = geometry.has_indexer
    choices = (
        _backend(is_sparse),
        *_parallel(geometry, tp, pp, gpus, nodes, fit, requests, context),
        _cache_choice(fit, cache_dtype, is_sparse),
        *_limits(context, requests, room),
    )
    return ServePlan(
        model=HUB_IDS.get(ALIASES.get(model.lower(), model.lower()), model),
        tp=tp,
        pp=pp,
        dcp=fit.dcp,
        nodes=nodes,
        cache_dtype=fit.dtype,
        context=context,
        requests=requests,
        weight_bytes=weight_bytes,
        cache_bytes=max(fit.free, 0),
        needed_bytes=fit.needed,
        max_requests=fit.max_requests,
        max_tokens=fit.max_tokens,
        choices=choices,
        notes=tuple(_notes(model, weights, room, fit, weight_bytes, tp * pp, nodes)),
        why_not=None if fit.fits else _why_not(fit, room, weight_bytes, weights, gpus, context),
    )


def _check_context(model: str, context: int) -> None:
    longest = config_fields(model).get("max_position_embeddings")
    if isinstance(longest, int) and context > longest:
        raise ValueError(
            f"context must be at most the model's max_position_embeddings, {longest}, got {context}"
        )


def _check_row(geometry: MLAGeometry, cache_dtype: str | None) -> None:
    row = geometry.row
    if row.width not in ROW_WIDTHS:
        raise ValueError(
            f"the model must have rows of {', '.join(map(str, ROW_WIDTHS))} columns for vLLM "
            f"0.32.0, got {row.width}"
        )
    is_packed = cache_dtype == "fp8_ds_mla" or (cache_dtype is None and geometry.has_indexer)
    if is_packed and (row.kv_lora_rank, row.qk_rope_head_dim) != PACKED_ROW:
        latent, rope = PACKED_ROW
        raise ValueError(
            f"cache_dtype fp8_ds_mla must have rows of {latent} + {rope} columns, "
            f"got {row.kv_lora_rank} + {row.qk_rope_head_dim}"
        )


def _ranks(heads: int, gpus: int, per_node: int) -> tuple[int, int, int]:
    """TP, PP and nodes: TP is the largest number of GPUs of a node that divides GPUs and heads."""
    nodes = -(-gpus // per_node)
    if gpus > per_node and gpus % per_node:
        raise ValueError(
            f"gpus must be at most {per_node} or a multiple of it (--gpus-per-node), got {gpus}"
        )
    own = min(gpus, per_node)
    tp = max(each for each in range(1, own + 1) if own % each == 0 and heads % each == 0)
    return tp, gpus // tp, nodes


def _best_fit(
    model: str,
    geometry: MLAGeometry,
    dtypes: tuple[str, ...],
    room: Room,
    weight_bytes: int,
    tp: int,
    pp: int,
    context: int,
    requests: int,
) -> _Fit:
    """The first that fits: dtypes in order, DCP ascending; else the one with the most room."""
    degrees = [1] if geometry.has_indexer else [d for d in range(1, tp + 1) if tp % d == 0]
    tried = []
    for dtype in dtypes:
        for dcp in degrees:
            report = memory_report(
                model,
                [context],
                batch=requests,
                tp=tp,
                dcp=dcp,
                formats=[CACHE_DTYPES[dtype]],
                page_size=PAGE_SIZE,
            )
            share = -(-report.layers.total // pp) / report.layers.total  # layers of the first stage
            free = room.cache_bytes(weight_bytes)
            fit = _fit(dtype, dcp, report.sizes[0], share, free, context, requests)
            if fit.fits:
                return fit
            tried.append(fit)
    return max(tried, key=lambda each: each.max_tokens)


def _fit(
    dtype: str, dcp: int, size: CacheSize, share: float, free: int, context: int, requests: int
) -> _Fit:
    pages = max(int(free / (size.page_bytes * share)), 0)
    return _Fit(
        dtype,
        dcp,
        needed=int(size.rank_bytes(context, requests) * share),
        free=free,
        max_requests=pages // size.pages(context),
        max_tokens=pages * size.page_size * dcp,
    )


def _backend(is_sparse: bool) -> Choice:
    if is_sparse:
        return Choice("--attention-backend", SPARSE, "the model has an indexer: sparse attention")
    return Choice(
        "--attention-backend", DENSE, "mlakit's dense backend; vLLM never picks it itself"
    )


def _parallel(
    geometry: MLAGeometry,
    tp: int,
    pp: int,
    gpus: int,
    nodes: int,
    fit: _Fit,
    requests: int,
    context: int,
) -> list[Choice]:
    heads = geometry.num_heads
    found = []
    if tp > 1:
        where = "; the cache is on every rank" if fit.dcp == 1 else ""
        each = f"{heads // tp} of {heads} heads per rank{where}"
        found.append(Choice("--tensor-parallel-size", str(tp), each))
    if pp > 1:
        spread = f"{nodes} nodes" if nodes > 1 else f"{gpus} GPUs, of which TP takes {tp}"
        reason = f"{spread}: layers and their cache are divided by {pp}"
        found.append(Choice("--pipeline-parallel-size", str(pp), reason))
    if fit.dcp > 1:
        half = f"{requests} x {context} tokens do not fit with {_lower(fit.dcp, tp)}"
        reason = f"each rank caches 1 token of {fit.dcp}: {half}"
        found.append(Choice("--decode-context-parallel-size", str(fit.dcp), reason))
    return found


def _lower(dcp: int, tp: int) -> int:
    """The next lower degree."""
    return max(each for each in range(1, dcp) if tp % each == 0)


def _cache_choice(fit: _Fit, asked: str | None, is_sparse: bool) -> Choice:
    if asked is not None:
        reason = "as asked"
    elif is_sparse:
        reason = "656-byte rows; vLLM turns fp8 into it for its own sparse backends only"
    elif fit.dtype == "auto":
        reason = "the model's dtype, bf16"
    else:
        reason = "rows in bf16 do not fit"
    return Choice("--kv-cache-dtype", fit.dtype, reason)


def _limits(context: int, requests: int, room: Room) -> list[Choice]:
    share = f"of {room.gpu_bytes / GIB:g} GiB; vLLM keeps its weights and cache below it"
    return [
        Choice("--max-model-len", str(context), "prompt and answer together"),
        Choice("--max-num-seqs", str(requests), "requests at a time"),
        Choice("--gpu-memory-utilization", f"{room.utilisation:g}", share),
    ]


def _notes(
    model: str,
    weights: Weights,
    room: Room,
    fit: _Fit,
    weight_bytes: int,
    ranks: int,
    nodes: int,
) -> list[str]:
    found = [
        f"weights: {weights.total_bytes / GIB:,.1f} GiB ({weights.source}), "
        f"{weight_bytes / GIB:,.1f} GiB per rank",
        f"per rank: {max(fit.free, 0) / GIB:,.1f} GiB for the cache, {fit.needed / GIB:,.2f} GiB "
        f"needed; {fit.max_requests:,} requests of this length fit, {fit.max_tokens:,} tokens in "
        "all",
        f"assumed: {room.reserve_bytes / GIB:g} GiB for activations, CUDA graphs and NCCL; drafts "
        "and layers for multi-token prediction have no cache here",
    ]
    if ranks > 1 and room.cache_bytes(weights.total_bytes) >= fit.needed * fit.dcp:
        found.append(
            f"one GPU holds this, too: --data-parallel-size {ranks} without the parallel options "
            f"above has {ranks} engines"
        )
    if nodes > 1:
        found.append(
            "one line per node; ADDRESS is that of the first. Or start a Ray cluster and run the "
            "first line without its last options, with --distributed-executor-backend ray"
        )
    counts = memory_report(model, [1], formats=["bf16"]).layers
    if counts.mla < counts.total:
        found.append("the state of linear attention is not counted")
    return found


def _why_not(
    fit: _Fit, room: Room, weight_bytes: int, weights: Weights, gpus: int, context: int
) -> str:
    usable = int(room.gpu_bytes * room.utilisation) - room.reserve_bytes
    if fit.free <= 0:
        least = -(-weights.total_bytes // usable)
        return (
            f"the weights do not fit: {weight_bytes / GIB:,.1f} GiB per rank on {gpus} GPUs, "
            f"{usable / GIB:,.1f} GiB usable; weights alone need at least {least} GPUs"
        )
    tokens = fit.max_tokens
    return (
        f"the cache does not fit: {fit.needed / GIB:,.1f} GiB per rank needed, "
        f"{fit.free / GIB:,.1f} GiB free with {fit.dtype} rows and DCP {fit.dcp}; "
        f"{fit.max_requests:,} requests of {context:,} tokens fit, {tokens:,} tokens in all"
    )
