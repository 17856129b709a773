"""The bundle that a project has, and whether it is still what the project asks for.

Every job asks this before it begins, so what makes a bundle is imported only where one is made.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bundle.protocol.digest import Digest, canonical_json

from ..config.load import Config
from ..core.errors import BundleError
from ..core.store import Store, sha256_of
from ..core.values import Target
from ..pack import existing
from ..pack.existing import Chosen, Newest

if TYPE_CHECKING:
    from ..layers.source import Source
    from ..lock.spec import Spec

LOCK_NAME = "pylock.toml"


class Listener(Protocol):
    """Who is told how a build goes."""

    def begin(self, phase: str) -> None:
        """A phase begins."""

    def step(self, what: str, done: int, total: int) -> None:
        """One of ``total`` pieces of the phase is done; ``total`` is 0 where it is not known."""

    def note(self, line: str) -> None:
        """Something the user should know."""


def offline_root(config: Config) -> Path:
    """Where the project's store is: ``$OFFLINE_ROOT``, else the setting, else the default."""
    named = os.environ.get("OFFLINE_ROOT")
    if named:
        return Path(named).expanduser().absolute()
    if config.environment.offline_root is not None:
        return config.environment.offline_root
    python = config.environment.python or Target.of_host().python
    return Path.home() / f"offline_repo_py{python.replace('.', '')}"


def lock_path(config: Config, spec: Spec) -> Path:
    """The project's lock: beside its settings, and never the file that the user brought."""
    path = config.root / LOCK_NAME
    return config.root / "pylock.stager.toml" if spec.pylock == path else path


def newest_bundle(config: Config) -> Chosen:
    """Return the bundle that the project's last build made, whatever has changed since.

    Raises:
        BundleError: there is none that can be used.
    """
    found = _newest(config, Store(offline_root(config)))
    if found.id is None:
        raise BundleError(
            f"{found.path} was made by an older version of stager",
            hint="make it anew with `stager build`",
        )
    return Chosen(path=found.path, id=found.id)


def _newest(config: Config, store: Store) -> Newest:
    found = existing.newest(store, config.source)
    if found is None:
        raise BundleError(
            f"there is no bundle of {config.name} in {store.root} yet",
            hint="make one with `stager build`, or name a bundle's file",
        )
    return found


def current_bundle(config: Config, listener: Listener) -> Chosen:
    """Return the project's newest bundle, made anew first where files of the project have changed.

    That is quick and needs no network: the packages' layers are there. Changed requirements are
    another matter and are left to ``stager build``.

    Raises:
        StagerError: there is no bundle yet, or the requirements have changed.
    """
    from ..layers.source import project_sources
    from ..lock.spec import read_spec

    store = Store(offline_root(config))
    found = _newest(config, store)
    spec = read_spec(config)
    lock = lock_path(config, spec)
    current = inputs(spec, project_sources(config, (store.root, lock)), lock)
    if found.id is not None and found.inputs == current:
        return Chosen(path=found.path, id=found.id)
    from .build import make_again

    return make_again(config, spec, found.path, listener)


def inputs(spec: Spec, trees: Sequence[Source], lock: Path) -> Digest:
    """Digest of everything that decides a bundle, known without building it."""
    from ..layers.source import layer_id
    from ..pack.program import make_node_program

    ids = [*(layer_id(tree, spec.target) for tree in trees), *spec.prune]
    pinned = sha256_of(lock) if lock.is_file() else None
    node = Digest.of(make_node_program())
    known = {"spec": spec.digest, "lock": pinned, "trees": ids, "node": node}
    return Digest.of(canonical_json(known))
