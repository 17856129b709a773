"""The one table of failures that may not come again: whether to run a job again as it is, and why.

The driver decides by it whether to start the ranks again; the login side shows it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .enumerations import FailureClass, Retry


class RetryVerdict(NamedTuple):
    """Whether to run again, and the reason."""

    retry: Retry
    reason: str


_TABLE = {
    FailureClass.PYTHON_ERROR: RetryVerdict(
        Retry.ONCE, "such an exception may come from outside of the program"
    ),
    FailureClass.OUT_OF_MEMORY: RetryVerdict(
        Retry.ONCE, "other processes may have used the memory; a second time it is too little"
    ),
    FailureClass.KILLED: RetryVerdict(Retry.ONCE, "it is not known who ended the process"),
    FailureClass.PORT: RetryVerdict(Retry.YES, "a new start takes another port"),
    FailureClass.RENDEZVOUS: RetryVerdict(
        Retry.YES, "the ranks lost each other, and none of them failed by itself"
    ),
    FailureClass.INTERFACE: RetryVerdict(Retry.NO, "the setting of the interface stays the same"),
    FailureClass.NAME_RESOLUTION: RetryVerdict(Retry.ONCE, "the name service may answer later"),
    FailureClass.MISSING_ASSET: RetryVerdict(Retry.NO, "the file or asset is missing again"),
    FailureClass.MISSING_MODULE: RetryVerdict(Retry.NO, "the bundle is the same again"),
    FailureClass.DAMAGED_COPY: RetryVerdict(Retry.YES, "a damaged copy is made anew"),
    FailureClass.DISK_FULL: RetryVerdict(Retry.NO, "the disk is full until something is removed"),
    FailureClass.TIME_LIMIT: RetryVerdict(
        Retry.ONCE, "it makes sense with more time, or if the program goes on from a checkpoint"
    ),
    FailureClass.PREEMPTION: RetryVerdict(Retry.YES, "the program is not the reason"),
    FailureClass.NODE_FAILURE: RetryVerdict(Retry.YES, "a node failed, and not the program"),
    FailureClass.HANG: RetryVerdict(Retry.ONCE, "a hang may depend on the time of things"),
    FailureClass.ENVIRONMENT: RetryVerdict(
        Retry.NO, "the settings or the nodes have to change before"
    ),
    FailureClass.UNKNOWN: RetryVerdict(Retry.ONCE, "the reason of the failure is not known"),
}

_OF_PROGRAM = RetryVerdict(Retry.NO, "the program does the same again")
_PROGRAM_ERRORS = frozenset((
    *("ArithmeticError", "AssertionError", "AttributeError", "FloatingPointError", "IndexError"),
    *("IndentationError", "KeyError", "LookupError", "NameError", "NotImplementedError"),
    *("OverflowError", "RecursionError", "SyntaxError", "TypeError", "UnboundLocalError"),
    *("UnicodeDecodeError", "UnicodeEncodeError", "ValueError", "ZeroDivisionError"),
))  # fmt: skip
"""Exceptions that only the program itself causes, or what it reads."""
_CLASSES = {
    **dict.fromkeys(("ModuleNotFoundError", "ImportError"), FailureClass.MISSING_MODULE),
    **dict.fromkeys(("FileNotFoundError", "NotADirectoryError"), FailureClass.MISSING_ASSET),
    "gaierror": FailureClass.NAME_RESOLUTION,
}
_OF_GPU = RetryVerdict(Retry.NO, "the same program needs the same memory of the GPU again")
_GPU_MEMORY = re.compile(r"CUDA out of memory|HIP out of memory")
_IN_USE = re.compile(r"[Aa]ddress already in use|EADDRINUSE")
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_USAGE = "2"  # the status with which argparse and shells refuse arguments


def classify_exception(exception: str, message: str) -> FailureClass:
    """Return the class of a failure that is an exception."""
    if _GPU_MEMORY.search(message) or exception in ("OutOfMemoryError", "MemoryError"):
        return FailureClass.OUT_OF_MEMORY
    if exception in _PROGRAM_ERRORS:
        return FailureClass.PYTHON_ERROR
    if _IN_USE.search(message):
        return FailureClass.PORT
    if _DISK_FULL.search(message):
        return FailureClass.DISK_FULL
    return _CLASSES.get(exception, FailureClass.PYTHON_ERROR)


def find_retry(kind: FailureClass, exception: str = "", message: str = "") -> RetryVerdict:
    """Return whether to run again after a failure of a class; with its exception, if it is one."""
    if kind is FailureClass.PYTHON_ERROR:
        if exception in _PROGRAM_ERRORS:
            return _OF_PROGRAM
        if exception == "SystemExit":
            if message.strip() == _USAGE:
                return RetryVerdict(Retry.NO, "the arguments are refused again")
            return RetryVerdict(Retry.ONCE, "the program ended itself, for a reason of its own")
    if kind is FailureClass.OUT_OF_MEMORY and (
        exception == "OutOfMemoryError" or _GPU_MEMORY.search(message)
    ):
        return _OF_GPU
    return _TABLE[kind]
