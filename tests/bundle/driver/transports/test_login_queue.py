"""The order of logins, and what becomes of a host that was turned away."""

from __future__ import annotations

from bundle.driver.transports.ssh_fanout import LOGINS, PAUSES, LoginQueue


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_no_more_than_so_many_at_a_time_in_their_order() -> None:
    queue = LoginQueue(["n1", "n2", "n3"])
    assert [queue.next(0), queue.next(LOGINS - 1), queue.next(LOGINS)] == ["n1", "n2", ""]
    assert queue
    assert [queue.next(3), queue.next(3)] == ["n3", ""]
    assert not queue


def test_a_host_that_was_turned_away_comes_again_after_a_pause() -> None:
    clock = Clock()
    queue = LoginQueue(["n1"], clock)
    for number, pause in enumerate(PAUSES, 1):
        assert queue.next(0) == "n1"
        assert queue.turned_away("n1", 0)
        assert (queue.tries("n1"), bool(queue)) == (number, True)
        clock.now += pause - 0.5
        assert queue.next(0) == ""
        clock.now += 0.5
    assert queue.next(0) == "n1"
    assert not queue.turned_away("n1", 0)
    assert not queue


def test_then_no_more_are_under_way_than_were_let_in() -> None:
    clock = Clock()
    queue = LoginQueue([f"n{number}" for number in range(40)], clock)
    begun = [queue.next(number) for number in range(LOGINS)]
    for under_way in range(LOGINS - 1, 1, -1):  # all but two of them are turned away
        assert queue.turned_away(begun[under_way], under_way)
    assert (queue.next(2), queue.next(1)) == ("", "n16")
    assert queue.turned_away("n16", 0)
    assert (queue.next(1), queue.next(0)) == ("", "n17")


def test_other_hosts_do_not_wait_for_one_that_pauses() -> None:
    queue = LoginQueue(["n1", "n2"], Clock())
    assert queue.next(0) == "n1"
    assert queue.turned_away("n1", 5)
    assert queue.next(0) == "n2"
    assert (queue.next(0), bool(queue)) == ("", True)
