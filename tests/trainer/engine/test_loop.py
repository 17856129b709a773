"""Neither the number of ranks nor the way they synchronise changes what is learned."""

from __future__ import annotations

import pytest

from tests.support.launching import losses, metrics, same_bits, train, weights
from trainer.network.dist import World

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

GLOBAL_BATCH = 24
ROWS = 250  # the last step of an epoch has ten rows: not a share for each of six ranks alike
STEPS = 2 * 11
TOLERANCE = 2e-5  # of the losses: sums of 32-bit numbers in another order


def run(folder, ranks, *more):
    """Train the smallest model; the rows of a step are as many for any number of ranks."""
    sizes = ("--subset", str(ROWS), "--held-out", "64", "--epochs", "2", "--precision", "float32")
    batch = ("--batch-size", str(GLOBAL_BATCH // ranks), "--lr", "0.05")
    train(ranks, folder, "mlp", *sizes, *batch, "--out", "out", *more)
    return folder / "out"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone"), 1)


def assert_same_curve(one, other):
    first, second = losses(one), losses(other)
    assert sorted(first) == sorted(second) == [*range(1, STEPS + 1)]
    assert [first[step] for step in first] == pytest.approx(
        [second[step] for step in first], abs=TOLERANCE
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full), 6])
def test_the_loss_curve_does_not_depend_on_the_number_of_ranks(alone, tmp_path, ranks):
    out = run(tmp_path, ranks)
    assert_same_curve(alone, out)
    assert (metrics(out)["world_size"], metrics(out)["steps"]) == (ranks, STEPS)
    assert metrics(out)["accuracy"] == metrics(alone)["accuracy"]


@pytest.mark.parametrize("sync", ["all-reduce", "parameter-server"])
def test_synchronising_by_hand_gives_what_ddp_gives(alone, tmp_path, sync):
    out = run(tmp_path, 2, "--sync", sync)
    assert_same_curve(alone, out)
    for name, tensor in weights(alone).items():
        assert weights(out)[name].allclose(tensor, atol=1e-4), name


def test_data_parallel_is_for_one_process(alone, tmp_path):
    assert_same_curve(alone, run(tmp_path, 1, "--sync", "dp"))
    refused = train(2, tmp_path, "mlp", "--sync", "dp", "--out", "other", code=1)
    assert refused.stderr.count("error: --sync dp is for one process") == 1


def test_it_learns_and_the_same_run_gives_the_same_bits(alone, tmp_path):
    curve = losses(alone)
    assert curve[1] > 0.5
    assert curve[STEPS] < 0.7 * curve[1]
    assert metrics(alone)["accuracy"] > 0.8
    assert same_bits(weights(alone), weights(run(tmp_path, 1)))


def test_a_rank_without_rows_to_score_adds_nothing_to_the_accuracy(monkeypatch):
    """Three ranks share two rows: the third has an empty share, and takes part in the sum."""
    from trainer.engine.loop import measure_accuracy

    found, add_up = [], "trainer.network.dist.sum_over_ranks"
    monkeypatch.setattr(add_up, lambda _, sums: found.append(sums) or sums)

    def score(numbers):
        assert len(numbers) == 1
        return torch.tensor([[9.0, 0.0]]), torch.tensor([0])

    for rank in range(3):
        measure_accuracy(torch.nn.Identity(), 2, 8, World(rank=rank, size=3), score)
    (first, loss), (second, _), empty = found
    assert (first, second, empty) == (1, 1, [0, 0])
    assert 0 < loss < 1e-3
