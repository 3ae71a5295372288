"""`BatchMLAPagedAttentionWrapper`: absorbed attention over a cache that is two tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.compat.flashinfer.arguments import LOG2_E, one_of, page_table_of, refuse, split_pool
from mlakit.dispatch.checks import E4M3, FLOATS, Dims, UnsupportedError
from mlakit.model.geometry import RowShape
from mlakit.model.masks import CAUSAL, NULL
from mlakit.ops import mla_decode
from mlakit.ops._checks import INTEGERS

NAME = "BatchMLAPagedAttentionWrapper"
BACKENDS = ("auto", "fa2", "fa3", "cutlass")
SCALE_GROUP = 128  # columns of ckv that share a scale of `ckv_scale_arr`
# FlashInfer's CUTLASS kernel has no argument for it: 128 columns before absorption, and 64 of rope
CUTLASS_SM_SCALE = (128 + 64) ** -0.5
# entries of the page table that CUDA graphs see, 128 MiB: `plan` has few columns per request to
# spare where the batch is large
GRAPH_TABLE_ENTRIES = 2**25


@dataclass(frozen=True, eq=False)
class _Batch:
    """`plan` leaves these to `run`."""

    q_starts: Tensor | None  # [batch + 1]; None: one query per request
    page_table: Tensor  # [batch, columns]
    kv_lens: Tensor  # [batch]
    causal: bool
    sm_scale: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    sizes: dict[str, int]  # by axis


class BatchMLAPagedAttentionWrapper:
    """Absorbed MLA attention over a paged cache: `plan` takes the batch, `run` its tensors.

    float_workspace_buffer   its device is that of the plan's tensors; it is not written
    use_cuda_graph           plan copies into qo_indptr, kv_len_arr and a page table of the wrapper,
                             so that a captured `run` can be replayed after another plan for as
                             many requests
    qo_indptr, kv_indptr     [batch + 1] int32 buffers for CUDA graphs
    kv_indices               [pages] int32 buffer, as long as any plan's
    kv_len_arr               [batch] int32 buffer
    backend                  auto, fa2 and fa3 do the same; with cutlass, `run` needs no plan
    """

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        dims = Dims(NAME)
        one_of(dims, "backend", backend, *BACKENDS)
        self.device = dims.tensor("float_workspace_buffer", float_workspace_buffer).device
        self._backend = backend
        self._batch: _Batch | None = None
        self._buffers: dict[str, Tensor] | None = None
        self._table: Tensor | None = None  # of CUDA graphs
        if not use_cuda_graph or backend == "cutlass":
            return
        kinds = [torch.int32]
        dims.match("kv_len_arr", kv_len_arr, "batch", dtypes=kinds)
        dims.bind("batch + 1", dims["batch"] + 1, "one more than the batch")
        dims.match("qo_indptr", qo_indptr, "batch + 1", dtypes=kinds)
        dims.match("kv_indptr", kv_indptr, "batch + 1", dtypes=kinds)
        dims.match("kv_indices", kv_indices, "pages", dtypes=kinds)
        self._buffers = {
            "qo_indptr": cast(Tensor, qo_indptr),
            "kv_len_arr": cast(Tensor, kv_len_arr),
        }
        self._most_pages = min(dims["pages"], max(GRAPH_TABLE_ENTRIES // max(dims["batch"], 1), 1))

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Take a batch. As in FlashInfer, lengths that lie on a GPU are read: this synchronises.

        qo_indptr   [batch + 1] the rows of q that requests begin at; the queries of a request are
                    its newest tokens, and with `causal` see no later one
        kv_indptr   [batch + 1] where in kv_indices the pages of each request begin; further
                    entries are not read
        kv_indices  page ids, on any device
        kv_len_arr  [batch] cached tokens, the queries included
        kv_data_type  q_data_type, or float8_e4m3fn with bf16 queries
        """
        dims = Dims(f"{NAME}.plan")
        refuse(dims.op, use_profiler=use_profiler)
        sizes = {
            "num_heads": dims.integer("num_heads", num_heads, 1),
            "ckv": dims.integer("head_dim_ckv", head_dim_ckv, 1),
            "kpe": dims.integer("head_dim_kpe", head_dim_kpe, 0),
            "page_size": dims.integer("page_size", page_size, 1),
        }
        _check_dtypes(dims, q_data_type, kv_data_type)
        scale = dims.finite("sm_scale", sm_scale)
        batch, columns = _host_lengths(
            dims, qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size
        )
        pages = page_table_of(
            kv_indptr[:batch].to(self.device), kv_indices.to(self.device), columns
        )
        q_starts, kv_lens, table = qo_indptr, kv_len_arr, pages
        if self._buffers is None:
            q_starts, kv_lens = (
                each.to(self.device, torch.int32) for each in (qo_indptr, kv_len_arr)
            )
        else:
            q_starts, kv_lens = self._buffers["qo_indptr"], self._buffers["kv_len_arr"]
            fixed = kv_lens.shape[0]
            dims.require(batch == fixed, "kv_len_arr", f"have the buffers' batch, {fixed}", batch)
            table = self._graph_table(dims, batch, columns)
            q_starts.copy_(qo_indptr, non_blocking=True)
            kv_lens.copy_(kv_len_arr, non_blocking=True)
            table[:, :columns].copy_(pages)
        self._batch = _Batch(
            q_starts, table, kv_lens, bool(causal), scale, q_data_type, kv_data_type, sizes
        )

    def _graph_table(self, dims: Dims, batch: int, columns: int) -> Tensor:
        """The page table that captured graphs read, with room for later plans."""
        if self._table is None:
            most = max(self._most_pages, columns)
            self._table = torch.empty(batch, most, dtype=torch.int32, device=self.device)
        most = self._table.shape[1]
        held = f"give no request more than {most} pages, which CUDA graphs of this wrapper hold"
        dims.require(columns <= most, "kv_indptr", held, columns)
        return self._table

    def run(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention over the planned batch.

        q_nope     [tokens, num_heads, head_dim_ckv] absorbed, q_pe [tokens, num_heads,
                   head_dim_kpe] rotated
        ckv_cache  [pages, page_size, head_dim_ckv], kpe_cache [pages, page_size, head_dim_kpe],
                   read in place
        out        [tokens, num_heads, head_dim_ckv] and lse [tokens, num_heads] float32 to write to
        kv_len     [batch] and page_table [batch, columns] replace the plan for backend cutlass,
                   which has one query per request and softmax scale 192 ** -0.5
        return_lse_base_on_e  the lse is natural; otherwise base 2
        ckv_scale, kpe_scale  value = stored · scale, of e4m3 caches. Where they differ, q_pe is
                   multiplied by kpe_scale / ckv_scale, and rounded to its dtype
        ckv_scale_arr  [pages, page_size, head_dim_ckv / 128] float32 instead of ckv_scale, for
                   caches without kpe columns

        Returns out, with return_lse also lse. Where a query sees no key, out is 0 and lse −inf.
        """
        dims = Dims(f"{NAME}.run")
        refuse(dims.op, profiler_buffer=profiler_buffer, o_scale=o_scale)
        batch = self._batch
        if self._backend == "cutlass":
            table = dims.match("page_table", page_table, "batch", "columns", dtypes=INTEGERS)
            lengths = dims.match("kv_len", kv_len, "batch", dtypes=INTEGERS)
            scale, dtypes = CUTLASS_SM_SCALE, (q_nope.dtype, ckv_cache.dtype)
            batch = _Batch(None, table, lengths, False, scale, *dtypes, {})
        else:
            refuse(dims.op, kv_len=kv_len, page_table=page_table)
            dims.require(batch is not None, "plan", "be called before run", "no plan")
        assert batch is not None
        for axis, size in batch.sizes.items():
            dims.bind(axis, size, f"{axis} of the plan")
        q_dtype, kv_dtype = batch.q_dtype, batch.kv_dtype
        for name, tensor, dtype, planned in (
            ("q_nope", q_nope, q_dtype, "q_data_type"),
            ("q_pe", q_pe, q_dtype, "q_data_type"),
            ("ckv_cache", ckv_cache, kv_dtype, "kv_data_type"),
            ("kpe_cache", kpe_cache, kv_dtype, "kv_data_type"),
        ):
            got = dims.tensor(name, tensor).dtype
            dims.require(
                got == dtype, f"{name}.dtype", f"match the planned {planned}, {dtype}", got
            )
        dims.match("q_nope", q_nope, "tokens", "num_heads", "ckv")
        dims.match("q_pe", q_pe, "tokens", "num_heads", "kpe")
        if kv_dtype == E4M3:
            ckv_scale = _check_scales(dims, ckv_scale, ckv_scale_arr, kpe_scale)
            assert kpe_scale is not None
            if ckv_scale != kpe_scale and q_pe.shape[2]:
                q_pe = (q_pe.float() * (kpe_scale / ckv_scale)).to(q_pe.dtype)
        else:
            for name, given in (
                ("ckv_scale", ckv_scale),
                ("ckv_scale_arr", ckv_scale_arr),
                ("kpe_scale", kpe_scale),
            ):
                dims.require(given is None, name, f"be None for caches of {kv_dtype}", "a scale")
            ckv_scale = 1.0
        if ckv_scale_arr is not None:
            pool = _pool_with_scales(dims, ckv_cache, kpe_cache, ckv_scale_arr)
        else:
            pool = split_pool(dims, ckv_cache, kpe_cache, tensor_scale=ckv_scale)
        is_wanted = return_lse or lse is not None
        out, lse = mla_decode(
            q_nope,
            pool,
            batch.page_table,
            batch.kv_lens,
            softmax_scale=batch.sm_scale,
            q_rope=q_pe,
            q_starts=batch.q_starts,
            mask=CAUSAL if batch.causal else NULL,
            out=out,
            lse=lse,
        )
        if is_wanted and not return_lse_base_on_e:
            lse.mul_(LOG2_E)
        return (out, lse) if return_lse else out


def _check_dtypes(dims: Dims, q_data_type: torch.dtype, kv_data_type: torch.dtype) -> None:
    """Require the cache's dtype to be q's, or e4m3 for bf16 queries."""
    known = (*FLOATS, E4M3)
    must = f"be one of {', '.join(map(str, known))}"
    dims.require(kv_data_type in known, "kv_data_type", must, kv_data_type)
    if kv_data_type == E4M3:
        must = "come with q_data_type=torch.bfloat16"
        is_bf16 = q_data_type == torch.bfloat16
        dims.require(is_bf16, f"kv_data_type={E4M3}", must, f"q_data_type={q_data_type}")
    else:
        must = f"be kv_data_type, {kv_data_type}"
        dims.require(q_data_type == kv_data_type, "q_data_type", must, q_data_type)


def _host_lengths(
    dims: Dims,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    kv_len_arr: Tensor,
    page_size: int,
) -> tuple[int, int]:
    """The batch, and the most pages of a request; all values are checked."""
    given = {
        "qo_indptr": qo_indptr,
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "kv_len_arr": kv_len_arr,
    }
    for name, tensor in given.items():
        dims.dtype(name, dims.tensor(name, tensor), *INTEGERS)
        dims.require(tensor.ndim == 1, name, "have one axis", f"shape {tuple(tensor.shape)}")
    batch = len(kv_len_arr)
    must = f"have batch + 1 entries, {batch + 1}"
    dims.require(len(qo_indptr) == batch + 1, "qo_indptr", must, len(qo_indptr))
    dims.require(len(kv_indptr) > batch, "kv_indptr", must, len(kv_indptr))
    dims.starts("qo_indptr", qo_indptr.cpu(), None)
    starts = kv_indptr[: batch + 1].cpu()
    dims.starts("kv_indptr", starts, len(kv_indices), "the entries of kv_indices", is_padded=True)
    counts, lengths = starts.diff().tolist(), kv_len_arr.tolist()
    for request, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        held = f"be 0 to {count * page_size}, the tokens of its {count} pages"
        dims.require(0 <= length <= count * page_size, f"kv_len_arr[{request}]", held, length)
    return batch, max(counts, default=0)


def _check_scales(
    dims: Dims, ckv_scale: float | None, ckv_scale_arr: Tensor | None, kpe_scale: float | None
) -> float:
    """The scale of ckv, 1 with scales of its own per token."""
    if (ckv_scale is None) == (ckv_scale_arr is None):
        got = "neither" if ckv_scale is None else "both"
        raise ValueError(
            f"{dims.op}: Exactly one of ckv_scale or ckv_scale_arr must be given for e4m3 caches, "
            f"got {got}"
        )
    dims.require(kpe_scale is not None, "kpe_scale", "be given for e4m3 caches", None)
    assert kpe_scale is not None
    dims.scale("kpe_scale", kpe_scale)
    if ckv_scale is None:
        return 1.0
    dims.scale("ckv_scale", ckv_scale)
    return ckv_scale


def _pool_with_scales(
    dims: Dims, ckv_cache: Tensor, kpe_cache: Tensor, ckv_scale_arr: Tensor
) -> PagedLatentCache:
    """The pool of e4m3 rows and their scales per 128 columns."""
    width = ckv_cache.shape[2]
    expected = (*ckv_cache.shape[:2], -(-width // SCALE_GROUP))
    shape = tuple(dims.tensor("ckv_scale_arr", ckv_scale_arr).shape)
    if shape != expected:
        raise ValueError(
            f"{dims.op}: Invalid shape of ckv_scale_arr: must be {expected}, got {shape}"
        )
    if kpe_cache.shape[2]:
        raise UnsupportedError(
            f"{dims.op}: ckv_scale_arr must come with a kpe_cache of 0 columns, "
            f"got {kpe_cache.shape[2]}"
        )
    return PagedLatentCache.wrap(
        ckv_cache, RowShape(width, 0), format="fp8_group128", scales=ckv_scale_arr
    )
