"""Every main comparison of an oracle kills the oracle's mutants.

Comparisons look the oracle up as `reference.<name>` when they run, so that a mutant can take its
place. Their modules are imported, not the tests themselves, which would be collected twice.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit import reference
from mlakit.model.masks import CAUSAL
from tests.kernel_launchers import Launcher
from tests.mutations import Mutation, of_attribute
from tests.reference import test_attention as attention
from tests.reference import test_fp8 as fp8
from tests.reference import test_norm_rope_quant as norm_rope_quant
from tests.reference import test_sparse as sparse
from tests.reference import test_transformers as layer
from tests.reference.inputs import E4M3, SINK


def uniform_average(oracle: Launcher) -> Launcher:
    """Attention that ignores the scores."""
    return lambda *args, **options: oracle(*args, **{**options, "softmax_scale": 0.0})


def does_nothing(oracle: Launcher) -> Launcher:
    """Results of the right shape and dtype, with nothing in them."""

    def mutant(*args: Any, **options: Any) -> Any:
        result = oracle(*args, **options)
        if isinstance(result, Tensor):
            return torch.zeros_like(result)
        return tuple(torch.zeros_like(part) for part in result)

    return mutant


def gives_back_its_input(oracle: Launcher) -> Launcher:
    return lambda x, *args, **options: x


def gives_back_both_inputs(oracle: Launcher) -> Launcher:
    return lambda q_rope, kv, *args, **options: (q_rope, kv)


def plain_mean(oracle: Launcher) -> Launcher:
    """Merging that gives every split that has keys the same weight."""
    return lambda outs, lses, **options: (outs.nanmean(0).nan_to_num(), lses.logsumexp(0))


ATTENTION = (uniform_average, does_nothing)
MUTATIONS = [
    of_attribute(reference, oracle, change, comparison)
    for comparison, oracle, changes in [
        (
            partial(attention.test_prefill_matches_its_definition, CAUSAL, None),
            "mla_prefill",
            ATTENTION,
        ),
        (partial(attention.test_absorbed_equals_expanded, CAUSAL, None), "mla_prefill", ATTENTION),
        (partial(attention.test_absorbed_equals_expanded, CAUSAL, SINK), "mla_decode", ATTENTION),
        (attention.test_prefill_matches_scaled_dot_product_attention, "mla_prefill", ATTENTION),
        (attention.test_alibi_matches_the_documented_form, "mla_prefill", ATTENTION),
        (
            partial(attention.test_split_and_merged_equals_whole, SINK),
            "merge_states",
            (does_nothing, plain_mean),
        ),
        (
            partial(attention.test_chunked_prefill_equals_one_shot, None),
            "merge_states",
            (does_nothing, plain_mean),
        ),
        (
            partial(sparse.test_sparse_over_all_visible_rows_equals_decode, CAUSAL, None),
            "sparse_mla",
            ATTENTION,
        ),
        (
            partial(sparse.test_sparse_over_all_visible_rows_equals_decode, CAUSAL, SINK),
            "mla_decode",
            ATTENTION,
        ),
        (sparse.test_sparse_edge_cases, "sparse_mla", ATTENTION),
        (sparse.test_sparse_extra_rows_join_the_same_softmax, "sparse_mla", ATTENTION),
        (sparse.test_indexer_logits_of_a_ragged_batch, "indexer_logits", (does_nothing,)),
        (sparse.test_topk_orders_ties_nan_and_infinities, "indexer_topk", (does_nothing,)),
        (sparse.test_physical_rows_of_listed_positions, "physical_rows", (does_nothing,)),
        (sparse.test_selected_rows_are_those_of_the_best_tokens, "indexer_select", (does_nothing,)),
        (
            norm_rope_quant.test_rotation_is_a_complex_product,
            "rotate",
            (does_nothing, gives_back_its_input),
        ),
        (
            norm_rope_quant.test_finished_rows_are_stored_at_their_slots,
            "append_rows",
            (does_nothing,),
        ),
        (norm_rope_quant.test_norm_matches_torch, "rms_norm", (does_nothing, gives_back_its_input)),
        (
            norm_rope_quant.test_norm_rope_quant_takes_each_token_at_its_position,
            "norm_rope_quant",
            (does_nothing, gives_back_both_inputs),
        ),
        (
            partial(
                norm_rope_quant.test_stepwise_rotation_is_exact_to_the_bit,
                torch.bfloat16,
                torch.bfloat16,
                0,
            ),
            "rotate_stepwise",
            (does_nothing, gives_back_its_input),
        ),
        (
            norm_rope_quant.test_stepwise_norm_stays_close_to_the_exact_one,
            "rms_norm_stepwise",
            (does_nothing, gives_back_its_input),
        ),
        (
            partial(norm_rope_quant.test_stepwise_rows_are_the_steps_in_the_final_dtypes, E4M3),
            "norm_rope_quant_stepwise",
            (does_nothing, gives_back_both_inputs),
        ),
        (fp8.test_quantize_scales_every_group_of_every_row, "quantize_fp8", (does_nothing,)),
        (fp8.test_quantize_scales_every_group_of_every_row, "dequantize_fp8", (does_nothing,)),
        (fp8.test_scaled_product_equals_the_dequantised_one, "scaled_mm_fp8", (does_nothing,)),
        (
            partial(layer.test_parity_with_transformers, "interleaved", "expanded"),
            "mla_prefill",
            ATTENTION,
        ),
        (
            partial(layer.test_parity_with_transformers, "interleaved", "absorbed"),
            "mla_decode",
            ATTENTION,
        ),
        (
            partial(layer.test_parity_with_transformers, "interleaved", "absorbed"),
            "norm_rope_quant",
            (does_nothing, gives_back_both_inputs),
        ),
    ]
    for change in changes
]


def mutation_name(mutation: Mutation) -> str:
    test = getattr(mutation.check, "func", mutation.check)
    return f"{test.__name__.removeprefix('test_')}-{mutation}"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=mutation_name)
def test_a_mutant_is_killed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation.check()
    mutation.assert_killed(monkeypatch)
