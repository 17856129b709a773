"""What any program in an environment finds besides the packages: the user's code, and the trainer.

For ranks the run wrapper arranges ``sys.path``; any other program is told by ``PYTHONPATH``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def sources(project: str) -> list[str]:
    """Return the directory of a project's packages in a src layout; none for another layout."""
    folder = os.path.join(project, "src")
    is_layout = os.path.isdir(folder) and not os.path.exists(os.path.join(folder, "__init__.py"))
    return [folder] if is_layout else []


def trainer(variables: Mapping[str, str]) -> list[str]:
    """Return the directory of the bundle's ``trainer``, if it has one and no package is called so.

    ``PYTHONPATH`` comes before the packages, and nothing of the user's may be hidden.
    """
    packages = os.path.join(variables["STAGER_ENV"], "pkgs")
    hidden = any(os.path.lexists(os.path.join(packages, f"trainer{end}")) for end in ("", ".py"))
    place = variables["STAGER_TRAINER"]
    return [place] if os.path.isdir(place) and not hidden else []
