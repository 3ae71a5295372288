"""Append finished rows, latents or index keys, to the cache."""

from __future__ import annotations

from torch import Tensor

from mlakit.cache import PagedLatentCache
from mlakit.cache.slot_checks import (
    SKIPPED,
    check_slot_values,
    check_slots_unique,
)
from mlakit.dispatch import selection
from mlakit.dispatch.checks import FLOATS, Dims, values_visible
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.specs import Problem, device_facts
from mlakit.kernels.arguments import AppendRowsArguments
from mlakit.ops._checks import INTEGERS, check_layer, check_stored
from mlakit.ops._library import op

NAME = "append_rows"


def append_rows(
    latent: Tensor,
    k_rope: Tensor | None,
    cache: PagedLatentCache,
    slots: Tensor,
    *,
    layer: int = 0,
    power_of_two_scales: bool = False,
    backend: Backend = "auto",
) -> None:
    """Quantise rows that are normed and rotated already, and store them in the cache.

        cache[slots[t]] = quantise([ latent[t] | k_rope[t] ])

    latent     [tokens, D_C] bf16, fp16 or float32: columns of the values
    k_rope     [tokens, D_R] in latent's dtype; None where the rows of the cache have no rope
               columns. So index keys are appended: `append_rows(keys, None, index_cache, slots)`
    slots      [tokens] int32 or int64 row of each token, page · page_size + offset (vLLM's
               slot_mapping); no two tokens have the same. −1: the token is not stored, and its
               latent is not read
    power_of_two_scales  round scales up to powers of two, as DeepSeek-V3.2 does for index keys

    Nothing but the rows at these slots is written, and nothing is returned. Raises ValueError,
    where the slots are on the host, for a slot outside of the cache and for two equal ones; on a
    GPU rows with such a slot are skipped, unless `MLAKIT_CHECK_VALUES` is on.
    """
    arguments = AppendRowsArguments(
        latent=latent,
        k_rope=k_rope,
        layer=check_layer(NAME, cache, layer),
        slots=slots,
        power_of_two_scales=power_of_two_scales,
        backend=backend,
    )
    _append_rows(arguments)


def _nothing(a: AppendRowsArguments) -> tuple[()]:
    return ()


@op(NAME, fake=_nothing)
def _append_rows(a: AppendRowsArguments) -> tuple[()]:
    dims = Dims(NAME)
    row = a.layer.codec.row
    dims.bind("latent", row.kv_lora_rank, "the cache's kv_lora_rank")
    dims.bind("rope", row.qk_rope_head_dim, "the cache's qk_rope_head_dim")
    dims.match("latent", a.latent, "tokens", "latent", dtypes=FLOATS)
    dims.rows_contiguous("latent", a.latent)
    if a.k_rope is not None:
        dims.match("k_rope", a.k_rope, "tokens", "rope", dtypes=FLOATS)
        dims.rows_contiguous("k_rope", a.k_rope)
    elif row.qk_rope_head_dim:
        columns = f"{row.qk_rope_head_dim} rope columns"
        raise TypeError(f"{NAME}: k_rope must be given for a cache with {columns}, got None")
    check_stored(dims, a.layer)
    a.layer.check_writable(dims)
    dims.match("slots", a.slots, "tokens", dtypes=INTEGERS)
    if values_visible(a.slots):
        check_slot_values(dims, a.slots, a.layer.num_slots, minimum=SKIPPED)
        check_slots_unique(dims, a.slots)
    problem = Problem(
        *device_facts(a.latent.device),
        dtype=str(a.latent.dtype),
        format=a.layer.codec.name,
        page_size=a.layer.page_size,
        row=row,
    )
    selection.select(NAME, problem, a.backend).launch(a)
    return ()
