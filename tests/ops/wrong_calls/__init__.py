"""Wrong calls of the public ops, one table for each topic."""

from __future__ import annotations

from tests.ops.wrong_calls import (
    append_rows,
    compress_rows,
    decode,
    fp8,
    indexer,
    matmul,
    merge,
    norm_rope_quant,
    prefill,
    sparse,
)
from tests.ops.wrong_calls.spoiling import CallTables

WRONG: CallTables = {
    **append_rows.WRONG,
    **compress_rows.WRONG,
    **decode.WRONG,
    **fp8.WRONG,
    **indexer.WRONG,
    **matmul.WRONG,
    **merge.WRONG,
    **norm_rope_quant.WRONG,
    **prefill.WRONG,
    **sparse.WRONG,
}
