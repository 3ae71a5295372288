"""Every public op on random problems, on every backend that takes them.

The examples are the same in every run; with `--hypothesis-seed=random` (or a number) pytest looks
at others, and at more of them. That this sees a wrong kernel is proved in `test_sabotages`.
"""

from __future__ import annotations

import pytest

from mlakit import dispatch
from mlakit.checks import UnsupportedError
from mlakit.formats import FORMATS
from mlakit.workloads import (
    CASES,
    AppendCase,
    BatchedMatmulCase,
    DecodeCase,
    IndexerLogitsCase,
    IndexerTopkCase,
    MergeCase,
    PrefillCase,
    QuantizeCase,
    ScaledMatmulCase,
    SparseCase,
)
from mlakit.workloads.draw import CACHED, UNCACHED
from tests.ops.random_cases import Exploration, cached_cases, uncached_cases

PROPERTIES = [
    *(
        pytest.param(spec, cached_cases(case, format), 15, id=f"{spec}-{format}")
        for case in CACHED
        for spec in dispatch.specs(case.op)
        for format in FORMATS
    ),
    *(
        pytest.param(spec, uncached_cases(case), 40, id=str(spec))
        for case in UNCACHED
        for spec in dispatch.specs(case.op)
    ),
]
# what random problems of this size do not reach: every tile boundary of the kernels, real widths
LARGE = [
    AppendCase(kv_lora_rank=512, qk_rope_head_dim=64, kv_lens=(503, 40), q_lens=(3, 40), heads=16),
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
    DecodeCase(kv_lens=(1100, 64), page_size=1, flat_table=True, q_lens=(3, 1), num_workers=5),
    DecodeCase(kv_lens=(90, 40), q_lens=(64, 33), heads=40, mask="sliding_window_causal", window=9),
    DecodeCase(
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        kv_lens=(130, 65, 1),
        heads=20,
        page_size=64,
        format="fp8_block128",
        workspace_mib=1,
    ),
    SparseCase(topk=600, num_pages=50, num_tokens=3, extra_format="fp8_token", extra_topk=300),
    SparseCase(
        kv_lora_rank=448,
        qk_rope_head_dim=64,
        v_width=512,
        format="fp8_block64",
        topk=300,
        num_pages=30,
        num_tokens=20,
        workspace_mib=1,
    ),
    IndexerLogitsCase(kv_lens=(2100, 1024), q_lens=(2, 1), page_size=64, heads=8),
    IndexerLogitsCase(kv_lens=(1500,), q_lens=(40,), heads=16, workspace_mib=1, format="fp8"),
    IndexerTopkCase(num_columns=5000, k=2048, num_tokens=9, workspace_mib=1, levels=9),
    MergeCase(num_parts=40, v_width=512),
    QuantizeCase(m=300, k=512, group=128, workspace_mib=1),
    ScaledMatmulCase(m=5, n=8, k=64, n_group=128, k_group=128, padded=True),
    ScaledMatmulCase(m=200, n=700, k=512, n_group=128, k_group=128, workspace_mib=1),
    BatchedMatmulCase(batch=2, m=200, n=900, k=512, workspace_mib=1),
]


@pytest.mark.parametrize(("spec", "strategy", "examples"), PROPERTIES)
def test_random_problems_match_the_oracle(spec, strategy, examples, device, pytestconfig, request):
    exploration = Exploration(spec, device)
    if spec.backend != "cpu" and device.type == "cpu":
        examples //= 3  # the interpreter takes a second or so for each
    if pytestconfig.getoption("--hypothesis-seed") is None:
        exploration.over(strategy, examples_of=request.node.callspec.id, max_examples=examples)
    else:
        exploration.over(strategy, examples_of=None)
    if exploration.num_taken == 0:
        pytest.skip(exploration.refusal)


@pytest.mark.parametrize(
    ("spec", "case"),
    [
        pytest.param(spec, case, id=f"{spec}-{i}")
        for i, case in enumerate(LARGE)
        for spec in dispatch.specs(case.op)
    ],
)
def test_large_problems_match_the_oracle(spec, case, device):
    try:
        case.run(device, spec.name)
    except UnsupportedError as refusal:
        pytest.skip(str(refusal))


def test_every_op_has_a_case():
    assert {case.op for case in CASES} == set(dispatch.OPS)
    assert set(CASES) == {*CACHED, *UNCACHED}
