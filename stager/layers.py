"""Making layers: one for each wheel, the project, the trainer and each asset; several at a time."""

from __future__ import annotations

import ctypes
import importlib.util
import io
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from bundle.layer import HEAD_PREFIX, INDEX_FORMAT, LayerError, head_summary
from bundle.manifest import Digest, Layer, canonical_json

from .errors import StagerError, WheelError
from .layerfile import LayerWriter, compression
from .model import Target, Wheel
from .project import Tree, tree_digest
from .store import Store
from .unwheel import add_wheel, bytecode_path, compile_module

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with what was just made, how many layers are done, and how many there are to make."""

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Source:
    """What one layer is made from."""

    kind: str
    """``wheel``, ``project``, ``trainer`` or ``asset``."""
    name: str
    """The distribution's normalized name, or the project's or asset's."""
    version: str = ""
    """The distribution's version."""
    digest: Digest
    """Digest of the content: the wheel's, or the tree's."""
    wheel: Path | None = None
    """The wheel file, for a wheel."""
    tree: Tree | None = None
    """The files, for the other kinds."""
    prefix: str = ""
    """Where in the environment a tree's files go."""
    size: int
    """Rough amount of work in bytes: large ones are started first."""

    @classmethod
    def of_wheel(cls, wheel: Wheel) -> Source:
        """A wheel of the offline root."""
        return cls(
            kind="wheel",
            name=wheel.name,
            version=str(wheel.version),
            digest=wheel.sha256,
            wheel=wheel.path,
            size=wheel.size,
        )

    @classmethod
    def of_tree(cls, kind: str, name: str, tree: Tree, prefix: str) -> Source:
        """Files of the user's, to be laid under ``prefix``."""
        size = sum(file.size for file in tree.files)
        return cls(
            kind=kind, name=name, digest=tree_digest(tree), tree=tree, prefix=prefix, size=size
        )


@dataclass(frozen=True, kw_only=True)
class MadeLayers:
    """All layers of a bundle, in the order of the sources."""

    layers: tuple[Layer, ...]
    """What each one is; the files lie in the store under their ids."""
    built: int
    """How many were made now."""
    reused: int
    """How many were there already."""
    notes: tuple[str, ...] = field(default=())
    """What the user should know, such as links that were left out."""


def layer_id(source: Source, target: Target) -> Digest:
    """The layer's name: a digest of its content's digest and of every option that shapes its bytes.

    It is known before any work is done, which is what makes a second build free.
    """
    key: dict[str, object] = {
        "content": source.digest,
        "kind": source.kind,
        "format": INDEX_FORMAT,
        "compression": compression(),
    }
    if source.kind != "asset":
        compiled = importlib.util.MAGIC_NUMBER.hex() if target.is_host_python else None
        key |= {"python": target.python_tag, "bytecode": compiled}
    if source.kind != "wheel":
        key["prefix"] = source.prefix
    return Digest.of(canonical_json(key))


def make_layers(
    sources: Sequence[Source],
    *,
    store: Store,
    target: Target,
    jobs: int,
    progress: Progress = lambda name, done, total: None,
) -> MadeLayers:
    """Make whatever layer is not in the store yet. The store's lock must be held.

    Args:
        sources: what to make layers from.
        store: where layers live.
        target: the interpreter and platform they are for.
        jobs: how many processes work at a time.
        progress: told about each finished layer.

    Raises:
        WheelError: one or more wheels are unsound; all of them are reported.
        SpaceError: there is not enough room in the store.
    """
    ids = {layer_id(source, target): source for source in sources}
    missing = {key: source for key, source in ids.items() if not _usable(store, key)}
    if missing:
        # A wheel grows about fivefold in the spool, bytecode included, and only `jobs` at a time.
        spools = sorted((source.size for source in missing.values()), reverse=True)[:jobs]
        room = sum(source.size for source in missing.values()) * 2 + 5 * sum(spools)
        store.require_space(room, "the layers")
        _build_all(missing, store=store, target=target, jobs=jobs, progress=progress)
    layers = tuple(_describe(store, layer_id(source, target), source) for source in sources)
    return MadeLayers(layers=layers, built=len(missing), reused=len(ids) - len(missing))


def _usable(store: Store, key: Digest) -> bool:
    """Whether the layer is there with the length it says it has; a damaged one is removed."""
    path = store.layer(key)
    try:
        with path.open("rb") as handle:
            size = head_summary(handle.read(HEAD_PREFIX)).size
            if size == os.fstat(handle.fileno()).st_size:
                return True
    except FileNotFoundError:
        return False
    except LayerError:
        log.warning("layer %s cannot be read", key)
    log.warning("the stored layer %s is damaged and is made again", key)
    path.unlink()
    return False


def _describe(store: Store, key: Digest, source: Source) -> Layer:
    with store.layer(key).open("rb") as handle:
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
    missing: dict[Digest, Source], *, store: Store, target: Target, jobs: int, progress: Progress
) -> None:
    """Build each layer in a process of its own, forked from one prepared server.

    A fresh process for each wheel keeps one wheel's state (interned strings, which marshal's output
    depends on in some Python versions) out of the next one's bytes, and gives its memory back.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    queue = sorted(missing.items(), key=lambda item: item[1].size)
    running: dict[Connection, tuple[BaseProcess, Source]] = {}
    faults: list[StagerError] = []
    done = 0
    scratch = store.scratch("spool")
    try:
        while queue or running:
            while queue and len(running) < jobs and not faults:
                key, source = queue.pop()
                here, there = context.Pipe(duplex=False)
                process = context.Process(
                    target=_build_one, args=(source, target, store.layer(key), scratch, there)
                )
                process.start()
                there.close()
                running[here] = (process, source)
            if not running:
                break
            for connection in wait(list(running)):
                if not isinstance(connection, Connection):
                    continue
                finished, source = running.pop(connection)
                fault = _outcome(connection, finished, source)
                if fault is not None:
                    faults.append(fault)
                    continue
                done += 1
                progress(f"{source.name} {source.version}".strip(), done, len(missing))
    finally:
        for left, _ in running.values():
            left.kill()
    if faults:
        raise _joined(faults)


def _outcome(connection: Connection, process: BaseProcess, source: Source) -> StagerError | None:
    try:
        fault = connection.recv()
    except EOFError:
        process.join()
        fault = StagerError(
            f"building the layer of {source.name} was killed (exit status {process.exitcode})",
            hint="usually the machine ran out of memory; free some, or build with fewer --jobs",
        )
    process.join()
    connection.close()
    return fault if isinstance(fault, StagerError) else None


def _joined(faults: list[StagerError]) -> StagerError:
    if len(faults) == 1:
        return faults[0]
    lines = [line for fault in faults for line in (fault.message, *fault.context)]
    return WheelError(
        f"{len(faults)} layers cannot be built", hint=faults[0].hint, context=tuple(lines)
    )


def _build_one(
    source: Source, target: Target, final: Path, scratch: Path, report: Connection
) -> None:
    """Build one layer in a child process; the answer is None or the error that stopped it."""
    # The server's death ends this process too, so a killed build leaves nothing running.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides on Ctrl-C
    partial = scratch / final.name
    try:
        with LayerWriter(scratch) as writer:
            if source.wheel is not None:
                add_wheel(writer, source.wheel, target)
            elif source.tree is not None:
                compiled = target if source.kind != "asset" and target.is_host_python else None
                _add_tree(writer, source.tree, source.prefix, compiled)
            writer.write(partial)
        partial.replace(final)
    except StagerError as exc:
        report.send(exc)
    except OSError as exc:
        where = exc.filename or final
        report.send(StagerError(f"{source.name}: {exc.strerror or exc}: {where}"))
    else:
        report.send(None)


def _add_tree(writer: LayerWriter, tree: Tree, prefix: str, compiled: Target | None) -> None:
    """Add the files of a project or asset; modules with their bytecode where a target is given."""
    for file in tree.files:
        path = f"{prefix}/{file.path}"
        with file.source.open("rb") as stream:
            writer.add(path, stream, executable=file.mode == 0o755)
        if compiled is not None and path.endswith(".py"):
            bytecode = compile_module(file.source.read_bytes(), path)
            if bytecode is not None:
                writer.add(bytecode_path(path, compiled), io.BytesIO(bytecode))
    for path, target in tree.links:
        writer.link(f"{prefix}/{path}", target)
