"""A software bill of materials in a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core.files import SBOM_SUFFIX, output_file
from ..pack.members import refuse_in_project
from .inventory import Inventory
from .sbom import sbom


@dataclass(frozen=True, kw_only=True)
class SbomResult:
    """The result of ``stager inspect --sbom -o FILE``."""

    file: Path
    """The file."""
    bundle: Path
    """The bundle."""
    id: str
    """Its id."""
    packages: int
    """Number of packages in the environment."""
    assets: int
    """Number of models, data sets and other files or folders of data."""
    unknown_sources: tuple[str, ...]
    """Packages of which no lock at hand says where they came from."""


def unknown_sources(inventory: Inventory) -> tuple[str, ...]:
    """Return the packages of which no lock at hand says where they came from."""
    return tuple(package.name for package in inventory.packages if not package.provenance.kind)


def write_sbom(inventory: Inventory, output: Path, project: Path | None) -> SbomResult:
    """Write the document to a file, in place of one that is there.

    Raises:
        ConfigError: the file would become part of the project's next bundle.
        StagerError: it cannot be written, or the library is not installed.
    """
    refuse_in_project(output, project, SBOM_SUFFIX)
    text = sbom(inventory)
    with output_file(output) as handle:
        handle.write(text.encode())
    return SbomResult(
        file=output,
        bundle=inventory.bundle,
        id=inventory.manifest.id,
        packages=len(inventory.packages),
        assets=len(inventory.assets),
        unknown_sources=unknown_sources(inventory),
    )
