"""Compress windows of tokens to one cache row each, as the compressor of DeepSeek-V4 does."""

from __future__ import annotations

from torch import Tensor

from mlakit.cache import PagedLatentCache, PageTable
from mlakit.dispatch import selection
from mlakit.dispatch.checks import FLOATS, Dims
from mlakit.dispatch.knobs import Backend
from mlakit.dispatch.specs import Problem, device_facts
from mlakit.kernels.arguments import CompressArguments
from mlakit.ops._checks import (
    check_kv_lens,
    check_layer,
    check_page_table,
    check_query_starts,
    check_stored,
    check_used_rows,
)
from mlakit.ops._library import op

NAME = "compress_rows"


def compress_rows(
    kv: Tensor,
    gate: Tensor,
    bias: Tensor,
    gamma: Tensor | None,
    freqs: Tensor | None,
    cache: PagedLatentCache,
    page_table: PageTable,
    state_cache: PagedLatentCache,
    state_table: PageTable,
    kv_lens: Tensor,
    q_starts: Tensor | None = None,
    *,
    rate: int,
    overlap: bool,
    epsilon: float,
    layer: int = 0,
    state_layer: int = 0,
    keep: int = 0,
    state_pages_repeat: bool = False,
    power_of_two_scales: bool = False,
    backend: Backend = "auto",
) -> None:
    """Pool each window of `rate` tokens to one row by a softmax per column, and store the row.

        x, z           kv, gate + bias[position % rate] of the tokens of window w
        pooled[c]      = Σ_j softmax_j(z[j, c]) · x[j, c]
        cache[w]       = quantise(R(w · rate) (pooled · rsqrt(mean pooled² + ε) · γ))
        state_cache[t] = [ kv | gate + bias[position % rate] ]

    A window w of a request is its tokens [w · rate, (w + 1) · rate). The step that brings the last
    of them writes row w. Tokens whose rows are still to be computed wait in `state_cache`.

    With `overlap` a window also has the tokens of the window before it, if there is one: the first
    half of the columns of those tokens, and the second half of its own tokens' columns.

    kv, gate     [tokens, columns] bf16, fp16 or float32; columns are D, the row width of the cache,
                 or 2·D with overlap
    bias         [rate, columns] bf16, fp16 or float32, added to the gate by position in the window
    gamma        [D] bf16, fp16 or float32; the norm over all D columns, and the rotation, are
                 float32. None: no norm, and epsilon is not used
    freqs        [positions, D_R] bf16, fp16 or float32; cos0, sin0, cos1, … as in
                 `norm_rope_quant_append`: interleaved pairs of the last D_R columns are rotated.
                 D_R is that of the cache; where rows have no rope columns, such as index keys, D_R
                 may be any even width. None: no rope
    page_table   [batch, max_pages] int32, as in `mla_decode`, of the rows of windows: row w is at
                 position w
    state_cache  the states, float32 rows of 2·columns: RowShape(2 * columns, 0), format "fp32"
    state_table  [batch, max_pages] int32, as in `mla_decode`, by token. Pages of tokens that are
                 neither read nor stored may be −1
    kv_lens      [batch] int32, tokens of each request once this step's are in it, as in
                 `mla_decode`
    q_starts     [batch + 1] int32, new tokens of each request; None means one each. Tokens after
                 q_starts[-1] are padding and are not read
    rate         tokens of a window
    overlap      whether a window also has the tokens of the window before it
    state_layer  number of the layer in `state_cache`
    keep         newest tokens that a later step may take back, such as rejected drafts: so many
                 more tokens wait in `state_cache`
    state_pages_repeat   whether a request may have a page of states at several places of its table,
                 so that the tokens of these places have the same slots. Then a step may write a
                 slot that it reads

    New tokens are read from kv and gate, older ones from `state_cache`: those from
    max((before // rate − overlap) · rate, 0) on, where `before` is the length before the step, if
    the step completes a window. New tokens from max(((kv_len − keep) // rate − overlap) · rate, 0)
    on are stored. Without `state_pages_repeat`, no slot that the step writes may be one that it
    reads. A prompt gives the same rows however it is split into steps.

    Nothing but these rows is written, and nothing is returned. Raises ValueError, where the values
    are on the host, for a kv_len below the new tokens of its request, for a row outside of a cache
    or of its table, and for a window at a position outside of freqs.
    """
    arguments = CompressArguments(
        kv=kv,
        gate=gate,
        bias=bias,
        gamma=gamma,
        freqs=freqs,
        layer=check_layer(NAME, cache, layer),
        page_table=page_table,
        state=check_layer(NAME, state_cache, state_layer, owner="state_"),
        state_table=state_table,
        kv_lens=kv_lens,
        q_starts=q_starts,
        rate=rate,
        overlap=overlap,
        keep=keep,
        state_pages_repeat=state_pages_repeat,
        epsilon=epsilon,
        power_of_two_scales=power_of_two_scales,
        backend=backend,
    )
    _compress_rows(arguments)


def _nothing(a: CompressArguments) -> tuple[()]:
    return ()


@op(NAME, fake=_nothing)
def _compress_rows(a: CompressArguments) -> tuple[()]:
    dims = Dims(NAME)
    rate, keep = dims.integer("rate", a.rate, 1), dims.integer("keep", a.keep, 0)
    epsilon = dims.finite("epsilon", a.epsilon)
    dims.require(epsilon >= 0, "epsilon", "not be negative", epsilon)
    width = a.layer.codec.row.width
    times = "twice the row width of the cache" if a.overlap else "the row width of the cache"
    dims.bind("columns", (1 + a.overlap) * width, times)
    dims.bind("rate", rate, "the argument rate")
    dims.bind("width", width, "the row width of the cache")
    for name, tensor in (("kv", a.kv), ("gate", a.gate)):
        dims.match(name, tensor, "tokens", "columns", dtypes=FLOATS)
        dims.rows_contiguous(name, tensor)
    dims.match("bias", a.bias, "rate", "columns", dtypes=FLOATS)
    dims.rows_contiguous("bias", a.bias)
    if a.gamma is not None:
        dims.match("gamma", a.gamma, "width", dtypes=FLOATS)
    check_stored(dims, a.layer)
    a.layer.check_writable(dims)
    _check_state(dims, a)
    _check_freqs(dims, a.freqs, a.layer.codec.row.qk_rope_head_dim, width)
    kv_lens = check_kv_lens(dims, a.kv_lens)
    starts = check_query_starts(dims, a.q_starts, dims["tokens"], dims["batch"], is_padded=True)
    check_page_table(dims, a.page_table, dims["batch"])
    check_page_table(dims, a.state_table, dims["batch"], arg="state_table")
    a = a._replace(rate=rate, keep=keep, epsilon=epsilon, q_starts=starts)
    if kv_lens is not None:
        _check_places(dims, a, kv_lens, starts.diff().tolist())
    problem = Problem(
        *device_facts(a.kv.device),
        dtype=str(a.kv.dtype),
        format=a.layer.codec.name,
        page_size=a.layer.page_size,
        row=a.layer.codec.row,
    )
    selection.select(NAME, problem, a.backend).launch(a)
    return ()


def _check_state(dims: Dims, a: CompressArguments) -> None:
    """The state has float32 rows of two numbers for each column."""
    dims.same_device("state_cache", a.state.payload)
    codec = a.state.codec
    dims.require(codec.name == "fp32", "state_cache", "have rows of format fp32", codec.name)
    columns = 2 * dims["columns"]
    must = f"have rows of {columns} columns, kv and gate of a token"
    dims.require(codec.row.width == columns, "state_cache", must, codec.row.width)
    a.state.check_writable(dims, "state_cache")


def _check_freqs(dims: Dims, freqs: Tensor | None, rope: int, width: int) -> None:
    """The angles are those of the rope columns, or of the last columns where there are none."""
    if freqs is None:
        return
    if rope:
        dims.bind("rope", rope, "the cache's qk_rope_head_dim")
    dims.match("freqs", freqs, "positions", "rope", dtypes=FLOATS)
    if rope:
        return
    dims.require(width % 2 == 0, "freqs", f"be None for rows of odd width, {width}", "angles")
    columns = freqs.shape[1]
    fits = columns % 2 == 0 and columns <= width
    dims.require(fits, "freqs.shape[1]", f"be even and at most {width}", columns)


def _check_places(dims: Dims, a: CompressArguments, kv_lens: list[int], q_lens: list[int]) -> None:
    """All rows that are written or read lie in a page of their cache, and all windows in freqs."""
    dims.new_tokens_counted(kv_lens, q_lens)
    before = [kv_len - q_len for kv_len, q_len in zip(kv_lens, q_lens, strict=True)]
    first = [tokens // a.rate for tokens in before]
    last = [kv_len // a.rate for kv_len in kv_lens]
    check_used_rows(dims, a.page_table, a.layer, first, last, counted="windows of kv_lens")
    read = [
        first_needed(low, a.rate, a.overlap) if end > begin else low
        for low, begin, end in zip(before, first, last, strict=True)
    ]
    stored = [
        max(low, first_needed(kv_len - a.keep, a.rate, a.overlap))
        for low, kv_len in zip(before, kv_lens, strict=True)
    ]
    for rows in ((read, before), (stored, kv_lens)):
        check_used_rows(dims, a.state_table, a.state, *rows, arg="state_table")
    if a.freqs is None:
        return
    for request, (begin, end) in enumerate(zip(first, last, strict=True)):
        must = f"have a row for position {(end - 1) * a.rate} of request {request}"
        fits = end == begin or (end - 1) * a.rate < len(a.freqs)
        dims.require(fits, "freqs", must, f"{len(a.freqs)} rows")


def first_needed(length: int, rate: int, overlap: bool) -> int:
    """The oldest token that the windows to come read, once a request has `length` tokens."""
    return max((length // rate - overlap) * rate, 0)
