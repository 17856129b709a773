"""Compiled modules that a full disk has cut short; imports nothing of ours, which may be damaged.

Python raises an EOFError, which names no file; typer takes it for the end of standard input.
"""

from __future__ import annotations

_LOADER = "_compile_bytecode"  # reads a compiled module in importlib; its argument is the name
HINT = "remove that file, and Python makes it again; if it cannot, install stager again"


def find_damaged_file(exc: BaseException | None) -> str:
    """Return the compiled module that could not be read; empty for any other error."""
    while exc is not None:
        traceback = exc.__traceback__
        while traceback is not None:
            frame, traceback = traceback.tb_frame, traceback.tb_next
            if traceback is None and frame.f_code.co_name == _LOADER:
                return str(frame.f_locals.get("bytecode_path") or "")
        exc = exc.__cause__ or exc.__context__
    return ""


def message(file: str) -> str:
    """Return what happened, in one sentence."""
    return f"{file} is damaged: it ends too early, or holds something else than a compiled module"
