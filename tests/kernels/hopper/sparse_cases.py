"""What the tests of Hopper's sparse kernels run."""

from __future__ import annotations

import pytest

from mlakit.tools.workloads import SparseCase

ROW = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
# 512 columns that are all values, with and without rotated columns among them
ROWS = {
    "v3": ROW,
    "v4": {"kv_lora_rank": 448, "qk_rope_head_dim": 64, "v_width": 512},
    "no_rope": {"kv_lora_rank": 512, "qk_rope_head_dim": 0},
}
EVERY_ROW = pytest.mark.parametrize("row", ROWS)
KERNEL = "hopper:m64_bf16"


def run(kernel: str = KERNEL, **fields: object) -> None:
    """A case with pages of 64 rows, 64 heads and lists of 200 entries, by the kernel's name."""
    given = {**ROW, "page_size": 64, "num_pages": 6, "heads": 64, "topk": 200, **fields}
    SparseCase(**given).run("cuda", kernel)
