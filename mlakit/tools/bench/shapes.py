"""Parses shapes of the command line.

A batch is `<count>q<q_len>s<kv_len>`; `+` or `,` joins several. kv_len includes the new tokens.
Numbers may end in k (1024) or m (1024 · 1024): `64q1s4k+2q1s64k`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import accumulate

from mlakit.formats import Format, row_codec
from mlakit.model.geometry import MLAGeometry

NUMBER = r"(\d+[km]?)"
GROUP = re.compile(rf"{NUMBER}q{NUMBER}s{NUMBER}")
UNITS = {"k": 1 << 10, "m": 1 << 20}
TOPK = 2048  # without --topk
SMALL_COUNT, SMALL_QUERIES, SMALL_LENGTH = 2, 20, 200


@dataclass(frozen=True)
class Group:
    """`count` requests with `q_len` new tokens each; with these `kv_len` tokens are cached."""

    count: int
    q_len: int
    kv_len: int

    def __str__(self) -> str:
        return f"{self.count}q{short_number(self.q_len)}s{short_number(self.kv_len)}"


@dataclass(frozen=True)
class Batch:
    """The requests of a call, group by group."""

    groups: tuple[Group, ...]

    @classmethod
    def of(cls, count: int, q_len: int, kv_len: int) -> Batch:
        return cls((Group(count, q_len, kv_len),))

    @classmethod
    def parse(cls, text: str) -> Batch:
        """Raises ValueError, naming --shape, for other text."""
        return cls(tuple(_group(text, part) for part in re.split(r"[+,]", text.lower())))

    @property
    def q_lens(self) -> tuple[int, ...]:
        return tuple(group.q_len for group in self._requests)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        return tuple(group.kv_len for group in self._requests)

    @property
    def starts(self) -> tuple[int, ...]:
        """The first query of each request, and the total: q_starts."""
        return tuple(accumulate(self.q_lens, initial=0))

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    @property
    def size(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def is_even(self) -> bool:
        """Whether all requests have the same number of queries."""
        return len({group.q_len for group in self.groups}) == 1

    @property
    def small(self) -> Batch:
        return Batch(
            tuple(
                Group(
                    min(group.count, SMALL_COUNT),
                    min(group.q_len, SMALL_QUERIES),
                    min(group.kv_len, SMALL_LENGTH),
                )
                for group in self.groups
            )
        )

    @property
    def checked_requests(self) -> list[int]:
        """Requests to compare with the oracle: the first, middle and last of every group."""
        found: set[int] = set()
        first = 0
        for group in self.groups:
            found |= {first, first + group.count // 2, first + group.count - 1}
            first += group.count
        return sorted(found)

    @property
    def _requests(self) -> Iterator[Group]:
        return (group for group in self.groups for _ in range(group.count))

    def label(self, heads: int) -> str:
        """`b128-h16-q2-8192` for one group, else the text of the batch."""
        if len(self.groups) > 1:
            return f"{self}-h{heads}"
        (group,) = self.groups
        queries = f"-q{group.q_len}" if group.q_len > 1 else ""
        return f"b{group.count}-h{heads}{queries}-{group.kv_len}"

    def __str__(self) -> str:
        return "+".join(map(str, self.groups))


@dataclass(frozen=True)
class Shape:
    """--shape and the options that need it; None for those not given."""

    text: str
    heads: int | None = None
    format: Format | None = None
    page_size: int | None = None
    topk: int | None = None
    causal: bool | None = None

    @classmethod
    def given(
        cls, text: str | None, options: Mapping[str, int | str | bool | None]
    ) -> Shape | None:
        """None without --shape. Raises ValueError for options that need it."""
        if text is not None:
            return cls(text, **options)  # type: ignore[arg-type]  # by name
        for name, value in options.items():
            if value is not None:
                raise ValueError(f"{_option(name)} needs --shape")
        return None

    @property
    def batch(self) -> Batch:
        return Batch.parse(self.text)

    def accept(self, suite: str, *options: str) -> dict[str, int | str | bool]:
        """The given options by name. Raises ValueError for one that `suite` does not take."""
        given = {
            each.name: value
            for each in fields(self)
            if each.name != "text" and (value := getattr(self, each.name)) is not None
        }
        if self.format is not None:
            row_codec(
                self.format, MLAGeometry.preset("deepseek-v3").row
            )  # raises for an unknown format
        for name in given:
            if name not in options:
                known = ", ".join(_option(each) for each in options) or "none"
                raise ValueError(f"suite {suite} does not take {_option(name)}; it takes {known}")
        return given


def product_sizes(text: str) -> tuple[int, int, int]:
    """(M, N, K) of `MxNxK`. Raises ValueError, naming --shape, for anything else."""
    found = re.fullmatch(rf"{NUMBER}x{NUMBER}x{NUMBER}", text.lower())
    if found is None:
        raise ValueError(f"--shape must be MxNxK such as 4096x7168x2048 for fp8, got {text!r}")
    m, n, k = (parse_number(digits) for digits in found.groups())
    if 0 in (m, n, k):
        raise ValueError(f"--shape must have sizes of at least 1, got {text!r}")
    return m, n, k


def even_lengths(suite: str, batch: Batch) -> Batch:
    """`batch` of prompts without cached context. Raises ValueError if one has context."""
    for group in batch.groups:
        if group.q_len != group.kv_len:
            raise ValueError(
                f"--shape must have q_len equal to kv_len for {suite}, such as 8q2ks2k, got {group}"
            )
    return batch


def with_topk(suite: str, batch: Batch, topk: object) -> int:
    """--topk, or 2048. Raises ValueError if the shortest request has fewer tokens."""
    shortest = min(group.kv_len for group in batch.groups)
    wanted = topk if isinstance(topk, int) else min(TOPK, shortest)
    if wanted > shortest:
        raise ValueError(
            f"--topk must be at most the shortest kv_len, {shortest}, for {suite}, got {wanted}"
        )
    return wanted


def _group(text: str, part: str) -> Group:
    found = GROUP.fullmatch(part.strip())
    if found is None:
        raise ValueError(
            f"--shape must be <count>q<q_len>s<kv_len> such as 128q1s8k, several joined by +, "
            f"got {part!r} in {text!r}"
        )
    group = Group(*(parse_number(digits) for digits in found.groups()))
    if group.count < 1 or group.q_len < 1:
        raise ValueError(f"--shape must have a count and a q_len of at least 1, got {part!r}")
    if group.kv_len < group.q_len:
        raise ValueError(
            f"--shape must have kv_len of at least q_len, whose tokens it includes, got {part!r}"
        )
    return group


def parse_number(digits: str) -> int:
    """The value of text that matches `NUMBER`."""
    unit = UNITS.get(digits[-1], 1)
    return int(digits.rstrip("km")) * unit


def short_number(number: int) -> str:
    """The text of a number, with k for 1024 where it divides it."""
    return f"{number >> 10}k" if number and number % 1024 == 0 else str(number)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
