"""The oracles of a run, each computed twice: exactly, and in the precision of the kernels.

The exact run is float64 from the projections to the result. The naive run is float32 and rounds
what a branch stores between two kernels; it determines the tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from rich.progress import Progress
from torch import Tensor

from mlakit import reference
from mlakit.formats import RowCodec
from mlakit.model.geometry import MLAGeometry
from mlakit.model.masks import CAUSAL, NULL, Mask
from mlakit.steps import LayerWeights
from mlakit.tools.demo.check import Check, Result, check_results
from mlakit.tools.demo.model import RandomModel
from mlakit.tools.demo.serving import Attended, Selection, Transcript
from mlakit.tools.testing import assert_same_bits

PREFILL_HEADS = 16  # the float64 oracle would take 15 seconds for all 128 heads of a prompt


def prefill_heads(geometry: MLAGeometry) -> tuple[slice, slice]:
    """The heads whose prefill is checked: different ones in each of the two chunks."""
    every = -(-geometry.num_heads // PREFILL_HEADS)
    return slice(0, None, every), slice(every // 2, None, every)


@dataclass(frozen=True)
class Precision:
    """The dtype of an oracle, and the dtype of its stored tensors (None: not rounded)."""

    dtype: torch.dtype
    stored: torch.dtype | None = None

    def keep(self, x: Tensor) -> Tensor:
        """`x` as a branch stores it between two kernels."""
        return x.to(self.stored or self.dtype).to(self.dtype)


EXACT = Precision(torch.float64)


@dataclass(frozen=True, eq=False)
class Oracle:
    """The layer for the oracles: weights on the CPU, some or all of its heads."""

    geometry: MLAGeometry
    kv_b: Tensor  # [heads, D_N + D_V, D_C]
    layer: LayerWeights
    heads: slice  # which of the layer's heads these are

    @classmethod
    def of(cls, model: RandomModel, heads: slice) -> Oracle:
        g = model.geometry
        by_head = model.kv_b.cpu().unflatten(0, (g.num_heads, -1))[heads]
        layer = LayerWeights(
            model.layer.up,
            model.layer.gamma.cpu(),
            model.layer.freqs.cpu(),
            g.softmax_scale,
            model.layer.epsilon,
            model.layer.rope,
        )
        return cls(g, by_head, layer, heads)

    @property
    def num_heads(self) -> int:
        return len(self.kv_b)

    def both(self, step: Attended, oracle: Callable[[Tensor, Precision], Tensor]) -> Result:
        """`step`'s output with oracle(q, precision) of the same heads, exact and naive."""
        q, out = step.q.cpu()[:, self.heads], step.out.cpu()[:, self.heads]
        naive = Precision(torch.float32, step.q.dtype)
        return Result(out, oracle(q, EXACT), oracle(q, naive))

    def rotated(self, q: Tensor, positions: Sequence[int], precision: Precision) -> Tensor:
        """q with its rope columns rotated."""
        nope, rope = q.split([self.geometry.qk_nope_head_dim, self.geometry.qk_rope_head_dim], -1)
        rotate = reference.rotate if precision == EXACT else reference.rotate_stepwise
        turned = [
            rotate(x, self.layer.freqs[p], rope=self.layer.rope)
            for x, p in zip(rope, positions, strict=True)
        ]
        return torch.cat([nope.to(precision.dtype), torch.stack(turned).to(precision.dtype)], -1)

    def prefill(self, rows: Tensor, q_len: int) -> Callable[[Tensor, Precision], Tensor]:
        """Expanded attention of the last q_len of rows [kv_len, width]."""
        g, kv_len = self.geometry, len(rows)
        before = kv_len - q_len

        def attend(q: Tensor, precision: Precision) -> Tensor:
            latent, k_rope = precision.keep(rows).split([g.kv_lora_rank, g.qk_rope_head_dim], -1)
            weight = self.kv_b.to(precision.dtype).flatten(0, 1)
            expanded = precision.keep(latent @ weight.T).unflatten(1, (self.num_heads, -1))
            k_nope, v = expanded.split([g.qk_nope_head_dim, g.v_head_dim], -1)
            q = self.rotated(q, range(before, kv_len), precision)

            def over(first: int, last: int, mask: Mask) -> tuple[Tensor, Tensor]:
                keys = slice(first, last)
                return reference.mla_prefill(
                    q,
                    k_nope[keys],
                    k_rope[keys],
                    v[keys],
                    [0, q_len],
                    [0, last - first],
                    softmax_scale=g.softmax_scale,
                    mask=mask,
                    dtype=precision.dtype,
                )

            if precision == EXACT or before == 0:
                return over(0, kv_len, CAUSAL)[0]
            # the branch attends to its context and to the new tokens separately, and stores both
            parts = [over(0, before, NULL), over(before, kv_len, CAUSAL)]
            outs, lses = (torch.stack(each) for each in zip(*parts, strict=True))
            return reference.merge_states(precision.keep(outs), lses, dtype=precision.dtype)[0]

        return attend

    def absorbed(
        self, positions: Sequence[int], attend: Callable[[Tensor, torch.dtype], Tensor]
    ) -> Callable[[Tensor, Precision], Tensor]:
        """Absorb, `attend` to rows with the absorbed queries in a dtype, project up."""
        g = self.geometry

        def oracle(q: Tensor, precision: Precision) -> Tensor:
            keys, values = self.kv_b.to(precision.dtype).split(
                [g.qk_nope_head_dim, g.v_head_dim], 1
            )
            nope, rope = self.rotated(q, positions, precision).split(
                [g.qk_nope_head_dim, g.qk_rope_head_dim], -1
            )
            latent = precision.keep(torch.einsum("thn,hnc->thc", nope, keys))
            attended = precision.keep(attend(torch.cat([latent, rope], -1), precision.dtype))
            return torch.einsum("thc,hvc->thv", attended, values)

        return oracle

    def decode(
        self, rows: Sequence[Tensor], q_lens: Sequence[int]
    ) -> Callable[[Tensor, Precision], Tensor]:
        """Absorbed attention of the last q_lens of each sequence's rows."""
        positions = [
            position
            for cached, q_len in zip(rows, q_lens, strict=True)
            for position in range(len(cached) - q_len, len(cached))
        ]

        def attend(q: Tensor, dtype: torch.dtype) -> Tensor:
            row = self.geometry.row
            return reference.mla_decode(
                q,
                rows,
                q_lens,
                softmax_scale=self.geometry.softmax_scale,
                v_width=row.v_width,
                dtype=dtype,
            )[0]

        return self.absorbed(positions, attend)

    def sparse(
        self, rows: Sequence[Tensor], chosen: Tensor
    ) -> Callable[[Tensor, Precision], Tensor]:
        """Absorbed attention of each sequence's last token over its chosen positions."""
        starts = torch.tensor([0, *accumulate(len(cached) for cached in rows)])
        listed = chosen.cpu().long() + starts[:-1, None]
        pool = torch.cat(list(rows))

        def attend(q: Tensor, dtype: torch.dtype) -> Tensor:
            row = self.geometry.row
            return reference.sparse_mla(
                q,
                pool,
                listed,
                softmax_scale=self.geometry.softmax_scale,
                v_width=row.v_width,
                dtype=dtype,
            )[0]

        return self.absorbed([len(cached) - 1 for cached in rows], attend)

    def cached_rows(
        self, kv: Tensor, positions: Sequence[int], codec: RowCodec
    ) -> tuple[Tensor, Tensor]:
        """(exact, naive) rows of raw latents kv [tokens, width], the naive ones as stored."""
        no_queries = kv.new_empty(len(kv), 0, self.geometry.qk_rope_head_dim)
        step = (no_queries, kv, self.layer.freqs, self.layer.gamma, positions)
        epsilon, rope = self.layer.epsilon, self.layer.rope
        _, exact = reference.norm_rope_quant(*step, epsilon=epsilon, rope=rope)
        _, naive = reference.norm_rope_quant_stepwise(
            *step, epsilon=epsilon, rope=rope, out_dtype=kv.dtype, cache_dtype=torch.float32
        )
        return exact, codec.decode(*codec.encode(naive))


@dataclass(frozen=True)
class Stage:
    """One line of the demo's table. Seconds are of all its tokens; None: not measured."""

    label: str
    tokens: int
    projection_seconds: float | None
    attention_seconds: float | None
    check: Check


def checked_stages(
    transcript: Transcript, model: RandomModel, codec: RowCodec, progress: Progress
) -> list[Stage]:
    """All stages of a run, compared with their oracles row by row."""
    everything = Oracle.of(model, slice(None))
    cached = accumulate((step.num_tokens for step in transcript.prefills), initial=0)
    jobs: list[Callable[[], Stage]] = [
        partial(prefill_stage, Oracle.of(model, heads), step, transcript.rows[0], before)
        for step, heads, before in zip(
            transcript.prefills, prefill_heads(model.geometry), cached, strict=False
        )
    ]
    jobs.append(partial(decode_stage, everything, transcript))
    if transcript.sparse is not None and transcript.selection is not None:
        jobs.append(partial(index_stage, transcript.selection, transcript.index_keys))
        jobs.append(
            partial(sparse_stage, everything, transcript, transcript.sparse, transcript.selection)
        )
    jobs.append(partial(rows_stage, everything, transcript, codec))
    return [job() for job in progress.track(jobs, description="float64 oracles")]


def prefill_stage(oracle: Oracle, step: Attended, rows: Tensor, before: int) -> Stage:
    visible = rows[: before + step.num_tokens]
    result = oracle.both(step, oracle.prefill(visible, step.num_tokens))
    name = f"prefill on {before} cached" if before else "prefill"
    return _stage(name, step, check_results(name, result))


def decode_stage(oracle: Oracle, transcript: Transcript) -> Stage:
    step = transcript.decode
    # the sparse step came later: these queries do not see its rows
    last = 0 if transcript.sparse is None else 1
    rows = [cached[: len(cached) - last] for cached in transcript.rows]
    result = oracle.both(step, oracle.decode(rows, step.q_lens))
    return _stage("decode", step, check_results("decode", result))


def index_stage(selection: Selection, keys: Sequence[Tensor]) -> Stage:
    """Check the logits, and that the selection is the top-k of these logits."""
    q, weights, one_each = selection.q.cpu(), selection.weights.cpu(), [1] * len(keys)
    logits, chosen = selection.logits.cpu(), selection.chosen.cpu()
    exact = reference.indexer_logits(q, weights, keys, one_each)
    naive = reference.indexer_logits(q, weights, keys, one_each, dtype=torch.float32)
    check = check_results("index", Result(logits, exact, naive))
    try:
        best = reference.indexer_topk(logits, chosen.shape[1])
        assert_same_bits("index selection", chosen, best)
    except AssertionError as wrong:
        check = replace(check, message=check.message or str(wrong))
    label = f"index, top {chosen.shape[1]}"
    return Stage(label, len(chosen), None, selection.seconds, check)


def sparse_stage(
    oracle: Oracle, transcript: Transcript, step: Attended, selection: Selection
) -> Stage:
    result = oracle.both(step, oracle.sparse(transcript.rows, selection.chosen))
    name = f"sparse, {selection.chosen.shape[1]} of {len(transcript.rows[0])} rows"
    return _stage(name, step, check_results("sparse", result))


def rows_stage(oracle: Oracle, transcript: Transcript, codec: RowCodec) -> Stage:
    """Check the cache rows of both sequences, including the rounding of the format."""
    prompt = torch.cat([step.kv for step in transcript.prefills])
    later = [transcript.decode, *([] if transcript.sparse is None else [transcript.sparse])]
    by_step = [step.kv.split(step.q_lens) for step in later]
    own = [torch.cat(steps) for steps in zip(*by_step, strict=True)]  # of each sequence
    counts = [len(prompt), *map(len, own)]
    positions = [*range(len(prompt))]
    for kv in own:
        positions += range(len(prompt), len(prompt) + len(kv))
    exact, naive = oracle.cached_rows(torch.cat([prompt, *own]).cpu(), positions, codec)

    def sequence(rows: Tensor, index: int) -> Tensor:
        parts = rows.split(counts)
        return torch.cat([parts[0], parts[1 + index]])

    results = [
        Result(rows.float(), sequence(exact, index), sequence(naive, index))
        for index, rows in enumerate(transcript.rows)
    ]
    tokens = sum(len(rows) for rows in transcript.rows)
    return Stage("cached rows", tokens, None, None, check_results("cached rows", *results))


def _stage(label: str, step: Attended, check: Check) -> Stage:
    return Stage(label, step.num_tokens, step.projection_seconds, step.attention_seconds, check)
