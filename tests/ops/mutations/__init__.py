"""Mutations of the CPU kernels, one module for each topic."""

from __future__ import annotations

from tests.mutations import Mutation
from tests.ops.mutations import (
    append_rows,
    compress_rows,
    decode,
    fp8,
    indexer,
    matmul,
    merge,
    norm_rope_quant,
    physical_rows,
    prefill,
    sparse,
)

MUTATIONS: list[Mutation] = [
    *append_rows.MUTATIONS,
    *compress_rows.MUTATIONS,
    *decode.MUTATIONS,
    *fp8.MUTATIONS,
    *indexer.MUTATIONS,
    *matmul.MUTATIONS,
    *merge.MUTATIONS,
    *norm_rope_quant.MUTATIONS,
    *physical_rows.MUTATIONS,
    *prefill.MUTATIONS,
    *sparse.MUTATIONS,
]
