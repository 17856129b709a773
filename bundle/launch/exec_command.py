"""A command that is run in an environment without a launcher: ``exec`` and ``mounted``."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..environment.damage import MANIFEST, pyvenv_cfg
from ..environment.listing import own_python
from ..format.manifest import Manifest, ManifestError, parse
from ..node import interpreter, removal
from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import files
from ..system.hostlist import expand_hostlist, parse_counts
from ..system.own_program import read_source
from .program_variables import JobDirectories, make_environment_variables, make_task_variables
from .wrapper import find_src_folder

# --- The trainer: for ranks the run wrapper arranges ``sys.path``, for others PYTHONPATH ---------


def find_trainer(variables: Mapping[str, str]) -> list[str]:
    """Return the directory of the bundle's ``trainer``, unless it would hide a package."""
    packages = os.path.join(variables["STAGER_ENV"], "pkgs")
    hidden = any(os.path.lexists(os.path.join(packages, f"trainer{end}")) for end in ("", ".py"))
    place = variables["STAGER_TRAINER"]
    return [place] if os.path.isdir(place) and not hidden else []


# --- The rank that a task of ``srun`` is: for ``exec``, which no launcher of ours has started ----

_FIRST_PORT, _PORTS = 20_000, 10_000  # below those that Linux gives away


def read_step_variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for one of several tasks of ``srun``; none if a rank is set."""
    world = slurm.get("SLURM_STEP_NUM_TASKS", "1")
    listed = slurm.get("SLURM_STEP_NODELIST", "")
    if "RANK" in slurm or "SLURM_STEP_ID" not in slurm or world == "1" or not listed:
        return {}
    per_node = parse_counts(slurm.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    here = per_node[int(slurm["SLURM_NODEID"])]
    job = int(slurm.get("SLURM_JOB_ID", "0")) + int(slurm["SLURM_STEP_ID"])
    address = slurm.get("MASTER_ADDR", expand_hostlist(listed)[0])
    port = slurm.get("MASTER_PORT", _FIRST_PORT + job % _PORTS)
    return make_task_variables(slurm, world, here, address, port)


# --- An environment that is mounted from an image: a view of it that can be used where it is -----

# Neither the place of an image nor the node's Python is known when it is made. So each use makes a
# directory of links into it, or takes the one that is there, for the Python of this node (PEP 405).

LOOKING = "STAGER_LOOKS_FOR_PYTHON"  # set while ``bin/python`` of an image does
_WRAPPER = "run_wrapper.py"
_OWN = ("bin", "pyvenv.cfg")  # what a view has of its own


def read_manifest(place: str) -> Manifest:
    """Return the manifest of a mounted environment."""
    path = os.path.join(place, MANIFEST)
    try:
        return parse(files.read_file(path))
    except (OSError, ManifestError) as exc:
        why = getattr(exc, "strerror", None) or str(exc)
        raise NodeError(Problem(ProblemCode.BUNDLE_UNREADABLE, path, {"why": why})) from exc


def find_python(place: str, manifest: Manifest) -> str:
    """Return the program that runs a mounted environment: the image's own, or this node's."""
    if manifest.requires.bundled_python:
        return own_python(place, manifest.requires.python)
    env = {**os.environ, LOOKING: "1"}
    return interpreter.find_base_python(manifest.requires.python, env=env)


def make_view(place: str, manifest: Manifest, root: str, python: str) -> JobDirectories:
    """Make a view of a mounted environment in ``jobs/``, or take the one that is there."""
    text = os.fsencode("\n".join([place, manifest.id, python]))
    name = f"image-{hashlib.sha256(text).hexdigest()[:16]}"
    final = os.path.join(root, "jobs", name)
    try:
        os.utime(final)  # in use, from now on: not idle
    except FileNotFoundError:
        partial = tempfile.mkdtemp(prefix=f".{name}.", dir=os.path.dirname(final))
        try:
            _fill(partial, place, manifest.requires.python, python)
            os.rename(partial, final)
        except OSError as exc:
            if exc.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            # Another process was faster, with the same content.
        finally:
            removal.delete_as_far_as_possible(partial)
    return JobDirectories(root=root, environment=final, job_dir="")


def _fill(folder: str, place: str, version: str, python: str) -> None:
    links = {name: os.path.join(place, name) for name in {*os.listdir(place)}.difference(_OWN)}
    links |= {"bin/python": python, "bin/python3": "python", f"bin/python{version}": "python"}
    os.mkdir(os.path.join(folder, "bin"))
    for name, target in links.items():
        os.symlink(target, os.path.join(folder, name))
    Path(folder, "pyvenv.cfg").write_bytes(pyvenv_cfg(python))
    Path(folder, _WRAPPER).write_bytes(read_source("launch.wrapper"))


def make_mounted_variables(
    directories: JobDirectories, place: str, base: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of a program in a mounted environment, which does as the run wrapper."""
    found = make_environment_variables(directories, base, base, as_rank=True)
    for name in ("STAGER_JOB_DIR", LOOKING):
        found.pop(name, None)
    own, _, rest = found["PATH"].partition(os.pathsep)
    project = os.path.join(place, "project")
    own_code = [project, *filter(None, [find_src_folder(project)]), *find_trainer(found)]
    return {
        **found,
        "STAGER_PATCHES": base.get("STAGER_PATCHES", "1"),
        "PATH": os.pathsep.join([own, os.path.join(place, "bin"), rest]),
        "PYTHONPATH": os.pathsep.join(own_code),
    }


def make_argv(directories: JobDirectories, command: Sequence[str]) -> list[str]:
    """Return the command to become: a script or a module of its own runs under the wrapper."""
    if command[0] == "-m" or command[0].endswith(".py"):
        python = os.path.join(directories.environment, "bin", "python")
        return [python, os.path.join(directories.environment, _WRAPPER), *command]
    return list(command)
