"""Random problems find a kernel made wrong, and a failure says how to run its problem again."""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import e, log2
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

from mlakit import dispatch
from mlakit.cache import WHOLE
from mlakit.checks import UnsupportedError
from mlakit.formats import FORMATS
from mlakit.masks import CAUSAL, NULL, Mask
from mlakit.plan import DecodePlanTensors
from mlakit.workloads import (
    CASES,
    AppendCase,
    BatchedMatmulCase,
    Case,
    DecodeCase,
    IndexerLogitsCase,
    IndexerTopkCase,
    MergeCase,
    PrefillCase,
    QuantizeCase,
    ScaledMatmulCase,
    SparseCase,
)
from tests.ops.random_cases import Exploration, any_case

Change = Callable[[dict[str, Any]], dict[str, Any]]


class Sabotage(NamedTuple):
    """A kernel made wrong: its named arguments changed before it runs, or its results after."""

    case: type[Case]
    name: str
    before: Callable[[dict[str, Any]], dict[str, Any]] = lambda a: {}
    after: Callable[[dict[str, Any]], object] = lambda a: None
    formats: tuple[str, ...] = FORMATS

    def __call__(self, launch: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(launch)

        def wrong(*args: Any, **kwargs: Any) -> None:
            arguments = signature.bind(*args, **kwargs).arguments
            arguments.update(self.before(arguments))
            launch(**arguments)
            self.after(arguments)

        return wrong


class LooseMask(Mask):
    """Shows every query one key too many."""

    def interval(self, position, num_keys):
        first, last = super().interval(position, num_keys)
        return first, min(last + 1, num_keys)

    def visible(self, positions, keys):
        return super().visible(positions, keys) | (keys[None, :] == positions[:, None] + 1)


def keyless(a: dict[str, Any]) -> dict[str, Any]:
    return {"kv_lens": (a["kv_lens"] - 1).clamp_min(0)}


def rescaled(a: dict[str, Any]) -> dict[str, Any]:
    return {"softmax_scale": 1.02 * a["softmax_scale"]}


def loosened(a: dict[str, Any]) -> dict[str, Any]:
    return {"mask": LooseMask(a["mask"].kind, a["mask"].window)}


def unmasked(a: dict[str, Any]) -> dict[str, Any]:
    return {"mask": NULL}


def unwindowed(a: dict[str, Any]) -> dict[str, Any]:
    return {"mask": CAUSAL if a["mask"].is_causal else a["mask"]}


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda a: {name: None}


def with_pages_swapped(a: dict[str, Any]) -> dict[str, Any]:
    """The first and the last entry of every request that name something, exchanged."""
    is_flat = isinstance(a["page_table"], tuple)
    entries = (a["page_table"][1] if is_flat else a["page_table"]).clone()
    limit = a["layer"].num_slots if is_flat else len(a["layer"].payload)
    for request in entries[None] if is_flat else entries:
        used = ((request >= 0) & (request < limit)).nonzero().flatten()
        request[used[:1]], request[used[-1:]] = request[used[-1:]], request[used[:1]]
    return {"page_table": (a["page_table"][0], entries) if is_flat else entries}


def by_request(change: Change) -> Change:
    """Of an append by page table and lengths; others stay as they are."""
    return lambda a: change(a) if a["slots"] is None else {}


def by_slot(change: Change) -> Change:
    """Of an append by slots and positions."""
    return lambda a: {} if a["slots"] is None else change(a)


def plus_one(a: dict[str, Any], name: str) -> dict[str, Any]:
    return {name: a[name] + 1}


def with_next_slot(a: dict[str, Any]) -> dict[str, Any]:
    later = (a["slots"] + 1) % a["layer"].num_slots
    return {"slots": torch.where(a["slots"] < 0, a["slots"], later)}


def with_padding_stored(a: dict[str, Any]) -> dict[str, Any]:
    return {"slots": a["slots"].clamp_min(0)}


def with_any_position(a: dict[str, Any]) -> dict[str, Any]:
    return {"positions": a["positions"].clamp(0, max(len(a["freqs"]) - 1, 0))}


def with_binary_lse(a: dict[str, Any]) -> None:
    a["lse"].mul_(log2(e))


def with_a_row_missing(a: dict[str, Any]) -> None:
    a["out"][-1:] = 0


def averaged(a: dict[str, Any]) -> dict[str, Any]:
    return {"softmax_scale": 0.0}


def with_a_stray_write(a: dict[str, Any]) -> None:
    a["layer"].payload[-1, -1].view(torch.uint8)[-1] ^= 1


def with_overflow(name: str) -> Callable[[dict[str, Any]], object]:
    """e4m3 that goes to NaN where it should saturate."""

    def overflow(a: dict[str, Any]) -> None:
        if a[name].dtype == torch.float8_e4m3fn:
            stored = a[name].view(torch.uint8)
            stored[stored & 0x7F == 0x7E] |= 1

    return overflow


def with_last_column_dropped(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def drop(a: dict[str, Any]) -> dict[str, Any]:
        changed = a[name].clone()
        changed[..., -1:] = 0
        return {name: changed}

    return drop


def scaled(name: str, factor: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda a: {name: (a[name].float() * factor).to(a[name].dtype)}


def rolled(name: str, axis: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda a: {name: a[name].roll(1, axis)}


def with_unit_scale(a: dict[str, Any]) -> dict[str, Any]:
    return {"layer": replace(a["layer"], tensor_scale=1.0)}


def with_a_split_left_out(a: dict[str, Any]) -> dict[str, Any]:
    plan = a["splits"]
    return (
        {"splits": plan._replace(items=plan.items[:-1])}
        if isinstance(plan, DecodePlanTensors)
        else {}
    )


def with_negative_rows_wrapped(a: dict[str, Any]) -> dict[str, Any]:
    num_slots = a["layer"].num_slots
    rows = a["rows"]
    return {"rows": torch.where((rows < 0) & (rows >= -num_slots), rows + num_slots, rows)}


def with_ties_reversed(a: dict[str, Any]) -> None:
    columns = a["logits"].shape[1]
    if a["row_starts"] is None and a["row_ends"] is None and columns:
        order = a["logits"].flip(1).sort(dim=1, descending=True, stable=True)
        best = (columns - 1 - order.indices).masked_fill(order.values == -torch.inf, -1)
        kept = min(columns, a["out"].shape[1])
        a["out"][:, :kept] = best[:, :kept].int()


def with_equal_weights(a: dict[str, Any]) -> dict[str, Any]:
    return {"lses": [lse.clamp(max=0.0) for lse in a["lses"]]}


def with_empty_parts_read(a: dict[str, Any]) -> dict[str, Any]:
    return {"lses": [lse.clamp(min=-1e30) for lse in a["lses"]]}


SABOTAGES = [
    Sabotage(DecodeCase, "drops the last key", keyless),
    Sabotage(DecodeCase, "reads past the end", lambda a: {"kv_lens": a["kv_lens"] + 1}),
    Sabotage(DecodeCase, "scales scores by 1.02", rescaled),
    Sabotage(DecodeCase, "weighs all keys alike", averaged),
    Sabotage(DecodeCase, "is causal but for one key", loosened),
    Sabotage(DecodeCase, "does not mask the tail", unmasked),
    Sabotage(DecodeCase, "has no window", unwindowed),
    Sabotage(DecodeCase, "ignores the sink", without("sink")),
    Sabotage(DecodeCase, "swaps two pages", with_pages_swapped),
    Sabotage(DecodeCase, "ignores q_scale", without("q_scale")),
    Sabotage(DecodeCase, "ignores the tensor scale", with_unit_scale, formats=("fp8",)),
    Sabotage(DecodeCase, "ignores the shard", lambda a: {"shard": WHOLE}),
    Sabotage(DecodeCase, "leaves a split out", with_a_split_left_out),
    Sabotage(DecodeCase, "drops a column of the rope", with_last_column_dropped("q_rope")),
    Sabotage(DecodeCase, "gives lse in base 2", after=with_binary_lse),
    Sabotage(DecodeCase, "leaves a row unwritten", after=with_a_row_missing),
    Sabotage(DecodeCase, "writes to the cache", after=with_a_stray_write),
    Sabotage(PrefillCase, "scales scores by 1.02", rescaled),
    Sabotage(PrefillCase, "weighs all keys alike", averaged),
    Sabotage(PrefillCase, "is causal but for one key", loosened),
    Sabotage(PrefillCase, "does not mask the tail", unmasked),
    Sabotage(PrefillCase, "has no window", unwindowed),
    Sabotage(PrefillCase, "ignores the sink", without("sink")),
    Sabotage(PrefillCase, "ignores the slopes", without("alibi_slopes")),
    Sabotage(PrefillCase, "drops a column of the rope", with_last_column_dropped("k_rope")),
    Sabotage(PrefillCase, "mixes up the heads", rolled("v", 1)),
    Sabotage(PrefillCase, "gives lse in base 2", after=with_binary_lse),
    Sabotage(PrefillCase, "leaves a row unwritten", after=with_a_row_missing),
    Sabotage(SparseCase, "scales scores by 1.02", rescaled),
    Sabotage(SparseCase, "weighs all keys alike", averaged),
    Sabotage(SparseCase, "ignores the lengths", without("topk_lens")),
    Sabotage(SparseCase, "drops the last entry", lambda a: {"rows": a["rows"][:, :-1]}),
    Sabotage(SparseCase, "takes negative rows from the end", with_negative_rows_wrapped),
    Sabotage(SparseCase, "clamps rows", lambda a: {"rows": a["rows"].clamp(0)}),
    Sabotage(SparseCase, "ignores the extra cache", without("extra")),
    Sabotage(SparseCase, "ignores the sink", without("sink")),
    Sabotage(
        SparseCase, "gives lse for max_logits", after=lambda a: a["max_logits"].copy_(a["lse"])
    ),
    Sabotage(SparseCase, "writes to the cache", after=with_a_stray_write),
    Sabotage(IndexerLogitsCase, "drops the last key", keyless),
    Sabotage(IndexerLogitsCase, "is causal but for one key", loosened),
    Sabotage(IndexerLogitsCase, "has no window", unwindowed),
    Sabotage(IndexerLogitsCase, "swaps two pages", with_pages_swapped),
    Sabotage(IndexerLogitsCase, "scales weights by 1.001", scaled("weights", 1.001)),
    Sabotage(
        IndexerLogitsCase, "drops the sign of weights", lambda a: {"weights": a["weights"].abs()}
    ),
    Sabotage(
        IndexerLogitsCase,
        "leaves 0 where nothing is seen",
        after=lambda a: a["out"].nan_to_num_(neginf=0.0),
    ),
    Sabotage(IndexerTopkCase, "ignores row_ends", without("row_ends")),
    Sabotage(IndexerTopkCase, "ignores row_starts", without("row_starts")),
    Sabotage(IndexerTopkCase, "selects -inf", lambda a: {"logits": a["logits"].clamp_min(-1e38)}),
    Sabotage(
        IndexerTopkCase, "ranks NaN last", lambda a: {"logits": a["logits"].nan_to_num(nan=-1e38)}
    ),
    Sabotage(IndexerTopkCase, "prefers the later of equals", after=with_ties_reversed),
    Sabotage(MergeCase, "ignores the sink", without("sink")),
    Sabotage(MergeCase, "weighs the parts alike", with_equal_weights),
    Sabotage(MergeCase, "reads empty parts", with_empty_parts_read),
    Sabotage(
        MergeCase,
        "loses a part",
        lambda a: {"outs": a["outs"][1:] or a["outs"], "lses": a["lses"][1:] or a["lses"]},
    ),
    Sabotage(QuantizeCase, "ignores the bound", lambda a: {"scale_ub": torch.inf}),
    Sabotage(QuantizeCase, "takes wider groups", lambda a: {"x": a["x"].roll(1, -1)}),
    Sabotage(
        QuantizeCase, "leaves the padding unwritten", after=lambda a: a["scales"][..., -1:].fill_(1)
    ),
    Sabotage(ScaledMatmulCase, "scales by 1.02", scaled("b_scale", 1.02)),
    Sabotage(ScaledMatmulCase, "does not saturate", after=with_overflow("out")),
    Sabotage(ScaledMatmulCase, "drops the last product", with_last_column_dropped("a")),
    Sabotage(ScaledMatmulCase, "mixes up the groups", rolled("b_scale", -2)),
    Sabotage(
        ScaledMatmulCase, "reads padding of a_scale", lambda a: {"a_scale": a["a_scale"].flip(-1)}
    ),
    Sabotage(BatchedMatmulCase, "does not saturate", after=with_overflow("out")),
    Sabotage(BatchedMatmulCase, "drops the last product", with_last_column_dropped("a")),
    Sabotage(BatchedMatmulCase, "scales by 1.02", scaled("b", 1.02)),
    Sabotage(BatchedMatmulCase, "mixes up the batch", rolled("b", 0)),
    Sabotage(AppendCase, "appends one position late", by_request(lambda a: plus_one(a, "kv_lens"))),
    Sabotage(AppendCase, "swaps two pages", by_request(with_pages_swapped)),
    Sabotage(AppendCase, "rotates one position late", by_slot(lambda a: plus_one(a, "positions"))),
    Sabotage(AppendCase, "stores one slot late", by_slot(with_next_slot)),
    Sabotage(AppendCase, "stores padding tokens", by_slot(with_padding_stored)),
    Sabotage(AppendCase, "rotates padding tokens without a position", by_slot(with_any_position)),
    Sabotage(AppendCase, "scales gamma by 1.02", scaled("gamma", 1.02)),
    Sabotage(AppendCase, "doubles epsilon", lambda a: {"epsilon": 2 * a["epsilon"]}),
    Sabotage(
        AppendCase,
        "rotates the other way",
        lambda a: {
            "freqs": torch.stack([a["freqs"][:, 0::2], -a["freqs"][:, 1::2]], -1).flatten(1)
        },
    ),
    Sabotage(AppendCase, "has one rope", lambda a: {"rope": "half"}),
    Sabotage(AppendCase, "has scales of one kind", lambda a: {"power_of_two_scales": True}),
    Sabotage(AppendCase, "does not saturate", after=with_overflow("q_rope_out")),
    Sabotage(AppendCase, "writes to another row", after=with_a_stray_write),
]


@pytest.mark.parametrize(
    "sabotage", [pytest.param(each, id=f"{each.case.op} {each.name}") for each in SABOTAGES]
)
def test_a_wrong_kernel_is_found(sabotage, monkeypatch):
    (spec,) = (each for each in dispatch.specs(sabotage.case.op) if each.backend == "cpu")
    monkeypatch.setitem(spec.__dict__, "launch", sabotage(spec.launch))
    with pytest.raises(AssertionError, match=r'^python -c "from mlakit.workloads import'):
        Exploration(spec, "cpu").over(
            any_case(sabotage.case, sabotage.formats),
            examples_of=sabotage.name,
            max_examples=150,
            phases=[Phase.generate],
        )


def case_of(line: str) -> Case:
    """The case that a reproduction line runs."""
    python, option, code = shlex.split(line)
    assert (python, option) == ("python", "-c")
    imports, expression = code.split("; ")
    scope: dict[str, Any] = {}
    exec(imports, scope)
    constructor, _, arguments = expression.rpartition(".run(")
    assert arguments.endswith(")")
    case = eval(constructor, scope)
    assert isinstance(case, Case)
    return case


@pytest.mark.parametrize("case", CASES)
def test_the_reproduction_line_is_the_case(case):
    @settings(
        deadline=None, derandomize=True, max_examples=25, suppress_health_check=list(HealthCheck)
    )
    @given(any_case(case))
    def explore(drawn: Case) -> None:
        assert case_of(drawn.reproduction()) == drawn
        assert case_of(drawn.reproduction("cuda", "triton")) == drawn

    explore()


def test_the_reproduction_line_names_device_and_backend():
    assert MergeCase(seed=3).reproduction("cuda", "triton") == (
        'python -c "from mlakit.workloads import MergeCase; '
        "MergeCase(seed=3).run(device='cuda', backend='triton')\""
    )


def test_the_reproduction_line_runs(monkeypatch):
    (spec,) = (each for each in dispatch.specs("mla_decode") if each.backend == "cpu")
    case = DecodeCase(format="fp8_block64", kv_lens=(17, 0, 40), sink="mixed", seed=7, world=2)
    monkeypatch.setitem(spec.__dict__, "launch", Sabotage(DecodeCase, "", keyless)(spec.launch))
    with pytest.raises(AssertionError) as failure:
        case.run(backend="cpu")
    line = str(failure.value).splitlines()[0]
    assert case_of(line) == case
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        line,
        shell=True,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr  # nothing is wrong with the kernel over there


def test_an_exception_of_the_op_carries_the_reproduction_line():
    case = AppendCase(format="fp8_token", kv_lora_rank=7)
    with pytest.raises(AssertionError, match=r"^python -c .*\nValueError: fp8_token"):
        case.run()


def test_a_refusal_stays_a_refusal(monkeypatch):
    def refuse(*_: object) -> None:
        raise UnsupportedError("no kernel")

    monkeypatch.setattr(dispatch, "select", refuse)
    with pytest.raises(UnsupportedError, match=r"^no kernel$"):
        MergeCase().run()
