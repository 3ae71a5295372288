"""Names of the ops, for help texts and shell completion, which must not wait for torch."""

# in the order of `dispatch.OPS`, which a test holds them to
OPS = (
    "norm_rope_quant_append",
    "batched_matmul",
    "quantize_fp8",
    "scaled_mm_fp8",
    "mla_prefill",
    "mla_decode",
    "sparse_mla",
    "indexer_logits",
    "indexer_topk",
    "merge_states",
)
