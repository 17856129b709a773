"""Building sources into wheels, each kept in the offline root under its source's digest."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from packaging.markers import Marker
from packaging.pylock import Package, PackageDirectory, PackageVcs
from packaging.utils import parse_wheel_filename

from ..core.errors import ResolveError, StagerError
from ..core.store import Store, remove
from ..core.values import Digest, Target
from . import build_source
from .build_source import SourceRequirement, extract_build_output
from .indexes import GitPin, Indexes, make_git_pin, shorten_path, strip_credentials
from .pip import Pip, ResolvedFile, condense
from .pylock import Lock

_COMMIT = re.compile(r"[0-9a-f]{40}")


def pin_source(
    source: SourceRequirement, pins: Sequence[GitPin], pip: Pip
) -> tuple[SourceRequirement, GitPin | None]:
    """Return a source from git at a commit, and its pin; another source as it is, with None."""
    name, at, place = source.requirement.rpartition(" @ ")
    if not place.startswith("git+"):
        return source, None
    url, pin = _split_git_url(place.removeprefix("git+"))
    pin = replace(pin, commit=_find_commit(url, pin, pins, pip))
    if not pin.commit:
        return source, None
    line = f"{name}{at}git+{url}@{pin.commit}{pin.fragment}"
    return replace(source, requirement=line, label=pin.label, digest=pin.digest, moving=False), pin


def _find_commit(url: str, pin: GitPin, pins: Sequence[GitPin], pip: Pip) -> str:
    # Empty offline, or if git lists none.
    if _COMMIT.fullmatch(pin.revision):
        return pin.revision
    for earlier in pins:
        if replace(earlier, name="", commit="") == replace(pin, commit=""):
            return earlier.commit
    if pip.offline:
        return ""
    name, env = pin.revision or "HEAD", {"GIT_TERMINAL_PROMPT": "0"}
    argv = ["git", "ls-remote", "--", url, name]
    listing = pip.run(argv, timeout=600, env=env, check=False).stdout
    known = {ref: commit for commit, _, ref in (row.partition("\t") for row in listing.split("\n"))}
    refs = (f"refs/heads/{name}", f"refs/tags/{name}^{{}}", f"refs/tags/{name}", name)
    return next((known[ref] for ref in refs if ref in known), "")


def _split_git_url(place: str) -> tuple[str, GitPin]:
    place, _, fragment = place.partition("#")
    scheme, _, rest = place.partition("://")
    path, at, revision = rest.rpartition("@")
    if not at or "/" not in path:  # the name of a user, and no revision
        path, revision = rest, ""
    url = f"{scheme}://{path}"
    bare = strip_credentials(url)
    folder = dict(part.partition("=")[::2] for part in fragment.split("&")).get("subdirectory", "")
    pin = GitPin(name="", url=bare, revision=revision, commit=revision, subdirectory=folder)
    return url, pin


def build(source: SourceRequirement, store: Store, pip: Pip) -> Path:
    """Return the wheel of one source; build it unless the store has it."""
    keep = store.built / source.digest
    if pip.offline or not source.moving:
        wheel = find_fitting_wheel(keep, pip.target)
        if wheel:
            return wheel
    place = Path(source.requirement)
    if place.is_absolute() and place.is_dir():
        # A build writes into its source, and an old build/ ends up in the wheel: build a copy.
        place = build_source.copy_to_build(place, pip.scratch / f"source-{source.digest[:12]}")
    line = place.as_uri() if place.is_absolute() else source.requirement
    return build_line(line, keep, store, pip)


def build_line(line: str, keep: Path, store: Store, pip: Pip, packages: Path | None = None) -> Path:
    """Build the source that a requirement line names; keep the wheel in a folder of the store."""
    out = pip.scratch / f"built-{keep.name[:12]}"
    remove(out)
    done = pip.build(line, out, packages)
    wheels = sorted(out.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        output = done.stderr or done.stdout
        context = extract_build_output(output) if "[end of output]" in output else ()
        raise ResolveError(f"pip cannot build a wheel: {condense(output)}", context=context)
    if not fits(wheels[0].name, pip.target):
        raise ResolveError(
            f"its wheel is {wheels[0].name}, which Python {pip.target.python} on "
            f"{pip.target.platform} does not accept; build it on such a machine"
        )
    store.make_folder(keep)
    final = keep / wheels[0].name
    with store.publish(final) as partial:
        shutil.copyfile(wheels[0], partial)
    # A branch that has moved on leaves its last version's wheel behind.
    for old in keep.glob("*.whl"):
        if old != final and fits(old.name, pip.target):
            remove(old)
    return final


def find_fitting_wheel(folder: Path, target: Target) -> Path | None:
    """Return the first wheel in a folder that fits the target; None if none does."""
    return next((path for path in sorted(folder.glob("*.whl")) if fits(path.name, target)), None)


def fits(wheel_name: str, target: Target) -> bool:
    """Return whether a wheel's tags are among the target's."""
    return not parse_wheel_filename(wheel_name)[3].isdisjoint(target.tags())


def describe_source(where: Path | str, label: str) -> SourceRequirement:
    """Return a source from its place alone, to build a wheel again that a lock names."""
    if isinstance(where, Path) and not where.exists():
        raise ResolveError(f"no such file or folder: {where}")
    moving = isinstance(where, str)
    content = Digest.of(str(where).encode()) if moving else build_source.digest_content(Path(where))
    return SourceRequirement(requirement=str(where), label=label, digest=content, moving=moving)


# --- The wheels that are built for what a resolver takes from version control or from a folder


def take_built(lock: Lock, store: Store, indexes: Indexes) -> None:
    """Take wheels of git sources from a mirror: behind an air gap is no repository to clone."""
    wheels = {label: name for name, label in lock.sources}
    digests = {file.filename: file.sha256 for file in lock.files}
    for pin in lock.git:
        name = wheels.get(pin.label, "")
        place = store.built / pin.digest / name
        if name not in digests or place.exists():
            continue
        found = indexes.find_wheel(name, digests[name])
        if found is not None:
            store.make_folder(place.parent)
            with store.publish(place) as partial:
                shutil.copyfile(found, partial)


class SourceBuilder:
    """Builds wheels of what a resolver took from elsewhere than an index."""

    def __init__(self, store: Store, pip: Pip, root: Path) -> None:
        self.store, self.pip, self.root = store, pip, root
        self.built: list[tuple[str, str]] = []  # file names of wheels, and their sources' labels
        self.git: list[GitPin] = []

    def build_all(
        self, named: Sequence[SourceRequirement], pins: Sequence[GitPin]
    ) -> tuple[str, ...]:
        """Build the sources that the user has named; return requirements of the wheels."""
        lines, problems = [], []
        nodes = {key: str(value) for key, value in self.pip.target.environment().items()}
        for source in named:
            if source.marker and not Marker(source.marker).evaluate(nodes):
                continue
            try:
                chosen, pin = pin_source(source, pins, self.pip)
                wheel = build(chosen, self.store, self.pip)
            except StagerError as exc:
                problems += [f"{source.label}: {exc.message}"]
                problems += map("  | {}".format, exc.context)
                continue
            name = parse_wheel_filename(wheel.name)[0]
            marker = f" ; {source.marker}" if source.marker else ""
            lines.append(f"{name}{source.suffix} @ file://{quote(str(wheel))}{marker}")
            self.built.append((wheel.name, chosen.label))
            self.git += [replace(pin, name=name)] if pin else []
        if problems:
            raise ResolveError(
                "local projects and sources that cannot be built into wheels",
                hint="`pip wheel --no-deps` on each shows the full output; offline, their build "
                "backend has to be installed beside stager",
                context=problems,
            )
        return tuple(lines)

    def build_package(
        self, package: Package, selected: PackageVcs | PackageDirectory, base: Path
    ) -> ResolvedFile:
        """Return the wheel of a package."""
        if isinstance(selected, PackageVcs):
            if selected.type != "git" or not selected.url:
                raise ResolveError(
                    f"{package.name} comes from {selected.type}, which is not supported",
                    hint="name a wheel or an sdist of it instead",
                )
            pin = make_git_pin(package.name, selected)
            self.git.append(pin)
            requirement = f"{pin.name} @ git+{selected.url}@{pin.commit}{pin.fragment}"
            source = SourceRequirement(requirement=requirement, label=pin.label, digest=pin.digest)
        else:
            folder = Path(os.path.normpath(base / selected.path / (selected.subdirectory or "")))
            source = describe_source(folder, shorten_path(folder, self.root))
        try:
            wheel = build(source, self.store, self.pip)
        except ResolveError as exc:
            hint = "`pip wheel --no-deps` on its source shows the full output"
            message = f"{package.name}: {exc.message}"
            raise ResolveError(message, hint=hint, context=[source.label]) from exc
        self.built.append((wheel.name, source.label))
        return ResolvedFile(filename=wheel.name, path=wheel)
