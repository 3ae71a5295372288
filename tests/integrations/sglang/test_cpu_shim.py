"""The ops that stand for SGLang's compiled ones where it has none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.integrations.sglang import cpu_shim


@pytest.fixture
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ops_are_called_as_sglang_calls_them():
    """`sglang.srt.distributed.bootstrap`, on arm64."""
    cpu_shim.define_ops()
    assert isinstance(torch.ops.sgl_kernel.init_cpu_threads_env("0,1,2"), str)
    assert torch.ops.sgl_kernel.initialize(2, 1) is None


@pytest.mark.usefixtures("_group_of_one")
def test_ranks_reduce_and_gather():
    """`sglang.srt.distributed.parallel_state`, likewise."""
    cpu_shim.define_ops()
    data = torch.arange(6.0).view(2, 3)
    assert torch.ops.sgl_kernel.shm_allreduce(data, int(dist.ReduceOp.SUM)) is None
    assert data.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.equal(torch.ops.sgl_kernel.shm_allgather(data, 1), data)
    with pytest.raises(AssertionError):
        torch.ops.sgl_kernel.shm_allreduce(data, int(dist.ReduceOp.MAX))
