"""Making layers: one for each wheel, the project, the trainer and each asset; several at a time."""

from __future__ import annotations

import logging
import os
import resource
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bundle.format.layer import HEAD_PREFIX, LayerError, head_summary, read_origin
from bundle.format.manifest import Layer
from bundle.protocol.digest import Digest

from ..core.errors import StagerError, WheelError
from ..core.files import open_regular
from ..core.store import Store, remove
from ..core.values import Target
from .layer_process import LayerProcesses, LayerWork
from .source import LayerSource, layer_id

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with the name of a finished layer, the number done, and the number to make."""


@dataclass(frozen=True, kw_only=True)
class MadeLayers:
    """All layers of a bundle, in the order of the sources, each once."""

    layers: tuple[Layer, ...]
    """Descriptions of the layers; the files lie in the store under their ids."""
    built: int
    reused: int
    notes: tuple[str, ...]


def make_layers(
    sources: Sequence[LayerSource],
    *,
    store: Store,
    target: Target,
    jobs: int,
    progress: Progress = lambda name, done, total: None,
) -> MadeLayers:
    """Make every layer that is not in the store yet. The store's lock must be held."""
    ids = {layer_id(source, target): source for source in sources}
    missing = {key: source for key, source in ids.items() if not is_stored(store, key)}
    if missing:
        # A spool holds a layer unpacked; there are only `jobs` at a time.
        spools = sorted(map(_estimate_spool, missing.values()), reverse=True)[:jobs]
        room = sum(source.size for source in missing.values()) * 3 // 2 + sum(spools)
        store.require_space(room, "the layers")
        _require_files(min(jobs, len(missing)))
        _build_all(missing, store=store, target=target, jobs=jobs, progress=progress)
    return MadeLayers(
        layers=tuple(_describe(store, key, source) for key, source in ids.items()),
        built=len(missing),
        reused=len(ids) - len(missing),
        notes=() if _is_compiled(sources, target) else (_no_bytecode(target),),
    )


def _require_files(processes: int) -> None:
    """Refuse a limit of open files at which the fork server of multiprocessing would crash."""
    needed, limit = 24 + 3 * processes, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < needed:
        raise StagerError(
            f"the limit of open files is too low to make the layers: it is {limit}, and "
            f"{needed} are needed",
            hint="raise it in this shell: ulimit -n 1024",
        )


def _estimate_spool(source: LayerSource) -> int:
    """Return the bytes that a layer's spool needs: unpacked, with bytecode."""
    if source.wheel is None:
        return source.size
    try:
        with zipfile.ZipFile(source.wheel) as archive:
            members = [(member.filename, member.file_size) for member in archive.infolist()]
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError):
        return source.size  # it is refused with a message of its own
    total = 0
    for name, size in members:
        total += size * 5 // 2 if name.endswith(".py") else size
    return total


def _is_compiled(sources: Sequence[LayerSource], target: Target) -> bool:
    return target.is_host_python or any(source.compiler is not None for source in sources)


def _no_bytecode(target: Target) -> str:
    return (
        f"no bytecode is included: there is no Python {target.python} here to compile it, and "
        f"{Target.of_host().python}, which runs this, cannot; the first imports on each node take "
        f"about twice as long. Install one (uv python install {target.python}) to avoid that"
    )


def is_stored(store: Store, key: Digest) -> bool:
    """Return whether the store has the layer, with the origin its id says, whole by its length.

    Any other file in its place is removed. The frames are checked when they are read: to make a
    bundle, and to unpack it.
    """
    path = store.layer(key)
    try:
        with open_regular(path) as handle:
            prefix = handle.read(HEAD_PREFIX)
            summary = head_summary(prefix)
            made_from = read_origin(prefix + handle.read(summary.origin_size))
            if made_from.id == key and summary.size == os.fstat(handle.fileno()).st_size:
                return True
        log.debug("%s: %s %s", path, made_from.name, made_from.version)
    except FileNotFoundError:
        return False
    except LayerError as exc:
        log.debug("%s: %s", path, exc)
    except OSError as exc:
        raise StagerError(
            f"{path}: {exc.strerror or exc}", hint="make it readable, or remove it"
        ) from exc
    log.warning("the stored layer %s is damaged or is a different layer: making it again", key)
    remove(path)
    return False


def _describe(store: Store, key: Digest, source: LayerSource) -> Layer:
    with open_regular(store.layer(key)) as handle:
        prefix = handle.read(HEAD_PREFIX)
        summary = head_summary(prefix)
        head = prefix + handle.read(summary.head_size - HEAD_PREFIX)
    return Layer(
        id=key,
        kind=source.kind,
        name=source.name,
        version=source.version,
        head=Digest.of(head),
        head_size=summary.head_size,
        size=summary.size,
        unpacked_size=summary.unpacked_size,
        files=summary.files,
    )


def _build_all(
    missing: dict[Digest, LayerSource],
    *,
    store: Store,
    target: Target,
    jobs: int,
    progress: Progress,
) -> None:
    """Build each layer in a process of its own, the largest first."""
    queue = sorted(missing.values(), key=lambda source: source.size)
    faults: list[StagerError] = []
    done = 0
    with (
        store.scratch("spool") as scratch,
        LayerProcesses(
            LayerWork(target=target, store=store, scratch=scratch, jobs=jobs)
        ) as builders,
    ):
        while queue or builders.running:
            while queue and len(builders.running) < jobs:
                builders.start(queue.pop())
            for source, fault in builders.wait():
                if fault is None:
                    done += 1
                    progress(f"{source.name} {source.version}".strip(), done, len(missing))
                    continue
                faults.append(fault)
                if not isinstance(fault, WheelError):
                    queue.clear()  # no room, or no memory: the others would end alike
    if faults:
        raise _join_faults(faults)


def _join_faults(faults: list[StagerError]) -> StagerError:
    """Return one error for all; a fault that is no wheel's comes first: it stopped the rest."""
    faults = sorted(faults, key=lambda fault: isinstance(fault, WheelError))
    if len(faults) == 1:
        return faults[0]
    lines = [line for fault in faults for line in (fault.message, *fault.context)]
    return type(faults[0])(
        f"{len(faults)} layers cannot be built", hint=faults[0].hint, context=lines
    )
