"""An environment that is mounted from an image: a view of it that can be used where it is.

An image is read-only, and neither its place nor the node's Python is known when it is made. So each
use makes a directory of links under the node root, or takes the one that is there: everything in it
is a link into the image, except ``bin/python`` and ``pyvenv.cfg``, which are for the Python of this
node (PEP 405). As a virtual environment it is worth as much as an unpacked one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence

from ..environment.damage import MANIFEST, pyvenv_cfg
from ..environment.listing import own_python
from ..format.manifest import Manifest, ManifestError, parse
from ..node import interpreter, removal
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import files
from ..system.own_program import source_of
from . import import_path
from .directories import JobDirectories
from .variables import environment_variables

LOOKING = "STAGER_LOOKS_FOR_PYTHON"
"""The variable under which ``bin/python`` of an image does not start: it would look in its turn."""
_WRAPPER = "run_wrapper.py"
_OWN = ("bin", "pyvenv.cfg")
"""What a view has of its own."""


def manifest_of(place: str) -> Manifest:
    """Return the manifest of a mounted environment.

    Raises:
        NodeError: there is none, or it cannot be read.
    """
    path = os.path.join(place, MANIFEST)
    try:
        return parse(files.read_file(path))
    except (OSError, ManifestError) as exc:
        why = files.error_text(exc) if isinstance(exc, OSError) else str(exc)
        raise NodeError(Problem(ProblemCode.BUNDLE_UNREADABLE, path, {"why": why})) from exc


def python_for(place: str, manifest: Manifest) -> str:
    """Return the program that runs a mounted environment: the image's own, or this node's.

    Raises:
        NodeError: this node has none that fits.
    """
    version = manifest.requires.python
    if manifest.requires.bundled_python:
        return own_python(place, version)
    return interpreter.find(version, env={**os.environ, LOOKING: "1"})


def view(place: str, manifest: Manifest, root: str, python: str) -> JobDirectories:
    """Make a view of a mounted environment, or take the one that is there.

    It lies among the directories of jobs, where ``stager clean`` removes it once nobody uses it.

    Raises:
        OSError: it cannot be made.
    """
    text = "\n".join([place, manifest.id, python])
    name = f"image-{hashlib.sha256(os.fsencode(text)).hexdigest()[:16]}"
    final = os.path.join(root, "jobs", name)
    try:
        os.utime(final)  # in use, from now on: not idle
    except FileNotFoundError:
        partial = tempfile.mkdtemp(prefix=f".{name}.", dir=os.path.dirname(final))
        try:
            _fill(partial, place, manifest.requires.python, python)
            try:
                os.rename(partial, final)
            except OSError as exc:
                if exc.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                # Another process was faster, with the same content.
        finally:
            removal.sweep(partial)
    return JobDirectories(root=root, environment=final, job_dir="")


def _fill(folder: str, place: str, version: str, python: str) -> None:
    for name in os.listdir(place):
        if name not in _OWN:
            os.symlink(os.path.join(place, name), os.path.join(folder, name))
    os.mkdir(os.path.join(folder, "bin"))
    os.symlink(python, os.path.join(folder, "bin", "python"))
    for name in ("python3", f"python{version}"):
        os.symlink("python", os.path.join(folder, "bin", name))
    for name, data in (("pyvenv.cfg", pyvenv_cfg(python)), (_WRAPPER, source_of("launch.wrapper"))):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)


def variables(directories: JobDirectories, place: str, base: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a program in a mounted environment.

    What the run wrapper does for ranks is done by variables, as any program may be started: the
    project and the trainer are importable, and the patches are active. Nothing is recorded: there
    is no job.
    """
    found = environment_variables(directories, base, base, as_rank=True)
    for name in ("STAGER_JOB_DIR", LOOKING):
        found.pop(name, None)
    found["STAGER_PATCHES"] = base.get("STAGER_PATCHES", "1")
    own, _, rest = found["PATH"].partition(os.pathsep)
    found["PATH"] = os.pathsep.join([own, os.path.join(place, "bin"), rest])
    project = os.path.join(place, "project")
    own_code = [project, *import_path.sources(project), *import_path.trainer(found)]
    found["PYTHONPATH"] = os.pathsep.join(own_code)
    return found


def program(directories: JobDirectories, command: Sequence[str]) -> list[str]:
    """Return the command to become: a script or a module of its own runs under the wrapper.

    The wrapper looks for a script in the project first, as it does for ranks.
    """
    if command[0] == "-m" or command[0].endswith(".py"):
        python = os.path.join(directories.environment, "bin", "python")
        return [python, os.path.join(directories.environment, _WRAPPER), *command]
    return list(command)
