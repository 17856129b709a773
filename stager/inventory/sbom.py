"""The software bill of materials of a bundle, where the library that writes it is installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..core.errors import StagerError
from ..core.files import SBOM_SUFFIX, write_output
from ..pack.members import refuse_in_project
from .inventory import Inventory

_INSTALL = "uv tool install --reinstall '.[sbom]'"


def sbom(inventory: Inventory) -> str:
    """Return the inventory as JSON of CycloneDX 1.6; for the same bundle and locks the same text.

    The library comes with the extra ``stager[sbom]`` and is imported when it is needed.
    """
    try:
        from .cyclonedx_document import document
    except ImportError as exc:
        raise StagerError(
            "inspect --sbom needs cyclonedx-python-lib, which is not installed here as needed",
            hint=f"in the clone of stager: {_INSTALL}; or in its virtual environment: "
            "pip install 'cyclonedx-python-lib>=11.7,<12'",
            context=[str(exc)],
        ) from exc
    return document(inventory)


@dataclass(frozen=True, kw_only=True)
class SbomResult:
    """The result of ``stager inspect --sbom -o FILE``."""

    file: Path
    bundle: Path
    id: str
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
    """Write the document to a file, in place of one that is there."""
    refuse_in_project(output, project, SBOM_SUFFIX)
    text = sbom(inventory)
    with write_output(output) as handle:
        handle.write(text.encode())
    return SbomResult(
        file=output,
        bundle=inventory.bundle,
        id=inventory.manifest.id,
        packages=len(inventory.packages),
        assets=len(inventory.assets),
        unknown_sources=unknown_sources(inventory),
    )
