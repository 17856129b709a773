"""What one layer is made from, and the name that gives it before any work is done."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from bundle.format.layer import INDEX_FORMAT
from bundle.format.layer_origin import Origin
from bundle.protocol.digest import Digest

from ..config.load import Config
from ..core.values import Target, Wheel
from .bytecode import COMPILED
from .ignore import anchored
from .layer_file import compression
from .project import asset_excludes, asset_files, project_files
from .prune import RULES, concerned
from .tree import Tree, tree_digest

_CAME_HOME = (".[0-9]*", ".partial", ".partial.[0-9]*")
"""How outputs are named further that came home to a place where something was already."""
LARGE_PROJECT = 200 << 20
"""Bytes of a project above which the user is asked whether all of it is meant to travel."""


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
    prune: tuple[str, ...] = ()
    """What of a wheel is left out: words of :data:`stager.config.environment.PRUNABLE`."""

    @classmethod
    def of_wheel(cls, wheel: Wheel, prune: Sequence[str] = ()) -> Source:
        """A wheel of the offline root, without what the words of ``prune`` cover."""
        return cls(
            kind="wheel",
            name=wheel.name,
            version=str(wheel.version),
            digest=wheel.sha256,
            wheel=wheel.path,
            size=wheel.size,
            prune=concerned(wheel.path, prune),
        )

    @classmethod
    def of_tree(cls, kind: str, name: str, tree: Tree, prefix: str) -> Source:
        """Files of the user's, to be laid under ``prefix``."""
        size = sum(file.size for file in tree.files)
        return cls(
            kind=kind, name=name, digest=tree_digest(tree), tree=tree, prefix=prefix, size=size
        )


def origin(source: Source, target: Target) -> Origin:
    """Return what a layer is made from: its content's digest, and every option that shapes it.

    It is known before any work is done, which is what makes a second build free; and it stands in
    the layer, so that a layer under the name of another one is noticed.
    """
    options: dict[str, object] = {"format": INDEX_FORMAT, "compression": compression()}
    if source.kind != "asset":
        compiled = [importlib.util.MAGIC_NUMBER.hex(), COMPILED] if target.is_host_python else None
        options |= {"python": target.python_tag, "bytecode": compiled}
    if source.kind != "wheel":
        options["prefix"] = source.prefix
    if source.prune:  # and nothing otherwise: layers made without it keep their names
        options["prune"] = {"rules": RULES, "words": list(source.prune)}
    is_wheel = source.kind == "wheel"
    return Origin(
        kind=source.kind,
        name=source.name if is_wheel else "",
        version=source.version if is_wheel else "",
        content=source.digest,
        options=options,
    )


def layer_id(source: Source, target: Target) -> Digest:
    """Return the layer's name: the digest of what it is made from."""
    return origin(source, target).id


def project_sources(
    config: Config, own: Sequence[Path], note: Callable[[str], None] = lambda line: None
) -> list[Source]:
    """What the layers that are not wheels are made from: the project, the trainer, each asset.

    Args:
        config: the project's settings.
        own: what stager itself keeps, left out where it lies in the project: the offline root, and
            the lock, which is of no use on a node and may name wheels by paths of this machine.
        note: told what else was left out without being asked to.

    Raises:
        StagerError: files that cannot be shipped; see :mod:`stager.layers.project`.
    """
    sources = []
    assets = [str(path) for path in config.assets.paths]
    asset_files(config.root, assets)  # all their faults in one error
    folder = config.project.path
    if folder is not None:
        # Assets are layers of their own, and what a run writes must not make the bundle stale.
        leave = [*config.project.exclude, *asset_excludes(assets, folder)]
        for path in config.project.outputs:
            leave += [f"/{path.rstrip('/')}{more}" for more in ("", *_CAME_HOME)]
        leave += [
            anchored(str(path.relative_to(folder))) for path in own if path.is_relative_to(folder)
        ]
        tree = project_files(folder, leave)
        for line in tree.skipped:
            note(line)
        if tree.size > LARGE_PROJECT:
            largest = max(tree.files, key=lambda file: file.size)
            note(
                f"the project has {tree.size / 1e6:,.0f} MB, {largest.path} alone "
                f"{largest.size / 1e6:,.0f} MB: name what ranks do not need in project.exclude"
            )
        sources.append(Source.of_tree("project", config.name, tree, "project"))
    trainer = project_files(Path(str(resources.files("trainer"))), [])
    sources.append(Source.of_tree("trainer", "trainer", trainer, ".stager/site/trainer"))
    for path in assets:
        tree = asset_files(config.root, [path])
        sources.append(Source.of_tree("asset", Path(path).name, tree, "assets"))
    return sources
