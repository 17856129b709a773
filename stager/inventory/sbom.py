"""The software bill of materials of a bundle, where the library that writes it is installed."""

from __future__ import annotations

from ..core.errors import StagerError
from .inventory import Inventory

"""The ending that CycloneDX recommends for names of its files; no project ships such a file."""
_INSTALL = "uv tool install --reinstall '.[sbom]'"


def sbom(inventory: Inventory) -> str:
    """Return the inventory as JSON of CycloneDX 1.6; for the same bundle and locks the same text.

    The library comes with the extra ``stager[sbom]`` and is imported when it is needed.

    Raises:
        StagerError: it is not installed, or is of another major version.
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
