"""The application: options, help, and the boundary that makes an exit code of every ending."""

from __future__ import annotations

import errno
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import cache, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, get_type_hints

import typer
import typer.core

from .. import __version__
from ..core import damaged_bytecode
from ..core.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    UNWRITABLE,
    ConfigError,
    StagerError,
    escape_invisible,
)

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

    from ..console.output import Output


_place: ContextVar[Path | None] = ContextVar("place", default=None)


def get_settings_place() -> Path:
    """Return a settings file, or the folder from which to look upwards for one."""
    place = _place.get()
    if place is not None:
        return place
    try:
        return Path.cwd()
    except OSError as exc:
        raise ConfigError(
            f"the current directory cannot be used: {exc.strerror}",
            hint="it was removed or moved: go to the project's folder again with `cd`",
        ) from exc


# --- Help pages: options under a heading for each group, and summaries that are never cut --------

# Rich is not used for it: importing it takes longer than all else that ``--help`` does.

_ARGUMENTS, _OPTIONS = "Arguments", "Options"


class HelpfulCommand(typer.core.TyperCommand):
    """A command whose options stand under the heading of their group."""

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write arguments first, then the options by group, those without one last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            row = param.get_help_record(ctx)
            if row is not None:
                default = _ARGUMENTS if param.param_type_name == "argument" else _OPTIONS
                panel = getattr(param, "rich_help_panel", None) or default
                groups.setdefault(panel, []).append(row)
        for name in sorted(groups, key=lambda name: name == _OPTIONS):
            with formatter.section(name):
                formatter.write_dl(groups[name])


class HelpfulGroup(typer.core.TyperGroup):
    """The list of commands, with the whole summary of each."""

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write a row for each command."""
        rows = [
            (name, (command.help or "").split("\n\n")[0].strip())
            for name in self.list_commands(ctx)
            if (command := self.get_command(ctx, name)) and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def path_option(text: str) -> Path:
    """Return an option's value as a path; an empty one is a usage error, not this folder."""
    if not text:
        raise typer.BadParameter("it is empty: is a shell variable unset?")
    expanded = os.path.expanduser(text)  # noqa: PTH111 - Path's own raises
    if text.startswith("~") and expanded == text and not os.path.lexists(text):
        raise typer.BadParameter(f"{text}: there is no home directory that it could start at")
    return Path(text)


def option(words: str, help: str, **more: Any) -> Any:  # noqa: ANN401
    """Return an option: its names, and the word for its value, as in ``-p --partition NAME``."""
    names = [word for word in words.split() if word.startswith("-")]
    metavar = " ".join(words.split()[len(names) :]) or None
    return typer.Option(*names, **{"metavar": metavar, "help": help, **more})


path_flag = partial(option, parser=path_option)  # makes an option whose value is a path


def refuse_together(**given: object) -> None:
    """Refuse options that exclude each other, by the names of their parameters."""
    flags = [f"--{name.replace('_', '-')}" for name, value in given.items() if value]
    if len(flags) > 1:
        raise typer.BadParameter(f"cannot be used with {flags[1]}", param_hint=flags[0])


# --- Options that several commands share, written once -------------------------------------------

# typer reads a command's options from its signature. A command may take a value that is annotated
# with a function, whose own options make it; typer is shown a signature in which these options
# replace the parameter.


@cache
def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups of options; one with a ``console`` runs inside its boundary."""
    groups: dict[str, tuple[Callable[..., object], list[str]]] = {}
    shown: list[inspect.Parameter] = []
    for parameter in _list_parameters(command):
        group = next(filter(callable, getattr(parameter.annotation, "__metadata__", ())), None)
        if group is None:
            shown.append(parameter)
        else:
            options = _list_parameters(group)
            shown += options
            groups[parameter.name] = group, [one.name for one in options]

    def run(**given: object) -> None:
        def make(name: str) -> Any:  # noqa: ANN401
            group, options = groups[name]
            return group(**{option: given.pop(option) for option in options})

        talk = {name: make(name) for name in groups if name == "console"}
        with boundary(talk["console"]) if talk else nullcontext():
            made = {name: make(name) for name in groups if name not in talk}
            command(**talk, **made, **given)

    return _show_signature(run, command, shown)


def _list_parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True) if inspect.isfunction(function) else {}
    parameters = inspect.signature(function).parameters.values()
    return [one.replace(annotation=hints.get(one.name, one.annotation)) for one in parameters]


def drop_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return what the page of all commands needs: the options of all would take 0.03 s."""
    return _show_signature(lambda: None, command, [])


def _show_signature(
    run: Callable[..., None], command: Callable[..., None], shown: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    run = wraps(command)(run)
    run.__dict__["__signature__"] = inspect.Signature(shown)
    run.__annotations__ = {one.name: one.annotation for one in shown}
    return run


# --- The application, and the boundary where every ending becomes an exit code -------------------

app = typer.Typer(
    cls=HelpfulGroup,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Build a Python environment once, put it on every node's local disk, run the job there.",
)


def main(argv: list[str]) -> int:
    """Run a command, and return its exit code, however it ends."""
    try:
        return _exit_code(argv)
    finally:  # Python flushes at exit, and sets its own status where that fails
        if not _is_writable(sys.stderr):
            _drop(sys.stderr)


def _exit_code(argv: list[str]) -> int:
    try:
        for name in ("stdout", "stderr"):
            if getattr(sys, name) is None:
                setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - until the end
        _install_signal_handlers()
        code = app(args=argv, standalone_mode=False)
    except typer.Exit as exc:
        code = int(exc.exit_code)
    except OSError as exc:
        return _report_unwritable_output(exc)
    except (Exception, KeyboardInterrupt) as exc:
        code = _report_damaged_bytecode(exc) or _report_error(exc)
    if code == EXIT_INTERRUPTED:
        # All is done: another Ctrl-C must not change the exit code on the way out.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return int(code or EXIT_OK)


def _report_unwritable_output(exc: OSError) -> int:
    is_closed = isinstance(exc, BrokenPipeError)
    if not is_closed and (exc.errno not in UNWRITABLE or exc.filename is not None):
        raise exc
    _drop(sys.stdout)
    if not is_closed:
        _print_error(
            f"error: standard output cannot be written: {exc.strerror}",
            "hint: free some space there, or send the output elsewhere",
        )
    return EXIT_FAILURE


def _drop(stream: TextIO) -> None:
    """See the note on SIGPIPE in the signal module's manual."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_writable(stream: TextIO) -> bool:
    try:
        stream.flush()
    except (OSError, ValueError):
        return False
    return True


def _print_error(*lines: str) -> None:
    with suppress(OSError):
        print("\n".join(lines), file=sys.stderr, flush=True)


def _report_damaged_bytecode(exc: BaseException) -> int:
    failure = _explain_damage(exc)
    if failure is not None:
        _print_error(f"error: {escape_invisible(failure.message)}", f"hint: {failure.hint}")
    return EXIT_OK if failure is None else EXIT_FAILURE


def _explain_damage(exc: BaseException) -> StagerError | None:
    file = damaged_bytecode.find_damaged_file(exc)
    hint = damaged_bytecode.HINT
    return StagerError(damaged_bytecode.message(file), hint=hint) if file else None


def _report_error(exc: BaseException) -> int:
    """Return the exit code of an interrupt, or report a usage error."""
    # Before 3.12, an interrupt within a class's body is the cause of another error.
    if isinstance(exc, typer.Abort | KeyboardInterrupt) or isinstance(
        exc.__cause__, KeyboardInterrupt
    ):
        return EXIT_INTERRUPTED
    if not hasattr(exc, "format_message"):
        raise exc
    context = getattr(exc, "ctx", None)
    if type(exc).__name__ == "NoArgsIsHelpError" and context is not None:
        print(context.get_help(), file=sys.stderr)
        return EXIT_USAGE
    message = str(exc.format_message()).replace("a valid int range", "a whole number")
    command = context.command_path if context is not None else "stager"
    _print_error(
        f"error: {escape_invisible(message[:1].lower() + message[1:])}",
        f"hint: `{command} --help` shows what can be given",
    )
    return int(getattr(exc, "exit_code", EXIT_USAGE))


def _install_signal_handlers() -> None:
    """Let other signals end a command as Ctrl-C does: ranks are ended, locks released."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # else `nohup` has it ignored
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # they are for ranks, where there are some
        signal.signal(number, lambda number, frame: None)
    sys.unraisablehook = partial(_interrupt_again, sys.unraisablehook)


def _interrupt_again(
    otherwise: Callable[[sys.UnraisableHookArgs], object], dropped: sys.UnraisableHookArgs
) -> None:
    """Interrupt again, a moment later and elsewhere, if Python has dropped the exception.

    In destructors and in callbacks of weak references it only prints one: Ctrl-C would be lost.
    """
    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        otherwise(dropped)
        return
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.01)


_PROJECT_HELP = "Look for the settings in this folder and above it; ranks still run here."


@app.callback(invoke_without_command=True)
def read_global_options(
    *,
    directory: Annotated[
        Path | None, path_flag("--directory DIR", "Go to this directory first.")
    ] = None,
    project: Annotated[Path | None, path_flag("--project DIR", _PROJECT_HELP)] = None,
    config: Annotated[
        Path | None,
        path_flag("--config FILE", "The settings file; paths in it start at its folder."),
    ] = None,
    version: Annotated[bool, option("-V --version", "Print the version.", is_eager=True)] = False,
) -> None:
    """Options before the command."""
    if version:
        print(f"stager {__version__}")
        raise typer.Exit
    if directory is not None:
        try:
            os.chdir(directory)
        except OSError as exc:
            raise typer.BadParameter(
                f"{directory}: {exc.strerror}", param_hint="--directory"
            ) from None
    refuse_together(project=project, config=config)
    # Not the methods of Path, which raise where it is too long, or may not be looked at.
    if project is not None and not os.path.isdir(project):  # noqa: PTH112
        raise typer.BadParameter(f"{project} is not a directory", param_hint="--project")
    if config is not None and not os.path.isfile(config):  # noqa: PTH113
        raise typer.BadParameter(f"{config} is not a file", param_hint="--config")
    place = config or project
    _place.set(None if place is None else place.absolute())


@contextmanager
def boundary(console: Output) -> Iterator[None]:
    """Turn an expected failure into a message and an exit code."""
    try:
        yield
    except StagerError as exc:
        console.error(exc)
        raise typer.Exit(exc.exit_code) from None
    except (EOFError, ValueError, TypeError, OSError, MemoryError) as exc:
        failure = (
            _explain_limit(exc) if isinstance(exc, OSError | MemoryError) else _explain_damage(exc)
        )
        if failure is None:
            raise
        console.error(failure)
        raise typer.Exit(EXIT_FAILURE) from None
    except KeyboardInterrupt:  # typer makes an exit code of it, without a word
        console.show_interrupt()
        raise
    finally:
        console.stop()


def _explain_limit(exc: OSError | MemoryError) -> StagerError | None:
    if isinstance(exc, MemoryError):
        return StagerError(
            "there is not enough memory",
            hint="free some, build with --jobs 1, or allow more: `ulimit -v` shows the limit in kB",
        )
    if exc.errno in (errno.EMFILE, errno.ENFILE):
        return StagerError(
            f"too many files are open: {exc}",
            hint="allow more: `ulimit -n` shows how many one process may open, "
            "`ulimit -n 1024` sets it",
        )
    without_tmp = "temporary directory" in str(exc.strerror)  # the standard library's: all are full
    full = exc.errno in UNWRITABLE and (exc.filename is not None or _is_writable(sys.stdout))
    if not full and not without_tmp:
        return None
    return StagerError(
        f"{exc.filename or 'a file'} cannot be written: {exc.strerror}",
        hint="free some space in the offline root, in the project's folder and in $TMPDIR or /tmp; "
        "`quota` and `ulimit -f` show other limits",
    )
