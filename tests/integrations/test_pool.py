"""`LatentPool`: the sequences of a batch, their rows and their pages, without a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mlakit.integrations.transformers.pool import GROWTH, LatentPool

CPU = torch.device("cpu")
LATENT, ROPE, PAGE, LAYERS = 8, 4, 4, 2


class Model:
    """A pool, and the rows that each sequence should have."""

    def __init__(self, batch: int) -> None:
        self.pool = LatentPool(LAYERS, None, PAGE, CPU)
        self.rows: list[list[Tensor]] = [[] for _ in range(batch)]
        self.mask = torch.zeros(batch, 0, dtype=torch.int64)

    def step(self, new: Tensor) -> None:
        """Append random rows of the columns that `new` [batch, length] shows; padding is NaN."""
        batch, length = new.shape
        self.mask = torch.cat([self.mask, new], 1)
        self.pool.begin_step(batch, length, self.mask)
        for layer in range(LAYERS):
            rows = torch.randn(batch, 1, length, LATENT + ROPE)
            rows[~new.bool()[:, None]] = torch.nan
            self.pool.write(layer, rows[..., :LATENT], rows[..., LATENT:])
            if layer == 1:
                for own, row, shown in zip(self.rows, rows[:, 0], new.bool(), strict=True):
                    own.extend(row[shown])
        self.pool.commit()

    def select(self, rows: list[int]) -> None:
        self.pool.select(rows)
        self.rows = [list(self.rows[row]) for row in rows]
        self.mask = self.mask[rows]

    def crop(self, count: int) -> None:
        self.pool.crop(count)
        kept = self.mask.shape[1] - count
        for i, mask in enumerate(self.mask):
            self.rows[i] = self.rows[i][: int(mask[:kept].sum())]
        self.mask = self.mask[:, :kept]

    def check(self) -> None:
        pool = self.pool
        assert [each.length for each in pool.sequences] == list(map(len, self.rows))
        table = pool.allocator.page_table(pool.sequences)
        for request, rows in enumerate(self.rows):
            if rows:
                found = pool.cache.layer(1).read_tokens(table, request, 0, len(rows))
                assert torch.equal(found, torch.stack(rows))


def ones(batch: int, length: int) -> Tensor:
    return torch.ones(batch, length, dtype=torch.int64)


def test_steps_forks_and_crops():
    """Padding is not stored; forked sequences write to pages of their own."""
    torch.manual_seed(0)
    model = Model(3)
    new = ones(3, 10)
    new[0, 4:7] = 0
    new[2, :9] = 0
    model.step(new)
    model.check()
    model.select([0, 0, 2, 1, 0])
    model.check()
    for length in (1, 3, 1):
        model.step(ones(5, length))
        model.check()
    model.crop(4)
    model.check()
    model.step(ones(5, 6))
    model.check()
    model.select([4, 1])
    model.step(ones(2, 1))
    model.check()


def test_a_full_pool_grows_by_a_part_and_keeps_its_rows():
    torch.manual_seed(0)
    model, sizes = Model(2), []
    for _ in range(200):
        model.step(ones(2, 1))
        sizes.append(model.pool.allocator.num_pages)
    model.check()
    used = 2 * -(-200 // PAGE)
    assert used <= sizes[-1] <= (used + 4) * (1 + 1 / GROWTH)
    assert len(set(sizes)) < 40


def test_a_reset_pool_has_no_tokens_and_its_memory():
    model = Model(2)
    model.step(ones(2, 9))
    cache, pages = model.pool.cache, model.pool.allocator.num_pages
    model.pool.reset()
    assert model.pool.allocator.num_free_pages == pages
    assert (model.pool.sequences, model.pool.columns) == ([], 0)
    model.pool.begin_step(3, 2, None)  # a batch of another size
    assert model.pool.cache is cache


def test_the_step_has_the_tokens_without_padding():
    model = Model(2)
    model.step(ones(2, 3))
    new = torch.tensor([[1, 0, 1], [0, 0, 1]])
    model.step(new)
    step = model.pool.step
    assert step.q_starts.tolist() == [0, 2, 3]
    assert step.kv_lens.tolist() == [5, 4]
    assert step.request.tolist() == [0, 0, 1]
    assert step.position.tolist() == [3, 4, 3]
    assert step.positions.tolist() == [[0, 1, 2, 3, -1, 4], [0, 1, 2, -1, -1, 3]]
    padded = torch.arange(6)[:, None]
    assert step.take(padded).flatten().tolist() == [0, 2, 5]
    assert step.put(step.take(padded), 6).flatten().tolist() == [0, 0, 2, 0, 0, 5]


def refused(pool: LatentPool, *step: Any) -> str:
    with pytest.raises(ValueError, match="mlakit: ") as error:
        pool.begin_step(*step)
    return str(error.value)


def test_refused_steps_change_nothing():
    model = Model(2)
    model.step(ones(2, 3))
    hidden = ones(2, 4)
    hidden[1, 1] = 0
    assert "has 2 sequences, got a batch of 3" in refused(model.pool, 3, 1, None)
    assert "row 1 differs in 1 columns" in refused(model.pool, 2, 1, hidden)
    assert "[2, 4], the cached tokens and the new ones" in refused(model.pool, 2, 1, ones(2, 1))
    model.check()
