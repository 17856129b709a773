"""Every row is seen once an epoch, whatever the number of ranks, and wherever a run goes on."""

from __future__ import annotations

from collections import Counter

import pytest

from trainer.engine.run import Order, Position

torch = pytest.importorskip("torch")


def epoch_of(order, ranks, at=None):
    """The rows that each step of an epoch really uses, from a position on."""
    at = at or Position()
    steps, epoch = [], at.epoch
    while at.epoch == epoch:
        shares = [order.share(at, rank, ranks) for rank in range(ranks)]
        used = [share.rows[share.weights > 0].tolist() for share in shares]
        assert {share.total for share in shares} == {sum(map(len, used))}
        assert all(len(share.rows) for share in shares)
        steps.append(used)
        at = order.advance(at)
    return steps, at


@pytest.mark.parametrize("ranks", [1, 3, 6])
@pytest.mark.parametrize(("rows", "batch"), [(96, 24), (100, 24), (97, 24), (5, 24), (1, 24)])
def test_every_row_once_an_epoch(rows, batch, ranks):
    steps, end = epoch_of(Order(rows, batch, seed=7), ranks)
    seen = Counter(row for step in steps for share in step for row in share)
    assert seen == Counter(range(rows))
    assert end == Position(epoch=1, row=0, step=len(steps))
    assert len(steps) == Order(rows, batch, 7).steps


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_a_step_has_the_same_rows_for_any_number_of_ranks(ranks):
    alone, _ = epoch_of(Order(100, 24, seed=7), 1)
    many, _ = epoch_of(Order(100, 24, seed=7), ranks)
    assert [sorted(row for share in step for row in share) for step in many] == [
        sorted(step[0]) for step in alone
    ]


def test_a_run_that_goes_on_with_other_ranks_leaves_no_row_out():
    """Of a node fewer: the step is smaller, the position is not."""
    order = Order(100, 24, seed=7)
    first, at = [], Position()
    for _ in range(2):
        first += [row for rank in range(4) for row in order.share(at, rank, 4).rows.tolist()]
        at = order.advance(at)
    rest, _ = epoch_of(Order(100, 18, seed=7), 3, at)
    assert sorted(first + [row for step in rest for share in step for row in share]) == [
        *range(100)
    ]


def test_epochs_and_seeds_have_their_own_orders():
    orders = {
        tuple(Order(50, 50, seed).share(Position(epoch=epoch), 0, 1).rows.tolist())
        for seed in (1, 2)
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_a_rank_without_rows_has_one_that_does_not_count():
    order = Order(9, 8, seed=1)
    last = Position(row=8, step=1)
    (whole, none) = (order.share(last, rank, 2) for rank in (0, 1))
    assert (whole.weights.tolist(), none.weights.tolist(), none.total) == ([1.0], [0.0], 1)
    assert none.rows.tolist() == whole.rows.tolist()
