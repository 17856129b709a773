"""Running a smoke test in an unpacked bundle, and looking at what it read of the packages.

The bundle is unpacked into a directory of its own, the access times of its files are set back, and
the test runs as a local job in that environment: what stager itself reads to start a job counts as
read, since each job reads that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bundle.format.manifest import Manifest, room_for
from bundle.node.node_root import ROOT_VARIABLE, node_root_name
from bundle.protocol.enumerations import Action, Backend, Launcher, Stage, TransferWay
from bundle.protocol.events import Record
from bundle.protocol.messages import PreflightAnswer
from bundle.redaction.secrets import masked

from ..building.current_bundle import offline_root
from ..config.load import Config
from ..core.errors import JobError
from ..core.store import Store
from ..jobs.driver import DriverStart, JobListener, run_driver
from ..jobs.job_description import JobOptions, numbered
from ..jobs.outcome import Outcome
from ..jobs.preparation import Prepared, prepare
from ..layers.layer_file import decompress_index
from ..layers.prune import is_metadata
from ..pack.bundle_file import ChosenBundle, manifest_of, node_program, opened
from ..pack.members import unpacked
from .access_times import is_read, set_back, traced_place
from .result import TracedPackage, TraceResult, UnreadFiles
from .unread import ReadFile, Unit, units, unread

MOST_PROPOSED = 40
"""Number of patterns that are proposed."""


def trace(
    config: Config, bundle: ChosenBundle, command: Sequence[str], listener: JobListener
) -> TraceResult:
    """Run a smoke test in a bundle's environment, and return what it read.

    Raises:
        JobError: the smoke test failed.
        StagerError: access times are not kept anywhere here, or the bundle cannot be unpacked.
    """
    manifest = manifest_of(bundle.path, bundle.id)
    store = Store(offline_root(config))
    prepared = _prepared(config, bundle, manifest, command)
    listener.begin("trace")
    with traced_place(store, room_for(manifest.layers, manifest)) as folder:
        (node,) = prepared.job.nodes
        place = folder / node_root_name() / "nodes" / node  # where the job looks for it
        place.mkdir(mode=0o700, parents=True)
        program = node_program(bundle.path, store, bundle.id)
        environment = unpacked(program, bundle, place, trusted=True)  # just built
        set_back(environment)
        smoke = _SmokeTest(listener)
        outcome = smoke.run(prepared, folder)
        packages = dict(_packages(bundle, manifest, environment))
    return _trace(packages, outcome=outcome, gpus=smoke.gpus, config=config)


def _prepared(
    config: Config, bundle: ChosenBundle, manifest: Manifest, command: Sequence[str]
) -> Prepared:
    """Return the smoke test as a job of one rank on this machine, whatever the settings say."""
    with_torchrun = config.launch.launcher is not Launcher.PROCESSES and any(
        layer.name == "torch" for layer in manifest.layers
    )
    cluster = replace(
        config.cluster,
        nodes=(1, 1),
        min_nodes=None,
        stage=Stage.AUTO,
        transfer=TransferWay.AUTO,
        container_image=None,
    )
    launch = replace(
        config.launch,
        nproc_per_node=1,
        launcher=Launcher.TORCHRUN if with_torchrun else Launcher.PROCESSES,
        backend=Backend.AUTO,
        interface="auto",
        max_restarts=0,
    )
    config = replace(config, cluster=cluster, launch=launch)
    options = JobOptions(allocation="local", command=tuple(command), bundle=bundle.path)
    chosen = (bundle.path, manifest)
    return prepare(config, options, chosen, action=Action.RUN, source="local")


class _SmokeTest:
    def __init__(self, listener: JobListener) -> None:
        self.gpus = 0
        self._listener = listener

    def run(self, prepared: Prepared, folder: Path) -> Outcome:
        """Run it, with its node root below a directory; KeyboardInterrupt if its user ended it."""
        for note in prepared.notes:
            self._listener.note(note)
        job = numbered(prepared.job)
        self._listener.job(job, prepared.bundle)
        outcome = Outcome(job=job, bundle=prepared.bundle)
        start = DriverStart(environment={**os.environ, ROOT_VARIABLE: str(folder)})
        run_driver(outcome, prepared.config, start, self._hear, self._listener.talk)
        if outcome.interrupted:
            raise KeyboardInterrupt
        if not outcome.ok:
            raise _failed(outcome, prepared.config.environment.prune)
        return outcome

    def _hear(self, record: Record) -> None:
        if isinstance(record.event, PreflightAnswer) and record.event.gpus is not None:
            self.gpus = len(record.event.gpus.gpus)
        self._listener.event(record)


def _failed(outcome: Outcome, prune: Sequence[str]) -> JobError:
    failure, job = outcome.first_failure, outcome.job
    hints = [f"`stager diagnose {job.id} --log-dir {job.log_dir}` has the details"]
    if failure is not None and failure.hint:
        hints.insert(0, failure.hint)
    if prune:
        hints.insert(0, "it may need what environment.prune leaves out: try without some of that")
    cause = "" if failure is None else f": {failure.cause}"
    return JobError(
        f"the smoke test failed, so nothing is proposed{cause}",
        hint="; ".join(hints),
        context=() if failure is None else failure.lines,
    )


@dataclass(frozen=True, kw_only=True)
class _Package:
    version: str
    """Its version."""
    units: Sequence[Unit]
    """Its files in ``site-packages``."""


def _packages(
    bundle: ChosenBundle, manifest: Manifest, environment: Path
) -> Iterator[tuple[str, _Package]]:
    site = f"lib/python{manifest.requires.python}/site-packages/"
    with opened(bundle.path, bundle.id) as file:
        for layer in manifest.layers:
            if layer.kind == "wheel":
                entries = file.index(layer, file.head(layer), decompress_index).files
                files = [
                    ReadFile(
                        path=entry.path[len(site) :],
                        size=entry.size,
                        read=is_read(str(environment / entry.path)),
                    )
                    for entry in entries
                    if entry.path.startswith(site)
                ]
                yield layer.name, _Package(version=layer.version, units=units(files))


def _trace(
    packages: Mapping[str, _Package], *, outcome: Outcome, gpus: int, config: Config
) -> TraceResult:
    rows = [_row(name, package) for name, package in packages.items()]
    rows.sort(key=lambda row: -row.bytes)
    parts: list[UnreadFiles] = []
    for name, package in packages.items():
        parts += unread(name, package.units, gpus=gpus)
    parts.sort(key=lambda part: -part.bytes)
    proposed = [part for part in parts if part.pattern is not None][:MOST_PROPOSED]
    return TraceResult(
        command=tuple(masked(outcome.job.launch.command)),
        job_id=outcome.job.id,
        log_dir=outcome.job.log_dir,
        gpus=gpus,
        files=sum(row.files for row in rows),
        bytes=sum(row.bytes for row in rows),
        files_read=sum(row.files_read for row in rows),
        bytes_read=sum(row.bytes_read for row in rows),
        packages=tuple(rows),
        unread=tuple(parts),
        proposed=tuple(part.pattern for part in proposed if part.pattern is not None),
        proposed_files=sum(part.files for part in proposed),
        proposed_bytes=sum(part.bytes for part in proposed),
        prune=config.environment.prune,
    )


def _row(name: str, package: _Package) -> TracedPackage:
    read = [unit for unit in package.units if unit.read]
    return TracedPackage(
        name=name,
        version=package.version,
        files=sum(unit.files for unit in package.units),
        bytes=sum(unit.size for unit in package.units),
        files_read=sum(unit.files for unit in read),
        bytes_read=sum(unit.size for unit in read),
        used=not all(is_metadata(unit.path) for unit in read),
    )
