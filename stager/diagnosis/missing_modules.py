"""A module that a rank did not find: where the project has it, or the package to add."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from packaging.utils import canonicalize_name

from bundle.format.manifest import Manifest
from bundle.protocol.job import load
from bundle.protocol.problem import NodeError

from ..config import load as settings
from ..core.errors import StagerError
from .failure import FirstFailure

_NAME = re.compile(r"No module named '?([\w.]+)")
_ENTRY = "module-missing"
"""The catalogue's entry for such a failure."""
_PACKAGES = {
    **{"sklearn": "scikit-learn", "cv2": "opencv-python-headless", "PIL": "pillow"},
    **{"yaml": "pyyaml", "skimage": "scikit-image", "bs4": "beautifulsoup4"},
    **{"dotenv": "python-dotenv", "dateutil": "python-dateutil", "attr": "attrs"},
    **{"hydra": "hydra-core", "pkg_resources": "setuptools", "distutils": "setuptools"},
}
"""Packages that are not called like the module they are known for."""


def explained(first: FirstFailure, job_file: Path) -> FirstFailure:
    """Return a failure, with its reason and remedy if a module was missing.

    Args:
        first: the first failure of a job of stager's.
        job_file: the job's description, which names its bundle and its directory.
    """
    found = _NAME.search(first.cause)
    if first.entry != _ENTRY or found is None:
        return first
    from ..pack.bundle_file import layer_paths, opened

    try:
        job = load(str(job_file))
        with opened(Path(job.bundle), job.bundle_id) as bundle:
            paths = {path.partition("/")[2] for path in layer_paths(bundle, "project")}
            manifest = bundle.manifest
    except (NodeError, StagerError):  # it was removed, or replaced by a newer one
        return first
    root = _project_folder(Path(job.run_dir))
    reason = _elsewhere(found[1], paths) or _left_out(found[1], root)
    meaning, hint = reason or _without_package(found[1], manifest, root)
    return replace(first, meaning=meaning, hint=hint)


def _project_folder(run_dir: Path) -> Path:
    with suppress(StagerError):
        source = settings.find(run_dir)
        return source.parent if source is not None else run_dir
    return run_dir


def _elsewhere(module: str, paths: Collection[str]) -> tuple[str, str] | None:
    """Return meaning and hint where the project in the bundle has the module in another folder."""
    place = module.replace(".", "/")
    ends = (f"/{place}.py", f"/{place}/__init__.py")
    found = min((path for path in paths if path.endswith(ends)), key=len, default="")
    folder = found[: found.rfind(f"/{place}")]
    if not found or (folder == "src" and "src/__init__.py" not in paths):
        return None
    name = f"{folder.replace('/', '.')}.{module}"
    return (
        f"the project has {module} in {folder}, where Python does not look: it looks in the "
        "script's folder, the project's folder, and its src",
        f"import it as {name}; or move {found} to one of these folders; or add its folder to "
        "sys.path in the script",
    )


def _left_out(module: str, root: Path) -> tuple[str, str] | None:
    """Return meaning and hint where the project's folder has the module, and the bundle not."""
    place = module.replace(".", "/")
    for name in (f"{place}.py", f"{place}/", f"src/{place}.py", f"src/{place}/"):
        if (root / name).exists():
            return (
                f"{name} is in {root}, but not in the bundle",
                "project.exclude or a .gitignore leaves it out: to take it back, add "
                f'"!/{name}" to project.exclude',
            )
    return None


def _requirements(root: Path) -> str:
    """Return where the requirements of a project are to be named."""
    with suppress(StagerError):
        config = settings.load(root)
        named = config.environment.requirements
        files = [name for name in named if (config.root / name).is_file()]
        return next(iter(files), f"environment.requirements in {config.source.name}")
    return "environment.requirements"


def _without_package(module: str, manifest: Manifest, root: Path) -> tuple[str, str]:
    """Return meaning and hint where no file of the project is the module."""
    top = module.partition(".")[0]
    package = _PACKAGES.get(top, top)
    there = {layer.name: layer.version for layer in manifest.layers if layer.kind == "wheel"}
    version = there.get(canonicalize_name(package))
    where = _requirements(root)
    if version is not None:
        return (
            f"{package} is in the bundle in version {version}, which has no module {module}",
            f"name a version of {package} that has it in {where}, then `stager build`",
        )
    if top in sys.stdlib_module_names and top not in _PACKAGES:
        return (
            f"{top} is a part of Python's standard library that the nodes' Python lacks",
            'let the bundle bring a Python: environment.interpreter = "bundled"',
        )
    add = f"add {package} to {where}"
    if (root / "uv.lock").is_file():
        add = f"`uv add {package}`"
    named = "" if top in _PACKAGES else f" (if the package of {top} has another name, that one)"
    return (
        f"no package in the bundle has the module {top}, nor has the project",
        f"{add}{named}, then `stager build`",
    )
