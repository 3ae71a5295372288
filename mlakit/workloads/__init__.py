"""Test calls of every public op as plain values: `DecodeCase(kv_lens=(70, 3), heads=16).run()`.

A case builds seeded inputs on any device, with everything that the contract allows: shuffled pages,
poison in memory that must not be read, garbage in unused table entries, padded strides. `run` calls
the op, compares each row of each result with the float64 oracle on the dequantised inputs, and
checks that no other memory was written. An error message has the command that repeats the case.

case             the base class of cases
inputs           seeded tensors surrounded by poison
paged            poisoned caches and page tables
random_cases     random cases of every op
random_launches  random launches of few compiled configurations, thousands per minute
decode, …        the cases of one op
fp8_scores       scores with the accumulator precision of Hopper's FP8 tensor cores
"""

from mlakit.workloads.append_rows import AppendRowsCase
from mlakit.workloads.case import Case, Trial
from mlakit.workloads.decode import DecodeCase
from mlakit.workloads.decode_launch import DecodeLaunch
from mlakit.workloads.fp8 import QuantizeCase, ScaledMatmulCase
from mlakit.workloads.indexer import IndexerLogitsCase, IndexerTopkCase
from mlakit.workloads.indexer_launch import IndexerLaunch
from mlakit.workloads.indexer_select import IndexerSelectCase
from mlakit.workloads.matmul import BatchedMatmulCase
from mlakit.workloads.merge import MergeCase
from mlakit.workloads.norm_rope_quant import AppendCase
from mlakit.workloads.physical_rows import PhysicalRowsCase
from mlakit.workloads.prefill import PrefillCase
from mlakit.workloads.prefill_fp8 import PrefillFp8Case
from mlakit.workloads.prefill_launch import PrefillLaunch
from mlakit.workloads.select_launch import IndexerSelectLaunch, IndexerTopkLaunch
from mlakit.workloads.sparse import SparseCase
from mlakit.workloads.sparse_launch import SparseLaunch

CASES: tuple[type[Case], ...] = (
    AppendCase,
    AppendRowsCase,
    PrefillCase,
    DecodeCase,
    SparseCase,
    IndexerLogitsCase,
    IndexerTopkCase,
    IndexerSelectCase,
    PhysicalRowsCase,
    MergeCase,
    QuantizeCase,
    ScaledMatmulCase,
    BatchedMatmulCase,
)

__all__ = [
    "CASES",
    "AppendCase",
    "AppendRowsCase",
    "BatchedMatmulCase",
    "Case",
    "DecodeCase",
    "DecodeLaunch",
    "IndexerLaunch",
    "IndexerLogitsCase",
    "IndexerSelectCase",
    "IndexerSelectLaunch",
    "IndexerTopkCase",
    "IndexerTopkLaunch",
    "MergeCase",
    "PhysicalRowsCase",
    "PrefillCase",
    "PrefillFp8Case",
    "PrefillLaunch",
    "QuantizeCase",
    "ScaledMatmulCase",
    "SparseCase",
    "SparseLaunch",
    "Trial",
]
