"""The lock of a project: the current one, or a new one and what that changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bundle.protocol.counts import counted, sized

from ..config.load import Config
from ..core.errors import ConfigError, ResolveError
from ..core.store import Store
from ..lock.build_source import built_for_sure, refuse_without_nvcc
from ..lock.indexes import TORCH_INDEX
from ..lock.lock import ResolveOptions, make_lock
from ..lock.pylock import Lock, PackageChanges, changes, earlier_lock, keep_assets, read_lock
from ..lock.resolver import NONE
from ..lock.spec import Spec, read_spec
from .current_bundle import Listener, lock_path, offline_root
from .hub_lock import hub_files, upgraded, with_assets


@dataclass(frozen=True, kw_only=True)
class LockResult:
    """The result of ``stager lock``."""

    lock: Path
    """The lock."""
    packages: int
    """Number of packages in it."""
    first: bool
    """True if there was no lock before."""
    changes: PackageChanges
    """The difference to the lock before."""
    models: int = 0
    """Number of models of the hub in it."""
    datasets: int = 0
    """Number of data sets of the hub in it."""
    spaces: int = 0
    """Number of Spaces of the hub in it."""
    asset_bytes: int = 0
    """The size of their files in bytes."""
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Files of each of them that are not taken, by its type and name."""


def lock_project(config: Config, options: ResolveOptions, listener: Listener) -> LockResult:
    """Make the project's lock anew.

    Raises:
        StagerError: see :func:`stager.lock.spec.read_spec` and :func:`stager.lock.lock.make_lock`.
    """
    store = Store(offline_root(config))
    spec = buildable_spec(config)
    options, moved = upgraded(config, options)
    _refuse_without_effect(spec, options)
    listener.begin("lock")
    with store.lock():
        earlier = earlier_lock(lock_path(config, spec), spec.target)
        lock = _make_lock(config, spec, store, options, listener)
        files = hub_files(store, options.offline, listener)
        lock = with_assets(config, lock, files, listener, moved=moved)
    kinds = Counter(repository.request.kind for repository in lock.assets)
    return LockResult(
        lock=lock.path,
        packages=len(lock.files),
        models=kinds["model"],
        datasets=kinds["dataset"],
        spaces=kinds["space"],
        asset_bytes=sum(repository.size for repository in lock.assets),
        first=earlier is None,
        changes=changes(earlier, lock),
        left_out={
            f"{r.request.kind} {r.request.label}": r.left_out for r in lock.assets if r.left_out
        },
    )


def buildable_spec(config: Config, launcher: tuple[str, ...] = ()) -> Spec:
    """Return the project's spec; what has to be compiled without the compiler is refused now.

    Raises:
        StagerError: see :func:`stager.lock.spec.read_spec`; or a package needs ``nvcc``.
    """
    spec = read_spec(config)
    builds = replace(spec.builds, launcher=launcher)
    names = [canonicalize_name(Requirement(text).name) for text in spec.requirements]
    refuse_without_nvcc(built_for_sure(names, builds, spec.indexes), builds)
    return replace(spec, builds=builds)


def current_lock(
    config: Config,
    spec: Spec,
    store: Store,
    options: ResolveOptions,
    listener: Listener,
    *,
    locked: bool,
) -> Lock:
    """Return the lock on disk if it matches the spec, else a new one.

    Raises:
        ResolveError: it is not current, and ``locked`` forbids to make it.
    """
    _refuse_without_effect(spec, options)
    path = lock_path(config, spec)
    if path.exists():
        lock = read_lock(path, spec.target)
        if lock.is_current(spec) and not options.outdates(lock.exclude_newer):
            return lock
    if locked:
        state = "is out of date" if path.exists() else "does not exist"
        first = f"`{spec.uv_lock.command}`, then " if spec.uv_lock else ""
        raise ResolveError(
            f"the lock {path} {state}, and --locked does not allow making it",
            hint=f"run {first}`stager lock`, review the difference, and build again",
        )
    return _make_lock(config, spec, store, options, listener)


def _refuse_without_effect(spec: Spec, options: ResolveOptions) -> None:
    supplied = spec.uv_lock.file if spec.uv_lock else spec.pylock
    cutoff = options.exclude_newer not in (None, NONE)
    if supplied is None or not (options.upgrade or options.upgrade_packages or cutoff):
        return
    remedy = "give the option to the tool that wrote it"
    if spec.uv_lock:
        remedy = f"give the option to `{spec.uv_lock.command}` there, and run this command again "
        remedy += "without it"
    name = "--exclude-newer" if cutoff else "--upgrade"
    raise ConfigError(f"{name} has no effect: {supplied} decides all versions", hint=remedy)


def _make_lock(
    config: Config, spec: Spec, store: Store, options: ResolveOptions, listener: Listener
) -> Lock:
    told = replace(options, note=listener.note)
    path = lock_path(config, spec)
    earlier = earlier_lock(path, spec.target)
    lock = make_lock(spec, path=path, store=store, options=told)
    lock = keep_assets(lock, earlier.assets if earlier else ())
    _note_lock(spec, lock, options, listener)
    return lock


def _note_lock(spec: Spec, lock: Lock, options: ResolveOptions, listener: Listener) -> None:
    for remark in spec.remarks:
        listener.note(remark)
    index = _unanswering_index(spec, lock, options)
    if index:
        listener.note(
            f"PyTorch's own index, {index}, did not answer and was left out: its packages came "
            "from the other indexes"
        )
    gpu = [file for file in lock.files if file.name.startswith("nvidia-")]
    if gpu and spec.torch_backend is None:
        size = sum(file.size or 0 for file in lock.files)
        listener.note(
            f"for nodes with NVIDIA GPUs: {counted(len(gpu), 'CUDA package')} in {sized(size)}; "
            'where the nodes have none, environment.torch-backend = "cpu" is much smaller'
        )
    locked = {file.name for file in lock.files}
    for name in options.upgrade_packages:
        if canonicalize_name(name) not in locked:
            listener.note(f"--upgrade-package {name}: the lock has no such package")
    if lock.exclude_newer and options.exclude_newer is None:
        listener.note(
            f"files uploaded after {lock.exclude_newer} did not count, as in the lock before; "
            "--exclude-newer none lifts that"
        )


def _unanswering_index(spec: Spec, lock: Lock, options: ResolveOptions) -> str:
    """Return PyTorch's own index if it was queried and did not answer; else an empty string."""
    backend = lock.torch_backend or spec.torch_backend
    index = f"{TORCH_INDEX}{backend}"
    resolved = not options.offline and spec.pylock is None and spec.uv_lock is None
    left_out = backend and resolved and index not in lock.indexes.extra_index_urls
    return index if left_out else ""
