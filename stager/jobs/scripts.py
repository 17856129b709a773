"""The check that a job can be started: its script or module is here, or in the bundle."""

from __future__ import annotations

import ast
import difflib
import posixpath
import re
import shutil
import sys
import zipfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from ..core import toml
from ..core.errors import ConfigError
from ..pack.bundle_file import layer_paths, opened

_MAX_SHOWN = 200
"""Characters of a name that are shown."""
_SUFFIXES = (".py", ".pyw", ".pyc", ".pyz")
_PROJECT = "project/"
"""The folder of the project in an environment."""
_PACKAGES = re.compile(r"lib/python3\.\d+t?/site-packages/")
_EXEC = "run starts Python scripts and modules; for other programs: stager exec --"


def refuse_absent(command: Sequence[str], bundle: Path) -> None:
    """Refuse what Python cannot start, before the bundle is sent to any node.

    Args:
        command: a script, or ``-m`` and a module, and its arguments. An absolute path that is not
            here is left to the nodes.
        bundle: the bundle, which is searched for what is not here.

    Raises:
        ConfigError: there is no such script or module, or the file is none.
        BundleError: the bundle cannot be read.
    """
    if command[0] == "-m":
        _refuse_absent_module(command[1], bundle)
    elif not _is_here(command[0]):
        _refuse_absent_script(command[0], bundle)
    elif not _is_python(Path(command[0])):
        raise ConfigError(
            f"{_shown(command[0])} is not a Python script", hint=f"{_EXEC} {command[0]}"
        )


def _refuse_absent_script(name: str, bundle: Path) -> None:
    if name.startswith("/") and name.endswith(_SUFFIXES):
        return
    path = posixpath.normpath(name)
    with opened(bundle) as held:
        staged = {file.removeprefix(_PROJECT) for file in layer_paths(held, "project")}
    is_named_so = path.endswith(_SUFFIXES) or not posixpath.splitext(path)[1]
    if name and (f"{path}/__main__.py" in staged or (path in staged and is_named_so)):
        return
    scripts = {file for file in staged if file.endswith(".py")} | _scripts_here()
    raise ConfigError(
        f"there is no script {_shown(name)}: neither here nor in the project in the bundle",
        hint=_hint(path, scripts),
    )


def _refuse_absent_module(name: str, bundle: Path) -> None:
    top, place = name.partition(".")[0], name.replace(".", "/")
    if top in sys.stdlib_module_names or top == "trainer":  # every bundle brings the latter
        return
    wanted = (f"{place}.py", f"{place}/__main__.py")
    with opened(bundle) as held:
        staged = set(layer_paths(held, "project"))
        if not staged and any(map(_is_here, wanted)):
            return
        folders = (_PROJECT, f"{_PROJECT}src/")
        if not staged.isdisjoint(folder + file for folder in folders for file in wanted):
            return
        if any(_PACKAGES.sub("", path, count=1) in wanted for path in layer_paths(held, "wheel")):
            return
    files = {path.removeprefix(_PROJECT).removeprefix("src/") for path in staged}
    modules = [file[:-3].replace("/", ".") for file in sorted(files) if file.endswith(".py")]
    similar = difflib.get_close_matches(name[:_MAX_SHOWN], modules, n=1)
    raise ConfigError(
        f"there is no module {_shown(name)} to start: neither in the project nor in the packages "
        "of the bundle",
        hint=f"did you mean {similar[0]}?"
        if similar
        else "check the name; a package that can be started has a __main__.py",
    )


def in_project(name: str, project: Path) -> str:
    """Return a script's path below the project's folder, which hosts have a copy of.

    Returns:
        The path from that folder where an absolute path, or one with ``..``, leads into it; else
        the name as it is.
    """
    if not (name.startswith("/") or ".." in Path(name).parts) or not _is_here(name):
        return name
    path, root = Path(name).parent.resolve() / Path(name).name, project.resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else name


def prefer_here(name: str, project: Path) -> str:
    """Return a name of a script that means the one in this directory, a folder of the project.

    Ranks look for it at the top of the project first, which may have another one of that name.
    """
    if not (_is_here(name) and _is_here(str(project / name))):
        return name
    place = in_project(str(Path(name).absolute()), project)
    return name if place.startswith("/") else place


def _shown(name: str) -> str:
    if name.isprintable() and " " not in name and 0 < len(name) <= _MAX_SHOWN:
        return name
    return repr(name[:_MAX_SHOWN])


def _hint(path: str, scripts: Collection[str]) -> str:
    module = _entry_point_here(path)
    if module:
        return f"it is an entry point of pyproject.toml; start its module: -m {module}"
    similar = difflib.get_close_matches(path[:_MAX_SHOWN], sorted(scripts), n=1)
    if similar:
        return f"did you mean {similar[0]}?"
    if path and shutil.which(path) is not None:
        return f"{_EXEC} {path}"
    if " " in path:
        return "a blank is part of it: leave out the quotes around it, or the backslash before it"
    return "check the name; project.exclude and .gitignore keep files out of the bundle"


def _entry_point_here(name: str) -> str:
    """Return the module of a program that the project here would install; empty for no such."""
    with suppress(ConfigError):
        scripts = toml.table(toml.read(Path("pyproject.toml")), "project", "scripts")
        return str(scripts.get(name, "")).partition(":")[0]
    return ""


def _is_here(name: str) -> bool:
    path = Path(name)
    try:
        return path.is_file() or (path / "__main__.py").is_file()
    except (OSError, ValueError):
        return False


def _is_python(path: Path) -> bool:
    if path.suffix in _SUFFIXES or path.is_dir():
        return True
    try:
        content = path.read_bytes()
        first = content[:_MAX_SHOWN].partition(b"\n")[0]
        if first.startswith(b"#!"):
            return b"python" in first or b"uv run" in first
        return zipfile.is_zipfile(path) or (not path.suffix and ast.parse(content) is not None)
    except (OSError, ValueError, SyntaxError):
        return False


def _scripts_here() -> set[str]:
    try:
        return {path.name for path in Path.cwd().glob("*.py")}
    except OSError:  # it was removed, or may not be read
        return set()
