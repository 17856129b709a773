"""A project's current bundle, made again if need be: only then that code is imported."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bundle.format.archive import BundleFile
from bundle.protocol.digest import Digest, canonical_json
from bundle.protocol.problem import NodeError, ProblemCode

from ..config import inline_script
from ..config.load import Config
from ..config.sections import list_tracker_outputs
from ..core.errors import BundleError, StagerError
from ..core.files import expand_home, read_text
from ..core.store import DigestCache, Store, digest_file
from ..core.values import Target
from ..hub.repositories import HubRequest
from ..pack import bundle_file
from ..pack.bundle_file import ChosenBundle, Newest

if TYPE_CHECKING:
    from ..layers.source import LayerSource
    from ..lock.spec import Spec

LOCK_NAME = "pylock.toml"
_NAME = re.compile(r'^name = "([^"]+)"$', re.MULTILINE)  # the name of a package in a lock of ours


class Listener(Protocol):
    """Receives the progress of a build."""

    def begin(self, phase: str) -> None:
        """Report that a phase begins."""

    def step(self, what: str, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` steps are done; ``total`` is 0 if it is not known."""

    def note(self, line: str) -> None:
        """Report a note for the user."""


def offline_root(config: Config) -> Path:
    """Return the project's offline root: ``$OFFLINE_ROOT``, else the setting, else the default."""
    if named := os.environ.get("OFFLINE_ROOT"):
        return expand_home(named).absolute()
    if config.environment.offline_root is not None:
        return config.environment.offline_root
    python = config.environment.python or Target.from_host().python
    return expand_home("~") / f"offline_repo_py{python.replace('.', '')}"


def lock_path(config: Config, spec: Spec) -> Path:
    """Return the path of the project's lock, never that of a lock that the user supplied."""
    if inline_script.is_script(config):
        return config.root / f"pylock.{inline_script.make_script_name(config.source)}.toml"
    path = config.root / LOCK_NAME
    return config.root / "pylock.stager.toml" if spec.pylock == path else path


def newest_bundle(config: Config) -> ChosenBundle:
    """Return the bundle that the project's last build made, whatever has changed since."""
    newest = _newest(config, Store(offline_root(config)))
    return ChosenBundle(path=newest.path, id=newest.id)


def _newest(config: Config, store: Store) -> Newest:
    newest = bundle_file.find_newest(store, config.source)
    if newest is None:
        raise BundleError(
            f"there is no bundle of {config.name} in {store.root} that was built in this folder",
            hint="make one with `stager build`, or name a bundle's file",
            context=describe_imports(store),
        )
    return newest


def describe_imports(store: Store) -> list[str]:
    """Return a line for each imported bundle: none is chosen, as no build here has made it."""
    return [
        f"imported: {name} {begin}: give --id {begin}"
        for name, begin in bundle_file.list_imported(store)
    ]


def current_bundle(config: Config, listener: Listener) -> ChosenBundle:
    """Return the project's newest bundle, made again, without a network, if anything has changed.

    Changed requirements are left to ``stager build``, except those of a script that brings its own.
    """
    from ..lock.spec import read_spec

    store = Store(offline_root(config))
    if inline_script.is_script(config) and bundle_file.find_newest(store, config.source) is None:
        return _build_script_bundle(config, listener)
    newest = _newest(config, store)
    spec = read_spec(config)
    lock = lock_path(config, spec)
    trees = list_project_sources(config, store, lock, remembered=True)
    current = digest_inputs(config, spec, trees, lock)
    why = "the project has changed since its bundle was made"
    if newest.inputs == current:
        why = _find_unusable_layer(newest.path)
        if not why:
            return ChosenBundle(path=newest.path, id=newest.id)
    if inline_script.is_script(config):
        return _build_script_bundle(config, listener)
    from .build import describe_changed_files, find_previous_manifest, make_again

    old = find_previous_manifest(store, config.source)
    if old is not None and newest.inputs != current:
        why += describe_changed_files(old, trees, store, spec.target)
    return make_again(config, spec, newest.path, listener, why)


def _find_unusable_layer(bundle: Path) -> str:
    """Return which layer a bundle cannot use; empty for none, and for any other damage."""
    try:
        with BundleFile(str(bundle)):
            return ""
    except NodeError as exc:  # other damage is an error where it is read
        is_layer = exc.problem.code == ProblemCode.STORED_LAYER_UNUSABLE
        return f"its layer {exc.problem.why}" if is_layer else ""


def list_project_sources(
    config: Config,
    store: Store,
    lock: Path,
    note: Callable[[str], None] = lambda line: None,
    *,
    remembered: bool = False,
) -> Sequence[LayerSource]:
    """Return the sources of the layers that are not wheels.

    With ``remembered``, sources without their files will do where nothing has changed.
    """
    from ..layers.source import ProjectLook, project_sources

    try:
        packages = _NAME.findall(read_text(lock))
    except (OSError, UnicodeDecodeError):
        packages = []
    tracked = list_tracker_outputs(packages)
    own = [store.root, lock]
    if config.trust.allowed_signers is not None:  # a new signer is to make no new, unsigned bundle
        own.append(config.trust.allowed_signers)
    look = ProjectLook(store, config, [*map(str, own), *tracked])
    known = look.recall() if remembered else None
    if known is not None:
        return known
    digests = DigestCache(store)
    sources = project_sources(config, own, note, tracked, digests.digest_of_content)
    with contextlib.suppress(StagerError):  # a store that cannot be written to
        digests.save()
    look.remember(sources)
    return sources


def _build_script_bundle(config: Config, listener: Listener) -> ChosenBundle:
    from .build import BuildOptions, build

    listener.note(f"{config.source.name} says itself what it needs: building its bundle")
    packed = build(config, BuildOptions(), listener).packed
    return ChosenBundle(path=packed.path, id=packed.manifest.id)


def hub_requests(config: Config) -> tuple[HubRequest, ...]:
    """Return the models, data sets and Spaces that the settings name."""
    return (*config.assets.models, *config.assets.datasets, *config.assets.spaces)


def digest_inputs(config: Config, spec: Spec, trees: Sequence[LayerSource], lock: Path) -> Digest:
    """Return the digest of everything that decides a bundle, known without building it."""
    from ..layers.source import layer_id
    from ..pack.node_program import make_node_program

    content = {
        "spec": spec.digest,
        "lock": digest_file(lock) if lock.is_file() else None,
        "trees": [*(layer_id(tree, spec.target) for tree in trees), *spec.prune],
        "node": Digest.of(make_node_program()),
        "interpreter": config.environment.interpreter,
        "name": config.name,
        "imports": config.environment.imports,
        "builds": [sorted(spec.builds.in_environment), spec.builds.variables],
        "hub": [request.to_json() for request in hub_requests(config)],
    }
    return Digest.of(canonical_json(content))
