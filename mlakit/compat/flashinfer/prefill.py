"""Attention of prompts with expanded keys and values, at any widths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mlakit.compat.dense_prefill import attend
from mlakit.compat.flashinfer.arguments import LOG2_E, one_of, refuse
from mlakit.dispatch.checks import FLOATS, Dims
from mlakit.ops._checks import INTEGERS

RAGGED = "BatchPrefillWithRaggedKVCacheWrapper"
BACKENDS = ("auto", "fa2", "fa3", "cudnn", "cutlass", "cute-dsl")


def single_prefill_with_kv_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale_q: Tensor | None = None,
    scale_k: Tensor | None = None,
    scale_v: Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: Tensor | None = None,
    packed_custom_mask: Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    kv_cache_sf: tuple[Tensor, Tensor] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of one request's queries, its newest tokens.

    q          [qo_len, num_qo_heads, head_dim_qk] bf16, fp16 or f32
    k, v       [kv_len, num_kv_heads, head_dim_qk or head_dim_vo]; HND: heads come first
    sm_scale   head_dim_qk ** -0.5 if None
    use_fp16_qk_reduction, backend   without effect

    Returns out [qo_len, num_qo_heads, head_dim_vo], with return_lse also the base-2 lse [qo_len,
    num_qo_heads] float32, −inf where a query sees no key.
    """
    dims = Dims("single_prefill_with_kv_cache")
    refuse(
        dims.op,
        scale_q=scale_q,
        scale_k=scale_k,
        scale_v=scale_v,
        custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask,
        pos_encoding_mode=pos_encoding_mode,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        kv_cache_sf=kv_cache_sf,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    one_of(dims, "backend", backend, *BACKENDS)
    dims.tensor("q", q)
    if o_dtype is not None:
        dims.require(o_dtype == q.dtype, "o_dtype", f"be q's dtype, {q.dtype}", o_dtype)
    k, v = _tokens_first(dims, kv_layout, k=k, v=v)
    q_starts, kv_starts = (
        {name: torch.arange(2, dtype=torch.int32, device=tensor.device) * len(tensor)}
        for name, tensor in (("q", q), ("k", k))
    )
    out, lse = attend(dims, q, k, v, q_starts, kv_starts, {"sm_scale": sm_scale}, causal)
    return (out, lse.mul_(LOG2_E)) if return_lse else out


def single_prefill_with_kv_cache_return_lse(
    q: Tensor, k: Tensor, v: Tensor, *others: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Call `single_prefill_with_kv_cache` with return_lse=True."""
    out, lse = single_prefill_with_kv_cache(q, k, v, *others, **{**options, "return_lse": True})
    return out, lse


@dataclass(frozen=True, eq=False)
class _Batch:
    """`plan` leaves these to `run`."""

    q_starts: Tensor  # [batch + 1]
    kv_starts: Tensor  # [batch + 1]
    causal: bool
    sm_scale: float | None
    dtype: torch.dtype
    sizes: dict[str, int]  # by axis


class BatchPrefillWithRaggedKVCacheWrapper:
    """Attention of a ragged batch: `plan` takes its lengths, `run` its tensors.

    float_workspace_buffer   its device is that of the plan's tensors; it is not written
    kv_layout                NHD, or HND: heads come first in k and v
    use_cuda_graph           plan copies into qo_indptr_buf and kv_indptr_buf [batch + 1], so that
                             a captured `run` can be replayed after another plan
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        dims = Dims(RAGGED)
        refuse(RAGGED, jit_args=jit_args, jit_kwargs=jit_kwargs)
        one_of(dims, "kv_layout", kv_layout, "NHD", "HND")
        one_of(dims, "backend", backend, *BACKENDS)
        self.device = dims.tensor("float_workspace_buffer", float_workspace_buffer).device
        self._kv_layout = kv_layout
        self._buffers: tuple[Tensor, Tensor] | None = None
        if use_cuda_graph:
            axes, kinds = ("batch + 1",), [torch.int32]
            self._buffers = (
                dims.match("qo_indptr_buf", qo_indptr_buf, *axes, dtypes=kinds),
                dims.match("kv_indptr_buf", kv_indptr_buf, *axes, dtypes=kinds),
            )
        self._batch: _Batch | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plans are copied into buffers of the caller."""
        return self._buffers is not None

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
    ) -> None:
        """Take the lengths of a batch: rows of q, and of k and v, that each request begins at.

        qo_indptr, kv_indptr  [batch + 1] on any device; the queries are a request's newest tokens
        head_dim_vo           head_dim_qk if None
        sm_scale              head_dim_qk ** -0.5 if None
        Masks, positions, windows, caps and other offsets of v and out are refused by name. What
        only chooses a schedule has no effect: results are always deterministic.
        """
        dims = Dims(f"{RAGGED}.plan")
        refuse(
            dims.op,
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            token_pos_in_items_len=token_pos_in_items_len,
            max_item_len_ptr=max_item_len_ptr,
            v_indptr=v_indptr,
            o_indptr=o_indptr,
        )
        q_dtype = as_dtype(dims, "q_data_type", q_data_type)
        for name, value in (("kv_data_type", kv_data_type), ("o_data_type", o_data_type)):
            dtype = q_dtype if value is None else as_dtype(dims, name, value)
            dims.require(dtype == q_dtype, name, f"be q_data_type, {q_dtype}", dtype)
        dims.dtype("qo_indptr", dims.tensor("qo_indptr", qo_indptr), *INTEGERS)
        dims.dtype("kv_indptr", dims.tensor("kv_indptr", kv_indptr), *INTEGERS)
        batch = qo_indptr.shape[0] - 1
        same = kv_indptr.shape == qo_indptr.shape
        dims.require(same, "kv_indptr", f"have batch + 1 entries, {batch + 1}", len(kv_indptr))
        sizes = {
            "h_q": dims.integer("num_qo_heads", num_qo_heads, 1),
            "h_kv": dims.integer("num_kv_heads", num_kv_heads, 1),
            "d_qk": dims.integer("head_dim_qk", head_dim_qk, 1),
            "d_v": dims.integer(
                "head_dim_vo", head_dim_qk if head_dim_vo is None else head_dim_vo, 1
            ),
        }
        scale = None if sm_scale is None else dims.finite("sm_scale", sm_scale)
        starts = self._buffers
        if starts is None:
            starts = (
                qo_indptr.to(self.device, non_blocking=True),
                kv_indptr.to(self.device, non_blocking=True),
            )
        else:
            fixed = starts[0].shape[0] - 1
            dims.require(batch == fixed, "qo_indptr", f"have the buffers' batch, {fixed}", batch)
            for buffer, given in zip(starts, (qo_indptr, kv_indptr), strict=True):
                buffer.copy_(given, non_blocking=True)
        self._batch = _Batch(*starts, bool(causal), scale, q_dtype, sizes)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention as planned.

        q     [qo_indptr[-1], num_qo_heads, head_dim_qk]
        k, v  [kv_indptr[-1], num_kv_heads, head_dim_qk or head_dim_vo]
        out   [qo_indptr[-1], num_qo_heads, head_dim_vo] and lse [qo_indptr[-1], num_qo_heads]
              float32 to write to
        Returns out, with return_lse also the base-2 lse, −inf where a query sees no key.
        """
        dims = Dims(f"{RAGGED}.run")
        batch = self._batch
        dims.require(batch is not None, "plan", "be called before run", "no plan")
        assert batch is not None
        refuse(
            dims.op,
            args=args or None,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            o_scale=o_scale,
            kv_cache_sf=kv_cache_sf,
        )
        for axis, size in batch.sizes.items():
            dims.bind(axis, size, f"{axis} of the plan")
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            dtype = dims.tensor(name, tensor).dtype
            planned = f"match the planned q_data_type, {batch.dtype}"
            dims.require(dtype == batch.dtype, f"{name}.dtype", planned, dtype)
        k, v = _tokens_first(dims, self._kv_layout, k=k, v=v)
        is_wanted = return_lse or lse is not None
        out, lse = attend(
            dims,
            q,
            k,
            v,
            {"qo_indptr": batch.q_starts},
            {"kv_indptr": batch.kv_starts},
            {"sm_scale": batch.sm_scale},
            batch.causal,
            out,
            lse,
        )
        if is_wanted:
            lse.mul_(LOG2_E)
        return (out, lse) if return_lse else out

    def run_return_lse(
        self, q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Call `run` with return_lse=True."""
        out, lse = self.run(q, k, v, return_lse=True, **options)
        return out, lse


def as_dtype(dims: Dims, arg: str, dtype: str | torch.dtype) -> torch.dtype:
    """A floating dtype, or the name of one."""
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    dims.require(found in FLOATS, arg, f"be one of {', '.join(map(str, FLOATS))}", dtype)
    assert isinstance(found, torch.dtype)
    return found


def _tokens_first(dims: Dims, kv_layout: str, **given: Tensor) -> list[Tensor]:
    one_of(dims, "kv_layout", kv_layout, "NHD", "HND")
    tensors = [dims.tensor(name, tensor) for name, tensor in given.items()]
    return [each.transpose(0, 1) if kv_layout == "HND" else each for each in tensors]
