"""One op: `mla_decode` over a paged cache, in three row formats, beside plain torch.

Four requests of different lengths share a pool of pages. Each has one new token, whose query
attends to the request's cached rows; the page table says where they are. Plain torch computes the
same attention request by request from the rows that the cache returns.

    python examples/raw_op.py
    python examples/raw_op.py --device cuda --heads 128 --lengths 4096 8192 100 1

`kernel error` is the distance to plain torch over the same stored rows. `format error` is the
distance to attention over the rows before they were stored: what the format costs. Both are
relative to the largest output of a request. The exit status is 1 if a kernel error is above its
tolerance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

import mlakit
from mlakit.formats import Format, row_codec

PAGE_SIZE = 64
FORMATS: tuple[Format, ...] = ("bf16", "fp8_block128", "fp8_token")
TOLERANCE = 0.02  # a bf16 result has 8 bits of mantissa


def attention(q: Tensor, rows: Tensor, softmax_scale: float, v_width: int) -> tuple[Tensor, Tensor]:
    """One query [heads, width] over the rows [tokens, width] of its request, in float64."""
    rows = rows.double()
    scores = q.double() @ rows.T * softmax_scale
    return scores.softmax(-1) @ rows[:, :v_width], scores.logsumexp(-1)


def shuffled_page_table(lengths: Sequence[int]) -> tuple[Tensor, int]:
    """int32 [batch, columns] with pages in random order, -1 where a request has none."""
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    pages = torch.randperm(sum(counts)).int().split(counts)
    table = torch.nn.utils.rnn.pad_sequence(list(pages), batch_first=True, padding_value=-1)
    return table, sum(counts)


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest difference of a request, relative to its largest expected value."""
    difference = (actual.double() - expected).flatten(1).abs().amax(1)
    return (difference / expected.flatten(1).abs().amax(1)).max().item()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--heads", type=int, default=16, help="query heads of this rank")
    parser.add_argument("--lengths", type=int, nargs="+", default=[300, 64, 1, 517])
    options = parser.parse_args(arguments)
    device, lengths = torch.device(options.device), options.lengths
    torch.manual_seed(0)

    model = mlakit.MLAGeometry.preset("deepseek-v3").with_heads(options.heads)
    width, v_width, scale = model.row.width, model.row.v_width, model.softmax_scale
    page_table, num_pages = shuffled_page_table(lengths)
    kv_lens = torch.tensor(lengths, dtype=torch.int32)  # cached tokens, the new ones included
    tokens = [torch.randn(length, width) for length in lengths]  # latent | rotated key
    q = torch.randn(len(lengths), options.heads, width).bfloat16()  # absorbed and rotated
    exact = [attention(each, rows, scale, v_width)[0] for each, rows in zip(q, tokens, strict=True)]

    print(f"mla_decode, {len(lengths)} requests of {lengths} tokens, {options.heads} heads")
    print(f"{'format':<14}{'bytes/token':>12}{'kernel error':>14}{'format error':>14}")
    is_right = True
    for format in FORMATS:
        cache = mlakit.PagedLatentCache.allocate(
            model, format, num_pages=num_pages, page_size=PAGE_SIZE, device=device
        )
        layer = cache.layer(0)
        slots = [
            mlakit.request_slots(page_table, PAGE_SIZE, request, 0, length).to(device)
            for request, length in enumerate(lengths)
        ]
        for where, rows in zip(slots, tokens, strict=True):
            layer.write(where, rows.to(device))

        out, lse = mlakit.mla_decode(
            q.to(device), cache, page_table.to(device), kv_lens.to(device), softmax_scale=scale
        )

        pairs = [
            attention(each, layer.read(where).cpu(), scale, v_width)
            for each, where in zip(q, slots, strict=True)
        ]
        expected, expected_lse = (torch.stack(each) for each in zip(*pairs, strict=True))
        errors = [relative(out.cpu(), expected), relative(lse.cpu(), expected_lse)]
        format_error = relative(expected, torch.stack(exact))
        size = row_codec(format, model.row).bytes_per_token
        print(f"{format:<14}{size:>12}{max(errors):>14.5f}{format_error:>14.5f}")
        is_right &= all(error <= TOLERANCE for error in errors)  # false for NaN
    print("plain torch agrees" if is_right else "DIFFERENT from plain torch")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
