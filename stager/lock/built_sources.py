"""The wheels that are built for what a resolver takes from version control or from a folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote

from packaging.markers import Marker
from packaging.pylock import Package, PackageDirectory, PackageVcs
from packaging.utils import parse_wheel_filename

from ..core.errors import ResolveError, StagerError
from ..core.store import Store
from . import sources
from .git_pin import GitPin
from .indexes import Indexes, strip_credentials
from .located import SourceRequirement
from .pip import Pip
from .pylock import Lock
from .requirement_line import relative
from .resolver import ResolvedFile


def take_built(lock: Lock, store: Store, indexes: Indexes) -> None:
    """Take wheels that a lock has of commits from a mirror, in place of builds of their own.

    Behind an air gap there is the wheel, and no repository to clone.
    """
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
            with store.publishing(place) as partial:
                shutil.copyfile(found, partial)


@dataclass(kw_only=True)
class SourceBuilder:
    """Builds wheels of what a resolver took from elsewhere than an index."""

    store: Store
    """The offline root, which keeps each wheel under the digest of its source."""
    pip: Pip
    """Builds them."""
    root: Path
    """The project's folder; labels are relative to it."""
    built: list[tuple[str, str]] = field(default_factory=list)
    """File name and source of each wheel."""
    git: list[GitPin] = field(default_factory=list)
    """The commits that were built."""

    def build_all(
        self, named: Sequence[SourceRequirement], pins: Sequence[GitPin]
    ) -> tuple[str, ...]:
        """Build the sources that the user has named; return requirements that install the wheels.

        Raises:
            ResolveError: sources that cannot be built; the end of each build in the context.
        """
        lines, problems = [], []
        nodes = {key: str(value) for key, value in self.pip.target.environment().items()}
        for source in named:
            if source.marker and not Marker(source.marker).evaluate(nodes):
                continue
            try:
                chosen, pin = sources.pin_source(source, pins, self.pip)
                wheel = sources.build(chosen, self.store, self.pip)
            except StagerError as exc:
                problems += [f"{source.label}: {exc.message}"]
                problems += [f"  | {line}" for line in exc.context]
                continue
            name = parse_wheel_filename(wheel.name)[0]
            marker = f" ; {source.marker}" if source.marker else ""
            lines.append(f"{name}{source.suffix} @ file://{quote(str(wheel))}{marker}")
            self.built.append((wheel.name, chosen.label))
            self.git += [replace(pin, name=name)] if pin else []
        if problems:
            hint = "`pip wheel --no-deps` on each shows the full output"
            if self.pip.offline:
                hint += "; offline, their build backend has to be installed beside stager"
            raise ResolveError(
                "local projects and sources that cannot be built into wheels",
                hint=hint,
                context=problems,
            )
        return tuple(lines)

    def file(
        self, package: Package, selected: PackageVcs | PackageDirectory, base: Path
    ) -> ResolvedFile:
        """Return the wheel of a package.

        Raises:
            ResolveError: it cannot be built.
        """
        if isinstance(selected, PackageVcs):
            source = self._from_git(package, selected)
        else:
            source = self._from_folder(selected, base)
        try:
            wheel = sources.build(source, self.store, self.pip)
        except ResolveError as exc:
            raise ResolveError(
                f"{package.name}: {exc.message}",
                hint="`pip wheel --no-deps` on its source shows the full output",
                context=[source.label],
            ) from exc
        self.built.append((wheel.name, source.label))
        return ResolvedFile(filename=wheel.name, path=wheel)

    def _from_git(self, package: Package, selected: PackageVcs) -> SourceRequirement:
        if selected.type != "git" or not selected.url:
            raise ResolveError(
                f"{package.name} comes from {selected.type}, which is not supported",
                hint="name a wheel or an sdist of it instead",
            )
        pin = GitPin(
            name=package.name,
            url=strip_credentials(selected.url),
            revision=selected.requested_revision or "",
            commit=selected.commit_id,
            subdirectory=selected.subdirectory or "",
        )
        self.git.append(pin)
        return SourceRequirement(
            requirement=f"{pin.name} @ git+{selected.url}@{pin.commit}{pin.fragment}",
            label=pin.label,
            digest=pin.digest,
        )

    def _from_folder(self, selected: PackageDirectory, base: Path) -> SourceRequirement:
        folder = Path(os.path.normpath(base / selected.path / (selected.subdirectory or "")))
        return sources.describe_source(folder, relative(folder, self.root))
