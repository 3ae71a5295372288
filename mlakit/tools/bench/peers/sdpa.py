"""torch's scaled_dot_product_attention on cuDNN: expanded attention, equal lengths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mlakit.tools.bench.peers.peer import Call, Peer, Unavailable, Unsupported, require_gpu
from mlakit.tools.bench.problems import (
    Attention,
    DenseDecode,
    DensePrefill,
    SparseDecode,
    SparsePrefill,
)


def load() -> str:
    require_gpu()
    if not torch.backends.cudnn.is_available():
        raise Unavailable("this build of torch has no cuDNN")
    return f"cuDNN {torch.backends.cudnn.version()}"


def prepare(problem: Attention) -> Call:
    match problem:
        case DensePrefill():
            load()
            return dense_prefill(problem, SDPBackend.CUDNN_ATTENTION)
        case DenseDecode():
            raise Unsupported("does not support a paged cache")
        case SparsePrefill() | SparseDecode():
            raise Unsupported("does not support sparse indices")


def dense_prefill(problem: DensePrefill, backend: SDPBackend) -> Call:
    lengths = set(problem.starts.diff().tolist())
    if lengths != {problem.max_len}:
        raise Unsupported(f"needs equal lengths, got {sorted(lengths)}")
    batch = len(problem.starts) - 1
    q, k, v = (
        each.unflatten(0, (batch, problem.max_len)).transpose(1, 2)
        for each in (problem.q, problem.k, problem.v)
    )

    def call() -> Tensor:
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(
                q, k, v, is_causal=problem.causal, scale=problem.softmax_scale
            )
        return out.transpose(1, 2).flatten(0, 1)  # no copy: the result has the layout of q

    return call


PEER = Peer("sdpa", "torch's SDPA on cuDNN", load, prepare)
