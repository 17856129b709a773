"""Assembly of an environment in private: files of older ones are linked, the rest is written."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..format.archive import BundleFile
from ..format.layer import Index, LayerError
from ..format.manifest import Layer, Manifest, room_for
from ..format.zstd import Decompress, load_decompressor
from ..node import removal
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system.files import facts_of, refusals
from . import hard_links
from .hard_links import LinkableLayer, Linking
from .layer_writer import WriteSettings, write_layers
from .listing import Window
from .merge import Merged, merge
from .virtual_environment import EnvironmentOrigin, finish


class MissingLayer(NodeError):
    """A layer is neither in the file nor on the node: an older environment has gone or changed."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(Problem(ProblemCode.LAYER_MISSING, path, {"name": name}))


@dataclass(frozen=True)
class AssembleOptions:
    """The settings of an assembly."""

    processes: int
    """Number of processes."""
    compare: bool = True
    """True to compare each file with its digest in the index, as for a bundle of somebody else."""


def assemble(
    bundle: BundleFile,
    root: str,
    python: str,
    how: AssembleOptions,
    publish: Callable[[str, str], None],
) -> tuple[int, int]:
    """Build the environment of a bundle and publish it; return the files linked and written.

    Raises:
        NodeError: the bundle is damaged, or there is no room.
        MissingLayer: a layer is neither in the file nor in an older environment.
    """
    manifest = bundle.manifest
    layers = manifest.layers
    incoming, final = os.path.join(root, "incoming"), os.path.join(root, "envs", manifest.id)
    older = _sources(root, manifest)
    _require_room(incoming, manifest, [layer for layer in layers if layer.head not in older])
    private = tempfile.mkdtemp(prefix=f"{manifest.id}.", dir=incoming)
    staging, tools = os.path.join(private, "env"), os.path.join(private, "tools")
    try:
        os.mkdir(staging, 0o700)
        os.mkdir(tools, 0o700)
        if bundle.holds(manifest.node.name):
            bundle.part(manifest.node)  # not needed here, but damage must be found
        content = _content_of(bundle, root, older, tools)
        merged = content.merged
        for path in merged.directories:
            os.mkdir(os.path.join(staging, path), 0o755)
        started = os.stat(staging).st_mtime_ns  # by the clock that files get their times from
        # Where one file is damaged, more are likely to be: no file is then linked unread.
        linking = Linking(how.processes, verify=os.path.lexists(final))
        linked = _fill(bundle, staging, content, older, linking, compare=how.compare)
        for path, target in merged.links.items():
            os.symlink(target, os.path.join(staging, path))
        bundle.check_frame()  # possible only now if the file was still arriving
        origin = EnvironmentOrigin(content.heads, content.wheel, linked, started)
        finish(staging, manifest, python, merged, origin)
        publish(staging, final)
    finally:
        removal.sweep(private)
    total = sum(map(len, merged.entries))
    written = 0
    for layer, entries in zip(layers, merged.entries):
        if layer.head not in linked:
            written += len(entries)
    return total - written, written


@dataclass(frozen=True)
class _Content:
    decompress: Decompress
    """Turns a frame into its content."""
    wheel: bytes | None
    """The wheel with the decompressor, unless it is this Python's own."""
    heads: list[bytes]
    """The head of each layer."""
    indexes: list[Index]
    """The index of each layer."""
    merged: Merged
    """The files that each of them writes."""


def _content_of(
    bundle: BundleFile, root: str, older: Mapping[str, Sequence[str]], tools: str
) -> _Content:
    layers, part = bundle.manifest.layers, bundle.manifest.decompressor
    wheel = _wheel(bundle, os.path.join(root, "envs"))
    decompress = load_decompressor(part.name if part else "", wheel, tools)
    heads = _heads(bundle, older, layers)
    final = os.path.join(root, "envs", bundle.manifest.id)
    # Heads in another environment were checked when that was made; this one is damaged.
    checked = {head for head, sources in older.items() if set(sources) != {final}}
    with _no_collection():
        indexes = [
            bundle.index(layer, head, decompress, checked=layer.head in checked)
            for layer, head in zip(layers, heads)
        ]
        with bundle.refusing(LayerError):
            merged = merge(layers, indexes, bundle.manifest.requires.python)
    return _Content(decompress, wheel, heads, indexes, merged)


def _fill(
    bundle: BundleFile,
    staging: str,
    content: _Content,
    older: Mapping[str, Sequence[str]],
    linking: Linking,
    *,
    compare: bool,
) -> dict[str, Window]:
    """Link files of older environments, write the rest; return write times by linked head."""
    layers = bundle.manifest.layers
    linked = _link(layers, content.merged, older, staging, linking)
    fresh = [
        (layer, index, entries)
        for layer, index, entries in zip(layers, content.indexes, content.merged.entries)
        if layer.head not in linked
    ]
    for layer, _, _ in fresh:
        if not bundle.holds(layer.member):
            raise MissingLayer(layer.name, bundle.path)
    write_layers(
        bundle, staging, fresh, WriteSettings(content.decompress, linking.processes, compare)
    )
    return linked


def _sources(root: str, manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """Return environments that may have each layer, by head; a damaged one of this bundle too."""
    heads = [layer.head for layer in manifest.layers]
    older = hard_links.older_layers(os.path.join(root, "envs"), heads)
    final = os.path.join(root, "envs", manifest.id)
    if os.path.isdir(final) and not os.path.islink(final):
        for head in heads:
            older[head] = tuple(dict.fromkeys((*older.get(head, ()), final)))
    return older


def _link(
    layers: Sequence[Layer],
    merged: Merged,
    older: Mapping[str, Sequence[str]],
    staging: str,
    linking: Linking,
) -> dict[str, Window]:
    wanted = [
        LinkableLayer(layer.head, older[layer.head], entries)
        for layer, entries in zip(layers, merged.entries)
        if layer.head in older
    ]
    return hard_links.link_layers(wanted, staging, linking)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector while large structures without cycles are built."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _heads(
    bundle: BundleFile, older: Mapping[str, Sequence[str]], layers: Sequence[Layer]
) -> list[bytes]:
    heads = []
    for layer in layers:
        if bundle.holds(layer.head_member):
            head: bytes | None = bundle.head(layer)
        else:
            head = hard_links.head_of(older.get(layer.head, ()), layer)
        if head is None:
            raise MissingLayer(layer.name, bundle.path)
        heads.append(head)
    return heads


def _wheel(bundle: BundleFile, envs: str) -> bytes | None:
    """Return the zstandard wheel; None if this Python has its own zstd."""
    part = bundle.manifest.decompressor
    if part is None:
        return None
    if bundle.holds(part.name):
        return bundle.part(part)
    data = hard_links.older_decompressor(envs, part)
    if data is None:
        raise MissingLayer(part.name, bundle.path)
    return data


def _require_room(path: str, manifest: Manifest, layers: Sequence[Layer]) -> None:
    needed, inodes = room_for(layers, manifest)
    faults = refusals(facts_of(path), needed, inodes)
    if faults:
        raise NodeError(Problem(ProblemCode.NO_ROOM, path, {"why": "; ".join(faults)}))
