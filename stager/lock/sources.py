"""Building local projects, sdists and version-controlled requirements into wheels.

Each is built once for every content it has: the wheel is kept in the offline root under the
digest of its source, and used again until the source changes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from packaging.utils import parse_wheel_filename

from ..core.deletion import remove
from ..core.errors import ResolveError, StagerError
from ..core.store import Store, sha256_of
from ..core.values import Digest, Target
from . import source_tree
from .located import SourceRequirement
from .pip import Pip, condense
from .source_builds import failed_build


def build_all(
    sources: Sequence[SourceRequirement], store: Store, pip: Pip
) -> list[tuple[SourceRequirement, Path]]:
    """Return the wheel of each source; build those that are missing.

    Raises:
        ResolveError: sources that cannot be built; one context line for each.
    """
    built: list[tuple[SourceRequirement, Path]] = []
    problems: list[str] = []
    for source in sources:
        try:
            built.append((source, build(source, store, pip)))
        except StagerError as exc:
            problems.append(f"{source.label}: {exc.message}")
    if problems:
        hint = "`pip wheel --no-deps` on each shows the full output"
        if pip.offline:
            hint += "; offline, their build backend has to be installed beside stager"
        raise ResolveError(
            "local projects and sources that cannot be built into wheels",
            hint=hint,
            context=problems,
        )
    return built


def build(source: SourceRequirement, store: Store, pip: Pip) -> Path:
    """Return the wheel of one source; build it unless the store has it.

    Raises:
        ResolveError: it cannot be built, or its wheel does not fit the target.
    """
    keep = store.built / source.digest
    if pip.offline or not source.moving:
        wheel = fitting(keep, pip.target)
        if wheel:
            return wheel
    folder = Path(source.requirement)
    if folder.is_absolute() and folder.is_dir():
        # A build writes into its source, and an old build/ ends up in the wheel: build a copy.
        work = pip.scratch / f"source-{source.digest[:12]}" / folder.name
        source_tree.copy(folder, source_tree.files(folder, run=pip.run), work)
        line = work.as_uri()
    elif folder.is_absolute():
        line = folder.as_uri()
    else:
        line = source.requirement
    return build_line(line, keep, store, pip)


def build_line(line: str, keep: Path, store: Store, pip: Pip, packages: Path | None = None) -> Path:
    """Build the source that a requirement line names; keep the wheel in a folder of the store.

    Args:
        line: the requirement.
        keep: the folder.
        store: the offline root.
        pip: builds it.
        packages: see :meth:`stager.lock.pip.Pip.build`.

    Raises:
        ResolveError: pip fails, or the wheel is for another Python or platform than the target.
    """
    out = pip.scratch / f"built-{keep.name[:12]}"
    remove(out)
    done = pip.build(line, out, packages)
    wheels = sorted(out.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        output = done.stderr or done.stdout
        raise ResolveError(
            f"pip cannot build a wheel: {condense(output)}", context=failed_build(output)
        )
    if not fits(wheels[0].name, pip.target):
        raise ResolveError(
            f"its wheel is {wheels[0].name}, which Python {pip.target.python} on "
            f"{pip.target.platform} does not accept; build it on such a machine"
        )
    store.make_folder(keep)
    final = keep / wheels[0].name
    with store.publishing(final) as partial:
        shutil.copyfile(wheels[0], partial)
    # A branch that has moved on leaves its last version's wheel behind.
    for old in keep.glob("*.whl"):
        if old != final and fits(old.name, pip.target):
            remove(old)
    return final


def fitting(folder: Path, target: Target) -> Path | None:
    """Return the first wheel in a folder that fits the target; None if none does."""
    for path in sorted(folder.glob("*.whl")):
        if fits(path.name, target):
            return path
    return None


def fits(wheel_name: str, target: Target) -> bool:
    """Return whether a wheel's tags are among the target's."""
    return not parse_wheel_filename(wheel_name)[3].isdisjoint(target.tags())


def requirement_for(source: SourceRequirement, wheel: Path) -> str:
    """Return the requirement that installs a source's wheel."""
    name = parse_wheel_filename(wheel.name)[0]
    marker = f" ; {source.marker}" if source.marker else ""
    return f"{name}{source.suffix} @ file://{quote(str(wheel))}{marker}"


def known_source(where: Path | str, label: str) -> SourceRequirement:
    """Return a source from its place alone, to build a wheel again that a lock names."""
    if isinstance(where, str):
        content, moving = Digest.of(where.encode()), True
    elif where.is_dir():
        content, moving = source_tree.digest(where, source_tree.files(where)), False
    elif where.is_file():
        content, moving = sha256_of(where), False
    else:
        raise ResolveError(f"no such file or folder: {where}")
    return SourceRequirement(
        requirement=str(where), label=label, suffix="", marker="", digest=content, moving=moving
    )
