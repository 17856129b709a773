"""The lock: ``pylock.toml`` (PEP 751) with exactly one file for each package.

For one target there is nothing left to choose, so a lock of ours lists just the chosen wheel (or
sdist, where no wheel fits) with digest, size and place. What PEP 751 has no key for stands under
``[tool.stager]``. The same answer of a resolver always gives the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.pylock import Package, PackageSdist, PackageWheel, Pylock, is_valid_pylock_path
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..core import toml
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
        spec: what is asked for.
        path: the lock's file, ``pylock.toml`` or ``pylock.NAME.toml``. When it is the very lock
            that the spec brings, it is not written again.
        store: where sources are built, and what is offered when ``options.offline``.
        options: how to resolve.
        run: starts the resolver, pip and git.
        reachable: whether an index answers; by default one short request.

    Raises:
        ResolveError: there is no solution (every reason), no file for the target (every package,
            with what exists), CUDA packages in a CPU environment (all of them).
        StagerError: the lock cannot be written.
    """
    if not is_valid_pylock_path(path):
        raise ConfigError(
            f"{path.name} is not a name for a lock",
            hint="PEP 751 wants pylock.toml or pylock.NAME.toml",
        )
    scratch = store.scratch("lock")
    try:
        request, built = _resolve_request(spec, store, scratch, options, run)
        silent = _silent_index(request, spec.torch_backend, reachable or index_answers)
        if not silent:
            request = replace(request, indexes=_with_torch(request, spec.torch_backend))
        try:
            found = _chosen(spec, request, options)
            refusals.refuse_other_build(found, spec.torch_backend, silent)
        except ResolveError as exc:
            raise _with_reason(exc, silent) from exc
        files = measure(found, store=store, pip=request.pip)
        refusals.refuse_other_files(files, spec)
    finally:
        remove(scratch)
    lock = Lock(
        path=path,
        target=spec.target,
        files=files,
        spec_digest=spec.digest,
        digest=_digest_of(spec.target, files),
        indexes=(spec.indexes if options.offline else request.indexes).without_credentials(),
        sources=tuple((wheel, _beside(label, spec.root, path)) for wheel, label in built),
    )
    if spec.pylock is None or spec.pylock.absolute() != path.absolute():
        _publish(path, render(lock))
    return lock


def read_lock(path: Path, target: Target) -> Lock:
    """Read a lock.

    Args:
        path: the file.
        target: which files to select from a lock that another tool wrote. One of ours has no
            choice left and is read for the target that it names; :meth:`Lock.is_current` tells
            whether that is still the one asked for.

    Raises:
        ResolveError: no such file, no valid lock, or files missing for the target (all packages).
    """
    if not path.is_file():
        raise ResolveError(f"no lock at {path}", hint="run `stager lock` to make one")
    data = toml.read(path)
    tool = data.get("tool")
    own = tool.get("stager") if isinstance(tool, dict) else None
    about: Mapping[str, Any] = {}
    if isinstance(own, dict) and data.get("created-by") == CREATED_BY:
        about = own
    try:
        if about:
            target = Target(python=str(about["python"]), platform=str(about["platform"]))
        spec_digest = Digest(str(about["spec-digest"])) if about else None
    except (KeyError, ValueError, StagerError) as exc:
        raise ResolveError(
            f"{path}: [tool.stager] is damaged: {exc}", hint="run `stager lock` to make it again"
        ) from exc
    found, absent = select(data, target, base=path.parent.absolute(), source=str(path))
    if absent:
        raise ResolveError(
            f"{path} has no file for Python {target.python} on {target.platform}",
            hint="lock again for that target, or change environment.python and platform",
            context=[describe_unavailable(one, target) for one in absent],
        )
    files = locked_files(found, source=str(path))
    built, indexes = about.get("sources"), about.get("indexes")
    return Lock(
        path=path,
        target=target,
        files=files,
        spec_digest=spec_digest,
        digest=_digest_of(target, files),
        indexes=Indexes.from_dict(indexes if isinstance(indexes, dict) else {}),
        sources=tuple((k, str(v)) for k, v in built.items()) if isinstance(built, dict) else (),
    )


def render(lock: Lock) -> str:
    """The lock's text."""
    base = lock.path.parent.absolute()
    target = lock.target
    packages = []
    for file in lock.files:
        place: dict[str, Any] = {"size": file.size, "hashes": {"sha256": str(file.sha256)}}
        if file.path:
            inside = file.path.is_relative_to(base)
            place["path"] = file.path.relative_to(base).as_posix() if inside else str(file.path)
        else:
            place["url"] = file.url
        chosen: dict[str, Any] = (
            {"wheels": [PackageWheel(name=file.filename, **place)]}
            if file.is_wheel
            else {"sdist": PackageSdist(name=file.filename, **place)}
        )
        packages.append(Package(name=file.name, version=file.version, **chosen))
    about: dict[str, Any] = {
        "spec-digest": str(lock.spec_digest),
        "python": target.python,
        "platform": target.platform,
    }
    for key, value in (("indexes", lock.indexes.as_dict()), ("sources", dict(lock.sources))):
        if value:
            about[key] = value
    marker = (
        f"python_version == '{target.python}' and sys_platform == 'linux' "
        f"and platform_machine == '{target.machine}'"
    )
    lock_file = Pylock(
        lock_version=Version("1.0"),
        environments=[Marker(marker)],
        requires_python=SpecifierSet(f"=={target.python}.*"),
        created_by=CREATED_BY,
        packages=packages,
        tool={"stager": about},
    )
    lock_file.validate()
    return toml.dumps(lock_file.to_dict())


def _resolve_request(
    spec: Spec, store: Store, scratch: Path, options: ResolveOptions, run: Runner
) -> tuple[ResolveRequest, list[tuple[str, str]]]:
    """What to ask the resolver once sources are wheels; and those wheels, with their sources."""
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
    """Only what is on this machine: the store, and folders that the requirements name."""
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
    """The indexes, with PyTorch's own."""
    if backend is None or request.offline:
        return request.indexes
    return request.indexes.plus(Indexes(extra_index_urls=(TORCH_INDEX + backend,)))


def _silent_index(
    request: ResolveRequest, backend: str | None, reachable: Callable[[str], bool]
) -> str | None:
    """PyTorch's own index if it gives no answer; local wheels may do without it."""
    if backend is None or request.offline or reachable(f"{TORCH_INDEX}{backend}/"):
        return None
    return TORCH_INDEX + backend


def _with_reason(error: ResolveError, silent: str | None) -> ResolveError:
    """The same error, with the index that was left out."""
    if silent is None:
        return error
    line = f"{silent}, which environment.torch-backend adds, gave no answer and was left out"
    more = f"{error.hint}; or run it again where that index can be reached"
    context = (*error.context, line)
    return ResolveError(error.message, hint=more.removeprefix("; or "), context=context)


def _chosen(spec: Spec, request: ResolveRequest, options: ResolveOptions) -> list[ResolvedFile]:
    """One file for each package: of the lock that the user brought, or the resolver's choice."""
    found = _given(spec.pylock, request) if spec.pylock else resolve(request, options.resolver)
    if spec.torch_backend == "cpu":
        refusals.refuse_cuda(found)  # before anything of several GB could be downloaded
    return found


def _given(path: Path, request: ResolveRequest) -> list[ResolvedFile]:
    """The files of a lock that the user brought."""
    data = toml.read(path)
    found, absent = select(data, request.target, base=path.parent, source=str(path))
    if absent:
        raise ResolveError(
            f"{path} has no file for Python {request.target.python} on {request.target.platform}",
            hint="lock again for that target, or change environment.python and platform",
            context=unavailable_lines(absent, request),
        )
    return found


def _digest_of(target: Target, files: Sequence[LockedFile]) -> Digest:
    content = {
        "target": [target.python, target.platform],
        "files": [[f.name, str(f.version), f.filename, f.sha256] for f in files],
    }
    return Digest.of(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def _beside(label: str, root: Path, lock: Path) -> str:
    """A source's place as seen from the lock's folder; URLs and absolute paths as they are."""
    if "://" in label or Path(label).is_absolute():
        return label
    return os.path.relpath(root / label, lock.parent.absolute())


def _publish(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("w", encoding="utf-8", newline="\n") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(path)
    except OSError as exc:
        partial.unlink(missing_ok=True)
        raise StagerError(
            f"cannot write {path}: {exc.strerror or exc}",
            hint="the lock stands beside the project's settings; check the permissions there",
        ) from exc
