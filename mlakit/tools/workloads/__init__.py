"""Test calls of every public op as plain values: `DecodeCase(kv_lens=(70, 3), heads=16).run()`.

A case builds seeded inputs on any device, with everything that the contract allows: shuffled pages,
poison in memory that must not be read, garbage in unused table entries, padded strides. `run` calls
the op, compares each row of each result with the float64 oracle on the dequantised inputs, and
checks that no other memory was written. An error message has the command that repeats the case.

case             the base class of cases
absorbed         that of decode and sparse attention
inputs           seeded tensors surrounded by poison
paged            poisoned caches and page tables
random_cases     random cases of every op
random_launches  random cases of few compiled configurations with the batched oracle: a GPU checks
                 thousands a minute
decode, …        the cases of one op
fp8_scores       scores with the accumulator precision of Hopper's FP8 tensor cores
"""

from mlakit.tools.workloads.append_rows import AppendRowsCase
from mlakit.tools.workloads.case import BatchedCase, Case, Trial
from mlakit.tools.workloads.compress_rows import CompressCase
from mlakit.tools.workloads.decode import DecodeCase
from mlakit.tools.workloads.fp8 import QuantizeCase, ScaledMatmulCase
from mlakit.tools.workloads.indexer import IndexerLogitsCase, IndexerTopkCase
from mlakit.tools.workloads.indexer_select import IndexerSelectCase
from mlakit.tools.workloads.matmul import BatchedMatmulCase
from mlakit.tools.workloads.merge import MergeCase
from mlakit.tools.workloads.norm_rope_quant import AppendCase
from mlakit.tools.workloads.physical_rows import PhysicalRowsCase
from mlakit.tools.workloads.prefill import PrefillCase
from mlakit.tools.workloads.prefill_fp8 import PrefillFp8Case
from mlakit.tools.workloads.sparse import SparseCase

CASES: tuple[type[Case], ...] = (
    AppendCase,
    AppendRowsCase,
    CompressCase,
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
    "BatchedCase",
    "BatchedMatmulCase",
    "Case",
    "CompressCase",
    "DecodeCase",
    "IndexerLogitsCase",
    "IndexerSelectCase",
    "IndexerTopkCase",
    "MergeCase",
    "PhysicalRowsCase",
    "PrefillCase",
    "PrefillFp8Case",
    "QuantizeCase",
    "ScaledMatmulCase",
    "SparseCase",
    "Trial",
]
