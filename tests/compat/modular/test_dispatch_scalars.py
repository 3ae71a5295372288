"""The number of partitions (splits) MAX chooses, value by value, for every GPU and head count."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlakit.compat.modular.dispatch_scalars import (
    BUCKETS,
    Launch,
    compute_mla_dispatch_scalars,
    num_partitions,
)

B200_SMS = 148
CACHES = (128, 512, 1024, 4096, 16384, 65536, 131072)
PINS = {
    (128, 1): (2, 8, 9, 37, 74, 74, 74),
    (128, 8): (2, 8, 9, 9, 9, 18, 37),
    (128, 64): (1, 1, 1, 2, 8, 18, 37),
    (128, 128): (1, 1, 1, 1, 1, 1, 1),
    (64, 1): (2, 2, 2, 8, 32, 74, 74),
    (64, 8): (2, 2, 2, 8, 18, 18, 18),
    (64, 64): (1, 2, 2, 2, 2, 2, 2),
}


@pytest.mark.parametrize(
    ("heads", "batch", "cache", "partitions"),
    [
        (heads, batch, cache, partitions)
        for (heads, batch), row in PINS.items()
        for cache, partitions in zip(CACHES, row, strict=True)
    ],
)
def test_dense_pin(heads, batch, cache, partitions):
    scalars = compute_mla_dispatch_scalars(batch, cache, 1, heads, sm_count=B200_SMS)
    assert scalars.tolist() == [batch, 1, partitions]
    assert scalars.dtype == torch.int64
    assert scalars.device.type == "cpu"


@pytest.mark.parametrize("batch", [129, 256, 512])
@pytest.mark.parametrize("cache", CACHES)
def test_full_gpu_is_not_split(batch, cache):
    assert num_partitions(batch, cache, 1, 128, sm_count=B200_SMS) == 1


@pytest.mark.parametrize(
    ("batch", "cache", "heads", "is_fp8", "partitions"),
    [
        (16, 4096, 128, False, 8),  # 4 splits fill 128 of 148 SMs, less than 90 %: 5, bucket 8
        (3, 32768, 128, False, 32),  # 257 pages, at least 4 × 2 to a split
        (12, 16384, 128, True, 8),  # 129 pages, 8 × 2
        (3, 65536, 128, True, 64),  # 513 pages, 4 × 2 for up to 8 requests
        (64, 16384, 128, True, 4),  # 129 pages, 16 × 2 from 64 requests on
        (64, 500, 64, True, 2),  # 501 keys are 8 small pages, 4 to a split
    ],
)
def test_dense_rule_worked_by_hand(batch, cache, heads, is_fp8, partitions):
    chosen = num_partitions(batch, cache, 1, heads, sm_count=B200_SMS, is_fp8_kv=is_fp8)
    assert chosen == partitions


SPARSE_PINS = {
    (1, 6): 20,
    (2, 6): 9,
    (4, 6): 4,
    (8, 6): 3,
    (16, 6): 3,
    (32, 6): 3,
    (128, 6): 1,
    (8, 2): 9,
    (8, 3): 4,
    (8, 5): 3,
    (8, 7): 2,
    (8, 8): 2,
}


@pytest.mark.parametrize(("batch", "q_len"), SPARSE_PINS)
def test_sparse_verify_pin(batch, q_len):
    scalars = compute_mla_dispatch_scalars(
        batch, 30000, q_len, 8, sm_count=B200_SMS, is_fp8_kv=True, indices_stride=2048
    )
    assert scalars.tolist() == [batch, q_len, SPARSE_PINS[batch, q_len]]


@pytest.mark.parametrize("stride", [512, 4096])
def test_sparse_verify_fills_one_wave_at_other_widths(stride):
    sparse = {"sm_count": B200_SMS, "is_fp8_kv": True, "indices_stride": stride}
    assert num_partitions(8, 30000, 6, 8, **sparse) == 3


def test_sparse_verify_without_the_cost_model_pin():
    sparse = {"sm_count": B200_SMS, "is_fp8_kv": True, "indices_stride": 2048}
    assert num_partitions(8, 30000, 6, 8, **sparse, _cost_model=False) == 8
    assert num_partitions(8, 30000, 6, 8, **sparse) == 3


def test_sparse_length_is_the_topk_whatever_the_cache():
    sparse = {"sm_count": B200_SMS, "indices_stride": 512}
    assert {num_partitions(2, cache, 1, 16, **sparse) for cache in CACHES} == {2}
    assert num_partitions(2, 131072, 1, 16, sm_count=B200_SMS) == 74


def test_short_topk_decode_gets_a_split_per_page():
    sparse = {"sm_count": B200_SMS, "is_fp8_kv": True, "indices_stride": 2048}
    assert num_partitions(4, 2048, 1, 8, **sparse) == 16
    assert num_partitions(4, 1024, 1, 8, **sparse) == 9  # 1025 keys: 9 pages of 128
    assert num_partitions(4, 2049, 1, 8, **sparse) == 4
    assert num_partitions(9, 2048, 1, 8, **sparse) == 4


def test_folded_queries_share_a_thread_block():
    # 16 heads × 4 tokens fit the 64 rows of a block; 5 tokens do not, and fill the GPU themselves
    assert num_partitions(37, 16384, 4, 16, sm_count=B200_SMS) == 4
    assert num_partitions(37, 16384, 5, 16, sm_count=B200_SMS) == 1


def test_fp8_moves_the_limit_of_short_requests():
    assert num_partitions(64, 400, 1, 64, sm_count=B200_SMS) == 2
    assert num_partitions(64, 400, 1, 64, sm_count=B200_SMS, is_fp8_kv=True) == 1


def test_window_caps_the_keys():
    long = num_partitions(1, 131072, 1, 64, sm_count=B200_SMS)
    assert long == 74
    assert num_partitions(1, 131072, 1, 64, sm_count=B200_SMS, window=4096) == 8
    assert num_partitions(64, 131072, 1, 64, sm_count=B200_SMS, window=128) == 2
    assert num_partitions(64, 128, 1, 64, sm_count=B200_SMS, window=128) == 1


@pytest.mark.parametrize(("batch", "q_len"), [(0, 1), (0, 0), (0, 7), (3, 0)])
def test_no_work_is_one_split(batch, q_len):
    scalars = compute_mla_dispatch_scalars(batch, 4096, q_len, 128, sm_count=B200_SMS)
    assert scalars.tolist() == [batch, q_len, 1]


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(
    st.integers(1, 600),
    st.integers(0, 300_000),
    st.integers(1, 16),
    st.integers(1, 1200),
    st.integers(1, 200),
    st.booleans(),
    st.none() | st.integers(0, 5000),
)
def test_every_call_gets_a_bucket(batch, cache, q_len, heads, sm_count, is_fp8, stride):
    partitions = num_partitions(
        batch, cache, q_len, heads, sm_count=sm_count, is_fp8_kv=is_fp8, indices_stride=stride
    )
    assert partitions in (*BUCKETS, max(sm_count // 2, 1))
    assert 1 <= partitions <= max(sm_count // 2, 1)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.integers(0, 300))
def test_buckets_round_up_and_the_largest_caps(sm_count, partitions):
    launch = Launch(1, 10**6, 1, 64, 128, sm_count, is_fp8=False)
    buckets = launch.buckets()
    assert list(buckets) == sorted(set(buckets))
    chosen = launch.clamp_to_bucket(partitions, minimum=1)
    assert chosen == min((b for b in buckets if b >= partitions), default=buckets[-1])


@pytest.mark.parametrize(
    ("argument", "value", "must"),
    [
        ("batch_size", -1, "not be negative"),
        ("max_cache_length", -5, "not be negative"),
        ("q_max_seq_len", -1, "not be negative"),
        ("num_heads", 0, "be at least 1"),
        ("num_heads", -8, "be at least 1"),
        ("sm_count", 0, "be at least 1"),
        ("indices_stride", -64, "not be negative"),
    ],
)
def test_refused_values_are_named(argument, value, must):
    with pytest.raises(
        ValueError, match=f"^compute_mla_dispatch_scalars: {argument} must {must}, got {value}$"
    ):
        call_with(argument, value)


@pytest.mark.parametrize(
    "argument",
    ["batch_size", "max_cache_length", "q_max_seq_len", "num_heads", "sm_count", "indices_stride"],
)
@pytest.mark.parametrize("value", [1.5, True, "8", 2.0], ids=repr)
def test_arguments_that_are_no_integers_are_named(argument, value):
    with pytest.raises(
        TypeError,
        match=f"^compute_mla_dispatch_scalars: {argument} must be an integer, got {value!r}$",
    ):
        call_with(argument, value)


def call_with(argument: str, value: object) -> torch.Tensor:
    arguments = {
        "batch_size": 8,
        "max_cache_length": 4096,
        "q_max_seq_len": 1,
        "num_heads": 128,
        "sm_count": B200_SMS,
        "indices_stride": None,
    }
    return compute_mla_dispatch_scalars(**{**arguments, argument: value})


def test_numpy_integers_are_integers():
    assert call_with("batch_size", np.int64(8)).tolist() == [8, 1, 9]
