"""The time by which a relay judges others."""

from __future__ import annotations

from bundle.transfer.relay import MOST_SECONDS, RelayClock


def test_rounds_count_as_long_as_they_took_unless_this_process_stood_still() -> None:
    real = iter([100.0, 100.1, 100.3, 160.3, 160.4])
    clock = RelayClock(lambda: next(real))
    shown = []
    for _ in range(4):
        clock.advance()
        shown.append(round(clock.now - 100.0, 3))
    assert shown == [0.1, 0.3, 0.3 + MOST_SECONDS, 0.4 + MOST_SECONDS]
