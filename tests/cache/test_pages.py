"""The page allocator: failures change nothing. `test_pages_model` has what appends and forks do."""

from __future__ import annotations

import copy

import pytest
import torch

from mlakit.cache import PagedLatentCache, request_slots
from mlakit.cache.pages import OutOfPagesError, PageAllocator, PageCopy, PagedSequence
from mlakit.model.geometry import RowShape
from tests.cache.page_states import assert_consistent, raises, state


def test_reserve_takes_whole_pages():
    allocator = PageAllocator(8, 4)
    assert (allocator.num_pages, allocator.page_size, allocator.num_free_pages) == (8, 4, 8)
    lengths = {0: 0, 1: 1, 4: 1, 5: 2}
    sequences = [allocator.reserve(length) for length in lengths]
    assert [s.length for s in sequences] == list(lengths)
    assert [len(s.pages) for s in sequences] == list(lengths.values())
    assert all(s.is_live for s in sequences)
    assert allocator.num_free_pages == 4
    assert repr(allocator) == "PageAllocator(4 of 8 pages free, page_size=4)"
    assert repr(sequences[3]) == f"PagedSequence(length=5, pages={sequences[3].pages})"


def test_a_pool_grows_and_hands_out_new_pages_last():
    allocator = PageAllocator(3, 4)
    first = allocator.reserve(5)
    kept = first.pages
    allocator.grow(6)
    assert (allocator.num_pages, allocator.num_free_pages) == (6, 4)
    second = allocator.reserve(16)
    assert first.pages == kept
    assert second.pages == (2, 3, 4, 5)
    assert_consistent(allocator)
    allocator.grow(6)
    assert allocator.num_free_pages == 0
    for wrong, said in ((5, "not be below the 6 pages of the pool, got 5"), (0, "be at least 1")):
        with pytest.raises(ValueError, match=f"^PageAllocator.grow: num_pages must {said}"):
            allocator.grow(wrong)


def test_a_shared_last_page_is_copied_by_the_first_writer():
    allocator = PageAllocator(5, 4)
    old = allocator.reserve(6)
    new = allocator.fork(old)
    assert new.pages == old.pages
    assert allocator.num_free_pages == 3
    shared = old.pages[1]

    (copied,) = allocator.append(new, 1)
    assert copied == PageCopy(source=shared, target=new.pages[1], rows=2)
    assert new.pages[0] == old.pages[0]
    assert new.pages[1] != shared == old.pages[1]
    assert allocator.append(old, 1) == []  # it is alone there now
    assert old.pages[1] == shared


def test_the_last_of_a_batch_keeps_the_page_all_others_left():
    allocator = PageAllocator(3, 4)
    sequences = [allocator.reserve(3)]
    sequences += [allocator.fork(sequences[0], length) for length in (2, 1)]
    (page,) = sequences[0].pages
    copies = allocator.append_batch(sequences, [1, 1, 1])  # two free pages are enough
    assert [(c.source, c.rows) for c in copies] == [(page, 3), (page, 2)]
    assert sequences[2].pages == (page,)
    assert [c.target for c in copies] == [s.pages[0] for s in sequences[:2]]
    assert allocator.append_batch(sequences, [0, 0, 0]) == []


def test_a_batch_copies_for_each_writer_while_another_sequence_holds_the_page():
    allocator = PageAllocator(3, 4)
    onlooker = allocator.reserve(3)
    sequences = [allocator.fork(onlooker), allocator.fork(onlooker)]
    assert len(allocator.append_batch(sequences, [1, 1])) == 2
    assert len({*onlooker.pages, *sequences[0].pages, *sequences[1].pages}) == 3


def test_truncate_gives_back_the_pages_it_empties():
    allocator = PageAllocator(4, 4)
    sequence = allocator.reserve(13)
    pages = sequence.pages
    for length, free in ((13, 0), (12, 1), (5, 2), (4, 3), (0, 4)):
        allocator.truncate(sequence, length)
        assert (sequence.length, allocator.num_free_pages) == (length, free)
        assert sequence.pages == pages[: 4 - free]
    assert allocator.append(sequence, 16) == []
    assert sorted(sequence.pages) == sorted(pages)


def test_a_sequence_drops_its_first_pages():
    allocator = PageAllocator(4, 4)
    sequence = allocator.reserve(10)
    fork = allocator.fork(sequence)
    kept = sequence.pages[1:]
    allocator.drop_before(sequence, 7)
    assert (sequence.pages, sequence.length) == ((-1, *kept), 10)
    assert allocator.page_table([sequence, fork]).tolist() == [[-1, *kept], [*fork.pages]]
    assert allocator.num_free_pages == 1  # the fork still reads the page
    allocator.free(fork)
    assert allocator.num_free_pages == 2
    allocator.drop_before(sequence, 7)
    assert allocator.append(sequence, 3) == []
    allocator.free(sequence)
    assert allocator.num_free_pages == 4


def test_dropped_tokens_do_not_come_back():
    allocator = PageAllocator(4, 4)
    sequence = allocator.reserve(10)
    allocator.drop_before(sequence, 9)
    must = "length must be 0 or within the tokens that are not dropped"
    for method in ("truncate", "fork"):
        before = state(allocator)
        with raises(f"PageAllocator.{method}: {must}, got 8"):
            getattr(allocator, method)(sequence, 8)
        assert state(allocator) == before
    with raises(
        "PageAllocator.drop_before: token must not exceed the length of sequence, 10, got 11"
    ):
        allocator.drop_before(sequence, 11)
    allocator.truncate(sequence, 0)
    assert allocator.num_free_pages == 4


def test_new_tokens_that_are_not_stored_get_no_pages():
    allocator = PageAllocator(4, 4)
    sequence = allocator.reserve(6)
    kept = sequence.pages
    assert allocator.append_batch([sequence], [25], first_kept=[29]) == []
    assert sequence.pages == (*kept, -1, -1, -1, -1, -1, sequence.pages[-1])
    assert allocator.num_free_pages == 1
    allocator.drop_before(sequence, 30)  # also the pages before the unused ones
    assert allocator.num_free_pages == 3
    with raises(
        "PageAllocator.append_batch: first_kept[0] must not exceed the new length of sequence, "
        "33, got 34"
    ):
        allocator.append_batch([sequence], [2], first_kept=[34])
    with raises(
        "PageAllocator.append_batch: first_kept must have one entry per sequence, 1, got 2"
    ):
        allocator.append_batch([sequence], [2], first_kept=[0, 0])
    assert (sequence.length, allocator.num_free_pages) == (31, 3)


def test_adopt_holds_pages_by_their_ids():
    allocator = PageAllocator(4, 4)
    old = allocator.reserve(7)
    new = allocator.adopt(list(old.pages), 6)
    assert (new.length, new.pages) == (6, old.pages)
    assert allocator.adopt(torch.tensor(old.pages[:1]), torch.tensor(4)).length == 4
    assert allocator.adopt([], 0).pages == ()
    (copied,) = allocator.append(new, 1)
    assert (copied.source, copied.rows) == (old.pages[1], 2)


def test_out_of_pages_is_an_error_that_changes_nothing():
    allocator = PageAllocator(4, 4)
    first, second = allocator.reserve(6), allocator.reserve(1)
    fork = allocator.fork(first)
    before = state(allocator)
    error = OutOfPagesError
    with raises("PageAllocator.reserve: needs 2 pages, 1 of 4 are free", error):
        allocator.reserve(5)
    with raises("PageAllocator.append: needs 2 pages, 1 of 4 are free", error):
        allocator.append(fork, 3)  # a copy and a page
    with raises("PageAllocator.append_batch: needs 2 pages, 1 of 4 are free", error):
        allocator.append_batch([second, fork], [4, 1])
    assert state(allocator) == before
    assert issubclass(error, RuntimeError)
    assert allocator.append_batch([second, fork], [3, 1])
    assert allocator.num_free_pages == 0


METHODS = {
    "append": lambda allocator, sequence: allocator.append(sequence, 1),
    "truncate": lambda allocator, sequence: allocator.truncate(sequence, 0),
    "drop_before": lambda allocator, sequence: allocator.drop_before(sequence, 0),
    "fork": lambda allocator, sequence: allocator.fork(sequence),
    "free": lambda allocator, sequence: allocator.free(sequence),
}
BATCH_METHODS = {
    "append_batch": lambda allocator, sequences: allocator.append_batch(sequences, [1, 1]),
    "page_table": lambda allocator, sequences: allocator.page_table(sequences),
    "kv_lens": lambda allocator, sequences: allocator.kv_lens(sequences),
}


def freed_one(allocator: PageAllocator) -> PagedSequence:
    sequence = allocator.reserve(5)
    allocator.free(sequence)
    return sequence


def one_of_another(allocator: PageAllocator) -> PagedSequence:
    return PageAllocator(allocator.num_pages, allocator.page_size).reserve(5)


def copied_handle(allocator: PageAllocator) -> PagedSequence:
    return copy.copy(allocator.reserve(5))


BAD_SEQUENCES = [
    (freed_one, "be live, got a freed sequence", ValueError),
    (copied_handle, "be live, got a freed sequence", ValueError),
    (one_of_another, "belong to this allocator, got a sequence of another one", ValueError),
    (lambda allocator: [0, 1], "be a PagedSequence, got list", TypeError),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("make", "must", "error"), BAD_SEQUENCES)
def test_only_live_sequences_of_this_allocator_are_taken(method, make, must, error):
    allocator = PageAllocator(8, 4)
    sequence = make(allocator)
    before = state(allocator)
    with raises(f"PageAllocator.{method}: sequence must {must}", error):
        METHODS[method](allocator, sequence)
    assert state(allocator) == before


@pytest.mark.parametrize("method", BATCH_METHODS)
@pytest.mark.parametrize(("make", "must", "error"), BAD_SEQUENCES)
def test_batches_name_the_sequence_they_refuse(method, make, must, error):
    allocator = PageAllocator(8, 4)
    sequences = [allocator.reserve(1), make(allocator)]
    before = state(allocator)
    with raises(f"PageAllocator.{method}: sequences[1] must {must}", error):
        BATCH_METHODS[method](allocator, sequences)
    assert state(allocator) == before


def test_sequences_may_come_from_a_generator():
    allocator = PageAllocator(8, 4)
    sequences = [allocator.reserve(5), allocator.reserve(2)]
    assert allocator.append_batch(iter(sequences), (count for count in (4, 1))) == []
    assert allocator.kv_lens(iter(sequences)).tolist() == [9, 3]
    listed = allocator.page_table(sequences)
    assert allocator.page_table(each for each in sequences).tolist() == listed.tolist()
    pages = sequences[0].pages
    assert allocator.adopt(iter(pages), 9).pages == pages


def test_a_sequence_of_another_allocator_keeps_its_pages():
    mine, other = PageAllocator(4, 4), PageAllocator(4, 4)
    mine.reserve(5)
    sequence = other.reserve(5)
    before = state(other)
    with raises(
        "PageAllocator.free: sequence must belong to this allocator, got a sequence of another one"
    ):
        mine.free(sequence)
    assert state(other) == before
    assert sequence.is_live


def test_a_freed_sequence_says_so():
    sequence = freed_one(PageAllocator(8, 4))
    assert not sequence.is_live
    assert repr(sequence) == "PagedSequence(freed)"
    with raises("PagedSequence.length: sequence must be live, got a freed sequence"):
        _ = sequence.length
    with raises("PagedSequence.pages: sequence must be live, got a freed sequence"):
        _ = sequence.pages


@pytest.mark.parametrize("name", ["length", "pages", "is_live"])
def test_only_the_allocator_changes_a_sequence(name):
    with pytest.raises(AttributeError):
        setattr(PageAllocator(8, 4).reserve(5), name, 0)


# the pool has 8 pages of 4 tokens, pages 0 and 1 are held by `s`, which has 5 tokens
BAD_ARGUMENTS = [
    (lambda a, s: a.reserve(-1), "reserve: num_tokens must be at least 0, got -1"),
    (lambda a, s: a.append(s, -1), "append: num_tokens must be at least 0, got -1"),
    (lambda a, s: a.append_batch([s], [-2]), "append_batch: counts[0] must be at least 0, got -2"),
    (
        lambda a, s: a.append_batch([s], [1, 2]),
        "append_batch: counts must have one entry per sequence, 1, got 2",
    ),
    (
        lambda a, s: a.append_batch([s, a.fork(s), s], [1, 1, 1]),
        "append_batch: sequences[2] must appear once, got sequences[0] again",
    ),
    (lambda a, s: a.truncate(s, -1), "truncate: length must be at least 0, got -1"),
    (
        lambda a, s: a.truncate(s, 6),
        "truncate: length must not exceed the length of sequence, 5, got 6",
    ),
    (lambda a, s: a.fork(s, -1), "fork: length must be at least 0, got -1"),
    (lambda a, s: a.fork(s, 6), "fork: length must not exceed the length of sequence, 5, got 6"),
    (lambda a, s: a.adopt([0, -1], 5), "adopt: page_ids[1] must be at least 0, got -1"),
    (lambda a, s: a.adopt([0, 8], 5), "adopt: page_ids[1] must be below num_pages, 8, got 8"),
    (
        lambda a, s: a.adopt([0, 2], 5),
        "adopt: page_ids[1] must be a page in use, got the free page 2",
    ),
    (
        lambda a, s: a.adopt([1, 0, 1], 9),
        "adopt: page_ids[2] must appear once, got page_ids[0] again",
    ),
    (lambda a, s: a.adopt([0, 1], -1), "adopt: length must be at least 0, got -1"),
    (lambda a, s: a.adopt([0, 1], 4), "adopt: length must be in [5, 8] for page_ids, got 4"),
    (lambda a, s: a.adopt([0, 1], 9), "adopt: length must be in [5, 8] for page_ids, got 9"),
    (lambda a, s: a.adopt([], 1), "adopt: length must be in [0, 0] for page_ids, got 1"),
    (lambda a, s: a.page_table([s], columns=1), "page_table: columns must be at least 2, got 1"),
    (lambda a, s: a.page_table([], columns=-1), "page_table: columns must be at least 0, got -1"),
]


@pytest.mark.parametrize(("call", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_named_and_change_nothing(call, message):
    allocator = PageAllocator(8, 4)
    sequence = allocator.reserve(5)
    assert sequence.pages == (0, 1)
    free, length = allocator.num_free_pages, sequence.length
    with raises(f"PageAllocator.{message}"):
        call(allocator, sequence)
    assert (allocator.num_free_pages, sequence.length, sequence.pages) == (free, length, (0, 1))
    assert_consistent(allocator)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, s: a.reserve(1.0), "reserve: num_tokens must be an integer, got float"),
        (lambda a, s: a.append(s, True), "append: num_tokens must be an integer, got bool"),
        (lambda a, s: a.fork(s, "5"), "fork: length must be an integer, got str"),
        (lambda a, s: a.adopt([0.0], 1), "adopt: page_ids[0] must be an integer, got float"),
        (lambda a, s: a.adopt(3, 1), "adopt: page_ids must be a sequence of integers, got int"),
        (
            lambda a, s: a.append_batch([s], 3),
            "append_batch: counts must be a sequence of integers, got int",
        ),
        *(
            (
                lambda a, s, method=method: getattr(a, method)(s),
                f"{method}: sequences must be several PagedSequence, got PagedSequence",
            )
            for method in ("page_table", "kv_lens")
        ),
    ],
)
def test_counts_are_whole_numbers(call, message):
    allocator = PageAllocator(8, 4)
    sequence = allocator.reserve(5)
    before = state(allocator)
    with raises(f"PageAllocator.{message}", TypeError):
        call(allocator, sequence)
    assert state(allocator) == before


def test_a_pool_has_pages_and_pages_have_rows():
    with raises("PageAllocator: num_pages must be at least 1, got 0"):
        PageAllocator(0, 4)
    with raises("PageAllocator: page_size must be at least 1, got 0"):
        PageAllocator(4, 0)


def test_page_table_lists_pages_then_minus_one(device):
    allocator = PageAllocator(8, 4)
    long, empty, short = (allocator.reserve(length) for length in (9, 0, 1))
    a, b, c = long.pages
    (d,) = short.pages
    table = allocator.page_table([long, empty, short], device=device)
    assert (table.dtype, table.device.type) == (torch.int32, device.type)
    assert table.tolist() == [[a, b, c], [-1, -1, -1], [d, -1, -1]]
    assert table.is_contiguous()
    wide = allocator.page_table([short, long], columns=5, device=device)
    assert wide.tolist() == [[d, -1, -1, -1, -1], [a, b, c, -1, -1]]
    lengths = allocator.kv_lens([long, empty, short, long], device)
    assert (lengths.dtype, lengths.device.type) == (torch.int32, device.type)
    assert lengths.tolist() == [9, 0, 1, 9]


def test_page_table_of_nothing_has_its_shape():
    allocator = PageAllocator(8, 4)
    empty = allocator.reserve(0)
    tables = {
        (0, 0): allocator.page_table([]),
        (0, 3): allocator.page_table([], columns=3),
        (2, 0): allocator.page_table([empty, empty]),
        (1, 2): allocator.page_table([empty], columns=2),
    }
    for shape, table in tables.items():
        assert (table.shape, table.dtype) == (shape, torch.int32)
    assert tables[1, 2].tolist() == [[-1, -1]]
    assert allocator.kv_lens([]).shape == (0,)
    assert allocator.kv_lens([]).dtype == torch.int32


def test_a_page_table_is_a_snapshot():
    allocator = PageAllocator(8, 4)
    sequence = allocator.reserve(5)
    table, lengths = allocator.page_table([sequence]), allocator.kv_lens([sequence])
    before = table.tolist()
    allocator.append(sequence, 9)
    table[0, 0] = 7
    assert (before, lengths.tolist()) == ([[0, 1]], [5])
    assert sequence.pages[:2] == (0, 1)


def test_forks_keep_their_rows_in_a_real_cache(generator):
    row, page_size = RowShape(128, 64), 4
    pool = PagedLatentCache.allocate(
        row, "fp8_token", num_pages=6, page_size=page_size, num_layers=2
    )
    allocator = PageAllocator(pool.num_pages, pool.page_size)

    def slots(sequence: PagedSequence, first: int) -> torch.Tensor:
        table = allocator.page_table([sequence])
        return request_slots(table, page_size, 0, first, sequence.length)

    def write(sequence: PagedSequence, first: int) -> None:
        for index in range(pool.num_layers):
            where = slots(sequence, first)
            pool.layer(index).write(where, torch.randn(len(where), row.width, generator=generator))

    def read(sequence: PagedSequence) -> torch.Tensor:
        return torch.stack([pool.layer(i).read(slots(sequence, 0)) for i in range(2)])

    prompt = allocator.reserve(6)
    write(prompt, 0)
    prefix = read(prompt)
    branches = [prompt, allocator.fork(prompt)]
    for source, target, rows in allocator.append_batch(branches, [3, 1]):
        for tensor in (pool.payload, pool.scales):
            tensor[:, target, :rows] = tensor[:, source, :rows]
    for branch in branches:
        write(branch, 6)
    first, second = map(read, branches)
    assert torch.equal(first[:, :6], prefix)
    assert torch.equal(second[:, :6], prefix)
    assert not torch.equal(first[:, 6], second[:, 6])
