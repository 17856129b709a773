"""The commands of ``node.pyz``. Each is one call; talk goes to standard error.

node.pyz drive JOB.json          take a job through its phases (inside the allocation)
node.pyz agent PHASE             one node's part; requests come on standard input
node.pyz unpack BUNDLE ROOT      make the environment under a directory, print its path
node.pyz probe BUNDLE ROOT       unpack if needed, import what must import, print facts as JSON
node.pyz exec BUNDLE ROOT -- COMMAND...    run a command in the environment
node.pyz mounted PLACE -- COMMAND...       run a command in an environment that an image holds
node.pyz clean-node [BASE...]     remove what was not used for some days (an epilog of Slurm's)
node.pyz fanout [--attached] SCRIPT HOST...    run a shell script on hosts, over ssh
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .protocol.enumerations import EXIT_INTERRUPTED, Allocation, PhaseName
from .protocol.problem import NodeError

if TYPE_CHECKING:
    from .environment import unpack
    from .launch.program_variables import JobDirectories

# Each command imports what it needs when it is known: an agent is started for every node.

_PROBED = ("python", "prefix", "packages", "origins", "origin_ok", "problems")  # of its answer


def main(argv: Sequence[str]) -> int:
    """Run one command; return its exit status."""
    if sys.getfilesystemencoding() != "utf-8":
        # Names in a bundle are UTF-8, also where the locale has another encoding (PEP 540).
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-X", "utf8", sys.argv[0], *argv])
    try:
        return _run(argv)
    except KeyboardInterrupt:  # clean-up is done: end as Ctrl-C ends any program
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 0


def _run(argv: Sequence[str]) -> int:
    # Modules and indexes stay; there is little else to collect.
    gc.set_threshold(100_000, *gc.get_threshold()[1:])
    parser = _parser()
    options = parser.parse_args(argv)
    # If the starting process ignores it, no child could be waited for: that passes through exec.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if options.command in ("exec", "mounted") and not _command(options):
        parser.error(f"{options.command}: the command is missing")
    try:
        return _ACTS.get(options.command, _use_environment)(options)
    except NodeError as exc:
        if getattr(options, "json", False):
            print(json.dumps({"v": 1, "ok": False, "problem": exc.problem.to_json()}))
        elif options.command == "exec":
            _tell(exc)
        else:
            print(f"stager: {exc}", file=sys.stderr)
        return 1


def _tell(error: NodeError) -> None:
    """Print a problem as `stager` does, which has become this program: a person is waiting."""
    from .protocol.problem import format_problem

    problem = format_problem(error.problem, (os.uname().nodename,))
    lines = [f"error: {problem.line}", *(f"  {finding}" for finding in problem.findings)]
    if problem.hint:
        lines.append(f"hint: {problem.hint}")
    print("\n".join(lines), file=sys.stderr)


def _use_environment(options: argparse.Namespace) -> int:
    environment = _environment(options)
    if environment.mended is not None:
        print(f"stager: {environment.mended}", file=sys.stderr)
    if options.command == "exec":
        return _exec(environment, _command(options))
    if options.command == "probe":
        return _probe(options.bundle, environment)
    print(environment.path)
    return 0


def _drive(options: argparse.Namespace) -> int:
    from .protocol.job import load_job
    from .system.processes import signal_at_parent_death

    signal_at_parent_death(signal.SIGTERM)
    job = load_job(options.job)
    begun = None
    if job.allocation is Allocation.LOCAL:
        from .driver.transports import local
        from .system import processes

        processes.adopt_orphans()  # of agents that are killed
        begun = local.begin(job)
    from .driver import driver
    from .system import signals  # most of it: the agents start meanwhile

    try:
        return driver.drive(job, begun)
    except signals.Stopped:  # before there was a log for the message
        print("stager: the job was stopped before it started", file=sys.stderr)
        return EXIT_INTERRUPTED


def _agent(options: argparse.Namespace) -> int:
    from .agent import agent

    return agent.main(options.phase, options.request)


def _fanout(options: argparse.Namespace) -> int:
    from .driver.transports import ssh_fanout
    from .system.processes import signal_at_parent_death

    signal_at_parent_death(signal.SIGTERM)
    return ssh_fanout.main(options.hosts, options.script, attached=options.attached)


def _clean_node(options: argparse.Namespace) -> int:
    from .environment.clean import Retention, clean_node, describe

    most = None if options.max_gb is None else int(options.max_gb * 1e9)
    cleaned = clean_node(options.bases, Retention(options.days, most), options.dry_run)
    for one in cleaned:
        print(describe(one, options.dry_run))
        for problem in one.problems:
            print(f"stager: {NodeError(problem)}", file=sys.stderr)
    return 1 if any(one.problems for one in cleaned) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="node.pyz", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("drive").add_argument("job")
    fanout = commands.add_parser("fanout")
    fanout.add_argument("--attached", action="store_true", help="end with a pipe on stdin")
    fanout.add_argument("script")
    fanout.add_argument("hosts", nargs="+")
    agent = commands.add_parser("agent")
    agent.add_argument("phase", choices=[str(phase) for phase in PhaseName])
    agent.add_argument("--request", type=int, help="descriptor that holds the request")
    mounted = commands.add_parser("mounted")
    mounted.add_argument("place", help="where the image is mounted")
    mounted.add_argument("argv", nargs=argparse.REMAINDER)
    clean = commands.add_parser("clean-node")
    clean.add_argument("--days", type=float, default=7.0, help="days that unused ones stay (7)")
    clean.add_argument("--max-gb", type=float, help="GB that the environments of a user may have")
    clean.add_argument("--dry-run", action="store_true")
    clean.add_argument("bases", nargs="*", help="where node roots lie (/tmp, /dev/shm, $TMPDIR)")
    for name in ("unpack", "probe", "exec"):
        command = commands.add_parser(name)
        command.add_argument("bundle")
        command.add_argument("base", help="the directory under which the node root is made")
        command.add_argument("--python", action="append", default=[], help="interpreter to try")
        command.add_argument("--id", help="the id that the bundle must have")
        trusted = "the caller made it: do not compare each file"
        command.add_argument("--trusted", action="store_true", help=trusted)
        command.add_argument("--json", action="store_true", help="problems as JSON, too")
        if name == "exec":
            command.add_argument("argv", nargs=argparse.REMAINDER)
    return parser


def _command(options: argparse.Namespace) -> list[str]:
    words: list[str] = getattr(options, "argv", [])
    return words[1:] if words[:1] == ["--"] else words


def _environment(options: argparse.Namespace) -> unpack.Environment:
    from .checks import probe
    from .environment import unpack
    from .environment.listing import own_python
    from .format.archive import BundleFile
    from .format.manifest import estimate_room
    from .node import interpreter
    from .node.machine import host_facts
    from .node.node_root import choose_base_for_bundle, env_path, make_secure_root
    from .system import own_program

    with BundleFile(options.bundle, options.id) as bundle:
        manifest = bundle.manifest
    host = host_facts()
    for problem in probe.check_requires(manifest.requires, host):
        raise NodeError(problem)
    version, python = manifest.requires.python, ""
    if not manifest.requires.bundled_python:
        python = interpreter.find_base_python(version, options.python)
        if not own_program.can_load_modules_for(version):
            os.execv(python, [python, "-I", "-S", *sys.argv])
    room = estimate_room(manifest.layers, manifest)
    root = make_secure_root(choose_base_for_bundle(options.base, manifest.id, room, os.environ))
    environment = unpack.unpack(
        options.bundle,
        root=root,
        expected=manifest.id,
        python=python or own_python(env_path(root, manifest.id), version),
        processes=host.cpus,
        source=unpack.Source(trusted=options.trusted),
    )
    if options.command == "exec":  # the command that this becomes inherits the lock
        unpack.hold_environment(root, manifest.id)
    return environment


def _directories(environment: unpack.Environment) -> JobDirectories:
    from .launch.program_variables import JobDirectories

    root = os.path.dirname(os.path.dirname(environment.path))
    job_dir = os.path.join(root, "jobs", f"exec-{os.getpid()}")
    return JobDirectories(root=root, environment=environment.path, job_dir=job_dir)


def _probe(path: str, environment: unpack.Environment) -> int:
    from .agent import agent
    from .checks import probe
    from .format.archive import BundleFile
    from .launch.program_variables import make_environment_variables
    from .protocol.codec import encode

    with BundleFile(path, os.path.basename(environment.path)) as bundle:
        manifest = bundle.manifest
    variables = {
        **make_environment_variables(_directories(environment), os.environ),
        # Its own standard error is kept until it ends; this process's is read at once.
        "STAGER_PROGRESS": f"/proc/{os.getpid()}/fd/2",
    }
    facts = probe.probe_environment(
        environment.path, manifest.packages, manifest.imports, variables, True, agent.PROBE_SECONDS
    )
    found = {name: value for name, value in encode(facts).items() if name in _PROBED}
    print(json.dumps({"v": 1, "ok": not facts.problems, "path": environment.path, **found}))
    return 1 if facts.problems else 0


def _exec(environment: unpack.Environment, command: list[str]) -> int:
    from .launch import exec_command, program_variables
    from .launch.wrapper import find_src_folder

    directories = _directories(environment)
    program_variables.prepare_hub_cache(directories, os.environ)
    # It is the user's own command on the user's own machine, as in a shell: it gets everything.
    variables = program_variables.make_environment_variables(
        directories, os.environ, os.environ, as_rank=True
    )
    variables.update(exec_command.read_step_variables(os.environ))
    variables.setdefault("STAGER_PATCHES", "1")
    own_code = [find_src_folder(variables["STAGER_PROJECT"]), *exec_command.find_trainer(variables)]
    if any(own_code):  # an empty one would be the working directory
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, own_code))
    return _become(command, variables)


def _exec_mounted(options: argparse.Namespace) -> int:
    from .checks import probe
    from .environment.unpack import turn_into_problem
    from .launch import exec_command, program_variables
    from .node.machine import host_facts
    from .node.node_root import choose_base, make_secure_root

    place = os.path.realpath(options.place)
    manifest = exec_command.read_manifest(place)
    for problem in probe.check_requires(manifest.requires, host_facts()):
        raise NodeError(problem)
    python = exec_command.find_python(place, manifest)
    root = make_secure_root(choose_base("auto", os.environ))
    with turn_into_problem(root):
        directories = exec_command.make_view(place, manifest, root, python)
        program_variables.prepare_hub_cache(directories, os.environ)
    variables = exec_command.make_mounted_variables(directories, place, os.environ)
    variables.update(exec_command.read_step_variables(os.environ))
    return _become(exec_command.make_argv(directories, _command(options)), variables)


def _become(command: list[str], variables: dict[str, str]) -> int:
    """Become a command; return 126 or 127, as a shell does, if it cannot start."""
    try:
        os.execvpe(command[0], command, variables)
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or str(exc)
        print(f"error: cannot run {command[0]}: {why}", file=sys.stderr)
        if os.path.isfile(command[0]):  # PATH does not have this directory
            print(f"hint: for a script write: python {command[0]}", file=sys.stderr)
        return 127 if isinstance(exc, FileNotFoundError) else 126


_ACTS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "drive": _drive,
    "fanout": _fanout,
    "agent": _agent,
    "clean-node": _clean_node,
    "mounted": _exec_mounted,
}
"""The commands that need no environment, or find one by themselves."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
