"""The place of a node root on a node: the directory that it is made in, and its name there."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Mapping
from string import Template

from ..protocol.problem import NodeError, Problem, ProblemCode
from ..system import files

ROOT_VARIABLE = "STAGER_NODE_ROOT"
"""The variable of a node that wins over the setting ``cluster.node-root``."""
AUTO, AUTO_WITH_MEMORY = "auto", "auto-memory"
"""The settings with which each node's directory is chosen; the second one allows memory."""
MEMORY = "/dev/shm/"  # noqa: S108 - only compared


def base_for(setting: str, bundle_id: str, room: tuple[int, int], env: Mapping[str, str]) -> str:
    """Return the directory for the node root: one that has an environment, or room for it.

    Raises:
        NodeError: no directory fits.
    """
    base = choose_base(setting, env)
    if os.path.isdir(env_path(os.path.join(base, node_root_name()), bundle_id)):
        return base
    return choose_base(setting, env, room)


def env_path(root: str, bundle_id: str) -> str:
    """Return the path of a bundle's environment under a node root."""
    return os.path.join(root, "envs", bundle_id)


def node_root_name(user: int | None = None) -> str:
    """Return the name of a user's node root in its base directory; by default of this user's."""
    return f"stager-{os.geteuid() if user is None else user}"


def choose_base(setting: str, env: Mapping[str, str], room: tuple[int, int] = (0, 0)) -> str:
    """Return the directory under which the node root is to be made.

    ``$STAGER_NODE_ROOT`` wins over the setting. ``auto`` takes the first of ``$SLURM_TMPDIR``,
    ``$TMPDIR`` and ``/tmp`` that is local, writable, executable and has room; ``auto-memory`` takes
    ``/dev/shm`` as well, whose files take the node's memory. A directory that was named must meet
    the same conditions, but may be shared: the user chose it.

    Args:
        setting: ``auto``, ``auto-memory``, or an absolute path in which ``$NAME`` stands for the
            node's variable.
        env: the node's variables.
        room: bytes and inodes of new files; by default nothing is to be written.

    Raises:
        NodeError: no directory fits; every candidate is listed with all that is wrong with it.
    """
    asked = env.get(ROOT_VARIABLE) or setting
    named = asked not in (AUTO, AUTO_WITH_MEMORY)
    candidates = named_bases(setting, env) if named else automatic_bases(env)
    refused, code = [], ProblemCode.NO_PLACE
    for source, path in candidates:
        reasons, room_reasons = _faults(path, room, shared_ok=named)
        if asked == AUTO and os.path.join(os.path.realpath(path), "").startswith(MEMORY):
            reasons.append(f'it takes memory, which node-root = "{AUTO_WITH_MEMORY}" allows')
        if not reasons and not room_reasons:
            return path
        if room_reasons:
            code = ProblemCode.NO_PLACE_WITH_ROOM
        refused.append(f"{source}{path}: {', '.join([*reasons, *room_reasons])}")
    raise NodeError(Problem(code, os.uname().nodename, {"why": "; ".join(refused)}))


def automatic_bases(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the candidates in order, with the source of each; each directory once."""
    seen = set()
    for source, path in (
        ("$SLURM_TMPDIR = ", env.get("SLURM_TMPDIR", "")),
        ("$TMPDIR = ", env.get("TMPDIR", "")),
        ("", "/tmp"),  # noqa: S108 - examined, and guarded
        ("", "/dev/shm"),  # noqa: S108 - the same
    ):
        real = os.path.realpath(path)
        if path and real not in seen:
            seen.add(real)
            yield source, path


def named_bases(setting: str, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the one candidate that the user named, with the node's variables filled in."""
    named = env.get(ROOT_VARIABLE)
    if named:
        yield f"${ROOT_VARIABLE} = ", named
        return
    path = _substituted(setting, env)
    source = "" if path == setting else f"{setting} = "
    yield source, path


def _substituted(setting: str, env: Mapping[str, str]) -> str:
    try:
        return Template(setting).substitute(env)
    except KeyError as exc:
        values = {"name": str(exc.args[0])}
        raise NodeError(Problem(ProblemCode.UNSET_VARIABLE, setting, values)) from exc
    except ValueError:  # a dollar sign that starts no name stands for itself
        return setting


def _faults(path: str, room: tuple[int, int], *, shared_ok: bool) -> tuple[list[str], list[str]]:
    if not path.startswith("/"):
        return ["it is not an absolute path"], []
    if not os.path.exists(path):
        return [f"it does not exist (`mkdir -p {shlex.quote(path)}` makes it)"], []
    if not os.path.isdir(path):
        return ["it is not a directory"], []
    try:
        facts = files.facts_of(path)
    except NodeError as exc:
        return [exc.problem.values["why"]], []
    reasons = files.use_refusals(facts)
    if facts.shared and not shared_ok:
        reasons.insert(0, f"it is on a shared file system ({facts.fstype})")
    if not facts.read_only and not _is_writable(path):
        reasons.append("this user may not write to it")
    elif not shared_ok:
        reasons += planted(os.path.join(path, node_root_name()))
    return reasons, files.room_refusals(facts, *room)


def planted(node_root: str) -> list[str]:
    """Return why a node root is not ours: in a public directory anybody can take its place.

    Only the choice hangs on this: what is used is checked again when it is opened.
    """
    try:
        status = os.lstat(node_root)
    except OSError:
        return []
    if not stat.S_ISDIR(status.st_mode):
        return [f"{os.path.basename(node_root)} there is no directory"]
    if status.st_uid != os.geteuid():
        return [f"{os.path.basename(node_root)} there belongs to user {status.st_uid}"]
    return []


def _is_writable(base: str) -> bool:
    """Tell whether this user may write to the node root there, or make it."""
    node_root = os.path.join(base, node_root_name())
    target = node_root if os.path.isdir(node_root) else base
    return os.access(target, os.W_OK | os.X_OK)
