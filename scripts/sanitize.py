"""Small calls of every Hopper kernel for compute-sanitizer; needs a Hopper GPU.

    compute-sanitizer --tool memcheck python scripts/sanitize.py tma
    compute-sanitizer --tool memcheck python scripts/sanitize.py gather
    compute-sanitizer --tool memcheck python scripts/sanitize.py sparse
    compute-sanitizer --tool memcheck python scripts/sanitize.py indexer
    compute-sanitizer --tool memcheck python scripts/sanitize.py prefill
    compute-sanitizer --tool racecheck python scripts/sanitize.py one
    compute-sanitizer --tool racecheck python scripts/sanitize.py many

`tma` decodes with a page size of 64, `gather` with a page size of 1, which uses a gather producer.
`sparse` and `indexer` also run the portable kernels of `sparse_mla` and `indexer_topk`.

`one` and `many` are a minimal kernel: one warpgroup passes a vector to another through two
mbarriers. They differ in the number of threads that write and read each word: one, or several that
write the same value. racecheck accepts the first and reports the second, whose results are always
correct: its reports of words with several writers are false positives.
"""

from __future__ import annotations

import sys

import torch
from rich.console import Console
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from mlakit.dispatch.knobs import Backend
from mlakit.ops import mla_decode
from mlakit.tools.bench import gpu
from mlakit.tools.bench.pool import filled_pages
from mlakit.tools.workloads import (
    Case,
    IndexerLogitsCase,
    IndexerSelectCase,
    IndexerTopkCase,
    PrefillCase,
    SparseCase,
)

LENGTHS = [700, 64, 1, 333]  # split, one block, one key, an end within a block
E4M3 = torch.float8_e4m3fn
CALLS = (  # kernel, heads, format, type of the queries
    ("m64_bf16", 128, "bf16", torch.bfloat16),
    ("small_m_bf16", 16, "bf16", torch.bfloat16),
    ("small_m_fp8_kv", 16, "fp8_token", torch.bfloat16),
    ("small_m_fp8_kv", 32, "fp8_block128", torch.bfloat16),
    ("m64_fp8_kv", 128, "fp8", torch.bfloat16),
    ("m64_fp8_kv", 128, "fp8_token", torch.bfloat16),
    ("m64_fp8_qk", 128, "fp8", E4M3),
    ("m64_fp8_qk", 128, "fp8_token", E4M3),
)
ROW = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "page_size": 64, "num_pages": 9}
SPARSE = (  # lists that end within a block, splits, a second cache
    SparseCase(**{**ROW, "num_tokens": 3, "topk": 200, "heads": 128, "num_splits": 2}),
    SparseCase(**{**ROW, "num_tokens": 2, "topk": 65, "heads": 16, "page_size": 3}),
    SparseCase(
        **{**ROW, "num_tokens": 2, "topk": 64, "heads": 64, "padded": True},
        extra_format="bf16",
        extra_page_size=2,
        extra_topk=70,
    ),
)
SPARSE_FP8 = tuple(
    SparseCase(
        **{**ROW, "num_tokens": 2, "topk": 200, "heads": heads, "num_splits": 2, "format": format}
    )
    for format, heads in (("fp8_block128", 128), ("fp8_token", 64), ("fp8", 16))
)
PREFILL = (  # cached context, no keys, a tile of one block
    PrefillCase(
        kv_lens=(300, 0, 40),
        q_lens=(130, 0, 40),
        heads=3,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    PrefillCase(
        kv_lens=(200, 1),
        q_lens=(200, 1),
        heads=2,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        mask="null",
    ),
)
INDEX_ROW = {"kv_lora_rank": 128, "qk_rope_head_dim": 0, "format": "fp8_token", "dtype": "e4m3"}
INDEXER = tuple(
    IndexerLogitsCase(**INDEX_ROW, heads=heads, page_size=page_size, kv_lens=kv_lens, q_lens=q_lens)
    for heads, page_size, kv_lens, q_lens in (
        (64, 64, (700, 64, 1), (1, 1, 1)),
        (32, 128, (700, 64), (30, 9)),
    )
)
SELECTION = (
    IndexerTopkCase(num_tokens=3, num_columns=4096, k=2048),
    IndexerTopkCase(num_tokens=2, num_columns=20000, k=512),
    IndexerSelectCase(
        **{**INDEX_ROW, "format": "bf16", "dtype": "bf16"},
        page_size=64,
        kv_lens=(3000, 65),
        q_lens=(2, 1),
        heads=64,
        k=512,
    ),
)
ROUNDS = 16
CONSOLE = Console()


def decode(page_size: int) -> None:
    for kernel, heads, format, dtype in CALLS:
        own = gpu.generator()
        cache, table = filled_pages(LENGTHS, page_size, format, own)
        q = gpu.normal(own, len(LENGTHS), heads, 576).to(dtype)
        given = {"softmax_scale": 0.1, "backend": f"hopper:{kernel}"}
        out, _ = mla_decode(q, cache, table, gpu.int32(LENGTHS), **given)
        result = "finite" if out.isfinite().all() else "NOT FINITE"
        CONSOLE.print(kernel, page_size, heads, format, dtype, result)


def check(cases: tuple[Case, ...], backend: Backend) -> None:
    for case in cases:
        case.run("cuda", backend)
        CONSOLE.print(backend, case)


def sparse() -> None:
    check((*SPARSE, *SPARSE_FP8), "hopper")
    check(SPARSE, "triton")


def prefill() -> None:
    check(PREFILL, "hopper")


def indexer() -> None:
    check(INDEXER, "hopper")
    check(SELECTION, "triton")


@gluon.jit
def _produce(source, smem, full, empty, count, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    at = gl.arange(0, SIZE, LAYOUT)
    for i in range(count):
        mbarrier.wait(empty, (i & 1) ^ 1)
        smem.store(gl.load(source + i * SIZE + at))
        mbarrier.arrive(full, count=1)


@gluon.jit
def _consume(target, smem, full, empty, count, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    at = gl.arange(0, SIZE, LAYOUT)
    for i in range(count):
        mbarrier.wait(full, i & 1)
        gl.store(target + i * SIZE + at, smem.load(LAYOUT))
        mbarrier.arrive(empty, count=1)


@gluon.jit
def handover_kernel(source, target, count, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    smem = gl.allocate_shared_memory(gl.float32, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    gl.warp_specialize(
        [
            (_produce, (source, smem, full, empty, count, SIZE, LAYOUT)),
            (_consume, (target, smem, full, empty, count, SIZE, LAYOUT)),
        ],
        [4],
        [64],
    )


def hand_over(size: int, layout: object) -> None:
    source = torch.randn(ROUNDS, size, device="cuda")
    target = torch.zeros_like(source)
    handover_kernel[(4,)](source, target, ROUNDS, size, layout, num_warps=4)
    CONSOLE.print("equal" if torch.equal(source, target) else "NOT EQUAL")


def one() -> None:
    hand_over(128, gl.BlockedLayout([1], [32], [4], [0]))


def many() -> None:
    # the layout of the columns of a wgmma accumulator: 32 threads hold each column
    hand_over(16, gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])))


if __name__ == "__main__":
    PARTS = {
        "tma": lambda: decode(64),
        "gather": lambda: decode(1),
        "sparse": sparse,
        "indexer": indexer,
        "prefill": prefill,
        "one": one,
        "many": many,
    }
    if sys.argv[1:] not in [[name] for name in PARTS]:
        sys.exit(__doc__)
    PARTS[sys.argv[1]]()
