"""The lock: ``pylock.toml`` (PEP 751) with exactly one file for each package."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from packaging.utils import canonicalize_name

from bundle.protocol.counts import format_count
from bundle.protocol.dataclass import dataclass

from ..core import toml
from ..core.errors import ResolveError
from ..core.store import DigestCache, Store, digest_file
from ..core.values import LockedFile
from . import pip_tools, resolver, uv
from .indexes import TORCH_INDEX, Indexes, PipSettings, pip_settings
from .pip import Pip, ResolvedFile, condense
from .pylock import (
    Lock,
    find_earlier_lock,
    lock_files,
    missing_file_error,
    parse_lock,
    parse_pylock,
    publish,
    render,
    select,
)
from .resolver import (
    NONE,
    FindDriver,
    NoSolution,
    ResolveRequest,
    ResolverName,
    UnavailablePackage,
    describe_unavailable,
    parse_name,
)
from .source_wheels import SourceBuilder, take_built
from .spec import Spec

# --- Resolving requirements to one exact file for each package, or to every reason against it ----

_BUILD_OF_TORCH = re.compile(r"(?:^|\n)(torch[\w-]*)==[\w.]+\+(cpu|cu\d+|rocm[\d.]+)")
ROUNDS = 20  # each drops what the last reason involved: so many independent reasons are found


@dataclass(frozen=True, kw_only=True)
class ResolveOptions:
    """Options of a resolution."""

    resolver: ResolverName = "uv"
    offline: bool = False
    upgrade: bool = False
    upgrade_packages: tuple[str, ...] = ()  # also models and data sets, whose commits are not kept
    exclude_newer: str | None = None  # a date, or a time with its zone; ``none`` lifts it
    driver: FindDriver | None = None  # for ``torch-backend = "auto"``; None where nobody can
    note: Callable[[str], None] | None = None

    def requires_new_lock(self, cutoff: str | None) -> bool:
        """Return whether a lock with this cutoff is to be made again, whatever its spec."""
        if self.upgrade or self.upgrade_packages:
            return True
        return self.exclude_newer is not None and self.exclude_newer != (cutoff or NONE)


def resolve(request: ResolveRequest, resolver: ResolverName) -> list[ResolvedFile]:
    """Resolve requirements."""
    by_pip = resolver == "pip-tools"
    try:
        return pip_tools.solve(request) if by_pip else uv.solve(request)
    except NoSolution as failure:
        # As cheaply as possible, to find out whether there is a solution.
        raise _explain(failure, request, pip_tools.check if by_pip else uv.solve) from failure


def _explain(
    first: NoSolution, request: ResolveRequest, check: Callable[[ResolveRequest], object]
) -> ResolveError:
    failures = _all_failures(first, request, check)
    reasons = [failure.reason for failure in failures if not failure.absent]
    unavailable = {one.requirement: one for failure in failures for one in failure.absent}
    reasons += _describe_unavailable_packages(list(unavailable.values()), request)
    target = request.spec.target
    not_searched = dict.fromkeys(line for one in failures for line in one.not_searched)
    return ResolveError(
        f"the requirements have no solution for Python {target.python} on {target.platform}: "
        f"{format_count(len(reasons), 'problem')}",
        hint=_remedy(request, is_limited=bool(not_searched)),
        context=[*reasons, *not_searched],
    )


def _remedy(request: ResolveRequest, *, is_limited: bool) -> str:
    if request.pip.offline:
        return "only the offline root was searched; lock once without --offline"
    build = _BUILD_OF_TORCH.search("\n".join(request.requirements))
    if build and request.torch_backend != build[2]:
        return (
            f"{build[0].strip()} is on PyTorch's own index: set environment.torch-backend = "
            f'"{build[2]}", or name the index in a requirement file (--extra-index-url '
            f"{TORCH_INDEX}{build[2]})"
        )
    others = "check the names; change the versions asked for, or environment.python and platform"
    remedy = 'set environment.index-strategy = "unsafe-best-match" to search all indexes'
    return f"{remedy}; {others}" if is_limited else others


def _all_failures(
    first: NoSolution, request: ResolveRequest, check: Callable[[ResolveRequest], object]
) -> list[NoSolution]:
    failures = [first]
    for _ in range(ROUNDS):
        blamed = failures[-1].blamed
        rest = tuple(text for text in request.requirements if parse_name(text) not in blamed)
        if not rest or rest == request.requirements:
            break
        request = replace(request, requirements=rest)
        try:
            check(request)
            break
        except NoSolution as failure:
            failures.append(failure)
        except ResolveError:  # the index stopped answering; report what is known
            break
    return failures


def _describe_unavailable_packages(
    packages: list[UnavailablePackage], request: ResolveRequest
) -> list[str]:
    lines = []
    for package in packages:
        files = package.files or request.pip.list_existing_files(parse_name(package.requirement))
        known = package._replace(files=tuple(files))
        lines.append(describe_unavailable(known, request.spec.target))
    return lines


# --- Resolving and building packages whose builds import other packages of the environment -------


def _resolve_all(request: ResolveRequest, resolver: ResolverName) -> list[ResolvedFile]:
    """Resolve requirements, some of which may have to be built in the environment.

    The others are resolved and installed first: only then can the dependencies of these be learned.
    """
    named = request.spec.builds.in_environment
    if named and resolver == "pip-tools":
        raise ResolveError(
            "environment.no-build-isolation works with uv only", hint="leave --resolver out"
        )
    others = tuple(text for text in request.requirements if parse_name(text) not in named)
    if not others or len(others) == len(request.requirements):
        return resolve(request, resolver)
    with suppress(ResolveError):  # an sdist may state what it depends on
        return resolve(request, resolver)
    first = resolve(replace(request, requirements=others), resolver)
    wheels = [file for file in first if file.filename.endswith(".whl")]
    folder = install(map(_exact_line, wheels), request.pip, request.pip.scratch / "environment")
    pins = tuple("{}=={}".format(*file.identity) for file in first)
    together = (*request.constraints, *pins)
    return resolve(replace(request, constraints=together, packages=folder), resolver)


def install(lines: Iterable[str], pip: Pip, folder: Path) -> Path:
    """Install what requirement lines name into a folder, for builds to import; return it."""
    options = ["--no-deps", "--no-compile", "-q", "--target", str(folder)]
    done = pip.call("install", options, lines)
    if done.returncode != 0:
        raise ResolveError(
            "what environment.no-build-isolation builds against cannot be installed",
            context=[condense(done.stderr or done.stdout)],
        )
    return folder


def _exact_line(file: ResolvedFile) -> str:
    place = file.path.as_uri() if file.path else file.url
    digest = f" --hash=sha256:{file.sha256}" if file.sha256 and file.url else ""
    return f"{file.identity[0]} @ {place}{digest}"


# --- Digests and sizes of the files that a resolver chose, which an index page need not give -----

HEAD_SECONDS = 10.0
HEADS_AT_ONCE = 8
ANSWER_SECONDS = 3.0


def measure(resolved: Sequence[ResolvedFile], *, store: Store, pip: Pip) -> tuple[LockedFile, ...]:
    """Turn a resolver's answer into locked files, sorted by name."""
    digest_cache = DigestCache(store)
    files = [_from_disk(file, store, digest_cache) for file in resolved]
    urls = [file.url for file in files if file.url and file.size is None]
    with ThreadPoolExecutor(HEADS_AT_ONCE) as pool:
        sizes = dict(zip(urls, pool.map(_content_length, urls), strict=True))
    for number, file in enumerate(files):
        files[number] = replace(file, size=sizes.get(file.url or "", file.size))
        if file.url and None in (files[number].size, file.sha256):
            files[number] = _download(files[number], store, pip)
    digest_cache.save()
    return lock_files(files, source="the resolver's answer")


def _content_length(url: str) -> int | None:
    length = (_head(url, HEAD_SECONDS) or {}).get("Content-Length", "")
    return int(length) if length.isdigit() else None


def can_reach_index(url: str) -> bool:
    """Return whether a package index answers within three seconds; honours proxy variables."""
    return _head(url, ANSWER_SECONDS) is not None


def _head(url: str, seconds: float) -> Mapping[str, str] | None:
    import urllib.request  # here: a tenth of a second that most commands do not need

    if not url.startswith(("http://", "https://")):
        return None
    try:
        request = urllib.request.Request(url, method="HEAD")  # noqa: S310
        with urllib.request.urlopen(request, timeout=seconds) as response:  # noqa: S310
            return dict(response.headers.items())
    except (OSError, ValueError):  # URLError is an OSError
        return None


def _from_disk(file: ResolvedFile, store: Store, digest_cache: DigestCache) -> ResolvedFile:
    if file.path:
        try:
            size = file.path.stat().st_size
        except OSError as exc:
            raise ResolveError(f"cannot read {file.path}: {exc.strerror or exc}") from exc
        return replace(file, size=size, sha256=file.sha256 or digest_file(file.path))
    stored = store.wheels / file.filename
    is_same = file.sha256 is not None and digest_cache.digest(stored) == file.sha256
    return replace(file, size=stored.stat().st_size) if is_same else file


def _download(file: ResolvedFile, store: Store, pip: Pip) -> ResolvedFile:
    """Download a file into the store; without a known digest, the first download is trusted."""
    if not file.filename.endswith(".whl"):
        return file  # pip would build it to learn its metadata
    folder = pip.scratch / "measured"
    name, version = file.identity
    digest = f" --hash=sha256:{file.sha256}" if file.sha256 else ""
    for line in (f"{name} @ {file.url}{digest}", f"{name}=={version}{digest}"):
        if pip.download([line], folder).returncode == 0:
            break
    downloaded = folder / file.filename
    if not downloaded.is_file():
        return file
    with store.publish(store.wheels / file.filename) as partial:
        shutil.copyfile(downloaded, partial)
    size = downloaded.stat().st_size
    return replace(file, size=size, sha256=file.sha256 or digest_file(downloaded))


def _keep_pins(
    request: ResolveRequest, options: ResolveOptions, earlier: Lock | None
) -> ResolveRequest:
    cutoff = options.exclude_newer or (earlier.exclude_newer if earlier else None)
    request = replace(request, cutoff=None if cutoff == NONE else cutoff)
    if earlier is None or options.upgrade:
        return request
    upgraded = {canonicalize_name(name) for name in options.upgrade_packages}
    commits = tuple(pin for pin in earlier.git if canonicalize_name(pin.name) not in upgraded)
    return replace(request, pins=earlier.pins(upgraded), git=commits)


def make_lock(
    spec: Spec,
    *,
    path: Path,
    store: Store,
    options: ResolveOptions,
    reachable: Callable[[str], bool] = can_reach_index,
) -> Lock:
    """Resolve a spec and write the lock; ``reachable`` returns whether an index answers."""
    automatic = spec.torch_backend == resolver.AUTO
    spec = resolver.settle_torch_backend(spec, path, options.driver, options.note)
    spec, settings, earlier = _read_settings(spec, path, store)
    with store.scratch("lock") as scratch:
        pip = Pip(
            target=spec.target,
            indexes=_offline_indexes(spec, store) if options.offline else spec.indexes,
            scratch=scratch,
            offline=options.offline,
            builds=spec.builds,
        )
        builder = SourceBuilder(store, pip, spec.root)
        request = ResolveRequest(
            spec=spec,
            requirements=spec.own_requirements,
            constraints=spec.constraints,
            pip=pip,
            settings=settings,
            build=builder.build_package,
        )
        request = _keep_pins(request, options, earlier)
        wanted = (*request.requirements, *builder.build_all(spec.local_projects, request.git))
        request = replace(request, requirements=wanted)
        request, silent = _add_torch_index(request, reachable)
        resolved = _resolve(request, options, silent)
        if automatic:
            resolver.refuse_newer_cuda(resolved, spec.torch_backend)
        indexes = request.pip.indexes.merge(spec.all_indexes)
        files = measure(resolved, store=store, pip=replace(pip, indexes=indexes))
        resolver.refuse_other_files(files, spec, dict(builder.built))
    lock = Lock(
        path=path,
        target=spec.target,
        files=files,
        spec_digest=spec.digest,
        indexes=(spec.indexes if options.offline else indexes).strip_credentials(),
        sources=tuple((name, _relate(label, spec.root, path)) for name, label in builder.built),
        torch_backend=spec.torch_backend if automatic else None,
        git=tuple(builder.git),
        exclude_newer=request.cutoff,
    )
    if spec.pylock is None or spec.pylock.absolute() != path.absolute():
        publish(path, render(lock))
    return lock


def _read_settings(spec: Spec, path: Path, store: Store) -> tuple[Spec, PipSettings, Lock | None]:
    if spec.pylock is not None or spec.uv_lock is not None:
        return spec, PipSettings(Indexes(), {}), None
    settings, earlier = pip_settings(), find_earlier_lock(path, spec.target)
    if settings.require_hashes and not spec.require_hashes:
        spec = replace(spec, require_hashes="pip's configuration")
    if earlier is not None:
        take_built(earlier, store, spec.all_indexes.merge(settings.indexes))
    return spec, settings, earlier


def _add_torch_index(
    request: ResolveRequest, reachable: Callable[[str], bool]
) -> tuple[ResolveRequest, str | None]:
    """Add PyTorch's own index; return it instead if it does not answer."""
    backend = None if request.pip.offline else request.spec.torch_backend
    if not backend:
        return request, None
    index = TORCH_INDEX + backend
    if not reachable(f"{index}/"):  # local wheels may do without it
        return request, index
    indexes = request.pip.indexes.merge(Indexes(extra_index_urls=(index,)))
    pip = replace(request.pip, indexes=indexes)
    return replace(request, pip=pip, torch_backend=backend), None


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


def _resolve(
    request: ResolveRequest, options: ResolveOptions, silent: str | None
) -> list[ResolvedFile]:
    spec = request.spec
    try:
        if spec.pylock:
            files = _select(parse_lock(spec.pylock), spec.pylock, request, spec.pylock.parent)
        elif spec.uv_lock:
            exported = uv.export(spec.uv_lock, request)
            files = _select(exported, spec.uv_lock.file, request, request.pip.scratch)
        else:
            files = _resolve_all(request, options.resolver)
        if spec.torch_backend == "cpu":
            resolver.refuse_cuda(files)  # before several GB could be downloaded
        resolver.refuse_other_build(files, spec.torch_backend, silent)
    except ResolveError as exc:
        if silent is None:
            raise
        line = f"{silent}, which environment.torch-backend adds, did not answer and was left out"
        raise ResolveError(
            f"{exc.message}; PyTorch's own index did not answer",
            hint="pin a build that your indexes have, or run it where that index can be reached",
            context=(*exc.context, line),
        ) from exc
    return files


def _select(
    data: toml.Table, path: Path, request: ResolveRequest, base: Path
) -> list[ResolvedFile]:
    build = request.build if request.spec.uv_lock else None
    target = request.spec.target
    lock, empty = parse_pylock(data, str(path))
    files, unavailable = select(lock, target, base=base, source=str(path), build=build)
    unavailable += empty
    if unavailable:
        raise missing_file_error(path, target, _describe_unavailable_packages(unavailable, request))
    return files


def _relate(label: str, root: Path, lock: Path) -> str:
    if "://" in label or Path(label).is_absolute():
        return label
    return os.path.relpath(root / label, lock.parent.absolute())
