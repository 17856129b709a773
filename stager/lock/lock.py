"""The lock: ``pylock.toml`` (PEP 751) with exactly one file for each package.

For one target there is nothing left to choose, so a lock of ours lists only the chosen wheel (or
sdist, if no wheel fits) with digest, size and place. ``[tool.stager]`` holds what PEP 751 has no
key for. The same answer of a resolver always gives the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.pylock import Package, PackageSdist, PackageWheel, Pylock, is_valid_pylock_path
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from bundle.protocol.digest import canonical_json

from ..core import toml
from ..core.atomic_write import replacing
from ..core.deletion import remove
from ..core.errors import ConfigError, ResolveError, StagerError
from ..core.processes import Runner, run
from ..core.store import Store
from ..core.values import Digest, LockedFile, Target
from . import refusals, sources
from .file_digests import index_answers, measure
from .indexes import TORCH_INDEX, Indexes
from .pylock import Lock, locked_files, select
from .resolve import ResolveOptions, resolve, unavailable_lines
from .resolver import ResolvedFile, ResolveRequest, describe_unavailable
from .spec import Spec

__all__ = ["Lock", "ResolveOptions", "make_lock", "read_lock"]

CREATED_BY = "stager"


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
    if not is_valid_pylock_path(path):
        raise ConfigError(
            f"{path.name} is not a name for a lock",
            hint="PEP 751 requires pylock.toml or pylock.NAME.toml",
        )
    scratch = store.scratch("lock")
    try:
        request, built = _resolve_request(spec, store, scratch, options, run)
        silent = _silent_index(request, spec.torch_backend, reachable or index_answers)
        if not silent:
            request = replace(request, indexes=_with_torch(request, spec.torch_backend))
        resolved = _resolve(spec, request, options, silent)
        files = measure(resolved, store=store, pip=request.pip)
        refusals.refuse_other_files(files, spec)
    finally:
        remove(scratch)
    indexes = spec.indexes if options.offline else request.indexes
    lock = Lock(
        path=path,
        target=spec.target,
        files=files,
        spec_digest=spec.digest,
        digest=_digest_of(spec.target, files),
        indexes=indexes.without_credentials(),
        sources=tuple((wheel, _beside(label, spec.root, path)) for wheel, label in built),
    )
    if spec.pylock is None or spec.pylock.absolute() != path.absolute():
        _publish(path, render(lock))
    return lock


def read_lock(path: Path, target: Target) -> Lock:
    """Read a lock.

    Args:
        path: the file.
        target: the target to select files for, in a lock that another tool wrote. A lock of ours
            has no choice left and is read for the target it names; :meth:`Lock.is_current` tells
            if that is still the right one.

    Raises:
        ResolveError: no such file, no valid lock, or files missing for the target (all packages).
    """
    if not path.is_file():
        raise ResolveError(f"no lock at {path}", hint="run `stager lock` to make one")
    data = _parsed(path)
    metadata = _metadata(data)
    spec_digest = None
    if metadata:
        try:
            python, platform = str(metadata["python"]), str(metadata["platform"])
            target = Target(python=python, platform=platform)
            spec_digest = Digest(str(metadata["spec-digest"]))
        except (KeyError, ValueError, StagerError) as exc:
            raise ResolveError(
                f"{path}: [tool.stager] is damaged: {exc}",
                hint="run `stager lock` to make it again",
            ) from exc
    resolved, unavailable = select(data, target, base=path.parent.absolute(), source=str(path))
    if unavailable:
        lines = [describe_unavailable(package, target) for package in unavailable]
        raise _no_file(path, target, lines)
    files = locked_files(resolved, source=str(path))
    built = _mapping(metadata.get("sources"))
    return Lock(
        path=path,
        target=target,
        files=files,
        spec_digest=spec_digest,
        digest=_digest_of(target, files),
        indexes=Indexes.from_dict(_mapping(metadata.get("indexes"))),
        sources=tuple((wheel, str(label)) for wheel, label in built.items()),
    )


def _metadata(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``[tool.stager]`` of a lock that stager wrote; an empty table for any other lock."""
    if data.get("created-by") != CREATED_BY:
        return {}
    return _mapping(_mapping(data.get("tool")).get("stager"))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _no_file(path: Path, target: Target, lines: Sequence[str]) -> ResolveError:
    """Return the error for packages of a lock that have no file for a target."""
    return ResolveError(
        f"{path} has no file for Python {target.python} on {target.platform}",
        hint="lock again for that target, or change environment.python and platform",
        context=lines,
    )


def render(lock: Lock) -> str:
    """Return the lock's text."""
    target = lock.target
    marker = (
        f"python_version == '{target.python}' and sys_platform == 'linux' "
        f"and platform_machine == '{target.machine}'"
    )
    metadata: dict[str, Any] = {
        "spec-digest": str(lock.spec_digest),
        "python": target.python,
        "platform": target.platform,
    }
    indexes = lock.indexes.as_dict()
    if indexes:
        metadata["indexes"] = indexes
    if lock.sources:
        metadata["sources"] = dict(lock.sources)
    base = lock.path.parent.absolute()
    pylock = Pylock(
        lock_version=Version("1.0"),
        environments=[Marker(marker)],
        requires_python=SpecifierSet(f"=={target.python}.*"),
        created_by=CREATED_BY,
        packages=[_package(file, base) for file in lock.files],
        tool={"stager": metadata},
    )
    pylock.validate()
    return toml.dumps(pylock.to_dict())


def _package(file: LockedFile, base: Path) -> Package:
    """Return a package's entry; a file below the lock's folder gets a relative path."""
    place: dict[str, Any] = {"size": file.size, "hashes": {"sha256": str(file.sha256)}}
    if file.path is None:
        place["url"] = file.url
    elif file.path.is_relative_to(base):
        place["path"] = file.path.relative_to(base).as_posix()
    else:
        place["path"] = str(file.path)
    if file.is_wheel:
        wheel = PackageWheel(name=file.filename, **place)
        return Package(name=file.name, version=file.version, wheels=[wheel])
    sdist = PackageSdist(name=file.filename, **place)
    return Package(name=file.name, version=file.version, sdist=sdist)


def _resolve_request(
    spec: Spec, store: Store, scratch: Path, options: ResolveOptions, run: Runner
) -> tuple[ResolveRequest, list[tuple[str, str]]]:
    """Build sources; return the request to the resolver, and the wheels with their sources."""
    indexes = _offline_indexes(spec, store) if options.offline else spec.indexes
    request = ResolveRequest(
        requirements=spec.requirements,
        constraints=spec.constraints,
        target=spec.target,
        indexes=indexes,
        scratch=scratch,
        offline=options.offline,
        run=run,
    )
    built = sources.build_all(spec.local_projects, store, request.pip)
    extra = [sources.requirement_for(source, wheel) for source, wheel in built]
    request = replace(request, requirements=(*spec.requirements, *extra))
    return request, [(wheel.name, source.label) for source, wheel in built]


def _offline_indexes(spec: Spec, store: Store) -> Indexes:
    """Return places on this machine only: the store, and folders that the requirements name."""
    built = sorted(str(folder) for folder in store.built.iterdir() if any(folder.glob("*.whl")))
    named = [place for place in spec.indexes.find_links if Path(place).is_dir()]
    return replace(
        spec.indexes,
        index_url=None,
        extra_index_urls=(),
        find_links=(str(store.wheels), *built, *named),
        no_index=True,
    )


def _with_torch(request: ResolveRequest, backend: str | None) -> Indexes:
    """Return the indexes, with PyTorch's own added."""
    if backend is None or request.offline:
        return request.indexes
    return request.indexes.plus(Indexes(extra_index_urls=(TORCH_INDEX + backend,)))


def _silent_index(
    request: ResolveRequest, backend: str | None, reachable: Callable[[str], bool]
) -> str | None:
    """Return PyTorch's own index if it does not answer; local wheels may do without it."""
    if backend is None or request.offline or reachable(f"{TORCH_INDEX}{backend}/"):
        return None
    return TORCH_INDEX + backend


def _with_reason(error: ResolveError, silent: str | None) -> ResolveError:
    """Return the same error, with the index that was left out."""
    if silent is None:
        return error
    line = f"{silent}, which environment.torch-backend adds, did not answer and was left out"
    more = f"{error.hint}; or run it again where that index can be reached"
    context = (*error.context, line)
    return ResolveError(error.message, hint=more.removeprefix("; or "), context=context)


def _resolve(
    spec: Spec, request: ResolveRequest, options: ResolveOptions, silent: str | None
) -> list[ResolvedFile]:
    """Return one file for each package, from the user's lock or from the resolver."""
    try:
        if spec.pylock:
            files = _supplied(spec.pylock, request)
        else:
            files = resolve(request, options.resolver)
        if spec.torch_backend == "cpu":
            refusals.refuse_cuda(files)  # before anything of several GB could be downloaded
        refusals.refuse_other_build(files, spec.torch_backend, silent)
    except ResolveError as exc:
        raise _with_reason(exc, silent) from exc
    return files


def _parsed(path: Path) -> dict[str, Any]:
    """Parse a lock, which a person does not mend by hand where it is not TOML."""
    try:
        return toml.read(path)
    except ConfigError as exc:
        remedy = "run `stager lock` to make the lock again, or the tool that wrote it"
        raise ConfigError(exc.message, hint=f"{exc.hint}; {remedy}") from exc


def _supplied(path: Path, request: ResolveRequest) -> list[ResolvedFile]:
    """Return the files of a lock that the user supplied."""
    data = _parsed(path)
    files, unavailable = select(data, request.target, base=path.parent, source=str(path))
    if unavailable:
        raise _no_file(path, request.target, unavailable_lines(unavailable, request))
    return files


def _digest_of(target: Target, files: Sequence[LockedFile]) -> Digest:
    content = {
        "target": [target.python, target.platform],
        "files": [[f.name, str(f.version), f.filename, f.sha256] for f in files],
    }
    return Digest.of(canonical_json(content))


def _beside(label: str, root: Path, lock: Path) -> str:
    """Return a source's path from the lock's folder; URLs and absolute paths stay as they are."""
    if "://" in label or Path(label).is_absolute():
        return label
    return os.path.relpath(root / label, lock.parent.absolute())


def _publish(path: Path, text: str) -> None:
    """Write the lock to its place."""
    try:
        with replacing(path) as file:
            file.write(text.encode())
    except OSError as exc:
        raise StagerError(
            f"cannot write {path}: {exc.strerror or exc}",
            hint="the lock is written beside the project's settings; check the permissions there",
        ) from exc
