"""Building local projects, sdists and version-controlled requirements into wheels.

Each is built once for every content it has: the wheel is kept in the offline root under the
digest of its source, and used again until the source changes.
"""

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
    url, revision, subdirectory = _split_git_url(source.requirement)
    pin = GitPin(
        name="",
        url=strip_credentials(url),
        revision=revision,
        commit=revision,
        subdirectory=subdirectory,
    )
    commit = _find_commit(url, pin, pins, pip) if url else ""
    if not commit:
        return source, None
    pin = replace(pin, commit=commit)
    name, at, _ = source.requirement.partition(" @ ")
    requirement = f"{name + at if at else ''}git+{url}@{commit}{pin.fragment}"
    chosen = replace(
        source, requirement=requirement, label=pin.label, digest=pin.digest, moving=False
    )
    return chosen, pin


def _find_commit(url: str, pin: GitPin, pins: Sequence[GitPin], pip: Pip) -> str:
    """Return a revision's commit, the pinned one if any; empty offline, or if git lists none."""
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


def _split_git_url(requirement: str) -> tuple[str, str, str]:
    """Return repository, revision and folder of a source from git; empty texts for another."""
    place = requirement.rpartition(" @ ")[2]
    if not place.startswith("git+"):
        return "", "", ""
    place, _, fragment = place.removeprefix("git+").partition("#")
    scheme, _, rest = place.partition("://")
    path, at, revision = rest.rpartition("@")
    if not at or "/" not in path:  # the name of a user, and no revision
        path, revision = rest, ""
    folders = [part for part in fragment.split("&") if part.startswith("subdirectory=")]
    folder = folders[0].partition("=")[2] if folders else ""
    return f"{scheme}://{path}", revision, folder


def build(source: SourceRequirement, store: Store, pip: Pip) -> Path:
    """Return the wheel of one source; build it unless the store has it."""
    keep = store.built / source.digest
    if pip.offline or not source.moving:
        wheel = find_fitting_wheel(keep, pip.target)
        if wheel:
            return wheel
    folder = Path(source.requirement)
    if folder.is_absolute() and folder.is_dir():
        # A build writes into its source, and an old build/ ends up in the wheel: build a copy.
        work = pip.scratch / f"source-{source.digest[:12]}"
        line = build_source.copy_to_build(folder, work).as_uri()
    elif folder.is_absolute():
        line = folder.as_uri()
    else:
        line = source.requirement
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
        self.built: list[tuple[str, str]] = []
        """File names of wheels, and their sources' labels."""
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
            raise ResolveError(
                f"{package.name}: {exc.message}",
                hint="`pip wheel --no-deps` on its source shows the full output",
                context=[source.label],
            ) from exc
        self.built.append((wheel.name, source.label))
        return ResolvedFile(filename=wheel.name, path=wheel)
