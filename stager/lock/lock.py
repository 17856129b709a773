"""The lock: ``pylock.toml`` (PEP 751) with exactly one file for each package.

A resolver answers, the files are measured, and what is not allowed in the environment is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.pylock import is_valid_pylock_path

from ..core.errors import ConfigError, ResolveError
from ..core.processes import Runner, run
from ..core.store import Store
from . import refusals, torch_backend
from .build_environment import resolve_all
from .built_sources import SourceBuilder, take_built
from .file_digests import index_answers, measure
from .indexes import TORCH_INDEX, Indexes, PipSettings, pip_settings
from .kept import kept
from .lock_file import digest_of, earlier_lock, no_file, parsed, publish, render
from .pylock import Lock, select
from .resolve import ResolveOptions, unavailable_lines
from .resolver import ResolvedFile, ResolveRequest
from .spec import Spec
from .uv_export import export


def make_lock(
    spec: Spec,
    *,
    path: Path,
    store: Store,
    options: ResolveOptions,
    run: Runner = run,
    reachable: Callable[[str], bool] | None = None,
) -> Lock:
    """Resolve a spec and write the lock.

    Args:
        spec: the requirements.
        path: the lock's file, ``pylock.toml`` or ``pylock.NAME.toml``. When it is the very lock
            that the spec names, it is not written again.
        store: the offline root, where sources are built; all there is if ``options.offline``.
        options: the resolver to use, and if it may use a network.
        run: starts the resolver, pip and git.
        reachable: returns whether an index answers; by default by one short request.

    Raises:
        ResolveError: there is no solution (every reason), no file for the target (every package,
            with what exists), CUDA packages in a CPU environment (all of them).
        StagerError: the lock cannot be written.
    """
    _refuse_other_name(path)
    automatic = spec.torch_backend == torch_backend.AUTO
    spec = torch_backend.settled(spec, path, options.driver, options.note)
    supplied = spec.pylock is not None or spec.uv_lock is not None
    settings = None if supplied else pip_settings(run)
    spec = _require_hashes(spec, settings)
    keep = kept(options, _earlier(path, spec, store, settings))
    with store.scratch("lock") as scratch:
        request = replace(_resolve_request(spec, store, scratch, options, run), settings=settings)
        builder = SourceBuilder(store=store, pip=request.pip, root=spec.root)
        wanted = (*request.requirements, *builder.build_all(spec.local_projects, keep.git))
        request = replace(request, requirements=wanted, build=builder.file, keep=keep)
        request, resolved = _answer(request, options, reachable or index_answers)
        if automatic:
            torch_backend.refuse_newer_cuda(resolved, spec.torch_backend)
        request = replace(request, indexes=request.indexes.plus(spec.all_indexes))
        files = measure(resolved, store=store, pip=request.pip)
        refusals.refuse_other_files(files, spec, dict(builder.built))
    indexes = spec.indexes if options.offline else request.indexes
    lock = Lock(
        path=path,
        target=spec.target,
        files=files,
        spec_digest=spec.digest,
        digest=digest_of(spec.target, files),
        indexes=indexes.without_credentials(),
        sources=tuple((wheel, _beside(label, spec.root, path)) for wheel, label in builder.built),
        torch_backend=spec.torch_backend if automatic else None,
        git=tuple(builder.git),
        exclude_newer=keep.cutoff,
    )
    if spec.pylock is None or spec.pylock.absolute() != path.absolute():
        publish(path, render(lock))
    return lock


def _earlier(path: Path, spec: Spec, store: Store, settings: PipSettings | None) -> Lock | None:
    """Return the lock to start from; a mirror's wheels replace builds of its git sources."""
    earlier = earlier_lock(path, spec.target) if settings is not None else None
    if earlier is not None and settings is not None:
        take_built(earlier, store, spec.all_indexes.plus(settings.indexes))
    return earlier


def _require_hashes(spec: Spec, settings: PipSettings | None) -> Spec:
    if settings is None or not settings.require_hashes or spec.require_hashes:
        return spec
    return replace(spec, require_hashes="pip's configuration")


def _refuse_other_name(path: Path) -> None:
    if not is_valid_pylock_path(path):
        raise ConfigError(
            f"{path.name} is not a name for a lock",
            hint="PEP 751 requires pylock.toml or pylock.NAME.toml",
        )


def _answer(
    request: ResolveRequest, options: ResolveOptions, reachable: Callable[[str], bool]
) -> tuple[ResolveRequest, list[ResolvedFile]]:
    """Resolve, with PyTorch's own index if it is reachable; return the completed request, too."""
    backend = None if request.offline else request.spec.torch_backend
    silent = None
    if backend and reachable(f"{TORCH_INDEX}{backend}/"):
        # For all packages; with uv, only for PyTorch's.
        indexes = request.indexes.plus(Indexes(extra_index_urls=(TORCH_INDEX + backend,)))
        request = replace(request, indexes=indexes, torch_backend=backend)
    elif backend:  # local wheels may do without it
        silent = TORCH_INDEX + backend
    return request, _resolve(request, options, silent)


def _resolve_request(
    spec: Spec, store: Store, scratch: Path, options: ResolveOptions, run: Runner
) -> ResolveRequest:
    indexes = _offline_indexes(spec, store) if options.offline else spec.indexes
    of_uv = spec.uv_project.requirements if spec.uv_project else ()
    return ResolveRequest(
        spec=spec,
        requirements=tuple(text for text in spec.requirements if text not in of_uv),
        constraints=spec.constraints,
        indexes=indexes,
        scratch=scratch,
        offline=options.offline,
        run=run,
    )


def _offline_indexes(spec: Spec, store: Store) -> Indexes:
    built = sorted(str(folder) for folder in store.built.iterdir() if any(folder.glob("*.whl")))
    named = [place for place in spec.indexes.find_links if Path(place).is_dir()]
    return replace(
        spec.indexes,
        index_url=None,
        extra_index_urls=(),
        find_links=(str(store.wheels), *built, *named),
        no_index=True,
    )


def _with_reason(error: ResolveError, request: ResolveRequest, silent: str | None) -> ResolveError:
    """Add to an error that PyTorch's own index did not answer, and a build that can be pinned."""
    if silent is None:
        return error
    line = f"{silent}, which environment.torch-backend adds, did not answer and was left out"
    here = _local_builds(request, silent.rpartition("/")[2])
    pin = f"pin a build that is here: {here}" if here else "pin a build that your own indexes have"
    return ResolveError(
        f"{error.message}; PyTorch's own index did not answer",
        hint=f"{pin}; or run it again where that index can be reached",
        context=(*error.context, line),
    )


def _local_builds(request: ResolveRequest, backend: str) -> str:
    configured = request.settings.indexes if request.settings else Indexes()
    tag = f"cp{request.spec.target.python.replace('.', '')}"
    found = [
        f"torch=={path.name.split('-')[1]} in {folder}"
        for folder in configured.plus(request.indexes).find_links
        for path in Path(folder.removeprefix("file://")).glob(f"torch-*+{backend}-*.whl")
        if path.name.split("-")[2] in (tag, "py3")
    ]
    return ", ".join(sorted(found))


def _resolve(
    request: ResolveRequest, options: ResolveOptions, silent: str | None
) -> list[ResolvedFile]:
    """Return one file for each package; ``silent`` is PyTorch's index if it did not answer."""
    spec = request.spec
    try:
        if spec.pylock:
            files = _select(parsed(spec.pylock), spec.pylock, request, spec.pylock.parent)
        elif spec.uv_lock:
            exported = export(spec.uv_lock, request)
            files = _select(exported, spec.uv_lock.file, request, request.scratch)
        else:
            files = resolve_all(request, options.resolver)
        if spec.torch_backend == "cpu":
            refusals.refuse_cuda(
                files, request.names
            )  # before anything of several GB could be downloaded
        refusals.refuse_other_build(files, spec.torch_backend, silent)
    except ResolveError as exc:
        raise _with_reason(exc, request, silent) from exc
    return files


def _select(
    data: Mapping[str, Any], path: Path, request: ResolveRequest, base: Path
) -> list[ResolvedFile]:
    """Return the files of the user's own lock; build the sources in a lock of uv."""
    build = request.build if request.spec.uv_lock else None
    target = request.spec.target
    files, unavailable = select(data, target, base=base, source=str(path), build=build)
    if unavailable:
        raise no_file(path, target, unavailable_lines(unavailable, request))
    return files


def _beside(label: str, root: Path, lock: Path) -> str:
    """Make a source's path relative to the lock's folder; keep URLs and absolute paths."""
    if "://" in label or Path(label).is_absolute():
        return label
    return os.path.relpath(root / label, lock.parent.absolute())
