"""The candidates for serving a model, and the `vllm serve` lines of the one that is chosen.

Rules of vLLM 0.32.0: the heads must be divisible by TP, TP by DCP, and DCP is for dense models only
with mlakit's backends. TP is the GPUs of a node, PP the nodes. Weights are divided by TP and PP,
the cache by DCP and PP (by layers). DCP is raised before an FP8 cache is tried.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlakit.model.config import index_pool
from mlakit.model.geometry import MLAGeometry
from mlakit.model.releases import ALIASES, HUB_IDS
from mlakit.model.v4 import is_v4
from mlakit.tools.memory.budget import GIB, latent_size
from mlakit.tools.memory.layers import LayerCounts, read_model
from mlakit.tools.planner.times import attention_us
from mlakit.tools.planner.weights import Weights, model_weights

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
MOST_NODES = 8  # that are tried if the number of GPUs is not given
MOST_REQUESTS = 1024  # at a time, if their number is not given
UTILISATION = 0.9  # vLLM's --gpu-memory-utilization; the serve line has it
RESERVE = 4 * GIB  # activations, CUDA graphs and NCCL: an assumption; vLLM measures them


@dataclass(frozen=True)
class Candidate:
    """One way to serve the requests. Bytes are those of one rank.

    attention_ms  of all layers, one token for every request; None if they do not fit, or the
                  attention was not measured
    max_requests  requests of this length that fit; `max_tokens` counts the tokens of all
    """

    gpus: int
    tp: int
    pp: int
    dcp: int
    cache_dtype: str
    weight_bytes: int
    free_bytes: int
    needed_bytes: int
    max_requests: int
    max_tokens: int
    attention_ms: float | None

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.free_bytes


@dataclass(frozen=True)
class Plan:
    """The candidates, and the first that fits. If none does, `why_not` says so in numbers.

    enough_gpus  the fewest GPUs that fit, where those that were asked for do not; None if there are
                 none
    """

    model: str
    context: int
    requests: int
    weights: Weights
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    options: tuple[tuple[str, str, str], ...]  # of `vllm serve`: option, value, reason
    nodes: int
    notes: tuple[str, ...]
    why_not: str | None
    enough_gpus: int | None

    @property
    def lines(self) -> list[str]:
        """The command of each node. The address of the first is for the user to fill in."""
        if self.chosen is None:
            return []
        words = [word for option, value, _ in self.options for word in (option, value)]
        line = shlex.join(["vllm", "serve", self.model, *words])
        if self.nodes == 1:
            return [line]
        spread = f"{line} --nnodes {self.nodes} --master-addr ADDRESS --node-rank"
        return [f"{spread} {i}{' --headless' if i else ''}" for i in range(self.nodes)]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"lines": self.lines}


@dataclass(frozen=True)
class Task:
    """A model, the requests it has to serve, and the GPUs."""

    geometry: MLAGeometry
    layers: LayerCounts
    weights: Weights
    context: int
    requests: int
    gpu_bytes: int
    cache_dtype: str | None
    is_filled: bool = False  # the requests are as many as fit

    @property
    def usable_bytes(self) -> int:
        """The memory of a GPU for weights and cache, as vLLM divides it."""
        return int(self.gpu_bytes * UTILISATION) - RESERVE

    def candidates(self, gpus: int, per_node: int) -> Iterator[Candidate]:
        """Yield cache dtypes in order, each with DCP ascending; one if the weights do not fit."""
        heads, own = self.geometry.num_heads, min(gpus, per_node)
        tp = max(each for each in range(1, own + 1) if own % each == 0 == heads % each)
        is_sparse = self.geometry.has_indexer
        dtypes = (self.cache_dtype,) if self.cache_dtype else DENSE_DTYPES
        if is_sparse and not self.cache_dtype:
            dtypes = SPARSE_DTYPES
        for dtype in dtypes:
            for dcp in (d for d in range(1, tp + 1) if tp % d == 0 and not (is_sparse and d > 1)):
                found = self.candidate(gpus, tp, dcp, dtype)
                yield found
                if found.free_bytes <= 0:
                    return  # the weights do not fit

    def candidate(self, gpus: int, tp: int, dcp: int, dtype: str) -> Candidate:
        format, pp = CACHE_DTYPES[dtype], gpus // tp
        size = latent_size(self.geometry, self.layers, format, dcp=dcp, page_size=PAGE_SIZE)
        share = -(-self.layers.total // pp) / self.layers.total  # layers of the first stage
        weight_bytes = -(-self.weights.total_bytes // gpus)
        free = self.usable_bytes - weight_bytes
        needed = int(size.rank_bytes(self.context, self.requests) * share)
        pages = max(int(free / (size.page_bytes * share)), 0)
        us = None
        if needed <= free:
            us = attention_us(
                self.geometry,
                self.layers,
                format=format,
                heads=-(-self.geometry.num_heads * dcp // tp),
                requests=self.requests,
                context=-(-self.context // dcp),
            )
        return Candidate(
            gpus=gpus,
            tp=tp,
            pp=pp,
            dcp=dcp,
            cache_dtype=dtype,
            weight_bytes=weight_bytes,
            free_bytes=free,
            needed_bytes=needed,
            max_requests=pages // size.pages(self.context),
            max_tokens=pages * size.page_size * dcp,
            attention_ms=None if us is None else us / 1e3,
        )


def make_plan(
    model: str,
    *,
    context: int,
    requests: int | None = None,
    gpus: int | None = None,
    gpu_gib: float = 141.0,
    cache_dtype: str | None = None,
    gpus_per_node: int = 8,
    weights_gib: float | None = None,
) -> Plan:
    """The serve line that fits, or why none does. Raises ValueError for wrong arguments.

    model        a folder with a config.json, or a known model
    requests     at a time; None: as many as fit where one does, up to `MOST_REQUESTS`
    gpus         None: the fewest that fit, in powers of two up to a node, then in whole nodes
    gpu_gib      memory of one GPU
    cache_dtype  vLLM's; None: bf16 rows if they fit, else fp8; fp8_ds_mla for sparse models
    weights_gib  of the whole model; None: those of the checkpoint, else by the config
    """
    if cache_dtype not in (None, *CACHE_DTYPES):
        raise ValueError(
            f"cache_dtype must be one of {', '.join(CACHE_DTYPES)}, got {cache_dtype!r}"
        )
    if is_v4(model):
        raise ValueError(
            "model must not be DeepSeek-V4, whose rows stand for several tokens; mlakit memory has "
            f"its cache, got {model!r}"
        )
    weights = model_weights(model, weights_gib)
    fields, geometry, layers = read_model(model)
    longest = fields.get("max_position_embeddings")
    if isinstance(longest, int) and context > longest:
        raise ValueError(
            f"context must be at most the model's max_position_embeddings, {longest}, got {context}"
        )
    pooled = index_pool(fields) if layers.indexer else 1
    if pooled > 1:
        must = "have one index key for every token with mlakit's backends for vLLM"
        raise ValueError(f"the model must {must}, got one for {pooled} tokens")
    _check_row(geometry, cache_dtype)
    task = Task(geometry, layers, weights, context, requests or 1, int(gpu_gib * GIB), cache_dtype)
    if gpus and gpus > gpus_per_node and gpus % gpus_per_node:
        raise ValueError(
            f"gpus must be at most {gpus_per_node} or a multiple of it (--gpus-per-node), "
            f"got {gpus}"
        )
    found, chosen = _searched(task, [gpus] if gpus else _counts(gpus_per_node), gpus_per_node)
    if requests is None and chosen is not None:
        most = min(chosen.max_requests, MOST_REQUESTS)
        task = replace(task, requests=most, is_filled=True)
        counts = list(dict.fromkeys(each.gpus for each in found))
        found, chosen = _searched(task, counts, gpus_per_node)
    enough = None
    if gpus and chosen is None:
        more = [count for count in _counts(gpus_per_node) if count > gpus]
        enough = _searched(task, more, gpus_per_node)[1]
    nodes = 1 if chosen is None else -(-chosen.gpus // gpus_per_node)
    return Plan(
        model=HUB_IDS.get(ALIASES.get(model.lower(), model.lower()), model),
        context=context,
        requests=task.requests,
        weights=weights,
        candidates=tuple(found),
        chosen=chosen,
        options=() if chosen is None else tuple(_options(task, chosen)),
        nodes=nodes,
        notes=() if chosen is None else tuple(_notes(task, chosen, nodes)),
        why_not=_why_not(task, found) if chosen is None else None,
        enough_gpus=None if enough is None else enough.gpus,
    )


def _searched(
    task: Task, counts: Sequence[int], per_node: int
) -> tuple[list[Candidate], Candidate | None]:
    """Return the candidates with these numbers of GPUs up to one that fits, and the first that
    does."""
    found: list[Candidate] = []
    for count in counts:
        found += task.candidates(count, per_node)
        chosen = next((each for each in found if each.fits), None)
        if chosen is not None:
            return found, chosen
    return found, None


def _counts(per_node: int) -> list[int]:
    in_a_node = [1 << power for power in range(per_node.bit_length()) if 1 << power < per_node]
    return [*in_a_node, *(per_node * nodes for nodes in range(1, MOST_NODES + 1))]


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


def _options(task: Task, chosen: Candidate) -> Iterator[tuple[str, str, str]]:
    """The options of `vllm serve`, each with its reason."""
    is_sparse, heads = task.geometry.has_indexer, task.geometry.num_heads
    tp, pp, dcp = chosen.tp, chosen.pp, chosen.dcp
    backend = "MLAKIT_SPARSE" if is_sparse else "MLAKIT"
    why = "the model has an indexer" if is_sparse else "vLLM never picks it itself"
    yield "--attention-backend", backend, why
    if tp > 1:
        where = "; the cache is on every rank" if dcp == 1 else ""
        reason = f"{heads // tp} of {heads} heads per rank{where}"
        yield "--tensor-parallel-size", str(tp), reason
    if pp > 1:
        reason = f"layers and their cache are divided by {pp}"
        yield "--pipeline-parallel-size", str(pp), reason
    if dcp > 1:
        lower = max(each for each in range(1, dcp) if tp % each == 0)
        reason = f"1 token of {dcp} per rank: the requests do not fit with {lower}"
        yield "--decode-context-parallel-size", str(dcp), reason
    dtypes = {"auto": "the model's dtype", "fp8": "rows in bf16 do not fit"}
    why = "as asked" if task.cache_dtype else dtypes.get(chosen.cache_dtype, "656-byte rows")
    yield "--kv-cache-dtype", chosen.cache_dtype, why
    yield "--max-model-len", str(task.context), "prompt and answer together"
    filled = "as many as fit" if chosen.max_requests <= task.requests else "more fit"
    why = f"requests at a time: {filled}" if task.is_filled else "requests at a time"
    yield "--max-num-seqs", str(task.requests), why
    memory = f"of {task.gpu_bytes / GIB:g} GiB; vLLM keeps its weights and cache below it"
    yield "--gpu-memory-utilization", f"{UTILISATION:g}", memory


def _notes(task: Task, chosen: Candidate, nodes: int) -> Iterator[str]:
    needed = chosen.needed_bytes * chosen.dcp * chosen.pp
    if chosen.gpus > 1 and needed <= task.usable_bytes - task.weights.total_bytes:
        yield (
            f"one GPU holds this, too: --data-parallel-size {chosen.gpus} without the parallel "
            f"options above has {chosen.gpus} engines"
        )
    if nodes > 1:
        yield (
            "one line per node; ADDRESS is that of the first. Or start a Ray cluster and run the "
            "first line without its last options, with --distributed-executor-backend ray"
        )
    if task.layers.mla < task.layers.total:
        yield "the state of linear attention is not counted"


def _why_not(task: Task, found: list[Candidate]) -> str:
    most = max(found, key=lambda each: (each.gpus, each.max_tokens))
    free = most.free_bytes / GIB
    if free <= 0:
        return (
            f"the weights do not fit: {most.weight_bytes / GIB:,.1f} GiB per rank on {most.gpus} "
            f"GPUs, {task.usable_bytes / GIB:,.1f} GiB usable"
        )
    return (
        f"the cache does not fit: {most.needed_bytes / GIB:,.1f} GiB per rank needed, {free:,.1f} "
        f"GiB free with {most.cache_dtype} rows and DCP {most.dcp}; {most.max_requests:,} requests "
        f"of {task.context:,} tokens fit, {most.max_tokens:,} tokens in all"
    )
