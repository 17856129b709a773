"""Being told to end, by a signal: it becomes an exception, once, and what follows is tidying up."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

TERMINATED = 128 + signal.SIGTERM
"""Exit status of what was ended by SIGTERM."""

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_AGAIN_SECONDS = 0.01


_holding = [0, 0]
"""How many blocks put signals off, and whether one has come meanwhile."""


class Stopped(BaseException):
    """A signal to end arrived. Not an Exception, so that nothing on the way swallows it."""


def end_on_signals() -> None:
    """From now on SIGTERM, SIGINT and SIGHUP raise :class:`Stopped`, once, in the main thread.

    SIGHUP stays ignored where it was, as under ``nohup``.
    """
    for number in _ENDING:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    sys.unraisablehook = _raise_again


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Put off being told to end until the block is done: what it does must be done whole."""
    _holding[0] += 1
    try:
        yield
    finally:
        _holding[0] -= 1
        if _holding[1] and not _holding[0]:
            _holding[1] = 0
            _stop(signal.SIGTERM, None)


def ignore_signals() -> None:
    """From now on the same signals do nothing: what is left to do is quick, and must be done."""
    for number in (*_ENDING, signal.SIGALRM):
        # A function, not SIG_IGN: for a signal that has come already and whose handler has not run
        # yet, Python would then print a traceback (see Modules/signalmodule.c, "race condition").
        signal.signal(number, _pass)


def _stop(number: int, frame: FrameType | None) -> None:
    if _holding[0]:
        _holding[1] = 1
        return
    # Once is enough: a second signal must not interrupt the cleaning up that the first one began.
    ignore_signals()
    raise Stopped


def _raise_again(dropped: sys.UnraisableHookArgs) -> None:
    """Raise once more, a moment later and elsewhere, what Python drops.

    It does so in destructors and in callbacks of weak references, and only prints the exception;
    that we were told to end would go unheard.
    """
    if not issubclass(dropped.exc_type, Stopped):
        sys.__unraisablehook__(dropped)
        return
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)


def _pass(number: int, frame: FrameType | None) -> None:
    """Do nothing."""
