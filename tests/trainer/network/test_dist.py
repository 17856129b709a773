"""What the trainer makes of the variables that a launcher sets."""

from __future__ import annotations

from unittest import mock

import pytest

from trainer.config import TrainerError
from trainer.network.dist import (
    World,
    read_world,
    run_on_all_ranks,
    run_on_first_rank,
    sum_over_ranks,
    write_line,
)

LAUNCHED = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_a_launchers_variables_are_read_and_without_them_the_process_is_alone():
    assert read_world({}) == World(rank=0, size=1, local_rank=0, local_size=1, launched=False)
    assert read_world(LAUNCHED) == World(rank=3, size=4, local_rank=1, local_size=2, launched=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"RANK": "first"}, "RANK=first is not a number"),
        ({"RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
    ],
)
def test_an_incomplete_description_is_refused(change, named):
    with pytest.raises(TrainerError, match=named):
        read_world(LAUNCHED | change)


def test_alone_the_collectives_need_no_process_group():
    def fail():
        raise TrainerError("no such thing", hint="bring it")

    alone = World()
    assert run_on_all_ranks(alone, lambda: 5) == 5
    assert run_on_first_rank(alone, lambda: "done") == "done"
    assert sum_over_ranks(alone, [1.0, 2.5]) == [1.0, 2.5]
    with pytest.raises(TrainerError, match="no such thing") as error:
        run_on_all_ranks(alone, fail)
    assert error.value.hint == "bring it"
    assert error.value.everywhere


def test_a_line_is_written_in_one_call(monkeypatch):
    out = mock.Mock()
    monkeypatch.setattr("sys.stdout", out)
    write_line("[RANK 1] WORLD_SIZE=2")
    assert out.mock_calls == [mock.call.write("[RANK 1] WORLD_SIZE=2\n"), mock.call.flush()]
