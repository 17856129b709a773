"""The source of one layer, and the layer's id, known before any work is done."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import posixpath
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from bundle.format.layer import INDEX_FORMAT, Origin
from bundle.launch.program_variables import ENV
from bundle.protocol.counts import format_count, format_size
from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import Digest, canonical_json

from ..config.load import Config
from ..core.errors import ConfigError, StagerError
from ..core.files import read_text
from ..core.store import SETTLED_NS, Store, digest_file, to_stamp
from ..core.values import Target, Wheel
from .bytecode import COMPILED, SETTINGS, Compiler
from .ignore import anchor
from .layer_file import describe_compression
from .project import asset_excludes, asset_files, asset_place, find_repository, project_files
from .prune import RULES, list_effective_entries, select_entries
from .tree import Tree, TreeFile, digest_contents, digest_names, digest_tree

# --- The layer of the Python that a bundle brings: made relocatable, and compiled by itself ------


class RunPath(NamedTuple):
    """A run path in a program or shared library, and the one that replaces it."""

    at: int
    old: bytes
    new: bytes  # the new one, which is not longer


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """The changes that make the layer of a Python out of its files."""

    program: Path
    run_paths: Mapping[str, RunPath]  # the run paths that are replaced, by file

    def content(self, file: TreeFile) -> bytes:
        """Return a file as it is shipped."""
        data = file.source.read_bytes()
        run_path = self.run_paths.get(file.path)
        if run_path is None:
            return data
        end = run_path.at + len(run_path.old)
        if data[run_path.at : end] != run_path.old:
            raise StagerError(
                f"{file.source} changed while it was being packed",
                hint="another program is writing there; run the command again when it is done",
            )
        return data[: run_path.at] + run_path.new.ljust(len(run_path.old), b"\0") + data[end:]


_WHEEL_RULES = 2  # counted up when :mod:`stager.layers.wheel` makes other files of a wheel

_OUTPUT_SUFFIXES = (".[0-9]*", ".partial", ".partial.[0-9]*")  # of outputs beside an existing one
LARGE_PROJECT, MANY_FILES = 200 << 20, 5_000  # from here on, a note says so


@dataclass(frozen=True, kw_only=True)
class LayerSource:
    """The source of one layer."""

    kind: str  # one of `bundle.format.manifest.KINDS`
    name: str  # the distribution's normalized name, or the project's or asset's
    version: str = ""  # of a distribution or Python, or the beginning of a commit of the hub
    digest: Digest  # digest of the content: the wheel's, or the tree's
    wheel: Path | None = None  # the wheel file, for a wheel
    tree: Tree | None = None  # the files, for the other kinds
    contents: tuple[Digest, ...] = ()  # the digests of the tree's files, where they are known
    prefix: str = ""  # the directory in the environment for a tree's files
    size: int  # rough amount of work in bytes: large ones are started first
    prune: tuple[str, ...] = ()  # words and patterns, see :mod:`stager.layers.prune`
    hub: Mapping[str, object] = field(default_factory=dict)  # type, name, commit, licence, left-out
    interpreter: Interpreter | None = None  # how the files of a Python are changed and compiled
    compiler: Compiler | None = None  # None for the running interpreter

    @classmethod
    def from_wheel(cls, wheel: Wheel, prune: Sequence[str] = ()) -> LayerSource:
        """Return the source for a wheel of the offline root, without what ``prune`` leaves out."""
        return cls(
            kind="wheel",
            name=wheel.name,
            version=str(wheel.version),
            digest=wheel.sha256,
            wheel=wheel.path,
            size=wheel.size,
            prune=list_effective_entries(wheel.path, select_entries(prune, wheel.name)),
        )

    @property
    def is_sampled(self) -> bool:
        """True if frames that hardly compress are stored as they are: data may be such."""
        return self.kind == "asset"

    @classmethod
    def from_tree(
        cls,
        kind: str,
        name: str,
        tree: Tree,
        prefix: str,
        read: Callable[[Path], Digest] = digest_file,
    ) -> LayerSource:
        """Return the source for files of the user under ``prefix``; ``read`` digests a file."""
        contents = digest_contents(tree, read)
        return cls(
            kind=kind,
            name=name,
            digest=digest_tree(tree, contents),
            tree=tree,
            contents=tuple(contents),
            prefix=prefix,
            size=tree.size,
        )


def make_origin(source: LayerSource, target: Target) -> Origin:
    """Return a layer's origin: its content's digest, and every option that shapes it."""
    compression = describe_compression(sampled=source.is_sampled)
    options: dict[str, object] = {"format": INDEX_FORMAT, "compression": compression}
    if source.kind != "asset":
        bytecode = _describe_bytecode(source, target)
        options |= {"python": target.python_tag, "bytecode": bytecode}
    is_wheel = source.kind == "wheel"
    options |= {"files": _WHEEL_RULES} if is_wheel else {"prefix": source.prefix}
    if source.prune:  # and nothing otherwise: layers made without it keep their names
        options |= {"prune": {"rules": RULES, "words": list(source.prune)}}
    if source.hub:
        options |= {"hub": dict(source.hub)}
    return Origin(
        kind=source.kind,
        name=source.name if is_wheel else "",
        version=source.version if is_wheel else "",
        content=source.digest,
        options=options,
    )


def _describe_bytecode(source: LayerSource, target: Target) -> object:
    if source.interpreter is not None:
        return "its own"
    if source.compiler is not None:
        return [source.compiler.magic, COMPILED, SETTINGS]
    return [importlib.util.MAGIC_NUMBER.hex(), COMPILED] if target.is_host_python else None


def layer_id(source: LayerSource, target: Target) -> Digest:
    """Return the layer's name: the digest of its origin."""
    return make_origin(source, target).id


def project_sources(
    config: Config,
    own: Sequence[Path],
    note: Callable[[str], None] = lambda line: None,
    tracked: Sequence[str] = (),
    read: Callable[[Path], Digest] = digest_file,
) -> list[LayerSource]:
    """Return the sources of the layers that are not wheels: the project, the trainer, each asset.

    stager's ``own`` files and the results of trackers, ``tracked``, stay out of the project.
    """
    sources = []
    assets = [str(path) for path in config.assets.paths]
    asset_files(config.root, assets)  # all their faults in one error
    folder = config.project.path
    if folder is not None:
        results = [pattern for name in tracked for pattern in _list_result_patterns(name)]
        tree = project_files(folder, [*results, *_excludes(config, folder, own)])
        for line in tree.skipped:
            note(line)
        if tree.size > LARGE_PROJECT or len(tree.files) > MANY_FILES:
            note(_advise_on_size(tree))
        sources.append(LayerSource.from_tree("project", config.name, tree, "project", read))
    trainer = project_files(Path(str(resources.files("trainer"))), [])
    sources.append(LayerSource.from_tree("trainer", "trainer", trainer, ".stager/site/trainer"))
    for path in assets:
        tree = asset_files(config.root, [path])
        sources.append(LayerSource.from_tree("asset", Path(path).name, tree, "assets", read))
    if config.assets.env:
        sources.append(_variables(config, assets))
    return sources


def _advise_on_size(tree: Tree) -> str:
    sizes = defaultdict[str, list[int]](list)
    for file in tree.files:
        folder, slash, _ = file.path.partition("/")
        sizes[folder + slash].append(file.size)
    place, largest = max(sizes.items(), key=lambda item: (sum(item[1]), len(item[1])))
    return (
        f"the project has {format_size(tree.size)} in {format_count(len(tree.files), 'file')}, "
        f"{place} alone {format_size(sum(largest))} in {format_count(len(largest), 'file')}: name "
        "data in assets.paths, so that an edit of your code does not send it again, and what ranks "
        "do not need in project.exclude"
    )


def _variables(config: Config, assets: Sequence[str]) -> LayerSource:
    """Return the links of ``assets.env``; as they have a version, an import does not write them."""
    places = ((name, asset_place(config.root, assets, path)) for name, path in config.assets.env)
    links = ((name, posixpath.relpath(f"/assets/{place}", f"/{ENV}")) for name, place in places)
    tree = Tree(links=tuple(sorted(links)))
    return replace(LayerSource.from_tree("asset", "variables", tree, ENV), version="1")


def _list_result_patterns(output: str) -> list[str]:
    return [f"/{output.rstrip('/')}{suffix}" for suffix in ("", *_OUTPUT_SUFFIXES)]


def _excludes(config: Config, folder: Path, own: Sequence[Path]) -> list[str]:
    assets = list(map(str, config.assets.paths))
    patterns = [*config.project.exclude, *asset_excludes(assets, folder)]
    for output in config.project.outputs:
        patterns += _list_result_patterns(output)
    for path in own:
        if path == folder:
            raise ConfigError(
                f"the offline root is the project's own folder, {folder}: bundles would pile up",
                hint="name another one with environment.offline-root or $OFFLINE_ROOT",
            )
        if path.is_relative_to(folder):
            patterns.append(anchor(str(path.relative_to(folder))))
    return patterns


# --- The last look at a project's files, so that the next one only asks if something has changed

# A look holds as long as the same patterns apply, each directory has the names that it had, and
# each file its size, times and inode.

_VERSION = 3
_STAMP, _CHANGED = 4, 2  # length of a stamp, and the place of the time of the last change in it
_FEWEST = 1_000  # files and directories below which a look is as quick as its record


class ProjectLook:
    """The record of one project's last look."""

    def __init__(self, store: Store, config: Config, left_out: Sequence[str]) -> None:
        project, assets = config.project, config.assets
        repository = find_repository((project.path or config.root).resolve())
        shaped_by = [
            *(_VERSION, config.name, str(project.path), str(repository)),
            *(list(project.exclude), list(project.outputs), list(left_out)),
            *(list(map(str, assets.paths)), [[name, str(path)] for name, path in assets.env]),
        ]
        self._key = Digest.of(canonical_json(shaped_by))
        self._store = store
        self._file = store.root / "projects" / f"{Digest.of(str(config.source).encode())[:32]}.look"
        self._started = time.time_ns()
        # The directories that a pattern was looked for in are not known.
        self._usable = all(os.path.lexists(path) for path in assets.paths)

    def recall(self) -> list[LayerSource] | None:
        """Return the sources that the last look found, without their files; None to look again."""
        try:
            key, stamps, sources = json.loads(read_text(self._file))
            if key != self._key or not _is_unchanged(stamps):
                return None
            return [
                LayerSource(kind=kind, name=name, digest=Digest(digest), prefix=prefix, size=size)
                for kind, name, digest, prefix, size in sources
            ]
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def remember(self, sources: Sequence[LayerSource]) -> None:
        """Keep a look, if it is worth it, and nothing has changed just now."""
        stamps: dict[str, Sequence[int | str]] = {}
        for source in sources:
            if source.tree is not None:
                stamps |= source.tree.looked_at
        latest = max((int(one[_CHANGED]) for one in stamps.values() if one), default=0)
        if not self._usable or len(stamps) < _FEWEST or latest > self._started - SETTLED_NS:
            return
        found = [[one.kind, one.name, one.digest, one.prefix, one.size] for one in sources]
        record = self._key, stamps, found
        # A store that cannot be written to is no reason to fail.
        with contextlib.suppress(StagerError), self._store.publish(self._file) as partial:
            partial.write_text(json.dumps(record), encoding="utf-8")


def _is_unchanged(stamps: Mapping[str, Sequence[int | str]]) -> bool:
    """Compare the stamps of paths with earlier ones; an empty stamp stands for a missing file."""
    for path, before in stamps.items():
        now: Sequence[int | str] = ()
        with contextlib.suppress(FileNotFoundError):
            now = to_stamp(os.stat(path))  # noqa: PTH116 - a Path each would cost more than the call
        if list(now) == list(before[:_STAMP]):
            continue
        if not now or len(before) <= _STAMP:
            return False
        with os.scandir(path) as entries:
            if digest_names(entries) != before[_STAMP]:
                return False
    return True
