"""Compiled modules that a full disk has cut short: which file it is, and what to do.

Python ends the import of such a file with an EOFError, which names none; typer takes that for the
end of standard input, and ends as after Ctrl-C, without a word. Imports nothing of ours: any of it
may be what is damaged.
"""

from __future__ import annotations

from types import TracebackType

_LOADER = "_compile_bytecode"
"""The function of importlib that reads a compiled module; its argument is the file's name."""
HINT = "remove that file, and Python makes it again; if it cannot, install stager again"


def find_damaged_file(exc: BaseException | None) -> str:
    """Return the compiled module that could not be read; empty for any other error."""
    while exc is not None:
        file = _file_being_read(exc.__traceback__)
        if file:
            return file
        exc = exc.__cause__ or exc.__context__
    return ""


def message(file: str) -> str:
    """Return what happened, in one sentence."""
    return f"{file} is damaged: it ends too early, or holds something else than a compiled module"


def _file_being_read(traceback: TracebackType | None) -> str:
    if traceback is None:
        return ""
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame = traceback.tb_frame
    if frame.f_code.co_name != _LOADER:
        return ""
    return str(frame.f_locals.get("bytecode_path") or "")
