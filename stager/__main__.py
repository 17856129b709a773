"""The entry point: arguments in, exit code out."""

from __future__ import annotations

# Importing takes longer than many commands. A Ctrl-C until then ends the process as it would end
# any other, without a traceback; `_signal` is built in, and `signal` would be an import of its own.
import _signal  # type: ignore[import-not-found]
import gc
import sys

_asked = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
if _asked:  # else it is ignored, as in a script's background
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
try:
    # Half of what a command does before its work begins is to import, and what it imports stays.
    gc.set_threshold(100_000, *gc.get_threshold()[1:])

    from .cli import load_commands, main

    load_commands(sys.argv[1:])
except (EOFError, ValueError, TypeError) as exc:
    from .core import damaged_bytecode

    _file = damaged_bytecode.find_damaged_file(exc)
    if not _file:
        raise
    sys.exit(f"error: {damaged_bytecode.message(_file)}\nhint: {damaged_bytecode.HINT}")
finally:
    if _asked:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
