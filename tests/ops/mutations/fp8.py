"""Mutations of `quantize_fp8` and `scaled_mm_fp8`."""

from __future__ import annotations

import torch

from mlakit.tools.workloads import QuantizeCase, ScaledMatmulCase
from tests.ops.mutations.changes import rolled, scaled, with_last_column_dropped, with_overflow
from tests.ops.mutations.checks import kernel, line

MUTATIONS = [
    kernel(QuantizeCase, "ignores the bound", lambda a: {"scale_ub": torch.inf}),
    kernel(QuantizeCase, "takes wider groups", lambda a: {"x": a["x"].roll(1, -1)}),
    kernel(
        QuantizeCase, "leaves the padding unwritten", after=lambda a: a["scales"][..., -1:].fill_(1)
    ),
    line(QuantizeCase, "fp8", "no bound on amax", ".clamp_max(scale_ub)", ""),
    line(
        QuantizeCase,
        "fp8",
        "last group left out",
        "scales[matrices, :, tile] = scale.mT",
        "scales[matrices, :-1, tile] = scale.mT[:, :-1]",
    ),
    kernel(ScaledMatmulCase, "scales by 1.02", scaled("b_scale", 1.02)),
    kernel(ScaledMatmulCase, "does not saturate", after=with_overflow("out")),
    kernel(ScaledMatmulCase, "drops the last product", with_last_column_dropped("a")),
    kernel(ScaledMatmulCase, "mixes up the groups", rolled("b_scale", -2)),
    kernel(
        ScaledMatmulCase, "reads padding of a_scale", lambda a: {"a_scale": a["a_scale"].flip(-1)}
    ),
    line(
        ScaledMatmulCase,
        "fp8",
        "scales one group off",
        "a_scale[matrices, :, left].mT",
        "a_scale[matrices, :, left].mT.roll(1, 1)",
    ),
]
