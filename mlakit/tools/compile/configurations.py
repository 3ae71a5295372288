"""The problems whose kernels `mlakit support --compile` compiles.

Each is a case of `mlakit.tools.workloads` with the dimensions of a real model.
"""

from __future__ import annotations

from typing import Any, cast

from mlakit.dispatch.architectures import AMD
from mlakit.dispatch.names import Backend
from mlakit.formats import FORMATS, GROUP_FORMATS
from mlakit.kernels.blackwell.support import why_not_triton
from mlakit.model.masks import KINDS, WINDOWED
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
    PrefillFp8Case,
    QuantizeCase,
    ScaledMatmulCase,
    SparseCase,
)

ARCHITECTURES = (80, 89, 90, 100, 120)
AMD_ARCHITECTURES = tuple(AMD)
COMPILED_SPLIT = ("bf16_split", "fp8_split")  # fp16 and fp32 rows load and store alike
V3_ROW = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
GLM5_NEXT_ROW = {"kv_lora_rank": 512, "qk_rope_head_dim": 0}
NARROW_ROW = {"kv_lora_rank": 256, "qk_rope_head_dim": 64}  # of Mistral 4
V4_ROW = {"kv_lora_rank": 448, "qk_rope_head_dim": 64, "v_width": 512}


def _row(format: str) -> dict[str, Any]:
    return {"format": format, "page_size": 64, **(V4_ROW if format == "fp8_block64" else V3_ROW)}


def _query(format: str) -> str:
    return format if format in ("bf16", "fp16", "fp32") else "bf16"


def _decode(format: str, heads: int, **more: Any) -> DecodeCase:
    given = {
        "dtype": _query(format),
        "kv_lens": (130, 65),
        "q_lens": (1, 1),
        **_row(format),
        **more,
    }
    return DecodeCase(heads=heads, **given)


def _sparse(format: str, heads: int, **more: Any) -> SparseCase:
    given = {"dtype": _query(format), "topk": 128, "num_tokens": 2, **_row(format), **more}
    return SparseCase(heads=heads, **given)


def _append(format: str, **more: Any) -> AppendCase:
    return AppendCase(**{"heads": 16, "kv_lens": (7,), "q_lens": (2,), **_row(format), **more})


def _compress(**more: Any) -> CompressCase:
    """The overlapping windows of DeepSeek-V4."""
    given: dict[str, Any] = {"kv_lens": (9, 4), "q_lens": (2, 1), "page_size": 64, **V4_ROW}
    return CompressCase(**{**given, "format": "fp8_block64", **more})


def _prefill(nope: int, rope: int, v: int, **more: Any) -> PrefillCase:
    widths = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": v}
    return PrefillCase(**{"heads": 2, "kv_lens": (200,), "q_lens": (130,), **widths, **more})


def _prefill_fp8(**more: Any) -> PrefillFp8Case:
    widths = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return PrefillFp8Case(**{"heads": 2, "kv_lens": (200,), "q_lens": (130,), **widths, **more})


def _index_keys(**more: Any) -> IndexerLogitsCase:
    row = {"kv_lora_rank": 128, "qk_rope_head_dim": 0, "page_size": 64}
    return IndexerLogitsCase(**{"heads": 64, "kv_lens": (130,), "q_lens": (2,), **row, **more})


def _product(**more: Any) -> ScaledMatmulCase:
    """K is neither a multiple of a group nor of a step of the Hopper kernel."""
    return ScaledMatmulCase(**{"k": 528, "n_group": 128, "k_group": 128, **more})


def _select(**more: Any) -> IndexerSelectCase:
    row = {"kv_lora_rank": 128, "qk_rope_head_dim": 0, "page_size": 64, "format": "fp8_token"}
    shape = {"heads": 64, "dtype": "e4m3", "kv_lens": (130,), "q_lens": (2,), "k": 2048}
    return IndexerSelectCase(**{**row, **shape, **more})


CONFIGURATIONS: dict[str, Case] = {
    **{f"append-{format}": _append(format) for format in FORMATS},
    "append-half-split-e4m3-q": _append("fp8_block128", rope="half", q_out="e4m3"),
    "append-flat-table": _append("bf16", flat_table=True),
    "quantize-128": QuantizeCase(m=130, k=512, group=128),
    "scaled-mm-128": ScaledMatmulCase(m=130, n=256, k=512, n_group=128, k_group=128),
    "scaled-mm-64": ScaledMatmulCase(m=130, n=256, k=512, n_group=64, k_group=64, batch=2),
    "scaled-mm-1-row": ScaledMatmulCase(m=1, n=2112, k=512, n_group=128, k_group=128),
    "scaled-mm-few-tiles": ScaledMatmulCase(m=16, n=576, k=1024, n_group=128, k_group=128),
    "scaled-mm-16-rows": ScaledMatmulCase(m=16, n=16896, k=512, n_group=128, k_group=128),
    "scaled-mm-32-rows": ScaledMatmulCase(m=32, n=16896, k=512, n_group=128, k_group=128),
    "scaled-mm-heads": ScaledMatmulCase(m=4, n=512, k=128, n_group=128, k_group=128, batch=128),
    "matmul-bf16": BatchedMatmulCase(batch=2, m=130, n=128, k=512),
    "matmul-fp32": BatchedMatmulCase(batch=2, m=130, n=128, k=512, dtype="fp32"),
    "prefill-192-128": _prefill(128, 64, 128),
    "prefill-256-256": _prefill(192, 64, 256),
    "prefill-128-128": _prefill(128, 0, 128),
    "prefill-96-64": _prefill(64, 32, 64),
    "prefill-e4m3": _prefill_fp8(),
    "prefill-fp32": _prefill(128, 64, 128, dtype="fp32"),
    "prefill-window-alibi-sink": _prefill(
        128, 64, 128, mask="sliding_window_causal", window=50, alibi=True, sink="finite"
    ),
    **{f"decode-h16-{format}": _decode(format, 16) for format in FORMATS},
    **{f"decode-h128-{format}": _decode(format, 128) for format in ("bf16", "fp8", "fp8_block128")},
    "decode-e4m3-q": _decode("fp8_token", 128, dtype="e4m3", q_scaled=True),
    "decode-page1": _decode("bf16", 16, flat_table=True),
    "decode-ragged": _decode("bf16", 20, q_lens=(3, 2), kv_lens=(130, 65), sink="finite"),
    "decode-even-split": _decode("bf16", 16, num_splits=3),
    **{f"sparse-h128-{format}": _sparse(format, 128) for format in FORMATS},
    "sparse-h16-bf16": _sparse("bf16", 16),
    "sparse-q-rope": _sparse("fp8_token", 128, dtype="e4m3", q_rope_dtype="bf16", q_scaled=True),
    "sparse-extra": _sparse("bf16", 64, extra_format="fp8_block128", extra_topk=64, sink="finite"),
    "indexer-e4m3": _index_keys(format="fp8_token", dtype="e4m3"),
    "indexer-bf16": _index_keys(format="bf16"),
    "indexer-mxfp4": _index_keys(format="mxfp4_block32", dtype="e4m3"),
    "topk-4096": IndexerTopkCase(num_columns=4096, k=2048, num_tokens=2),
    "topk-8192": IndexerTopkCase(num_columns=9000, k=8192, num_tokens=2),
    "topk-split": IndexerTopkCase(num_columns=16384, k=2048, num_tokens=2),
    "topk-long": IndexerTopkCase(num_columns=20000, k=2048, num_tokens=200),
    "topk-many": IndexerTopkCase(num_columns=20000, k=9000, num_tokens=200),
    "topk-64": IndexerTopkCase(num_columns=500, k=64, num_tokens=2),
    "select-decode": _select(spare_columns=16384),
    "select-prefill": _select(kv_lens=(200,), q_lens=(150,), block_tokens=140, spare_columns=6000),
    "select-long": _select(kv_lens=(200,), q_lens=(150,), spare_columns=20000),
    "select-short": _select(k=64, flat_table=True),
    "select-always": _select(init_tokens=16, local_tokens=1024, spare_columns=16384),
    "merge-2": MergeCase(num_parts=2, v_width=512, heads=16),
    "merge-8-fp32": MergeCase(num_parts=8, v_width=128, heads=16, dtype="fp32", sink="finite"),
    "sparse-odd-pages": _sparse(
        "fp8_block64",
        64,
        page_size=61,
        extra_format="fp8_block64",
        extra_page_size=2,
        extra_topk=64,
    ),
    "append-slots": _append("fp8_block128", slots="some"),
    # enough work for programs of four rows and many heads
    "append-many-tokens": _append("fp8_block128", kv_lens=(2000,), q_lens=(2000,)),
    "append-shard": _append("bf16", rank=1, world=2, positions="given"),
    "append-index-keys": _append(
        "fp8_token", kv_lora_rank=128, qk_rope_head_dim=0, page_size=64, gamma_dtype="", heads=1
    ),
    "topk-131072": IndexerTopkCase(num_columns=65536, k=2048, num_tokens=400),
    "physical-rows": PhysicalRowsCase(topk=2048, page_size=64),
    "physical-rows-flat": PhysicalRowsCase(topk=64, flat_table=True),
    **{f"append-rows-{format}": AppendRowsCase(**_row(format)) for format in FORMATS},
    "append-rows-index-keys": AppendRowsCase(
        kv_lora_rank=128, qk_rope_head_dim=0, page_size=64, format="fp8_token"
    ),
    "compress-overlap": _compress(),
    "compress-bf16": _compress(format="bf16", dtype="fp32"),
    "compress-index-keys": _compress(
        format="fp8_token", kv_lora_rank=128, qk_rope_head_dim=0, v_width=0, angles=64
    ),
    "compress-128": _compress(
        rate=128, overlap=False, page_size=2, state_page_size=8, kv_lens=(130,), q_lens=(4,)
    ),
    # index keys of pools, as GLM-5.3-Flash has them: a launch for rows and one for states
    "compress-pools": _compress(
        format="fp8_token",
        kv_lora_rank=128,
        qk_rope_head_dim=0,
        v_width=0,
        overlap=False,
        normed=False,
        rotated=False,
        page_size=16,
        state_page_size=8,
        state_repeats=8,
    ),
    # enough work for programs of several tokens
    "compress-many-tokens": _compress(kv_lens=(4000,), q_lens=(4000,), flat_table=True),
    "indexer-no-heads": _index_keys(format="bf16", heads=0),
    **{f"append-{format}": _append(format) for format in GROUP_FORMATS},
    **{f"decode-h16-{format}": _decode(format, 16) for format in GROUP_FORMATS},
    **{f"append-{format}": _append(format) for format in COMPILED_SPLIT},
    **{f"decode-h16-{format}": _decode(format, 16) for format in COMPILED_SPLIT},
    **{f"sparse-h16-{format}": _sparse(format, 16) for format in COMPILED_SPLIT},
    # four-bit rows of 448 + 64 columns and index keys; the last columns of a row are values, too
    "append-rows-v4-mxfp4": AppendRowsCase(**{**_row("mxfp4_block32"), **V4_ROW}),
    "decode-h16-v4-mxfp4": _decode("mxfp4_block32", 16, **V4_ROW),
    "sparse-h64-v4-mxfp4": _sparse("mxfp4_block32", 64, **V4_ROW),
    "compress-v4-mxfp4": _compress(format="mxfp4_block32"),
    "append-rows-index-keys-mxfp4": AppendRowsCase(
        kv_lora_rank=128, qk_rope_head_dim=0, page_size=64, format="mxfp4_block32"
    ),
}
# enough work for `auto` to select an m64 kernel
MUCH_WORK = {"kv_lens": (2200, 65), "q_lens": (64, 1)}
EXTERNAL_PLAN = {"page_size": 128, "num_ctas": 3, "tile": 16}
E4M3_QUERY: dict[str, Any] = {"dtype": "e4m3", "q_scaled": True}
E4M3_QUERY_BF16_ROPE = {**E4M3_QUERY, "q_rope_dtype": "bf16"}
GROUPED_FP8_QK = "m64_fp8_qk-fp8_block128"
# of Gluon kernels, for one architecture only: name, format, heads and what differs
HOPPER_DECODES: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("h128-bf16", "bf16", 128, MUCH_WORK),
    ("h40-fp16", "fp16", 40, {"sink": "finite", **MUCH_WORK}),
    ("external-plan", "bf16", 128, {**EXTERNAL_PLAN, **MUCH_WORK}),
    ("small-batch", "bf16", 128, {}),
    ("h8-bf16", "bf16", 8, {}),
    ("h16-bf16", "bf16", 16, {}),
    ("h16-fp16", "fp16", 16, {"sink": "finite"}),
    ("h32-bf16", "bf16", 32, {}),
    ("small_m-external-plan", "bf16", 32, EXTERNAL_PLAN),
    ("narrow-h32", "bf16", 32, NARROW_ROW),
    ("narrow-h16-fp16", "fp16", 16, {**NARROW_ROW, "sink": "finite"}),
    ("narrow-h40-page8", "bf16", 40, {**NARROW_ROW, "page_size": 8}),
    ("narrow-h8-page1", "bf16", 8, {**NARROW_ROW, "page_size": 1}),
    ("narrow-external-plan", "bf16", 32, {**NARROW_ROW, **EXTERNAL_PLAN}),
    ("narrow-split-cache", "bf16_split", 32, NARROW_ROW),
    *(
        (f"h{heads}-{format}", format, heads, {"sink": sink})
        for heads, sink in ((8, ""), (16, "finite"), (32, ""))
        for format in ("fp8", "fp8_token", "fp8_block128")
    ),
    *(
        (f"m64-{format}{name}", format, heads, {**MUCH_WORK, **more})
        for format in ("fp8", "fp8_token", "fp8_block128")
        for name, heads, more, others in (
            ("", 128, {}, ()),
            ("-external-plan", 128, EXTERNAL_PLAN, ()),
            ("-page8", 100, {"page_size": 8, "sink": "finite"}, ()),
            ("-page32", 64, {"page_size": 32}, ()),
            ("-page1", 128, {"page_size": 1}, ("fp8", "fp8_token")),
            ("-e4m3-q", 128, E4M3_QUERY, ()),
            (
                "-e4m3-q-page8",
                100,
                {"dtype": "e4m3", "page_size": 8, "sink": "finite"},
                ("fp8_block128",),
            ),
            (
                "-e4m3-q-external-plan",
                64,
                {"dtype": "e4m3", **EXTERNAL_PLAN},
                ("fp8_block128",),
            ),
            (
                "-e4m3-q-bf16-rope",
                128,
                {"dtype": "e4m3", "q_rope_dtype": "bf16"},
                ("fp8", "fp8_token"),
            ),
        )
        if format not in others
    ),
    *(
        (f"{GROUPED_FP8_QK}{name}", "fp8_block128", heads, {**MUCH_WORK, **more})
        for name, heads, more in (
            ("", 128, E4M3_QUERY),
            ("-page8", 100, {"dtype": "e4m3", "page_size": 8, "sink": "finite"}),
            ("-page1", 128, {**E4M3_QUERY, "page_size": 1}),
            ("-external-plan", 64, {"dtype": "e4m3", **EXTERNAL_PLAN}),
            ("-bf16-rope", 128, E4M3_QUERY_BF16_ROPE),
        )
    ),
    ("m64-fp8-fp16-q", "fp8", 128, {"dtype": "fp16", **MUCH_WORK}),
    ("m64-fp8_token-e4m3-q-bf16-rope", "fp8_token", 128, {**E4M3_QUERY_BF16_ROPE, **MUCH_WORK}),
    ("h16-fp8-fp16-q", "fp8", 16, {"dtype": "fp16"}),
    *(
        (f"h{heads}-{format}-e4m3-q", format, heads, {"dtype": "e4m3", "q_scaled": is_scaled})
        for heads, is_scaled, formats in (
            (8, True, ("fp8_token",)),
            (16, False, ("fp8", "fp8_token", "fp8_block128")),
            (32, True, ("fp8", "fp8_token", "fp8_block128")),
        )
        for format in formats
    ),
    *(
        (f"h{heads}-{format}-e4m3-q-bf16-rope", format, heads, E4M3_QUERY_BF16_ROPE)
        for heads, format in ((16, "fp8_token"), (32, "fp8_token"), (32, "fp8_block128"))
    ),
    *(
        (f"h{heads}-{format}-e4m3-q-external-plan", format, heads, {**EXTERNAL_PLAN, **more})
        for heads, format, more in (
            (16, "fp8_block128", E4M3_QUERY),
            (32, "fp8", {**E4M3_QUERY, "page_size": 16}),
            (32, "fp8_token", {**E4M3_QUERY, "page_size": 16}),
        )
    ),
    *(
        (f"h{heads}-{format}-external-plan", format, heads, EXTERNAL_PLAN)
        for heads, format in ((16, "fp8_block128"), (32, "fp8"), (32, "fp8_block128"))
    ),
    *(
        (f"h{heads}-{format}-page{page_size}", format, heads, {"page_size": page_size, **more})
        for heads, format, more, page_sizes in (
            (16, "bf16", {}, (8, 32)),
            (128, "bf16", MUCH_WORK, (8, 32, 16)),
            (16, "fp8", {}, (8, 32)),
            (16, "fp8_token", {}, (8, 32)),
            (16, "fp8_block128", {}, (8, 32)),
            (32, "fp8_token", {}, (8, 32)),
            (32, "fp8_block128", {}, (8, 32)),
            # with a gather producer
            (16, "bf16", {}, (1,)),
            (32, "fp16", {}, (24,)),
            (128, "bf16", MUCH_WORK, (1, 96)),
            (16, "fp8", {}, (3,)),
            (16, "fp8_token", {}, (1,)),
            (32, "fp8_token", {}, (1,)),
            (16, "fp8_block128", {}, (1,)),
            (32, "fp8_block128", {}, (1,)),
            (128, "fp8", MUCH_WORK, (96,)),
            (128, "fp8_token", MUCH_WORK, (1,)),
        )
        for page_size in page_sizes
    ),
    *(
        (f"h{heads}-mxfp4_block32{name}", "mxfp4_block32", heads, more)
        for heads, name, more in (
            (16, "", {}),
            (8, "-sink", {"sink": "finite"}),
            (32, "-page8", {"page_size": 8}),
            (16, "-external-plan", EXTERNAL_PLAN),
        )
    ),
    ("h128-bf16_split", "bf16_split", 128, MUCH_WORK),
    ("h16-bf16_split-page32", "bf16_split", 16, {"page_size": 32}),
    ("h128-fp8_split-e4m3-q", "fp8_split", 128, {**E4M3_QUERY, **MUCH_WORK}),
    ("h16-fp8_split", "fp8_split", 16, {}),
    ("h128-fp8_split", "fp8_split", 128, MUCH_WORK),
    ("h128-fp8_split-page1", "fp8_split", 128, {"page_size": 1, **MUCH_WORK}),
    ("h128-fp8-e4m3-q-page24", "fp8", 128, {"page_size": 24, **E4M3_QUERY, **MUCH_WORK}),
    ("h128-fp8_token-e4m3-q-page1", "fp8_token", 128, {"page_size": 1, **E4M3_QUERY, **MUCH_WORK}),
)
HOPPER_INDEX_KEYS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        (f"h{heads}-q{q_len}", {"heads": heads, "kv_lens": (130, 65), "q_lens": (q_len, q_len)})
        for heads in (32, 64)
        for q_len in (1, 2, 4, 9)
    ),
    *(
        (f"single-h{heads}-q{q_len}", {"heads": heads, "q_lens": (q_len,)})
        for heads in (32, 64)
        for q_len in (1, 2, 4)
    ),
    ("h20-q3", {"heads": 20, "q_lens": (3,)}),
    ("h48-q9", {"heads": 48, "q_lens": (9,)}),
    ("null-mask-page128", {"mask": "null", "page_size": 128}),
    ("null-mask-q9", {"mask": "null", "q_lens": (9,)}),
    ("int64", {"wide_indices": True, "q_lens": (9,)}),
)
# a tile of each size, which are named rows of the left operand x rows of the right one
HOPPER_PRODUCTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("256x128", {"m": 2100, "n": 4096}),
    ("128x128", {"m": 70, "n": 8600}),
    ("128x64", {"m": 70, "n": 256}),
    ("swapped-16", {"m": 9, "n": 256}),
    ("swapped-32", {"m": 30, "n": 256}),
    ("swapped-64", {"m": 50, "n": 256}),
    ("256x128-e4m3", {"m": 2100, "n": 4096, "out_dtype": "e4m3", "n_group": 256, "k_group": 256}),
    ("swapped-heads", {"m": 30, "n": 100, "k": 128, "batch": 3, "n_group": 1000}),
)
SECOND_CACHE = {"extra_format": "fp8_block128", "extra_page_size": 2, "sink": "finite"}
HOPPER: dict[str, Case] = {
    **{
        f"hopper-decode-{name}": _decode(format, heads, **more)
        for name, format, heads, more in HOPPER_DECODES
    },
    **{
        f"hopper-indexer-{name}": _index_keys(format="fp8_token", dtype="e4m3", **more)
        for name, more in HOPPER_INDEX_KEYS
    },
    **{f"hopper-scaled-mm-{name}": _product(**more) for name, more in HOPPER_PRODUCTS},
    "hopper-sparse-h128-bf16": _sparse("bf16", 128),
    "hopper-sparse-q-rope": _sparse("bf16", 128, q_rope_dtype="bf16"),
    # lists of 512 entries are split
    "hopper-sparse-h16-fp16-splits": _sparse("fp16", 16, topk=512, sharpness=-2.0),
    "hopper-sparse-extra": _sparse(
        "bf16",
        64,
        extra_format="bf16",
        extra_topk=64,
        extra_page_size=16,
        padded=True,
        sink="finite",
    ),
    "hopper-sparse-bf16_split": _sparse("bf16_split", 128),
    "hopper-sparse-bf16_split-padded": _sparse("bf16_split", 64, padded=True),
    "hopper-sparse-512": _sparse("bf16", 64, **V4_ROW, with_lens=False),
    "hopper-sparse-fp8_block128": _sparse("fp8_block128", 128, with_lens=False),
    "hopper-sparse-fp8_block128-extra": _sparse("fp8_block128", 64, topk=512, **SECOND_CACHE),
    "hopper-sparse-h16-fp8_block128": _sparse("fp8_block128", 16, with_lens=False),
    "hopper-sparse-h32-fp8_block128-extra": _sparse("fp8_block128", 32, topk=512, **SECOND_CACHE),
    "hopper-sparse-h8-fp8_token": _sparse("fp8_token", 8),
    "hopper-sparse-h16-mxfp4_block32": _sparse("mxfp4_block32", 16, with_lens=False),
    "hopper-sparse-h8-mxfp4_block32": _sparse("mxfp4_block32", 8, padded=True, q_rope_dtype="bf16"),
    "hopper-sparse-h32-mxfp4_block32-extra": _sparse(
        "mxfp4_block32", 32, topk=512, **{**SECOND_CACHE, "extra_format": "mxfp4_block32"}
    ),
    "hopper-sparse-fp8_block64": _sparse(
        "fp8_block64", 64, extra_format="fp8_block64", extra_page_size=2, extra_topk=64
    ),
    "hopper-sparse-no-rope-fp8_block128": _sparse("fp8_block128", 64, **GLM5_NEXT_ROW),
    "hopper-sparse-no-rope-fp8_token": _sparse("fp8_token", 64, **GLM5_NEXT_ROW),
    "hopper-sparse-no-rope-fp8": _sparse("fp8", 64, **GLM5_NEXT_ROW),
    "hopper-sparse-no-rope-h8-fp8_block128": _sparse(
        "fp8_block128", 8, topk=512, **{**GLM5_NEXT_ROW, **SECOND_CACHE}
    ),
    "hopper-sparse-no-rope-h32-fp8_token": _sparse("fp8_token", 32, **GLM5_NEXT_ROW),
    "hopper-sparse-fp8_token": _sparse("fp8_token", 64),
    "hopper-sparse-fp8_split": _sparse("fp8_split", 128),
    "hopper-sparse-fp8_split-padded": _sparse("fp8_split", 64, padded=True),
    "hopper-sparse-fp8-fp16-q": _sparse("fp8", 64, dtype="fp16", tensor_scale_on_device=True),
    "hopper-prefill-192-128": _prefill(128, 64, 128),
    "hopper-prefill-256-256": _prefill(192, 64, 256),
    "hopper-prefill-128-128": _prefill(128, 0, 128),
    "hopper-prefill-96-64": _prefill(64, 32, 64),
    "hopper-prefill-256-0-256": _prefill(256, 0, 256),
    "hopper-prefill-256-0-256-fp16-null": _prefill(256, 0, 256, dtype="fp16", mask="null"),
    "hopper-prefill-64-64-128": _prefill(64, 64, 128),
    "hopper-prefill-64-64-128-fp16-sink": _prefill(64, 64, 128, dtype="fp16", sink="finite"),
    "hopper-prefill-fp16-sink": _prefill(128, 64, 128, dtype="fp16", sink="finite"),
    "hopper-prefill-null": _prefill(128, 64, 128, mask="null"),
    "hopper-prefill-256-256-null": _prefill(192, 64, 256, mask="null"),
    **{
        f"hopper-prefill-{mask}": _prefill(128, 64, 128, mask=mask, window=300)
        for mask in WINDOWED
        if not KINDS[mask].IS_COMPRESSED
    },
    "hopper-prefill-fp8": _prefill_fp8(),
    "hopper-prefill-fp8-unscaled": _prefill_fp8(scaled=False),
    "hopper-prefill-fp8-blocks": _prefill_fp8(block_scales=True),
    "hopper-prefill-fp8-null-sink": _prefill_fp8(mask="null", sink="finite"),
    "hopper-prefill-fp8-chunked": _prefill_fp8(mask="chunked", window=300),
    "hopper-prefill-fp8-128-128": _prefill_fp8(qk_rope_head_dim=0),
}
# the variant of a kernel that `mlakit check --quick` checks comes first
# token blocks of every size, of many requests and alone; those of 64 heads first
BLACKWELL_INDEX_KEYS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        (f"h{heads}-q{q_len}", {"heads": heads, "kv_lens": (300, 65), "q_lens": (q_len, q_len)})
        for heads in (64, 32)
        for q_len in (1, 2, 4, 9)
    ),
    *(
        (f"h{heads}-alone-q{q_len}", {"heads": heads, "kv_lens": (300,), "q_lens": (q_len,)})
        for heads in (64, 32)
        for q_len in (1, 2, 4)
    ),
    ("h20-q3", {"heads": 20, "q_lens": (3,)}),
    ("h48-q9", {"heads": 48, "q_lens": (9,)}),
    ("null-mask-page128", {"mask": "null", "page_size": 128}),
    ("null-mask-q9", {"mask": "null", "q_lens": (9,)}),
    ("h32-int64", {"heads": 32, "wide_indices": True, "q_lens": (9,)}),
)
BLACKWELL: dict[str, Case] = {
    "blackwell-sparse-h128-bf16": _sparse("bf16", 128),
    "blackwell-sparse-q-rope": _sparse("bf16", 72, q_rope_dtype="bf16", sink="finite"),
    "blackwell-sparse-negative-scale": _sparse("bf16", 130, sharpness=-2.0),
    "blackwell-sparse-extra": _sparse(
        "bf16", 128, extra_format="bf16", extra_topk=64, extra_page_size=16, sink="finite"
    ),
    # lists of 512 entries are split
    "blackwell-sparse-fp16-splits": _sparse("fp16", 128, topk=512, sink="finite"),
    "blackwell-sparse-512": _sparse("bf16", 128, **V4_ROW, with_lens=False),
    "blackwell-sparse-fp16-512": _sparse("fp16", 70, **GLM5_NEXT_ROW, topk=64),
    "blackwell-sparse-h64-bf16": _sparse("bf16", 64),
    "blackwell-sparse-h16-q-rope": _sparse("bf16", 9, q_rope_dtype="bf16", sink="finite"),
    "blackwell-sparse-h32-extra": _sparse(
        "bf16", 32, extra_format="bf16", extra_topk=64, extra_page_size=16, sink="mixed"
    ),
    "blackwell-sparse-h64-fp16-splits": _sparse("fp16", 40, topk=600, num_splits=3, sink="finite"),
    "blackwell-sparse-h64-fp8_block128": _sparse("fp8_block128", 64),
    "blackwell-sparse-h16-fp8_block128-extra": _sparse(
        "fp8_block128", 16, extra_format="fp8_block128", extra_page_size=16, extra_topk=64
    ),
    "blackwell-sparse-h128-fp8_block128-splits": _sparse(
        "fp8_block128", 128, topk=600, num_splits=3, sink="finite", q_rope_dtype="bf16"
    ),
    "blackwell-sparse-h32-fp8_block128-no-rope": _sparse("fp8_block128", 20, **GLM5_NEXT_ROW),
    "blackwell-decode-h64-bf16": _decode("bf16", 64),
    "blackwell-decode-h16-fp16-page1": _decode("fp16", 9, page_size=1, sink="finite"),
    "blackwell-decode-h128-ragged": _decode(
        "bf16", 128, q_lens=(3, 2), kv_lens=(300, 65), sink="mixed", sharpness=-2.0
    ),
    "blackwell-decode-h64-fp8_block128": _decode("fp8_block128", 64),
    "blackwell-decode-h16-fp8_block128-page1": _decode(
        "fp8_block128", 9, page_size=1, q_lens=(2, 1), sink="finite"
    ),
    "blackwell-decode-external-plan": _decode("bf16", 32, **EXTERNAL_PLAN),
    "blackwell-decode-h16-bf16_split-page24": _decode("bf16_split", 16, page_size=24),
    "blackwell-decode-h16-fp16_split": _decode("fp16_split", 9, dtype="fp16", kv_lens=(140, 3)),
    "blackwell-sparse-h16-512": _sparse("bf16", 16, **V4_ROW, sharpness=-2.0),
    "blackwell-sparse-h16-fp16-512": _sparse("fp16", 9, **V4_ROW, topk=64, sink="finite"),
    "blackwell-prefill-192-128": _prefill(128, 64, 128),
    "blackwell-prefill-256-256": _prefill(192, 64, 256),
    "blackwell-prefill-128-128": _prefill(128, 0, 128),
    "blackwell-prefill-fp16-sink": _prefill(
        128, 64, 128, dtype="fp16", sink="mixed", sharpness=-2.0
    ),
    "blackwell-prefill-fp16-128-128": _prefill(128, 0, 128, dtype="fp16", heads=1),
    "blackwell-prefill-null": _prefill(128, 64, 128, mask="null"),
    "blackwell-prefill-256-256-null": _prefill(192, 64, 256, mask="null", dtype="fp16"),
    **{
        f"blackwell-prefill-{mask}": _prefill(128, 64, 128, mask=mask, window=300)
        for mask in WINDOWED
        if not KINDS[mask].IS_COMPRESSED
    },
    "blackwell-prefill-256-256-window": _prefill(
        192, 64, 256, mask="sliding_window_causal", window=50, sink="finite"
    ),
    "blackwell-prefill-fp8": _prefill_fp8(transposed=False, block_scales=True),
    "blackwell-prefill-fp8-128-128": _prefill_fp8(
        transposed=False, qk_rope_head_dim=0, block_scales=True, mask="null", sink="mixed"
    ),
    "blackwell-prefill-fp8-uniform": _prefill_fp8(
        transposed=False,
        uniform_keys=True,
        uniform_values=True,
        mask="sliding_window_causal",
        window=50,
        sharpness=-2.0,
    ),
    "blackwell-prefill-fp8-unscaled": _prefill_fp8(
        transposed=False, scaled=False, mask="chunked", window=300, sink="finite"
    ),
    **{
        f"blackwell-indexer-{name}": _index_keys(format="fp8_token", dtype="e4m3", **more)
        for name, more in BLACKWELL_INDEX_KEYS
    },
}
HOPPER_ARCH = 90
BLACKWELL_ARCHS = (100, 103)
# backends with kernels for some architectures, with them and with their configurations
SPECIALISED: dict[Backend, tuple[tuple[int, ...], dict[str, Case]]] = {
    "hopper": ((HOPPER_ARCH,), HOPPER),
    "blackwell": (BLACKWELL_ARCHS, BLACKWELL),
}
EVERYWHERE = (
    "append-fp8_block128",
    "scaled-mm-128",
    "prefill-192-128",
    "decode-h16-bf16",
    "decode-h128-fp8_block128",
    "sparse-h128-fp8_block128",
    "indexer-e4m3",
    "topk-split",
    "topk-131072",
)
# every op once, each on the next of AMD's architectures; FP8 rows on gfx942 and gfx950
ON_AMD = (
    "decode-h16-fp8_token",
    "sparse-h128-fp8_block128",
    "decode-h16-bf16",
    "append-fp8_block128",
    "indexer-e4m3",
    "prefill-192-128",
    "scaled-mm-128",
    "quantize-128",
    "matmul-bf16",
    "append-rows-fp8_token",
    "compress-index-keys",
    "select-decode",
    "topk-4096",
    "prefill-96-64",
    "physical-rows",
    "merge-8-fp32",
)


def named_checks() -> list[tuple[str, int]]:
    """(configuration, architecture): every configuration once, some on every architecture of
    NVIDIA's, a few on AMD's."""
    others = [name for name in CONFIGURATIONS if name not in EVERYWHERE]
    # sm_90 twice: most users have it
    rotation = (90, 80, 100, 90, 89, 120)
    return [
        *((name, arch) for name in EVERYWHERE for arch in ARCHITECTURES),
        *((name, rotation[i % len(rotation)]) for i, name in enumerate(others)),
        *((name, AMD_ARCHITECTURES[i % 3]) for i, name in enumerate(ON_AMD)),
        *_specialised_checks(),
    ]


def all_checks() -> list[tuple[str, int]]:
    architectures = (*ARCHITECTURES, *AMD_ARCHITECTURES)
    portable = [(name, arch) for name in CONFIGURATIONS for arch in architectures]
    return [*portable, *_specialised_checks()]


def _specialised_checks() -> list[tuple[str, int]]:
    """Those of Blackwell need a newer Triton than the oldest."""
    return [
        (name, arch)
        for backend, (archs, cases) in SPECIALISED.items()
        if backend != "blackwell" or why_not_triton() is None
        for name in cases
        for arch in archs
    ]


def configured(name: str) -> tuple[Backend, Case]:
    """The backend and the case of a configuration, or the kernel where only its name selects it."""
    if name.startswith(f"hopper-decode-{GROUPED_FP8_QK}"):
        return cast("Backend", "hopper:m64_fp8_qk"), HOPPER[name]
    for backend, (_, cases) in SPECIALISED.items():
        if name in cases:
            return backend, cases[name]
    return "triton", CONFIGURATIONS[name]


def archs_of(backend: Backend) -> tuple[int, ...]:
    """The architectures of a specialised backend, or of a kernel of one."""
    return SPECIALISED[cast("Backend", backend.partition(":")[0])][0]
