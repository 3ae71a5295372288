"""The time of a decode step on a cluster, per tensor (TP) and decode context parallel (DCP) degree.

A model of the step, not a measurement. One step gives one token to each request of an engine:

    step        attention + weights + collectives + fixed
    attention   MLA layers × measured kernel time (kernel_times.py) of heads · DCP / TP heads over
                requests · ceil(context / DCP) tokens; sparse models: logits and top-k are on every
                rank, whatever TP
    weights     the larger of the bytes that the step reads / TP / (efficiency · read bandwidth) and
                2 · active parameters · requests / TP / (efficiency · bf16 rate); of the experts,
                those that evenly routed tokens take are read
    collectives per layer two all-reduces of requests · hidden_size values in 16 bits,
                2 (TP - 1) / TP of them per rank; with DCP per MLA layer an all-gather of the
                absorbed queries, one of lse, and a reduce-scatter of the outputs. Each takes
                latency + bytes that a rank receives / bandwidth of the link; nothing overlaps
    fixed       layers × `layer_us`: small kernels of a layer

GPUs beyond TP run further engines with requests of their own. A group that spans nodes has the link
between nodes for all its bytes. Pipeline and expert parallelism, prefill, drafts, sampling and the
scheduler are not simulated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any

from mlakit.model.geometry import MLAGeometry
from mlakit.tools.memory import LayerCounts, memory_report, parse_contexts
from mlakit.tools.memory.gpus import GIB
from mlakit.tools.planner.kernel_times import (
    GPU,
    ROW,
    SPARSE_FORMAT,
    TOPK,
    KernelTimes,
    measured_times,
)
from mlakit.tools.planner.room import Room
from mlakit.tools.planner.weights import Weights, model_weights

# fitted to `mlakit bench layer` on an H200 (bf16 weights, 16 requests): a layer without its
# attention kernel takes 32 us and reads its weights at 0.87 of the bandwidth, with 16 heads and
# with 128. MLPs and experts were not measured: the efficiency is lowered and the time doubled.
WEIGHT_EFFICIENCY = 0.7
LAYER_US = 60.0
MAX_REQUESTS = 256
# (GB/s that a GPU receives, us of one collective): data sheets, and assumed latencies
LINKS = {"nvlink": (450.0, 10.0), "ib": (50.0, 30.0)}
DEFAULT_NODE_LINK, DEFAULT_LINK = "nvlink", "ib"


@dataclass(frozen=True)
class Link:
    """What connects the ranks of a group."""

    name: str
    gb_s: float
    latency_us: float

    def us(self, received: float) -> float:
        """The time of a collective in which each rank receives so many bytes."""
        return self.latency_us + received / self.gb_s / 1e3


def parse_link(option: str, text: str) -> Link:
    """A link: `nvlink`, `ib:50` (GB/s) or `ib:50:20` (and us). Raises ValueError."""
    number = r"(\d+(?:\.\d+)?)"
    found = re.fullmatch(rf"([a-z]+)(?::{number}(?::{number})?)?", text.strip().lower())
    if found is None or found[1] not in LINKS:
        raise ValueError(
            f"{option} must be {' or '.join(LINKS)}, with GB/s and us as in ib:50:20, got {text!r}"
        )
    gb_s, latency = LINKS[found[1]]
    link = Link(found[1], float(found[2] or gb_s), float(found[3] or latency))
    if not link.gb_s > 0:
        raise ValueError(f"{option} must have more than 0 GB/s, got {text!r}")
    return link


def parse_range(text: str) -> tuple[int, ...]:
    """Contexts as `mlakit memory` has them; `4k..1m` doubles. Raises ValueError for other text."""
    first, dots, last = text.partition("..")
    if not dots:
        return parse_contexts(text)
    ends = (*parse_contexts(first), *parse_contexts(last))
    if len(ends) != 2 or not 0 < ends[0] < ends[1]:
        raise ValueError(f"context must ascend from one number to another, got {text!r}")
    found = []
    context = ends[0]
    while context <= ends[1]:
        found.append(context)
        context *= 2
    return tuple(found)


def parse_degrees(name: str, text: str) -> tuple[int, ...]:
    """The degrees in `8,16`; none in empty text. Raises ValueError for other text."""
    found = [each.strip() for each in text.split(",")] if text.strip() else []
    if not all(each.isdecimal() for each in found):
        raise ValueError(f"{name} must be numbers such as 8,16, got {text!r}")
    return tuple(map(int, found))


@dataclass(frozen=True)
class Settings:
    """A cluster and how it is used.

    requests      of an engine; None: as many as fit, at most `max_requests`
    format        of the cache; None: bf16, or fp8_block128 for sparse models
    """

    gpus: int
    gpus_per_node: int = 8
    gpu_memory: str = "H200"
    node_link: Link = Link(DEFAULT_NODE_LINK, *LINKS[DEFAULT_NODE_LINK])
    link: Link = Link(DEFAULT_LINK, *LINKS[DEFAULT_LINK])
    requests: int | None = None
    max_requests: int = MAX_REQUESTS
    format: str | None = None
    weights_gib: float | None = None
    weight_efficiency: float = WEIGHT_EFFICIENCY
    layer_us: float = LAYER_US

    def check(self) -> None:
        """Raises ValueError."""
        counts = {
            "gpus": self.gpus,
            "gpus_per_node": self.gpus_per_node,
            "max_requests": self.max_requests,
            "requests": 1 if self.requests is None else self.requests,
        }
        for name, value in counts.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(
                f"gpus must be at most {self.gpus_per_node} or a multiple of it "
                f"(--gpus-per-node), got {self.gpus}"
            )
        if not 0.0 < self.weight_efficiency <= 1.0:
            raise ValueError(
                f"weight_efficiency must be above 0 and at most 1, got {self.weight_efficiency}"
            )
        if not (isfinite(self.layer_us) and self.layer_us >= 0.0):
            raise ValueError(f"layer_us must be at least 0, got {self.layer_us}")

    def link_of(self, ranks: int) -> Link:
        return self.node_link if ranks <= self.gpus_per_node else self.link


@dataclass(frozen=True)
class Model:
    """What of a model the step depends on."""

    name: str
    geometry: MLAGeometry
    layers: LayerCounts
    weights: Weights

    @classmethod
    def of(cls, name: str, weights_gib: float | None = None) -> Model:
        """Raises ValueError for a model that the measured kernels do not stand for."""
        weights = model_weights(name, weights_gib)
        geometry = MLAGeometry.from_config(name)
        row = (geometry.row.kv_lora_rank, geometry.row.qk_rope_head_dim)
        if row != ROW:
            raise ValueError(
                f"the model must have rows of {ROW[0]} + {ROW[1]} columns, which the kernel times "
                f"are of, got {row[0]} + {row[1]}"
            )
        if geometry.has_indexer and geometry.index_topk != TOPK:
            raise ValueError(
                f"the model must have index_topk {TOPK}, which the kernel times are of, "
                f"got {geometry.index_topk}"
            )
        layers = memory_report(name, [1], formats=["bf16"]).layers
        return cls(name, geometry, layers, weights)


@dataclass(frozen=True)
class Step:
    """A decode step of one engine, in us, and what it gives. Without requests nothing fits."""

    context: int
    tp: int
    dcp: int
    requests: int
    attention_us: float = 0.0
    weights_us: float = 0.0
    collectives_us: float = 0.0
    fixed_us: float = 0.0
    tokens_per_s_gpu: float = 0.0
    tokens_per_s_node: float = 0.0
    tokens_per_s: float = 0.0

    @property
    def us(self) -> float:
        return self.attention_us + self.weights_us + self.collectives_us + self.fixed_us


@dataclass(frozen=True)
class Plan:
    """The steps of every context and degree; `left_out` says of a TP degree why it has none."""

    model: Model
    settings: Settings
    format: str
    steps: tuple[Step, ...]
    left_out: tuple[str, ...]

    def best(self, context: int) -> Step | None:
        """With the most tokens per second and GPU."""
        found = [step for step in self.steps if step.context == context and step.requests]
        return max(found, key=lambda step: step.tokens_per_s_gpu, default=None)

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model.name,
            "weights": asdict(self.model.weights),
            "settings": asdict(self.settings) | {"format": self.format},
            "kernel_times": f"interpolated between times measured on an {GPU}",
            "steps": [asdict(step) | {"step_us": step.us} for step in self.steps],
            "left_out": list(self.left_out),
        }


def plan_cluster(
    name: str,
    contexts: Sequence[int],
    settings: Settings,
    tp: Sequence[int] = (),
    dcp: Sequence[int] = (),
) -> Plan:
    """Simulates every degree, or only those in `tp` and `dcp`. Raises ValueError."""
    settings.check()
    for context in contexts:
        if context < 1:
            raise ValueError(f"context must be at least 1, got {context}")
    model = Model.of(name, settings.weights_gib)
    times = measured_times()
    format = _format(model, settings.format, times)
    room = Room.of(settings.gpu_memory)
    steps: list[Step] = []
    left_out = []
    known = list(_tp_degrees(model, settings))
    shared = [1] if model.geometry.has_indexer else range(1, known[-1] + 1)
    possible = [d for d in shared if any(each % d == 0 for each in known)]
    degrees = _chosen("dcp", possible, dcp)
    for each in _chosen("tp", known, tp):
        weight_bytes = -(-model.weights.total_bytes // each)
        free = room.cache_bytes(weight_bytes)
        if free <= 0:
            left_out.append(
                f"TP {each}: weights take {weight_bytes / GIB:,.1f} GiB per rank, "
                f"{room.cache_bytes(0) / GIB:,.1f} GiB are usable"
            )
            continue
        for context in contexts:
            for shards in (d for d in degrees if each % d == 0):
                requests = _requests(model, settings, format, context, each, shards, free)
                step = step_of(model, settings, times, format, context, each, shards, requests)
                steps.append(step)
    steps.sort(key=lambda step: (contexts.index(step.context), step.tp, step.dcp))
    return Plan(model, settings, format, tuple(steps), tuple(left_out))


def step_of(
    model: Model,
    settings: Settings,
    times: KernelTimes,
    format: str,
    context: int,
    tp: int,
    dcp: int,
    requests: int,
) -> Step:
    """One step of an engine with so many requests; all zero without any."""
    if not requests:
        return Step(context, tp, dcp, 0)
    heads = -(-model.geometry.num_heads * dcp // tp)
    if model.geometry.has_indexer:
        attention = model.layers.mla * times.sparse_us(heads, requests, context)
    else:
        tokens = requests * -(-context // dcp)
        attention = model.layers.mla * times.dense_us(heads, tokens, format)
    step = Step(
        context,
        tp,
        dcp,
        requests,
        attention_us=attention,
        weights_us=_weights_us(model, settings, times, tp, requests),
        collectives_us=_collectives_us(model, settings, tp, dcp, requests),
        fixed_us=model.layers.total * settings.layer_us,
    )
    rate = requests / step.us * 1e6 / tp
    node = min(settings.gpus, settings.gpus_per_node)
    return replace(
        step,
        tokens_per_s_gpu=rate,
        tokens_per_s_node=rate * node,
        tokens_per_s=rate * settings.gpus,
    )


def _weights_us(
    model: Model, settings: Settings, times: KernelTimes, tp: int, requests: int
) -> float:
    read = model.weights.bytes_read(requests) / (times.read_gb_s * 1e3)
    multiplied = 2 * model.weights.active_parameters() * requests / (times.bf16_tflops * 1e6)
    return max(read, multiplied) / tp / settings.weight_efficiency


def _collectives_us(model: Model, settings: Settings, tp: int, dcp: int, requests: int) -> float:
    total = 0.0
    if tp > 1:
        states = requests * model.geometry.hidden_size * 2
        total += model.layers.total * 2 * settings.link_of(tp).us(2 * (tp - 1) / tp * states)
    if dcp > 1:
        link = settings.link_of(dcp)
        others = (dcp - 1) * requests * model.geometry.num_heads // tp  # heads of the other ranks
        queries, outputs = 2 * sum(ROW) * others, 2 * ROW[0] * others
        # an lse for each head that the rank attends with, of each other rank
        lse = 4 * others * dcp
        total += model.layers.mla * (link.us(queries) + link.us(lse) + link.us(outputs))
    return total


def _format(model: Model, asked: str | None, times: KernelTimes) -> str:
    if model.geometry.has_indexer:
        known: tuple[str, ...] = (SPARSE_FORMAT,)
    else:
        known = ("bf16", *times.factors)
    if asked is not None and asked not in known:
        raise ValueError(
            f"format must be one of {', '.join(known)}, which are timed, got {asked!r}"
        )
    return asked or known[0]


def _tp_degrees(model: Model, settings: Settings) -> Iterator[int]:
    """Degrees that divide the GPUs and the heads, and a node, or fill whole nodes."""
    for tp in range(1, settings.gpus + 1):
        divides = settings.gpus % tp == 0 and model.geometry.num_heads % tp == 0
        per_node = min(settings.gpus, settings.gpus_per_node)
        if divides and (per_node % tp == 0 or tp % per_node == 0):
            yield tp


def _chosen(name: str, known: Sequence[int], asked: Sequence[int]) -> list[int]:
    for each in asked:
        if each not in known:
            shown = ", ".join(map(str, known))
            raise ValueError(f"{name} must be one of {shown}, got {each}")
    return [each for each in known if not asked or each in asked]


def _requests(
    model: Model, settings: Settings, format: str, context: int, tp: int, dcp: int, free: int
) -> int:
    """Requests of an engine, 0 if those that are asked for do not fit."""
    options = {"tp": tp, "dcp": dcp, "formats": [format]}
    size = memory_report(model.name, [context], **options).sizes[0]  # type: ignore[arg-type]
    fit = free // size.page_bytes // size.pages(context)
    if settings.requests is None:
        return min(fit, settings.max_requests)
    return settings.requests if settings.requests <= fit else 0
