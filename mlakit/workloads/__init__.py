"""Calls of every public op as plain values: `DecodeCase(kv_lens=(70, 3), heads=16).run()`.

A case builds seeded inputs on any device, hostile in every way the contract allows: shuffled pages,
poison in whatever must not be read, garbage in unused table entries, strides that are not packed.
`run` calls the op and holds each row of each result against the float64 oracle on the dequantised
inputs, then all memory against its state before. What fails prints the line that repeats it.
"""

from mlakit.workloads.case import Case, Trial
from mlakit.workloads.decode import DecodeCase
from mlakit.workloads.decode_launch import DecodeLaunch
from mlakit.workloads.fp8 import QuantizeCase, ScaledMatmulCase
from mlakit.workloads.indexer import IndexerLogitsCase, IndexerTopkCase
from mlakit.workloads.matmul import BatchedMatmulCase
from mlakit.workloads.merge import MergeCase
from mlakit.workloads.norm_rope_quant import AppendCase
from mlakit.workloads.prefill import PrefillCase
from mlakit.workloads.sparse import SparseCase

CASES: tuple[type[Case], ...] = (
    AppendCase,
    PrefillCase,
    DecodeCase,
    SparseCase,
    IndexerLogitsCase,
    IndexerTopkCase,
    MergeCase,
    QuantizeCase,
    ScaledMatmulCase,
    BatchedMatmulCase,
)

__all__ = [
    "CASES",
    "AppendCase",
    "BatchedMatmulCase",
    "Case",
    "DecodeCase",
    "DecodeLaunch",
    "IndexerLogitsCase",
    "IndexerTopkCase",
    "MergeCase",
    "PrefillCase",
    "QuantizeCase",
    "ScaledMatmulCase",
    "SparseCase",
    "Trial",
]
