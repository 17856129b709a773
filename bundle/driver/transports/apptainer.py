"""Agents in a container that Apptainer, or Singularity, starts: pure functions, and a shell's part.

Slurm's pyxis plugin starts a container by itself. Where the image is a file of Apptainer's or a
directory, the first program on a node is a shell that looks for ``apptainer`` or ``singularity``
there, and starts the agent, and so the ranks, inside. The node root and what a job needs besides
is bound at the same place, so that paths mean the same on both sides.

What Apptainer does by itself (https://apptainer.org/docs/user/latest/bind_paths_and_mounts.html):
variables pass, except ``PATH`` and ``LD_LIBRARY_PATH``, which are the image's; the network and the
processes are the node's; signals are passed on, and the exit status is the program's, or 255 where
the container could not be started. A site may have switched off that ``/tmp`` or the home is bound.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from ...format.archive import layers_folder
from ...protocol.job import Job
from ...protocol.problem import ProblemCode
from .agent_program import REFUSE
from .transport import list_root_places

_PROGRAMS = "apptainer singularity"
ENTER = (
    "image=$1 quoted=$2 phase=$3 framed=$4 stays=$5 given=$6 count=$7; shift 7; node=; "
    + REFUSE
    + f"runtime=; for name in {_PROGRAMS}; do "
    'if [ -z "$runtime" ] && command -v "$name" >/dev/null 2>&1; then runtime=$name; fi; done; '
    f'[ -n "$runtime" ] || refuse {ProblemCode.NO_CONTAINER_PROGRAM} ""; '
    f'[ -r "$image" ] || refuse {ProblemCode.IMAGE_UNREADABLE} "\\"image\\": $quoted"; '
    'binds=; add() { case ",$binds," in *",$1,"*) return;; esac; '
    'case $1 in *[,:]*) ;; /?*) if [ -e "$1" ]; then binds=$binds,$1; fi;; esac; }; '
    'add "$STAGER_NODE_ROOT"; add "$SLURM_TMPDIR"; add "$TMPDIR"; '
    'while [ "$count" -gt 0 ]; do add "$1"; shift; count=$((count-1)); done; '
    "binds=${binds#,}${given:+,$given}; gpus=; "
    "if [ -e /dev/nvidiactl ]; then gpus=--nv; elif [ -e /dev/kfd ]; then gpus=--rocm; fi; "
    'set -- "$runtime" exec --pwd / ${gpus:+"$gpus"} --bind "${binds#,}" "$image" "$@"; '
    'if [ -n "$stays" ]; then "$@"; code=$?; '
    'if [ "$code" -eq 255 ]; then code=1; fi; exit "$code"; fi; '
    'exec "$@"'
)
"""The shell's part on a node. One line, as a csh on the way takes no more in quotes."""


def make_container_command(
    job: Job,
    phase: str,
    program: Sequence[str],
    *,
    framed: bool = True,
    stays: bool = False,
    folders: Sequence[str] = (),
) -> list[str]:
    """Return the command that runs a program in a job's container, on the node where it is started.

    Args:
        job: the job; its image is one of Apptainer's.
        phase: the agents' phase.
        program: the program and its arguments, as the container knows them.
        framed: True if agents answer in frames, False if in lines.
        stays: True if the shell waits for the end. An ``ssh`` ends with 255 for reasons of its own,
            so the container's program must not.
        folders: directories of the node that it needs besides those of the job.
    """
    settings = job.launch
    image = settings.container_image or ""
    bundle = (os.path.dirname(job.bundle), layers_folder(job.bundle))
    places = list_root_places(job, ("/tmp", "/dev/shm"))  # noqa: S108 - its usual places
    bound = [*places, job.run_dir, *bundle, *folders]
    return [
        *("/bin/sh", "-c", ENTER, "stager", image.rstrip("/"), json.dumps(image), phase),
        *("yes" if framed else "", "yes" if stays else "", ",".join(settings.container_mounts)),
        *(str(len(bound)), *bound, *program),
    ]
