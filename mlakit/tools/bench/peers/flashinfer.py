"""FlashInfer, if installed; it selects its own backend (fa3 on Hopper)."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from mlakit.tools.bench.peers.peer import (
    Call,
    Peer,
    Unavailable,
    Unsupported,
    one_line,
    require_gpu,
)
from mlakit.tools.bench.problems import (
    LATENT,
    ROPE,
    Attention,
    DenseDecode,
    DensePrefill,
    SparseDecode,
    SparsePrefill,
)
from mlakit.tools.bench.suite import PEER_ERRORS

WORKSPACE_BYTES = 128 << 20  # recommended by its documentation


def load() -> ModuleType:
    require_gpu()
    try:
        import_module("flashinfer.mla")
        return import_module("flashinfer")
    except PEER_ERRORS as error:
        raise Unavailable(one_line(error)) from error


def prepare(problem: Attention) -> Call:
    match problem:
        case DenseDecode():
            return _dense_decode(load(), problem)
        case DensePrefill():
            return _dense_prefill(load(), problem)
        case SparsePrefill() | SparseDecode():
            raise Unsupported("its sparse kernels support sm_100 and sm_120 only")


def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _dense_decode(library: ModuleType, problem: DenseDecode) -> Call:
    batch, s_q, heads, _ = problem.q.shape
    page_size, device = problem.pages.shape[1], problem.q.device
    num_pages = (problem.kv_lens + page_size - 1) // page_size
    columns = torch.arange(problem.page_table.shape[1], device=device)
    starts = torch.zeros(batch + 1, dtype=torch.int32, device=device)
    starts[1:] = num_pages.cumsum(0)
    wrapper = library.mla.BatchMLAPagedAttentionWrapper(_workspace(device))
    wrapper.plan(
        s_q * torch.arange(batch + 1, dtype=torch.int32, device=device),
        starts,
        problem.page_table[columns < num_pages[:, None]],
        problem.kv_lens,
        heads,
        LATENT,
        ROPE,
        page_size,
        problem.causal,
        problem.softmax_scale,
        problem.q.dtype,
        problem.pages.dtype,
    )
    q = problem.q.flatten(0, 1)
    q_latent, q_rope = q[..., :LATENT], q[..., LATENT:]
    latent, rope = problem.pages[..., :LATENT], problem.pages[..., LATENT:]

    def call() -> Tensor:
        out: Tensor = wrapper.run(q_latent, q_rope, latent, rope)
        return out.view(batch, s_q, heads, LATENT)

    return call


def _dense_prefill(library: ModuleType, problem: DensePrefill) -> Call:
    heads = problem.q.shape[1]
    workspace = _workspace(problem.q.device)
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        problem.starts,
        problem.starts,
        heads,
        heads,
        problem.q.shape[-1],
        head_dim_vo=problem.v.shape[-1],
        causal=problem.causal,
        sm_scale=problem.softmax_scale,
        q_data_type=problem.q.dtype,
        kv_data_type=problem.k.dtype,
    )

    def call() -> Tensor:
        out: Tensor = wrapper.run(problem.q, problem.k, problem.v)
        return out

    return call


PEER = Peer("flashinfer", "FlashInfer", load, prepare, packages=("flashinfer-python",))
