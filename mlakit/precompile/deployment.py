"""What decides which kernels a serving process launches: a model, its cache and its callers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from mlakit.dispatch.checks import Dims
from mlakit.dispatch.names import one_of
from mlakit.formats import ENGINE_NAMES, FORMATS, Format
from mlakit.model.config import config_fields, index_pool
from mlakit.model.geometry import MLAGeometry

User = Literal["vllm", "sglang", "steps"]
"""Who calls the ops: the plugin of an engine, or `mlakit.steps`."""
USERS: tuple[User, ...] = get_args(User)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MAX_CONTEXT = 163_840  # of a model whose config does not say


@dataclass(frozen=True)
class Deployment:
    """One rank of a model in a serving process."""

    geometry: MLAGeometry  # with the heads of the rank
    format: Format
    page_size: int
    page_rows: int  # from a page to the next
    dtype: str  # of activations, a key of `DTYPES`
    users: tuple[User, ...]
    max_context: int
    max_tokens: int  # new tokens of a step
    has_fp8_weights: bool
    is_batch_invariant: bool  # engines' decode steps have no plan
    index_pool: int = 1  # tokens of an index key
    selects_tail: bool = False  # the tokens after the last pool, too

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def max_pages(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_context // self.page_size)

    @property
    def max_keys(self) -> int:
        """Keys that these pages have room for."""
        return self.max_pages * self.page_size


def deployment(
    model: Any,
    *,
    heads: int | None,
    format: str,
    page_size: int,
    page_rows: int | None,
    dtype: str,
    user: str,
    max_context: int | None,
    max_tokens: int,
    has_fp8_weights: bool = False,
    is_batch_invariant: bool = False,
) -> Deployment:
    """Check the arguments of `warmup`; ValueError and TypeError name the one that is wrong."""
    dims = Dims("warmup")
    geometry = MLAGeometry.from_config(model)
    if heads is not None:
        geometry = geometry.with_heads(dims.integer("heads", heads, 1))
    format = ENGINE_NAMES.get(format, format)
    for name, value, known in (
        ("format", format, tuple(FORMATS)),
        ("dtype", dtype, tuple(DTYPES)),
        ("user", user, (*USERS, "all")),
    ):
        dims.require(value in known, name, f"be {one_of(known)}", repr(value))
    page_size = dims.integer("page_size", page_size, 1)
    fields = None if isinstance(model, MLAGeometry) else config_fields(model)
    pool = 1 if fields is None else index_pool(fields)
    if geometry.has_indexer and pool > 1:
        must = "be steps or all for a model with one index key for several tokens"
        dims.require(user in ("steps", "all"), "user", must, repr(user))
        user = "steps"
        must = f"be a multiple of the {pool} tokens of an index key"
        dims.require(page_size % pool == 0, "page_size", must, page_size)
    page_rows = page_size if page_rows is None else dims.integer("page_rows", page_rows, page_size)
    if max_context is None:
        max_context = geometry.rope_parameters.max_position_embeddings or MAX_CONTEXT
    return Deployment(
        geometry=geometry,
        format=format,  # type: ignore[arg-type]  # it is one of them
        page_size=page_size,
        page_rows=page_rows,
        dtype=dtype,
        users=USERS if user == "all" else (user,),  # type: ignore[arg-type]  # likewise
        max_context=dims.integer("max_context", max_context, 1),
        max_tokens=dims.integer("max_tokens", max_tokens, 1),
        has_fp8_weights=has_fp8_weights,
        is_batch_invariant=is_batch_invariant,
        index_pool=pool,
        selects_tail=fields is not None
        and bool(fields.get("index_kpool_always_select_tail", True)),
    )
