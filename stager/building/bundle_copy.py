"""A copy of the bundle at a place of the user's, which has all of it or nothing."""

from __future__ import annotations

import os
from pathlib import Path

from ..config.load import Config
from ..core.errors import ConfigError
from ..core.files import ANOTHER_OUTPUT, BUNDLE_SUFFIX, output_file
from ..pack.existing import opened
from ..pack.members import write_members


def project_folder(config: Config) -> Path | None:
    """Return the project's folder; None where there are no settings of a project."""
    return config.project.path if config.source.is_file() else None


def refuse_in_project(output: Path, project: Path | None, suffix: str = BUNDLE_SUFFIX) -> None:
    """Refuse a place where a bundle's copy would become part of the project's next bundle.

    Raises:
        ConfigError: it is such a place.
    """
    if project is None or output.name.endswith(suffix):
        return
    place = Path(os.path.realpath(output.parent))  # `..` leads out, and links lead anywhere
    if place.is_relative_to(os.path.realpath(project)):
        raise ConfigError(
            f"--output {output} is in the project, and would be a part of its next bundle",
            hint=f"let its name end in {suffix}, which no project ships, or name another folder",
        )


def copy_to(bundle: Path, output: Path) -> Path:
    """Write all of a bundle to a file, in place of one that is there; return the file's path.

    Raises:
        BundleError: the bundle is damaged.
        StagerError: it cannot be written; what was there before still is.
    """
    output = output.absolute()
    hint = f"{ANOTHER_OUTPUT}; the bundle itself is {bundle}"
    with output_file(output, hint=hint) as target, opened(bundle) as source:
        write_members(source, target)
    return output
