"""The job that the far side gets: options, log directory, description."""

from __future__ import annotations

import os
import secrets
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bundle.format.manifest import Manifest, estimate_room
from bundle.protocol import log_names
from bundle.protocol.counts import format_count
from bundle.protocol.enumerations import (
    Action,
    Allocation,
    Backend,
    Launcher,
    LogMode,
    Stage,
    TransferWay,
)
from bundle.protocol.job import ONE_A_CPU, Job, Launch
from bundle.system import permissions

from ..config.job_settings import ClusterConfig, JobOptions, list_rows, make_key
from ..config.load import Config, choose_ranks
from ..config.sections import list_tracker_outputs
from ..core.errors import ConfigError, StagerError
from ..core.files import expand_home
from ..core.store import keep_out_of_projects
from ..logs.job_files import DEFAULT_LOG_DIR

_SECTIONS = ("project", "cluster", "launch")  # the tables that have settings which options change


def apply_options(config: Config, options: JobOptions) -> Config:
    """Return the settings as the command line changes them."""
    settled = _apply(config, options)
    if config.fixed:
        before = _apply(config, JobOptions())
        config.refuse_fixed(
            f"{section}.{make_key(name)}"
            for section in _SECTIONS
            for name, value in vars(getattr(before, section)).items()
            if value != getattr(getattr(settled, section), name)
        )
    most, min_nodes = settled.cluster.nodes[1], settled.cluster.min_nodes
    if min_nodes is not None and min_nodes > most:
        raise ConfigError(
            f"min-nodes: {min_nodes} must work, and the job asks for {format_count(most, 'node')}",
            hint="ask for more nodes with --nodes, or for fewer with --min-nodes",
        )
    return settled


def _apply(config: Config, options: JobOptions) -> Config:
    project, cluster, launch = (
        _collect_changes(getattr(config, section), options) for section in _SECTIONS
    )
    if options.stage and not options.transfer:  # an option counts more than a setting
        cluster["transfer"] = TransferWay.AUTO
    if options.transfer and not options.stage:
        cluster["stage"] = Stage.AUTO
    image = options.container_image or config.cluster.container_image
    cluster["container_image"] = _resolve_image(
        image, Path.cwd() if options.container_image else config.root
    )
    if options.nproc_per_node is not None and config.launch.nproc_per_node == ONE_A_CPU:
        # The setting "cpu" has chosen a backend, which another number takes back.
        launch.setdefault("backend", Backend.AUTO)
    return replace(
        config,
        project=replace(config.project, **project),
        cluster=replace(config.cluster, **cluster),
        launch=choose_ranks(replace(config.launch, **launch)),
    )


def _collect_changes(section: object, options: JobOptions) -> dict[str, Any]:
    changed = {}
    for name, row in list_rows(type(section)).items():
        option = getattr(options, name, None)
        if option in (None, ()) or name == "hosts":  # which hosts there are is decided elsewhere
            continue
        changed[name] = row.merge(getattr(section, name), option) if row.merge else option
    return changed


def _resolve_image(named: str | None, folder: Path) -> str | None:
    """Make an image's path absolute; a directory's ends in a slash (``is_run_by_apptainer``)."""
    if named is None or "://" in named:
        return named
    path = folder / expand_home(Path(named))
    if "/" in named and path.is_dir():
        return f"{Path(*path.parts)}/"
    return str(path) if named.endswith(".sif") else named


# --- A job's log directory, and the number of a job that is claimed in it ------------------------

_RANDOM_DIGITS = 6  # random digits at the end of the number of a job that Slurm has not numbered


def make_log_dir(log_dir: Path, mode: LogMode) -> None:
    """Make the log directory, which must not become part of a project's next bundle."""
    try:
        permissions.make_folder(str(log_dir), mode)
        keep_out_of_projects(log_dir, mode)
        group = log_dir.stat().st_gid
    except OSError as exc:
        raise explain_unwritable(log_dir, exc) from exc
    if mode is LogMode.GROUP and os.geteuid() and group not in (os.getegid(), *os.getgroups()):
        raise ConfigError(
            f"cluster.log-mode: you are not a member of the group of {log_dir} (number {group})",
            hint='use chgrp, another directory (--log-dir), or log-mode = "private"',
        )


def assign_number(job: Job) -> Job:
    """Return the job with a number, where Slurm gives it none; nothing can be refused after that.

    A number is claimed by creating its event log, and sorts by time. Jobs with other log
    directories do not see the claim, but use the same node root: so the last digits are random.
    """
    while job.allocation is not Allocation.SLURM:
        milliseconds = time.time_ns() // 1_000_000 % 10**10
        number = milliseconds * 10**_RANDOM_DIGITS + secrets.randbelow(10**_RANDOM_DIGITS)
        claim = Path(job.log_dir, log_names.make_events_name(str(number)))
        try:
            open(claim, "xb", opener=permissions.make_opener(job.log_mode)).close()
        except FileExistsError:
            continue
        except OSError as exc:
            raise explain_unwritable(Path(job.log_dir), exc) from exc
        return replace(job, id=str(number))
    return job


def explain_unwritable(log_dir: Path, exc: OSError) -> StagerError:
    """Return the error for a log directory that cannot be written."""
    what = f"the log directory {log_dir} cannot be written: {exc.strerror or exc}"
    return StagerError(what, hint="name another one with --log-dir")


# --- The job that the far side gets, made from settings, options and a bundle --------------------

_SENDING = (TransferWay.RELAY, TransferWay.SBCAST)


def make_job(
    config: Config, options: JobOptions, bundle: Path, manifest: Manifest, action: Action
) -> Job:
    """Return the job as the far side gets it, and make its log directory."""
    settled = apply_options(config, options)
    allocation = Allocation(options.allocation)
    least, most = settled.cluster.nodes
    launch = _make_launch(settled, manifest, action, slurm=allocation is Allocation.SLURM)
    cluster = _check_transfer(settled.cluster, options, allocation)
    log_dir = expand_home(options.log_dir or DEFAULT_LOG_DIR).absolute()
    if launch.is_run_by_apptainer:
        _refuse_unbindable(Path.cwd(), bundle.absolute().parent, Path(cluster.node_root))
    tracked = _list_tracker_outputs(settled, manifest) if action is Action.RUN else ()
    job = Job(
        id="",
        name=config.name,
        allocation=allocation,
        nodes=_list_nodes(allocation, options.hosts, most + settled.cluster.spares),
        bundle=str(bundle),
        bundle_id=manifest.id,
        requires=manifest.requires,
        room=estimate_room(manifest.layers, manifest),
        packages=manifest.packages,
        imports=manifest.imports,
        node_root=settled.cluster.node_root,
        run_dir=str(Path.cwd()),
        run_subdir=_find_run_subdir(config),
        log_dir=str(log_dir),
        log_mode=settled.cluster.log_mode,
        action=action,
        import_modules=action is Action.VERIFY,
        python_hints=(getattr(sys, "_base_executable", sys.executable),),
        launch=launch,
        # Without a word about nodes on the command line, all of an allocation that stands is used.
        wanted=options.nodes or (None if least == most else (least, most)),
        min_nodes=settled.cluster.min_nodes,
        spares=settled.cluster.spares,
        stage=_choose_stage(cluster),
        transfer=cluster.transfer,
        cpus_per_task=settled.cluster.cpus_per_task,
        outputs=tuple(dict.fromkeys((*settled.project.outputs, *tracked))),
        tracked=tracked,
        resume_limit=settled.project.resume_limit,
        dry_run=options.dry_run,
        deep=options.deep,
        show_all=options.show_all,
    )
    make_log_dir(log_dir, settled.cluster.log_mode)
    return job


def _find_run_subdir(config: Config) -> str | None:
    """Return this directory's path in the project, whose files nodes may have to put there."""
    here, root = Path.cwd(), config.root.resolve()
    if config.project.path not in (None, config.root) or not here.is_relative_to(root):
        return None
    inner = here.relative_to(root)
    return "" if inner == Path() else inner.as_posix()


def _list_tracker_outputs(config: Config, manifest: Manifest) -> tuple[str, ...]:
    names = list_tracker_outputs(layer.name for layer in manifest.layers if layer.kind == "wheel")
    own = {output.rstrip("/") for output in config.project.outputs}
    return tuple(name for name in names if name not in own)


def _list_nodes(allocation: Allocation, hosts: tuple[str, ...], most: int) -> tuple[str, ...]:
    """Return the nodes of a job; empty until Slurm allocates them."""
    if allocation is Allocation.LOCAL:
        return tuple(f"local{number}" for number in range(1, most + 1))
    return hosts if allocation is Allocation.SSH else ()


def _check_transfer(
    cluster: ClusterConfig, options: JobOptions, allocation: Allocation
) -> ClusterConfig:
    """Return the settings without what the allocation lacks; refuse such options."""
    if allocation is Allocation.SLURM:
        return cluster
    is_local = allocation is Allocation.LOCAL
    absent = (*_SENDING, Stage.ALWAYS) if is_local else (TransferWay.SBCAST,)
    for option, value in (("--stage", options.stage), ("--transfer", options.transfer)):
        if value in absent:
            why = "nothing is sent to this machine" if is_local else "only Slurm has sbcast"
            raise ConfigError(
                f"{option} {value}: {why}",
                hint=f"leave {option} out, or ask Slurm for nodes: --allocation slurm",
            )
    if options.container_image or not is_local:
        _refuse_pyxis(cluster.container_image)
    transfer = TransferWay.AUTO if cluster.transfer in absent else cluster.transfer
    stage = Stage.AUTO if cluster.stage in absent else cluster.stage
    return replace(cluster, transfer=transfer, stage=stage)


def _refuse_pyxis(image: str | None) -> None:
    if image and not image.endswith((".sif", "/")):
        raise ConfigError(
            f"container-image {image}: only Slurm's pyxis plugin starts such containers",
            hint="leave it out, or name a .sif file or a directory that Apptainer starts",
        )


def _refuse_unbindable(*folders: Path) -> None:
    """Refuse a path with a comma or colon: Apptainer would start without binding it."""
    for folder in folders:
        if not {",", ":"}.isdisjoint(str(folder)):
            raise ConfigError(
                f"container-image: Apptainer cannot bind {folder}: its name has a comma or colon",
                hint="rename it: containers have this directory, the bundle's, and node-root",
            )


def _choose_stage(cluster: ClusterConfig) -> Stage:
    """Return the stage rule; naming a transfer way implies one."""
    if cluster.transfer is TransferWay.AUTO:
        return cluster.stage
    implied = Stage.NEVER if cluster.transfer is TransferWay.SHARED else Stage.ALWAYS
    if cluster.stage not in (Stage.AUTO, implied):
        raise ConfigError(
            f'transfer = "{cluster.transfer}" contradicts stage = "{cluster.stage}"',
            hint="leave one of them out",
        )
    return implied


def _refuse_contradictions(config: Config) -> None:
    settings, (least, most) = config.launch, config.cluster.nodes
    elastic = least != most
    if settings.launcher is not Launcher.TORCHRUN and (elastic or settings.max_restarts):
        what = "launch.max-restarts" if settings.max_restarts else f"--nodes {least}:{most}"
        raise ConfigError(
            f"{what}: only torchrun starts ranks again, and launcher is {settings.launcher}",
            hint='use launcher = "torchrun", or a fixed number of nodes and max-restarts = 0',
        )
    if elastic and config.cluster.spares:
        raise ConfigError(
            f"--spares {config.cluster.spares}: a job of --nodes {least}:{most} has none",
            hint="ask for a fixed number of nodes, whose places spare ones take",
        )
    if settings.hang_timeout and not settings.watch:
        raise ConfigError(
            "--hang-timeout: launch.watch is false, so silent ranks are not noticed",
            hint="remove watch = false below [launch], or set hang-timeout = 0",
        )


def _make_launch(config: Config, manifest: Manifest, action: Action, *, slurm: bool) -> Launch:
    settings, (least, most) = config.launch, config.cluster.nodes
    _refuse_contradictions(config)
    if action is Action.RUN:
        if not config.project.command:
            raise ConfigError(
                "there is nothing to run: project.command is not set and no command was given",
                hint="give one after two dashes, as in: -- train.py --epochs 3",
            )
        refuse_launcher(settings.launcher, manifest, slurm=slurm)
    interface = settings.interface
    return Launch(
        command=config.project.command if action is Action.RUN else (),
        nproc_per_node=settings.nproc_per_node,
        launcher=settings.launcher,
        backend=settings.backend,
        interface=interface if isinstance(interface, str) else dict(interface),
        omp_num_threads=settings.omp_num_threads,
        max_restarts=settings.max_restarts,
        elastic=None if least == most else (least, most),
        grace_seconds=settings.grace_seconds,
        watch=settings.watch,
        retries=settings.retries,
        hang_timeout=settings.hang_timeout,
        pass_env=settings.pass_env,
        container_image=config.cluster.container_image,
        container_mounts=config.cluster.container_mounts,
    )


def refuse_launcher(launcher: Launcher, manifest: Manifest, *, slurm: bool) -> None:
    """Refuse a launcher that cannot start ranks."""
    if launcher is Launcher.SRUN and not slurm:
        raise ConfigError(
            "launch.launcher: srun starts ranks through Slurm, which this allocation does not have",
            hint='use launcher = "torchrun", or "processes" for ranks without torch',
        )
    if launcher is Launcher.TORCHRUN and "torch" not in {layer.name for layer in manifest.layers}:
        raise ConfigError(
            "torchrun is part of torch, and torch is not in the bundle",
            hint="--launcher processes starts ranks without torch; or add torch to "
            "environment.requirements and build again",
        )
