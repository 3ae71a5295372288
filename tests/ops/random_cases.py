"""Random problems of every op, as hypothesis draws them, and a kernel's way through them.

The examples are the same in every run; with `--hypothesis-seed=random` (or a number) pytest looks
at others, and at more of them. `test_mutations` shows that they kill mutants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.specs import KernelSpec
from mlakit.formats import FORMATS
from mlakit.tools.workloads import (
    AppendCase,
    AppendRowsCase,
    BatchedMatmulCase,
    Case,
    CompressCase,
    DecodeCase,
    IndexerLogitsCase,
    IndexerSelectCase,
    IndexerTopkCase,
    MergeCase,
    PhysicalRowsCase,
    PrefillCase,
    QuantizeCase,
    ScaledMatmulCase,
    SparseCase,
)
from mlakit.tools.workloads.random_cases import CACHED, UNCACHED, Draw, SeededDraw


class HypothesisDraw(Draw):
    """Choices that hypothesis makes, and simplifies where one fails."""

    def __init__(self, draw: Callable[..., Any]) -> None:
        super().__init__()
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))


class Simplest(Draw):
    """The simplest choice each time: sizes and strides of 1."""

    def integer(self, low: int, high: int) -> int:
        return low


@st.composite
def cached_cases(draw: Callable[..., Any], case: type[Case], format: str) -> Case:
    return CACHED[case](HypothesisDraw(draw), format)


@st.composite
def uncached_cases(draw: Callable[..., Any], case: type[Case]) -> Case:
    return UNCACHED[case](HypothesisDraw(draw))


def any_case(case: type[Case], formats: Sequence[str] = FORMATS) -> st.SearchStrategy[Any]:
    if case in UNCACHED:
        return uncached_cases(case)
    return st.sampled_from(formats).flatmap(lambda format: cached_cases(case, format))


class Exploration:
    """Random cases for one kernel; those it refuses are passed over, and counted."""

    def __init__(self, spec: KernelSpec, device: torch.device | str) -> None:
        self.spec, self.device = spec, device
        self.num_taken = 0
        self.refusal = f"{spec} was given nothing"

    def run(self, case: Case) -> None:
        try:
            case.run(self.device, self.spec.name)
        except UnsupportedError as refusal:
            self.refusal = str(refusal)
        else:
            self.num_taken += 1

    def over(
        self, strategy: st.SearchStrategy[Any], *, examples_of: str | None, **options: Any
    ) -> None:
        """Explore `strategy`; always the same examples for one name, others without one."""
        if torch.device(self.device).type == "cuda":
            # every step of simplifying a failed case compiles kernels: minutes, where the case
            # as it was drawn says enough
            options["phases"] = (Phase.explicit, Phase.generate)

        @settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), **options)
        @given(strategy)
        def explore(case: Case) -> None:
            self.run(case)

        if examples_of is not None:
            seed(crc32(examples_of.encode()))(explore)
        explore()


# no cache, rows without scales, and rows with scales
SIMPLEST = (None, "bf16", "fp8_token")


class Property(NamedTuple):
    """A kernel gives what the oracle gives, on so many random problems of a kind and format."""

    spec: KernelSpec
    case: type[Case]
    format: str | None  # None for a case without a cache
    examples: int

    @property
    def name(self) -> str:
        return str(self.spec) if self.format is None else f"{self.spec}-{self.format}"

    @property
    def strategy(self) -> st.SearchStrategy[Any]:
        if self.format is None:
            return uncached_cases(self.case)
        return cached_cases(self.case, self.format)

    def explore(self, device: str, **options: Any) -> Exploration:
        """The problems that every run of the tests looks at."""
        exploration = Exploration(self.spec, device)
        if device == "cuda":
            self._explore_on_gpu(exploration)
            return exploration
        examples = self.examples
        if self.spec.backend != "cpu":
            examples //= 3  # the interpreter takes a second or so for each
        examples_of = f"{device}-{self.name}"
        exploration.over(self.strategy, examples_of=examples_of, max_examples=examples, **options)
        return exploration

    def _explore_on_gpu(self, exploration: Exploration) -> None:
        """Look at few problems, because most compile kernels for a second or more.

        Hypothesis, which simplifies nothing here, would begin with the simplest of each format.
        """
        draws: list[Draw] = [
            SeededDraw(f"{self.name}-{number}") for number in range(self.examples // 5)
        ]
        if self.format in SIMPLEST:
            draws.append(Simplest())
        for draw in draws:
            if self.format is None:
                exploration.run(UNCACHED[self.case](draw))
            else:
                exploration.run(CACHED[self.case](draw, self.format))


PROPERTIES = [
    *(
        Property(spec, case, format, examples=15)
        for case in CACHED
        for spec in selection.specs(case.op)
        for format in FORMATS
    ),
    *(
        Property(spec, case, None, examples=40)
        for case in UNCACHED
        for spec in selection.specs(case.op)
    ),
]
# what random problems of this size do not reach: every tile boundary of the kernels, real widths
LARGE = [
    AppendCase(kv_lora_rank=512, qk_rope_head_dim=64, kv_lens=(503, 40), q_lens=(3, 40), heads=16),
    AppendRowsCase(
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        num_tokens=700,
        num_pages=60,
        format="fp8_block128",
        workspace_mib=1,
    ),
    CompressCase(
        kv_lora_rank=448,
        qk_rope_head_dim=64,
        v_width=512,
        format="fp8_block64",
        rate=128,
        overlap=False,
        kv_lens=(300, 128),
        q_lens=(270, 1),
        workspace_mib=1,
    ),
    # programs of several tokens, with windows of several requests
    CompressCase(kv_lens=(2300, 7, 6, 9), q_lens=(2290, 5, 6, 3), padded=True),
    PrefillCase(kv_lens=(300, 129), q_lens=(290, 129), heads=2, workspace_mib=1, padded=True),
    PrefillCase(kv_lens=(1100,), q_lens=(600,), heads=1),
    PrefillCase(
        kv_lens=(150,),
        q_lens=(20,),
        heads=8,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        sink="finite",
        expanded=True,
    ),
    DecodeCase(kv_lens=(8300, 4097), q_lens=(1, 1), page_size=48, sharpness=4.0, sink="finite"),
    DecodeCase(kv_lens=(1300, 513, 512), page_size=48, sharpness=4.0, workspace_mib=1),
    DecodeCase(
        kv_lens=(2700,), q_lens=(2,), page_size=2000, num_splits=3, padded=True, workspace_mib=1
    ),
    DecodeCase(kv_lens=(1100, 64), page_size=1, flat_table=True, q_lens=(3, 1), num_ctas=5),
    DecodeCase(kv_lens=(90, 40), q_lens=(64, 33), heads=40, mask="sliding_window_causal", window=9),
    # the portable kernel's own tile of many heads on sm_90
    DecodeCase(
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        kv_lens=(200, 64),
        q_lens=(2, 1),
        heads=40,
        page_size=64,
    ),
    DecodeCase(
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        kv_lens=(130, 65, 1),
        heads=20,
        page_size=64,
        format="fp8_block128",
        workspace_mib=1,
    ),
    SparseCase(
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        heads=130,
        topk=150,
        num_pages=20,
        num_tokens=2,
        format="fp8_block128",
        num_splits=2,
        padded=True,
    ),
    SparseCase(topk=600, num_pages=50, num_tokens=3, extra_format="fp8_token", extra_topk=300),
    SparseCase(
        kv_lora_rank=448,
        qk_rope_head_dim=64,
        v_width=512,
        format="fp8_block64",
        topk=300,
        num_pages=30,
        num_tokens=6,
        workspace_mib=1,
    ),
    SparseCase(topk=40, num_pages=5, num_tokens=3, extra_format="bf16", extra_topk=30),
    SparseCase(
        format="fp16",
        dtype="fp16",
        topk=40,
        num_pages=5,
        num_tokens=3,
        extra_format="fp16",
        extra_topk=30,
    ),
    IndexerLogitsCase(kv_lens=(2100, 1024), q_lens=(2, 1), page_size=64, heads=8),
    IndexerLogitsCase(kv_lens=(1500,), q_lens=(40,), heads=16, workspace_mib=1, format="fp8"),
    IndexerTopkCase(num_columns=5000, k=2048, num_tokens=9, workspace_mib=1, levels=9),
    IndexerTopkCase(num_columns=9000, k=1500, num_tokens=2, levels=900),
    IndexerSelectCase(kv_lens=(1200, 700), q_lens=(7, 20), k=400, block_tokens=6, page_size=64),
    PhysicalRowsCase(kv_lens=(7,) * 300, q_lens=(0, 1, 2) * 100, topk=1030, padding=3),
    MergeCase(num_parts=40, v_width=512),
    MergeCase(num_parts=6, v_width=1),
    QuantizeCase(m=300, k=512, group=128, workspace_mib=1),
    ScaledMatmulCase(m=5, n=8, k=64, n_group=128, k_group=128, padded=True),
    ScaledMatmulCase(m=200, n=700, k=512, n_group=128, k_group=128, workspace_mib=1),
    BatchedMatmulCase(batch=2, m=3, n=5, k=1),
    BatchedMatmulCase(batch=2, m=200, n=900, k=512, workspace_mib=1),
]
# rows without scales, like those of bf16
LIKE_BF16 = ("fp16", "fp32")


def is_repeated(checked: Property) -> bool:
    """Whether an interpreted kernel takes the same path as for another format.

    `indexer_select` scores with the kernel of `indexer_logits`, which is run on every format.
    """
    repeated = LIKE_BF16
    if checked.spec.op == "indexer_select":
        repeated += ("fp8", "fp8_block128", "fp8_block64")
    return checked.spec.backend == "triton" and checked.format in repeated


def problems_of(op: str) -> pytest.MarkDecorator:
    """Give a test each `problem` of an op: a function of a device and hypothesis' seed, or None."""
    cases = [case for case in LARGE if case.op == op]
    return pytest.mark.parametrize(
        "problem",
        [
            *(
                pytest.param(
                    partial(explore, each),
                    id=each.name,
                    marks=[pytest.mark.thorough] if is_repeated(each) else [],
                )
                for each in PROPERTIES
                if each.spec.op == op
            ),
            *(
                pytest.param(partial(run_large, spec, case), id=f"{spec}-large-{i}")
                for i, case in enumerate(cases)
                for spec in selection.specs(op)
            ),
        ],
    )


def explore(checked: Property, device: torch.device, hypothesis_seed: str | None) -> None:
    if hypothesis_seed is None:
        exploration = checked.explore(device.type)
    else:
        exploration = Exploration(checked.spec, device)
        exploration.over(checked.strategy, examples_of=None)
    if exploration.num_taken == 0:
        pytest.skip(exploration.refusal)


def run_large(spec: KernelSpec, case: Case, device: torch.device, _: str | None) -> None:
    try:
        case.run(device, spec.name)
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))
