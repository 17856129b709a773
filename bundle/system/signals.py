"""Signals that end the program: the first one becomes an exception, and clean-up follows."""

from __future__ import annotations

import collections
import contextlib
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Callable, Optional, Union

TERMINATED = 128 + signal.SIGTERM  # exit status of a program that SIGTERM ended

_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_AGAIN_SECONDS = 0.01
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # for the ranks: they write a checkpoint
_received: collections.deque[int] = collections.deque()
_Handler = Union[Callable[[int, Optional[FrameType]], object], signal.Handlers]


class _Deferral:
    blocks = 0
    is_pending = False  # true if a signal has come meanwhile


class Stopped(BaseException):
    """A signal to end arrived. Not an Exception, so that nothing on the way swallows it."""


def end_on_signals() -> None:
    """Let SIGTERM, SIGINT and SIGHUP (not under ``nohup``) raise :class:`Stopped`, once."""
    for number in _ENDING_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    sys.unraisablehook = _raise_again


def receive_user_signals() -> None:
    """Let SIGUSR1 and SIGUSR2 wait for :func:`take_user_signals`; they do not end this process."""
    for number in USER_SIGNALS:
        signal.signal(number, lambda number, frame: _received.append(number))


def drop_user_signals() -> None:
    """Let SIGUSR1 and SIGUSR2 do nothing from now on; :func:`add_user_signal` still counts."""
    for number in USER_SIGNALS:
        signal.signal(number, _pass)


def add_user_signal(number: int) -> None:
    """Add a signal that another process has received for this one."""
    _received.append(number)


def take_user_signals() -> list[int]:
    """Return the user's signals that have come since the last call."""
    return [_received.popleft() for _ in range(len(_received))]


def ignore_user_signals() -> contextlib.AbstractContextManager[None]:
    """Ignore the user's signals while the block runs, so that what it starts ignores them, too."""
    return replace_handlers(USER_SIGNALS, signal.SIG_IGN)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Put signals off until the block is done; they interrupt the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _Deferral.blocks += 1
    try:
        yield
    finally:
        _Deferral.blocks -= 1
        if _Deferral.is_pending and not _Deferral.blocks:
            _Deferral.is_pending = False
            _stop(signal.SIGTERM, None)


def restore_default_signals() -> None:
    """Let the same signals end a forked child; raise Stopped if one has come since the fork."""
    for number in _ENDING_SIGNALS:
        if signal.getsignal(number) is _stop:
            signal.signal(number, signal.SIG_DFL)
    if _Deferral.is_pending:
        raise Stopped


def ignore_signals() -> None:
    """Ignore the same signals from now on: the remaining work is short, and must be done."""
    for number in (*_ENDING_SIGNALS, signal.SIGALRM):
        # A function, not SIG_IGN: for a signal that has come already and whose handler has not run
        # yet, Python would then print a traceback (see Modules/signalmodule.c, "race condition").
        signal.signal(number, _pass)


def handle_signals(act: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    """Call a function at each of these signals while the block runs, in the main thread."""
    return replace_handlers(_ENDING_SIGNALS, lambda number, frame: act())


@contextlib.contextmanager
def replace_handlers(numbers: Iterable[signal.Signals], handler: _Handler) -> Iterator[None]:
    """Handle signals in another way while the block runs; to be used in the main thread."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _stop(number: int, frame: FrameType | None) -> None:
    if _Deferral.blocks:
        _Deferral.is_pending = True
        return
    # A second signal must not interrupt the clean-up that the first one began, nor may one that was
    # put off before.
    ignore_signals()
    _Deferral.is_pending = False
    raise Stopped


def _raise_again(dropped: sys.UnraisableHookArgs) -> None:
    """Raise it later and elsewhere: destructors and weakref callbacks would only print it."""
    if not issubclass(dropped.exc_type, Stopped):
        sys.__unraisablehook__(dropped)
        return
    signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)


def _pass(number: int, frame: FrameType | None) -> None:
    """Do nothing."""
