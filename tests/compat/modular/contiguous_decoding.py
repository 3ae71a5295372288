"""Decoding over a contiguous cache: inputs, call and comparison in one."""

from __future__ import annotations

import torch

from mlakit import reference
from mlakit.tools.testing import assert_matches
from tests.compat.modular.inputs import (
    BF16,
    E4M3,
    F32,
    NOTHING,
    Padded,
    make_mask,
    modular,
    normal,
    store,
)


def contiguous_decoding(
    generator, dtype, k_dtype, batch, q_len, num_keys, heads, mask, window, *, parts
):
    rows = store(normal(generator, batch, num_keys, 1, 576), k_dtype)
    k = Padded.holding(rows, gaps=(1, 2, 1, 8))
    queries = store(normal(generator, batch, q_len, heads, 576), dtype)
    q = Padded.holding(queries, gaps=(1, 1, 1, 8))
    out_dtype = BF16 if dtype == E4M3 else dtype
    output = Padded(batch, q_len, heads, 512, dtype=out_dtype, gaps=(1, 1, 1, 4))

    def oracle(precision):
        out, _ = reference.mla_decode(
            queries.double().flatten(0, 1),
            list(rows[:, :, 0].double()),
            [q_len] * batch,
            softmax_scale=0.137,
            v_width=512,
            mask=make_mask(mask, window),
            dtype=precision,
        )
        return out.unflatten(0, (batch, q_len))

    returned = modular.flare_mla_decoding(
        output.view, q.view, k.view, make_mask(mask, window), 0.137, None, num_partitions=parts
    )
    assert returned.data_ptr() == output.view.data_ptr()
    assert_matches("output", output.view, oracle(torch.float64), oracle(F32))
    output.assert_only_written("output", torch.tensor(True))
    for name, tensor in (("q", q), ("k", k)):
        tensor.assert_only_written(name, NOTHING)
