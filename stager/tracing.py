"""The files of an environment that a smoke test reads, and what could be left out of it."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bundle.format.manifest import Manifest
from bundle.node.node_root import ROOT_VARIABLE, list_automatic_bases, node_root_name
from bundle.protocol.dataclass import dataclass
from bundle.protocol.enumerations import Action, Backend, Launcher, Stage, TransferWay
from bundle.protocol.events import Record
from bundle.protocol.messages import PreflightAnswer
from bundle.redaction.secrets import mask_arguments
from bundle.regex import compile_lazily

from .building.build import BuildResult
from .building.current_bundle import offline_root
from .config.job_settings import JobOptions
from .config.load import Config
from .core.errors import JobError, StagerError
from .core.store import Store, remove
from .jobs.driver import DriverStart, JobListener, run_driver
from .jobs.job_description import assign_number
from .jobs.outcome import Outcome
from .jobs.preparation import Prepared, prepare
from .layers.ignore import anchor
from .layers.layer_file import decompress_index
from .layers.prune import is_metadata, is_top
from .layers.tree import list_parents
from .pack.bundle_file import ChosenBundle, node_program, open_bundle, read_manifest
from .pack.members import unpack_here

# --- The result of a trace: what a smoke test read of an environment, and what it did not --------


@dataclass(frozen=True)
class TracedPackage:
    """The files of one package that were read."""

    name: str
    version: str
    files: int
    bytes: int
    files_read: int  # a module counts with its bytecode
    bytes_read: int  # their whole size, however much of each was read
    used: bool  # false if nothing of it was read but its metadata


@dataclass(frozen=True)
class UnreadFiles:
    """Files of one package of which none was read."""

    package: str
    path: str  # directory, ending in a slash, or file, relative to site-packages; empty for several
    files: int
    bytes: int
    pattern: str | None  # for ``environment.prune``; null if none is proposed
    reason: str = ""  # why none is proposed; else empty


@dataclass(frozen=True, kw_only=True)
class TraceResult:
    """The files of an environment that a smoke test read."""

    command: tuple[str, ...]  # the smoke test, without secrets
    job_id: str
    log_dir: str
    gpus: int  # number of NVIDIA GPUs that the test could see
    files: int  # number of files of all packages, bytecode included
    bytes: int
    files_read: int
    bytes_read: int
    packages: tuple[TracedPackage, ...]
    """Every package, the largest first; so are what was not read, and the patterns for it."""
    unread: tuple[UnreadFiles, ...]
    proposed: tuple[str, ...]
    proposed_files: int
    proposed_bytes: int
    prune: tuple[str, ...]  # as it is: the test has passed without what that leaves out


@dataclass(frozen=True, kw_only=True)
class TracedBuildResult(BuildResult):
    """The result of ``stager build --trace``."""

    trace: TraceResult


# --- Access times: a place where they are kept, and which files of a tree were read --------------

# Every file gets an access time of long ago before a program runs. Linux renews it when the file is
# read or mapped, also with ``relatime`` (mount(8)), but not with ``noatime``, nor on many network
# file systems.

LONG_AGO = 946_684_800 * 10**9  # the first second of 2000: the access time of what nobody has read


@contextlib.contextmanager
def make_traced_place(store: Store) -> Iterator[Path]:
    """Yield an empty directory, on a file system that keeps access times, until the end."""
    # The offline root is tried first, where the next build sweeps what a killed command leaves.
    bases = [base for _, base in list_automatic_bases(os.environ)]
    for candidate in (store.scratch_without_lock("trace"), *map(_make_folder, bases)):
        with contextlib.ExitStack() as stack:
            keeps = False
            with contextlib.suppress(OSError, StagerError):
                folder = stack.enter_context(candidate)
                keeps = keeps_access_times(folder)
            if keeps:
                yield folder
                return
    raise StagerError(
        "no directory here shows which files a program reads (noatime?)",
        hint="set $TMPDIR to a directory on a local file system that keeps access times",
        context=[str(store.root), *bases],
    )


@contextlib.contextmanager
def _make_folder(base: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="stager-trace-", dir=base))
    try:
        yield folder
    finally:
        remove(folder)


def keeps_access_times(folder: Path) -> bool:
    """Return whether reading a file in a directory renews the file's access time."""
    file = folder / "read"
    file.write_bytes(b"read")
    try:
        _set_back(str(file), file.stat())
        file.read_bytes()
        return is_read(str(file))
    finally:
        file.unlink()


def set_back(tree: Path) -> None:
    """Give every file of a tree an access time of long ago; other times stay as they are."""
    for folder, _, names in os.walk(tree):
        for path in (f"{folder}/{name}" for name in names):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                _set_back(path, status)


def _set_back(path: str, status: os.stat_result) -> None:
    # The other time is compared with the environment's listing when a job uses it.
    os.utime(path, ns=(LONG_AGO, status.st_mtime_ns), follow_symlinks=False)


def is_read(path: str) -> bool:
    """Return whether a file was read since its time was set back; one that is gone counts, too."""
    try:
        return os.lstat(path).st_atime_ns != LONG_AGO
    except FileNotFoundError:
        return True


# --- Files that only a program with a GPU reads: they are no evidence where there was none -------

REASON = "for a GPU, and the test ran without one"

_PACKAGE = compile_lazily(
    r"(nvidia|cuda|pytorch-triton|triton|cupy|rocm|nvshmem)(-.*)?|.*-cu\d{2,3}|jax-cuda.*"
)
_FOLDER = compile_lazily(r"(nvidia|triton)/.*")
_LIBRARY = compile_lazily(
    r".*(cuda|cudnn|cublas|cufft|curand|cusolver|cusparse|nccl|nvrtc|nvtx|nvjit|cupti|gpu"
    r"|hip|rocm|rccl|miopen).*",
    re.IGNORECASE,
)
_FOR_LINKERS = "_static.a"
"""NVIDIA's name for what is a shared library as well: no program loads it. Other archives hold code
for a GPU, which is linked when a program runs (libnvshmem_device.a)."""
_SHARED = compile_lazily(r"\.(so|bc|cubin|fatbin|ptx|hsaco)(\.\d+)*$")


def needs_gpu(package: str, path: str) -> bool:
    """Return whether a file is one of CUDA, ROCm or Triton, and no copy for linkers alone."""
    if path.endswith(_FOR_LINKERS):
        return False
    if _PACKAGE.fullmatch(package) or _FOLDER.fullmatch(path):
        return True
    name = path.rpartition("/")[2]
    return bool(_SHARED.search(name) and _LIBRARY.fullmatch(name))


# --- The unread part of a package, as few directories and files as possible, and their patterns

LEAST = 500_000  # bytes below which no pattern is proposed: a list that nobody reads helps nobody
SMALL = "each is small"  # why no pattern is proposed for what is below that
PROGRAMS = "programs, which may only be looked for"
"""Why none is proposed for a package's programs: torch does not import without one it may run."""
_PROGRAM = compile_lazily(r".+/bin/(?!test_)[^/]+")
_BYTECODE = compile_lazily(r"^((?:.*/)?)__pycache__/([^/.]*)(?:\.[^/]*)?\.pyc$")


@dataclass
class Unit:
    """Files that stay or go together: a module, of which only bytecode is read, with that."""

    path: str  # of the file that a pattern can name
    files: int = 0
    size: int = 0
    read: bool = False


def group_files(files: Iterable[tuple[str, int, bool]]) -> list[Unit]:
    """Group files, given by path, size and whether they were read: modules with their bytecode."""
    made: dict[str, Unit] = {}
    for file, size, read in files:
        path = _BYTECODE.sub(r"\1\2.py", file)
        unit = made.setdefault(path, Unit(path))
        unit.files += 1
        unit.size += size
        unit.read |= read
    return list(made.values())


def list_unread(package: str, made: Sequence[Unit], *, gpus: int) -> Iterator[UnreadFiles]:
    """Yield unread topmost directories and files; without a GPU, set files for GPUs apart."""
    by_reason = defaultdict[str | None, list[Unit]](list)
    for unit in made:
        by_reason[_explain_staying(package, unit, gpus)].append(unit)
    unread = by_reason.pop(None, [])
    kept = {unit.path for units in by_reason.values() for unit in units}
    for path, members in _group_unread(unread, kept).items():
        files, size = _sum_units(members)
        if size < LEAST or not path.isprintable():
            by_reason[SMALL] += members
        else:
            yield UnreadFiles(package, path, files, size, f"{package}:{_pattern(path)}")
    for reason in (SMALL, PROGRAMS, REASON):
        files, size = _sum_units(by_reason[reason])
        if files:
            yield UnreadFiles(package, "", files, size, None, reason)


def _explain_staying(package: str, unit: Unit, gpus: int) -> str | None:
    if unit.read or is_metadata(unit.path):
        return ""
    if not gpus and needs_gpu(package, unit.path):
        return REASON
    return PROGRAMS if _PROGRAM.fullmatch(unit.path) else None


def _sum_units(units: Sequence[Unit]) -> tuple[int, int]:
    return sum(unit.files for unit in units), sum(unit.size for unit in units)


def _group_unread(unread: Sequence[Unit], kept: set[str]) -> Mapping[str, Sequence[Unit]]:
    stays = {folder for path in kept for folder in list_parents(path)}
    everything = kept | {unit.path for unit in unread}
    groups: dict[str, list[Unit]] = {}
    for unit in unread:
        if not is_top(unit.path):
            groups.setdefault(_find_topmost(unit.path, stays, everything), []).append(unit)
    return groups


def _find_topmost(path: str, kept: set[str], everything: set[str]) -> str:
    """Return the topmost directory of which nothing was read, with a slash; else the file."""
    # The top of a package stays, so that an import names what is missing: ``sympy/*/``.
    folders = list_parents(path)
    for folder in folders:
        if folder in kept:
            continue
        if "/" not in folder and f"{folder}/__init__.py" in everything:
            return f"{folder}/*/" if len(folders) > 1 else path
        return f"{folder}/"
    return path


def _pattern(path: str) -> str:
    if path.endswith("/*/"):
        return f"{anchor(path[:-3])}/*/"
    return anchor(path[:-1]) + "/" if path.endswith("/") else anchor(path)


# --- Running a smoke test in an unpacked bundle, and looking at what it read of the packages -----

# It runs as a local job: what stager reads to start a job counts as read.

MOST_PROPOSED = 40  # number of patterns that are proposed


def trace(
    config: Config, bundle: ChosenBundle, command: Sequence[str], listener: JobListener
) -> TraceResult:
    """Run a smoke test in a bundle's environment, and return what it read."""
    manifest = read_manifest(bundle.path, bundle.id)
    store = Store(offline_root(config))
    prepared = _prepare_smoke_test(config, bundle, manifest, command)
    listener.begin("trace")
    with make_traced_place(store) as folder:
        (node,) = prepared.job.nodes
        place = folder / node_root_name() / "nodes" / node  # where the job looks for it
        place.mkdir(mode=0o700, parents=True)
        program = node_program(bundle.path, store, bundle.id)
        environment = unpack_here(program, bundle, place, trusted=True)  # just built
        set_back(environment)
        outcome, gpus = _run_smoke_test(prepared, folder, listener)
        packages = list(_list_packages(bundle, manifest, environment))
    return _make_trace_result(packages, outcome=outcome, gpus=gpus, config=config)


def _prepare_smoke_test(
    config: Config, bundle: ChosenBundle, manifest: Manifest, command: Sequence[str]
) -> Prepared:
    has_torch = any(layer.name == "torch" for layer in manifest.layers)
    with_torchrun = has_torch and config.launch.launcher is not Launcher.PROCESSES
    cluster = replace(
        config.cluster,
        nodes=(1, 1),
        min_nodes=None,
        spares=0,
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
        retries=0,
    )
    config = replace(config, cluster=cluster, launch=launch)
    options = JobOptions(allocation="local", command=tuple(command), bundle=bundle.path)
    chosen = (bundle.path, manifest)
    return prepare(config, options, chosen, action=Action.RUN, source="local")


def _run_smoke_test(prepared: Prepared, folder: Path, listener: JobListener) -> tuple[Outcome, int]:
    gpus = 0

    def take(record: Record) -> None:
        nonlocal gpus
        if isinstance(record.event, PreflightAnswer) and record.event.gpus is not None:
            gpus = len(record.event.gpus.gpus)
        listener.event(record)

    for note in prepared.notes:
        listener.note(note)
    outcome = Outcome(job=assign_number(prepared.job), bundle=prepared.bundle)
    listener.job(outcome.job, prepared.bundle)
    start = DriverStart(environment={**os.environ, ROOT_VARIABLE: str(folder)})
    run_driver(outcome, prepared.config, start, take, listener.talk)
    if outcome.is_interrupted:
        raise KeyboardInterrupt
    if not outcome.ok:
        raise _make_smoke_test_error(outcome, prepared.config.environment.prune)
    return outcome, gpus


def _make_smoke_test_error(outcome: Outcome, prune: Sequence[str]) -> JobError:
    failure, job = outcome.first_failure, outcome.job
    hints = [
        "it may need what environment.prune leaves out: try without some of that" if prune else "",
        failure.hint if failure else "",
        f"`stager diagnose {job.id} --log-dir {job.log_dir}` has the details",
    ]
    return JobError(
        "the smoke test failed, so nothing is proposed" + (f": {failure.cause}" if failure else ""),
        hint="; ".join(filter(None, hints)),
        context=failure.lines if failure else (),
    )


_Package = tuple[str, str, list[Unit]]  # name, version, files


def _list_packages(
    bundle: ChosenBundle, manifest: Manifest, environment: Path
) -> Iterator[_Package]:
    site = f"lib/python{manifest.requires.python}/site-packages/"
    with open_bundle(bundle.path, bundle.id) as file:
        for layer in manifest.layers:
            if layer.kind == "wheel":
                files = (
                    (one.path[len(site) :], one.size, is_read(str(environment / one.path)))
                    for one in file.index(layer, file.head(layer), decompress_index).files
                    if one.path.startswith(site)
                )
                yield layer.name, layer.version, group_files(files)


def _examine_packages(
    packages: Iterable[_Package], gpus: int
) -> tuple[list[TracedPackage], list[UnreadFiles]]:
    rows: list[TracedPackage] = []
    parts: list[UnreadFiles] = []
    for name, version, made in packages:
        read = [unit for unit in made if unit.read]
        used = not all(is_metadata(unit.path) for unit in read)
        rows.append(TracedPackage(name, version, *_sum_units(made), *_sum_units(read), used))
        parts += list_unread(name, made, gpus=gpus)
    rows.sort(key=lambda row: -row.bytes)
    parts.sort(key=lambda part: -part.bytes)
    return rows, parts


def _make_trace_result(
    packages: Iterable[_Package], *, outcome: Outcome, gpus: int, config: Config
) -> TraceResult:
    rows, parts = _examine_packages(packages, gpus)
    proposed = [part for part in parts if part.pattern][:MOST_PROPOSED]
    job = outcome.job
    return TraceResult(
        command=tuple(mask_arguments(job.launch.command)),
        job_id=job.id,
        log_dir=job.log_dir,
        gpus=gpus,
        files=sum(row.files for row in rows),
        bytes=sum(row.bytes for row in rows),
        files_read=sum(row.files_read for row in rows),
        bytes_read=sum(row.bytes_read for row in rows),
        packages=tuple(rows),
        unread=tuple(parts),
        proposed=tuple(str(part.pattern) for part in proposed),
        proposed_files=sum(part.files for part in proposed),
        proposed_bytes=sum(part.bytes for part in proposed),
        prune=config.environment.prune,
    )
