"""The job value: what the far side is told, made from settings, options and a bundle."""

from __future__ import annotations

import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bundle.job import Job, Launch
from bundle.manifest import Manifest
from bundle.unpack import room_for

from .config import Config
from .errors import ConfigError, StagerError
from .store import keep_out_of_projects

INTERPRETERS = ("python", "python3", "torchrun")
DEFAULT_LOG_DIR = "~/slurm_logs"


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What the command line says about a job; None leaves a value to the settings."""

    nodes: int | None = None
    """How many nodes."""
    nproc_per_node: int | None = None
    """Ranks on each node."""
    launcher: str | None = None
    """``torchrun`` or ``srun``."""
    backend: str | None = None
    """``auto``, ``gloo`` or ``nccl``."""
    interface: str | None = None
    """``auto`` or a network interface's name."""
    log_dir: Path | None = None
    """Where logs go."""
    command: tuple[str, ...] = ()
    """What each rank runs."""
    allocation: str = "auto"
    """Where the nodes come from."""


def refuse_allocation(name: str) -> None:
    """Accept ``auto`` and ``local``.

    Raises:
        ConfigError: any other allocation.
    """
    if name not in ("auto", "local"):
        raise ConfigError(
            f"--allocation {name}: this version knows auto and local",
            hint="local makes nodes out of processes on this machine",
        )


def make_job(
    config: Config, options: JobOptions, bundle: Path, manifest: Manifest, action: str
) -> Job:
    """Put together what the far side must know.

    Args:
        config: the project's settings.
        options: what the command line overrides.
        bundle: the bundle's file.
        manifest: what is in it.
        action: ``verify`` or ``run``.

    Raises:
        ConfigError: there is nothing to run, or a value that the local allocation cannot do.
        StagerError: the log directory cannot be written.
    """
    launch = _launch(config, options, manifest, action)
    nodes = options.nodes or config.cluster.nodes
    log_dir = (options.log_dir or Path(DEFAULT_LOG_DIR)).expanduser().absolute()
    return Job(
        id=_new_id(log_dir),
        name=config.name,
        allocation="local",
        nodes=tuple(f"local{number}" for number in range(1, nodes + 1)),
        bundle=str(bundle),
        bundle_id=manifest.id,
        requires=manifest.requires,
        room=room_for(manifest.layers),
        packages=manifest.packages,
        imports=manifest.imports,
        node_root=config.cluster.node_root,
        run_dir=str(Path.cwd()),
        log_dir=str(log_dir),
        action=action,
        import_modules=action == "verify",
        python_hints=(getattr(sys, "_base_executable", sys.executable),),
        launch=launch,
    )


def _launch(config: Config, options: JobOptions, manifest: Manifest, action: str) -> Launch:
    settings = config.launch
    interface = options.interface or settings.interface
    launcher = options.launcher or settings.launcher
    command = options.command or config.project.command
    if settings.max_restarts and (options.nodes or config.cluster.nodes) > 1:
        # Its static rendezvous does not bring the ranks of several nodes together a second time.
        raise ConfigError(
            "launch.max-restarts: torchrun starts ranks again within one node only",
            hint="set it to 0; a script can go on from its own checkpoint in another run",
        )
    if action == "run":
        _refuse(command, launcher, manifest)
    return Launch(
        command=command,
        nproc_per_node=options.nproc_per_node or settings.nproc_per_node,
        launcher=launcher,
        backend=options.backend or settings.backend,
        interface=interface if isinstance(interface, str) else dict(interface),
        omp_num_threads=settings.omp_num_threads,
        max_restarts=settings.max_restarts,
    )


def _refuse(command: tuple[str, ...], launcher: str, manifest: Manifest) -> None:
    """Find out now what would otherwise fail on every node."""
    if not command:
        raise ConfigError(
            "there is nothing to run: project.command is not set and no command was given",
            hint="give one after two dashes: stager run -- train.py --epochs 3",
        )
    if command[0] in INTERPRETERS:
        raise ConfigError(
            f"{command[0]} is no script: ranks are started by the environment's own Python",
            hint=f"leave it out: stager run -- {shlex.join(command[1:]) or 'train.py'}",
        )
    if command[0].startswith("-") and command[0] != "-m":
        raise ConfigError(
            f"{command[0]} is no script; what follows the two dashes replaces project.command",
            hint="name the script too: stager run -- train.py " + shlex.join(command),
        )
    if launcher == "srun":
        raise ConfigError(
            "launch.launcher: srun starts ranks through Slurm, which a local allocation has not",
            hint='use launcher = "torchrun"',
        )
    if "torch" not in {layer.name for layer in manifest.layers}:
        raise ConfigError(
            "torchrun is part of torch, and torch is not in the bundle",
            hint="add torch to environment.requirements and build again; "
            "`stager exec -- COMMAND` runs a program without ranks",
        )


def _new_id(log_dir: Path) -> str:
    """A number for a job that no Slurm has numbered; claimed by creating its event log."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        keep_out_of_projects(log_dir)
        while True:
            number = time.time_ns() // 1_000_000 % 10**10
            claim = log_dir / f"events.{number}.jsonl"
            try:
                os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            except FileExistsError:
                time.sleep(0.002)
                continue
            return str(number)
    except OSError as exc:
        raise StagerError(
            f"the log directory {log_dir} cannot be written: {exc.strerror or exc}",
            hint="name another one with --log-dir",
        ) from exc
