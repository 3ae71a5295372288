"""Absorbed MLA decode on Hopper: six kernels, and the parts that they share.

small_m_bf16    8, 16 or 32 heads per CTA, 16-bit cache rows
small_m_fp8_kv  8, 16 or 32 heads per CTA, FP8 cache rows
small_m_fp4_kv  8, 16 or 32 heads per CTA, four-bit cache rows
m64_bf16        64 heads per CTA, 16-bit cache rows
m64_fp8_kv      64 heads per CTA, FP8 cache rows, 16-bit queries
m64_fp8_qk      64 heads per CTA, FP8 cache rows and FP8 queries

`kernels.hopper.support` says which kernel takes which problem, `launch` starts them, `configs` has
their tile sizes, stages and registers.
"""
