"""The program of a step's agents, and their first request.

The program, ``bundle`` without the driver, travels in variables of the step, which Slurm passes on
along a tree; else on standard input, which ``srun`` sends to each task, one by one.
"""

from __future__ import annotations

import binascii
import io
import itertools
import json
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...channel.agent_channel import PACKED
from ...environment.listing import HOOK_MODULES, HOOKS
from ...format.archive import layers_folder
from ...protocol.codec import encode
from ...protocol.job import Job
from ...protocol.messages import RelayStart, StepMessage
from ...protocol.problem import ProblemCode
from .transport import Requests, list_root_places

STRIPPED = "stripped/"  # holds the modules as they are sent, if it has been made
_NOT_SENT = ("bundle/driver/", "bundle/__main__.py")
_LAYOUT = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
MAIN = b"""import sys
from bundle.agent.agent import command
sys.exit(command(sys.argv[1:]))
"""  # the main module, for a request that names another Python than the bootstrap program's own
VARIABLE = "STAGER_PROGRAM_"  # the beginning of the names of the variables that carry a program
_LONGEST_VARIABLE = 100_000  # characters; Linux refuses 128 KiB (``MAX_ARG_STRLEN`` in execve(2))
_ROOM = 1 << 19  # bytes of a step's arguments and variables, besides those that are there
PYTHONS = ("python3", "python3.14", "python3.13", "python3.12", "python3.11", "python3.10")
REFUSE = (
    "node=${node:-${STAGER_NODE:-$SLURMD_NODENAME}}; "
    'refuse() { [ -z "$framed" ] || printf "\\036%s 0 0 - . " "$node:${SLURM_PROCID:-0}"; '
    'printf \'{"v": 1, "event": "%s", "node": "%s", "ok": false, "seconds": 0, "problems": [{\' '
    '"$phase" "$node"; '
    'printf \'"code": "%s", "where": "%s", "values": {%s}}]}\\n\' "$1" "$node" "$2"; '
    "cat >/dev/null; exit 3; }; "
)
"""A function of the shell that answers for an agent that cannot be started.

It reads its input to the end: ``srun`` ends a whole step if a node hangs up while it still sends to
it (``step_launch_notify_io_failure`` in Slurm).
"""
_START = (
    "node=$1 phase=$2 framed=$3 count=$4; shift 4; left=$count; "
    + REFUSE
    + 'while [ "$left" -gt 0 ]; do python=$1; shift; left=$((left-1)); '
    "if \"$python\" -I -S -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then "
    'shift "$left"; exec "$python" -I -S "$@"; fi; done; '
    f'refuse {ProblemCode.NO_PYTHON} "\\"count\\": \\"$count\\""'
)
"""The shell's part on a node. One line, as a csh on the way takes no more in quotes."""
_OMITTED = ("job", "node", "node_rank")  # of a request: common to all, or filled in by the agent


def make_start_command(
    hints: Sequence[str], phase: str, words: Sequence[str], *, node: str = "", framed: bool = True
) -> list[str]:
    """Return the command that runs a Python, hints first, with these words on a node."""
    pythons = list(dict.fromkeys([*hints, *PYTHONS]))
    settings = (node, phase, "yes" if framed else "", str(len(pythons)))
    return ["/bin/sh", "-c", _START, "stager", *settings, *pythons, *words]


def agent_modules(program: bytes) -> dict[str, bytes]:
    """Return the agents' modules by path; making them takes 1/3 s if the program lacks them."""
    with zipfile.ZipFile(io.BytesIO(program)) as archive:
        names = archive.namelist()
        ready = [name for name in names if name.startswith(STRIPPED)]
        sent = ready or filter(_is_sent, names)
        modules = {name.removeprefix(STRIPPED): archive.read(name) for name in sent}
    if ready:
        return modules
    # Environments hold the source of these, which must be the same whoever makes them.
    hooks = [f"bundle/environment/{hook}.py" for hook in (*HOOKS, *HOOK_MODULES)]
    return {name: data if name in hooks else blank_texts(data) for name, data in modules.items()}


def _is_sent(name: str) -> bool:
    is_module = name.startswith("bundle/") and name.endswith(".py")
    return is_module and not name.startswith(_NOT_SENT)


def blank_texts(source: bytes) -> bytes:
    """Return the source of a module without docstrings and comments; each line keeps its number."""
    lines = source.decode().split("\n")
    for (first, start), (last, end), replacement in sorted(_find_texts(source), reverse=True):
        line = lines[first - 1][:start] + replacement + lines[last - 1][end:]
        lines[first - 1 : last] = [line.rstrip(), *[""] * (last - first)]
    return "\n".join(lines).encode()


def _find_texts(source: bytes) -> Iterator[tuple[tuple[int, int], tuple[int, int], str]]:
    begins_statement, text = True, None
    for token in tokenize.generate_tokens(io.StringIO(source.decode()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start, token.end, ""
        elif token.type != tokenize.NL:
            if text is not None and token.type == tokenize.NEWLINE:
                yield text.start, text.end, '""'
            text = token if begins_statement and token.type == tokenize.STRING else None
            begins_statement = token.type in _LAYOUT


class AgentProgram:
    """The program of agents, compressed once; ``bootstrap`` is the source of what runs first."""

    def __init__(self, program: bytes) -> None:
        modules = agent_modules(program)
        self.bootstrap = modules["bundle/channel/bootstrap.py"].decode()
        self._packed = compress_modules({"__main__.py": MAIN, **modules})

    def variables(self) -> dict[str, str]:
        """Return the variables that carry the program."""
        text = binascii.b2a_base64(self._packed, newline=False).decode()
        starts = range(0, len(text), _LONGEST_VARIABLE)
        return {
            f"{VARIABLE}{number}": text[start : start + _LONGEST_VARIABLE]
            for number, start in enumerate(starts)
        }

    def make_step_input(
        self, message: StepMessage, *, carried: bool = False, variables: Mapping[str, str] = {}
    ) -> bytes:
        """Return the input of a step that has these requests first."""
        program = b"" if carried else self._packed
        packed = zlib.compress(json.dumps(encode(message)).encode(), 9)
        sent = zlib.compress(json.dumps(dict(variables)).encode()) if variables else b""
        head = b"%d %d %d\n" % (len(program), len(packed), len(sent))
        return head + program + packed + sent


def can_carry(environment: Mapping[str, str]) -> bool:
    """Return whether a command may get a program in its variables besides those that it has.

    Their total is limited by a quarter of the stack's limit, which Slurm applies on nodes, too.
    """
    held = sum(len(name) + len(value) for name, value in environment.items())
    return held + _ROOM < os.sysconf("SC_ARG_MAX")


def compress_modules(modules: Mapping[str, bytes]) -> bytes:
    """Return modules as the bootstrap program takes them: a line of names and sizes, then all."""
    head = json.dumps([[name, len(data)] for name, data in modules.items()]).encode()
    return zlib.compress(head + b"\n" + b"".join(modules.values()), 9)


def request_line(message: StepMessage) -> str:
    """Return a further request as a line: compressed where that is shorter."""
    return min(json.dumps(encode(message)), pack_message(message), key=len)


def pack_message(message: StepMessage | RelayStart) -> str:
    """Return a message to agents, compressed, as a line or a part of one."""
    text = json.dumps(encode(message)).encode()
    return PACKED + binascii.b2a_base64(zlib.compress(text, 9), newline=False).decode()


def factor_requests(requests: Requests, known: Job | None = None) -> StepMessage:
    """Return many requests as one, common fields once; without the job if the agents know it."""
    first = next(iter(requests.values()))
    common, own = _split_common([encode(request, _OMITTED) for request in requests.values()])
    if first.job != known:
        common["job"] = first.job.to_json()
    differing = {node: items for node, items in zip(requests, own) if items}
    return StepMessage(phase=first.phase, common=common, own=differing)


_ABSENT = object()


def _split_common(
    values: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, object], list[dict[str, object]]]:
    """Split JSON objects into what all have, and what each has besides; objects may be in both."""
    common: dict[str, object] = {}
    own: list[dict[str, object]] = [{} for _ in values]
    for key in dict.fromkeys(itertools.chain.from_iterable(values)):
        items = [value.get(key, _ABSENT) for value in values]
        if items.count(items[0]) == len(items):
            common[key] = items[0]
            continue
        absent: object = _ABSENT
        if all(isinstance(item, dict) for item in items):
            common[key], items = _split_common(items)
            absent = {}
        for mine, item in zip(own, items):
            if item != absent:
                mine[key] = item
    return common, own


# A container that Apptainer, or Singularity, starts, and inside the agent and the ranks. What a job
# needs is bound at the same place, as a site may not bind ``/tmp`` or the home
# (https://apptainer.org/docs/user/latest/bind_paths_and_mounts.html). Variables pass, except
# ``PATH`` and ``LD_LIBRARY_PATH``; the exit status is the program's, or 255 where none was started.

ENTER = (
    "image=$1 quoted=$2 phase=$3 framed=$4 stays=$5 given=$6 count=$7; shift 7; node=; "
    + REFUSE
    + "runtime=; for name in apptainer singularity; do "
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

    ``stays`` if the shell waits for the end, as an ``ssh`` ends with 255 for reasons of its own.
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
