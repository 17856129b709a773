"""The command line: each command parses, makes one call, and renders."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from . import __version__
from .console import Console
from .errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, StagerError

if TYPE_CHECKING:
    from bundle.manifest import Manifest

    from .config import Config
    from .job import JobOptions
    from .resolving.solver import ResolverName
    from .verify import Outcome

RESOLVERS = ("auto", "uv", "pip-tools")
LAUNCHERS = ("torchrun", "srun")
BACKENDS = ("auto", "gloo", "nccl")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Build a Python environment once, put it on every node's local disk, run the job there.",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print only errors and results.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print what is done, and how.")]
Resolver = Annotated[str, typer.Option(help="auto, uv or pip-tools.")]
Offline = Annotated[bool, typer.Option("--offline", help="Fetch nothing.")]
Bundle = Annotated[
    Path | None, typer.Option("--bundle", help="The bundle; default: the project's newest.")
]
Allocation = Annotated[str, typer.Option(help="auto or local: nodes as processes here.")]
Nodes = Annotated[int | None, typer.Option("--nodes", min=1, help="How many nodes.")]
Nproc = Annotated[int | None, typer.Option("--nproc-per-node", min=1, help="Ranks on each node.")]
Launcher = Annotated[str | None, typer.Option(help="What starts the ranks: torchrun.")]
Backend = Annotated[str | None, typer.Option(help="auto, gloo or nccl.")]
Interface = Annotated[str | None, typer.Option(help="auto, or a network interface's name.")]
LogDir = Annotated[Path | None, typer.Option("--log-dir", help="Default: ~/slurm_logs.")]
Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- COMMAND...]", help="A script or -m MODULE, and its arguments."),
]


def main(argv: list[str] | None = None) -> int:
    """Run one command; every way to end becomes an exit code here."""
    # A batch system's SIGTERM ends a command as Ctrl-C does: ranks are ended, locks given back.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = app(args=argv, standalone_mode=False)
    except typer.Exit as exc:
        return int(exc.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes at exit, too; see the note on SIGPIPE in the signal module's manual.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except Exception as exc:
        show = getattr(exc, "show", None)  # a usage error, as typer words it
        if show is None:
            raise
        show()
        return int(getattr(exc, "exit_code", 2))
    return int(code or EXIT_OK)


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


@app.command()
def init(
    source: Annotated[
        Path | None, typer.Option("--from", help="A requirements file to start from.")
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Write a commented stager.toml here."""
    from .init import create

    console = Console(quiet=quiet, as_json=json)
    with _boundary(console):
        path = create(Path.cwd(), source)
        if json:
            console.emit({"path": str(path)})
        console.say(f"wrote {path.name}; look at it, then: stager build")


@app.command()
def lock(
    resolver: Resolver = "auto",
    offline: Offline = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Pin the requirements: pylock.toml, exact files and digests."""
    from .build import BuildOptions, lock_project

    console = _console(quiet, verbose, json)
    with _boundary(console):
        options = BuildOptions(resolver=resolver_name(resolver), offline=offline)
        made = lock_project(_config(), options, console)
        console.stop()
        if json:
            console.emit({"lock": str(made.path), "packages": len(made.files)})
        console.say(f"locked {len(made.files)} packages in {made.path}", "good")


@app.command()
def build(
    resolver: Resolver = "auto",
    offline: Offline = False,
    locked: Annotated[
        bool, typer.Option("--locked", help="Fail if the lock is not current.")
    ] = False,
    no_prove: Annotated[
        bool, typer.Option("--no-prove", help="Skip the proof that nothing is missing.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", min=1, help="Layers made at a time; default: CPUs.")
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Make the bundle, and prove that nothing is missing in it."""
    from .build import BuildOptions, build_report
    from .build import build as make

    console = _console(quiet, verbose, json)
    with _boundary(console):
        options = BuildOptions(
            resolver=resolver_name(resolver),
            offline=offline,
            locked=locked,
            prove=not no_prove,
            jobs=jobs,
        )
        report = build_report(make(_config(), options, console))
        console.stop()
        if json:
            console.emit(report)
        else:
            console.built(report)


@app.command()
def inspect(
    bundle: Annotated[Path | None, typer.Argument(help="Default: the project's newest.")] = None,
    files: Annotated[bool, typer.Option("--files", help="List every file.")] = False,
    json: Json = False,
) -> None:
    """Show what is in a bundle."""
    from .build import newest_bundle
    from .bundling.inspect import inspect as look

    console = Console(as_json=json)
    with _boundary(console):
        report = look(bundle or newest_bundle(_config()), files=files)
        if json:
            console.emit(report)
        else:
            console.inspected(report)


@app.command()
def verify(
    bundle: Bundle = None,
    allocation: Allocation = "auto",
    nodes: Nodes = None,
    nproc_per_node: Nproc = None,
    launcher: Launcher = None,
    backend: Backend = None,
    interface: Interface = None,
    log_dir: LogDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Put the bundle on every node and check it; launch nothing."""
    from .job import JobOptions
    from .verify import verify_report

    console = _console(quiet, verbose, json)
    with _boundary(console):
        options = JobOptions(
            allocation=allocation,
            nodes=nodes,
            nproc_per_node=nproc_per_node,
            launcher=_one_of(LAUNCHERS, launcher, "--launcher"),
            backend=_one_of(BACKENDS, backend, "--backend"),
            interface=interface,
            log_dir=log_dir,
        )
        outcome = _carry_out(console, bundle, options, "verify")
        if json:
            console.emit(verify_report(outcome))
        raise typer.Exit(console.verified(outcome))


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    command: Command = None,
    bundle: Bundle = None,
    allocation: Allocation = "auto",
    nodes: Nodes = None,
    nproc_per_node: Nproc = None,
    launcher: Launcher = None,
    backend: Backend = None,
    interface: Interface = None,
    log_dir: LogDir = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Verify, then launch COMMAND (default: project.command)."""
    from .job import JobOptions
    from .verify import run_report

    console = _console(quiet, verbose, json)
    with _boundary(console):
        options = JobOptions(
            allocation=allocation,
            nodes=nodes,
            nproc_per_node=nproc_per_node,
            launcher=_one_of(LAUNCHERS, launcher, "--launcher"),
            backend=_one_of(BACKENDS, backend, "--backend"),
            interface=interface,
            log_dir=log_dir,
            command=tuple(command or ()),
        )
        outcome = _carry_out(console, bundle, options, "run")
        if json:
            console.emit(run_report(outcome))
        raise typer.Exit(console.ran(outcome))


@app.command(name="exec", context_settings={"allow_interspersed_args": False})
def exec_(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND...", help="A program and its arguments.")
    ],
    bundle: Bundle = None,
    quiet: Quiet = False,
) -> None:
    """Run any command in the environment, on this machine."""
    from .verify import execute

    console = Console(quiet=quiet)
    with _boundary(console):
        config, path, _ = _project(console, bundle)
        execute(config, path, command)


@contextmanager
def _boundary(console: Console) -> Iterator[None]:
    """Turns an expected failure into a message and an exit code."""
    try:
        yield
    except StagerError as exc:
        console.error(exc)
        raise typer.Exit(exc.exit_code) from None
    except KeyboardInterrupt:  # typer makes an exit code of it, without a word
        console.stop()
        print("interrupted", file=sys.stderr)
        raise
    finally:
        console.stop()


def resolver_name(text: str) -> ResolverName:
    """A resolver's name, checked."""
    return cast("ResolverName", _one_of(RESOLVERS, text, "--resolver"))


def _one_of(allowed: tuple[str, ...], text: str | None, option: str) -> str | None:
    """An option's value as it is; one that is not allowed is a usage error."""
    if text is None or text in allowed:
        return text
    raise typer.BadParameter(f"{text!r} is none of {', '.join(allowed)}", param_hint=option)


def _console(quiet: bool, verbose: bool, json: bool) -> Console:
    if verbose:
        logging.basicConfig(level=logging.DEBUG, format="%(message)s", stream=sys.stderr)
    return Console(quiet=quiet, verbose=verbose, as_json=json)


def _config() -> Config:
    from .config import load

    return load(Path.cwd())


def _project(console: Console, bundle: Path | None) -> tuple[Config, Path, Manifest]:
    """Settings and bundle: the one named, else the project's newest, made current if need be."""
    from .build import current_bundle
    from .bundling.bundles import manifest_of
    from .init import default

    if bundle is None:
        config = _config()
        path = current_bundle(config, console)
    else:
        path = bundle.absolute()
        try:
            config = _config()
        except StagerError:
            config = default(Path.cwd())
    return config, path, manifest_of(path)


def _carry_out(console: Console, bundle: Path | None, options: JobOptions, action: str) -> Outcome:
    from .job import make_job, refuse_allocation
    from .verify import carry_out

    refuse_allocation(options.allocation)
    config, path, manifest = _project(console, bundle)
    job = make_job(config, options, path, manifest, action)
    console.job(job, path)
    return carry_out(job, config, path, console.event)
