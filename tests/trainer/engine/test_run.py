"""Every row is seen once an epoch, whatever the number of ranks, and wherever a run goes on."""

from __future__ import annotations

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


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("rows", [96, 100, 97, 5, 1])
def test_every_row_once_an_epoch_in_the_same_steps_for_any_number_of_ranks(rows, ranks):
    steps, end = epoch_of(Order(rows, 24, seed=7), ranks)
    seen = [sorted(row for share in step for row in share) for step in steps]
    assert sorted(row for step in seen for row in step) == [*range(rows)]
    assert end == Position(epoch=1, row=0, step=len(steps))
    assert len(steps) == Order(rows, 24, 7).steps
    assert seen == [sorted(step[0]) for step in epoch_of(Order(rows, 24, seed=7), 1)[0]]


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
