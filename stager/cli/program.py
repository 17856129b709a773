"""The application, and the boundary where every ending becomes an exit code."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import __version__
from ..core import damaged_bytecode
from ..core.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, StagerError
from ..core.printable import visible

if TYPE_CHECKING:
    from ..console.job_result import Console
    from ..console.output import Output
    from ..console.reports import Reports

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Build a Python environment once, put it on every node's local disk, run the job there.",
)


def main(argv: list[str] | None = None) -> int:
    """Run a command, and return its exit code, however it ends."""
    try:
        _open_streams()
        _end_as_ctrl_c_does()
        code = app(args=argv, standalone_mode=False)
    except typer.Exit as exc:
        code = int(exc.exit_code)
    except (typer.Abort, KeyboardInterrupt) as exc:
        # typer takes the EOFError of a file that was cut short for the end of standard input.
        code = _end_of_damaged(exc) or EXIT_INTERRUPTED
    except BrokenPipeError:
        _drop_stdout()
        return EXIT_FAILURE
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EIO) or exc.filename is not None:
            raise
        _drop_stdout()
        print(f"error: standard output cannot be written: {exc.strerror}", file=sys.stderr)
        return EXIT_FAILURE
    except Exception as exc:
        return _usage_error(exc)
    if code == EXIT_INTERRUPTED:
        # All is done: another Ctrl-C must not change the exit code on the way out.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return int(code or EXIT_OK)


def _drop_stdout() -> None:
    """Let nothing more be written to standard output.

    Python flushes at exit, too; see the note on SIGPIPE in the signal module's manual.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_of_damaged(exc: BaseException) -> int:
    """Report a compiled module that cannot be read, and return the exit code; 0 if all can."""
    file = damaged_bytecode.damaged_file(exc)
    if not file:
        return EXIT_OK
    print(f"error: {visible(damaged_bytecode.message(file))}", file=sys.stderr)
    print(f"hint: {damaged_bytecode.HINT}", file=sys.stderr)
    return EXIT_FAILURE


def _usage_error(exc: Exception) -> int:
    """Show a usage error as typer words it, and return its exit code; raise any other error."""
    code = _end_of_damaged(exc)
    if code:
        return code
    if isinstance(exc.__cause__, KeyboardInterrupt):  # before 3.12, from within a class's body
        return EXIT_INTERRUPTED
    show = getattr(exc, "show", None)
    if show is None:
        raise exc
    show()
    return int(getattr(exc, "exit_code", 2))


def _end_as_ctrl_c_does() -> None:
    """Let other signals end a command as Ctrl-C does: ranks are ended, locks released."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # else `nohup` has it ignored
        signal.signal(signal.SIGHUP, signal.default_int_handler)


def _open_streams() -> None:
    """Replace the standard streams that the parent process has closed."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - until the end


@app.callback(invoke_without_command=True)
def top(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""
    if version:
        print(f"stager {__version__}")
        raise typer.Exit


@contextmanager
def boundary(console: Output) -> Iterator[None]:
    """Turn an expected failure into a message and an exit code."""
    try:
        yield
    except StagerError as exc:
        console.error(exc)
        raise typer.Exit(exc.exit_code) from None
    except (EOFError, ValueError, TypeError) as exc:
        file = damaged_bytecode.damaged_file(exc)
        if not file:
            raise
        console.error(StagerError(damaged_bytecode.message(file), hint=damaged_bytecode.HINT))
        raise typer.Exit(EXIT_FAILURE) from None
    except OSError as exc:
        if exc.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        console.error(
            StagerError(
                f"too many files are open: {exc}",
                hint="allow more: `ulimit -n` shows how many one process may open, "
                "`ulimit -n 1024` sets it",
            )
        )
        raise typer.Exit(EXIT_FAILURE) from None
    except KeyboardInterrupt:  # typer makes an exit code of it, without a word
        console.interrupted()
        raise
    finally:
        console.stop()


class _Visible(logging.Formatter):
    """Formats log records for a terminal: a command's arguments may hold anything."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return visible(super().format(record))


def make_console(*, quiet: bool = False, verbose: bool = False, as_json: bool = False) -> Console:
    """Return the output of a command with a job; a verbose one also shows what is logged."""
    from ..console.job_result import Console  # not before: `--help` has no use for it

    _show_log(verbose=verbose)
    return Console(quiet=quiet, verbose=verbose, as_json=as_json)


def make_reports(*, quiet: bool = False, verbose: bool = False, as_json: bool = False) -> Reports:
    """Return the output of a command without a job, which is there sooner."""
    from ..console.reports import Reports

    _show_log(verbose=verbose)
    return Reports(quiet=quiet, verbose=verbose, as_json=as_json)


def _show_log(*, verbose: bool) -> None:
    """Let what is logged appear on standard error, if the command is verbose."""
    if verbose:
        shown = logging.StreamHandler(sys.stderr)
        shown.setFormatter(_Visible("%(message)s"))
        logging.basicConfig(level=logging.DEBUG, handlers=[shown])
