"""The check of one node: the environment is the one that was built, and it runs there.

``environment_facts`` starts the environment's own interpreter; it sends one JSON object to its
standard input, ``{"v": 1, "root", "packages", "imports", "deep"}``, and reads one from its standard
output, ``{"v": 1, "python", "prefix", "packages", "origins", "problems"}``.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..node.host import host_facts
from ..protocol.problem import Problem, ProblemCode
from ..protocol.requires import Requires
from ..system import processes

__all__ = ["check_requires", "environment_facts", "host_facts", "probe_line"]

SHOWN = {"torch": "torch", "transformers": "tfm", "datasets": "datasets", "numpy": "numpy"}
"""Packages that the probe's line shows, in this order, with the name it uses."""

_FOREIGN = (ProblemCode.MODULE_FOREIGN, ProblemCode.PACKAGE_FOREIGN)

# Runs in the environment, under its own Python. Imported modules may print, which must not mix with
# the answer: file descriptor 1 leads to standard error meanwhile.
_PROGRAM = r'''
import importlib, importlib.metadata, json, os, re, sys, sysconfig, traceback, types

answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
request = json.load(sys.stdin)
root = os.path.realpath(request["root"])
sys.path[:] = [entry for entry in sys.path if entry]  # "" is the working directory, by -c
sys.path.append(os.path.join(root, "project"))
standard = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
problems, origins, versions = [], {}, {}


def problem(code, where, **values):
    problems.append({"code": code, "where": where, "values": values})


def inside(path):
    real = os.path.realpath(path)
    if real == root or real.startswith(root + os.sep):
        return True
    for folder in standard:
        if real.startswith(folder + os.sep):
            return real[len(folder) + 1:].split(os.sep)[0] not in ("site-packages", "dist-packages")
    return False


def spec_of(module):
    """Find a module, and the packages it is in, without importing any."""
    path, spec, name, stubs = None, None, "", []
    try:
        for part in module.split("."):
            name = name + "." + part if name else part
            finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path)
            specs = (find(name, path) for find in finders if find)
            spec = next((spec for spec in specs if spec is not None), None)
            if spec is None:
                return None
            path = list(spec.submodule_search_locations or ())
            if name not in sys.modules:  # a namespace package looks for its parent there
                stubs.append(name)
                sys.modules[name] = types.ModuleType(name)
                sys.modules[name].__path__ = path
    finally:
        for name in stubs:
            del sys.modules[name]
    return spec


def check_origin(module, spec):
    places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    if not places:  # built in or frozen
        return
    origins[module] = places[0]
    outside = [place for place in places if not inside(place)]
    if outside:
        problem("MODULE_FOREIGN", module, found=outside[0])


def modules_of(dist):
    """The importable names a distribution brings, by its own record."""
    record = dist.read_text("RECORD") or ""
    names = re.findall(r"^([A-Za-z_]\w*)(?:/__init__)?(?:\.[\w-]+)*\.(?:py|so),", record, re.M)
    return sorted(set(names))


def check_package(name):
    try:
        dist = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        versions[name] = None
        problem("PACKAGE_MISSING", name, root=root)
        return
    versions[name] = dist.version
    place = str(dist.locate_file(""))
    if not inside(place):
        problem("PACKAGE_FOREIGN", name, found=place)
    for module in modules_of(dist):
        spec = spec_of(module)
        if spec is None:
            problem("PACKAGE_INCOMPLETE", name, module=module)
        else:
            check_origin(module, spec)


def check_import(module):
    spec = spec_of(module)
    if spec is None:
        problem("MODULE_MISSING", module, python=sys.executable)
        return
    if module not in origins:
        check_origin(module, spec)
    if not request["deep"]:
        return
    sys.stderr.write("importing " + module + "\n")
    sys.stderr.flush()
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as exc:
        last = traceback.format_exception_only(type(exc), exc)[-1].strip()
        problem("MODULE_NOT_IMPORTED", module, why=last)


for name in request["packages"]:
    check_package(name)
for module in request["imports"]:
    check_import(module)
version = ".".join(str(part) for part in sys.version_info[:3])
json.dump({"v": 1, "python": version, "prefix": sys.prefix, "packages": versions,
           "origins": origins, "problems": problems}, answer)
answer.flush()
os._exit(0)  # some libraries crash or hang while they are torn down; the answer stands
'''


def environment_facts(
    env_dir: str,
    packages: Sequence[str],
    imports: Sequence[str],
    rank_env: Mapping[str, str],
    deep: bool,
    timeout: float,
) -> dict[str, object]:
    """Ask a staged environment for its packages and the origins of its modules.

    Args:
        env_dir: the environment.
        packages: names of distributions whose version and modules are looked up.
        imports: modules that must be there; searched for in ``env_dir``'s ``project`` too.
        rank_env: the variables a rank will have.
        deep: True to import the modules, which takes seconds; else they are only located.
        timeout: seconds for all of it.

    Returns:
        ``python`` (full version), ``prefix``, ``packages`` (version or null by name), ``origins``
        (file or folder by module), ``origin_ok`` (every one lies under ``env_dir``; modules of the
        standard library are exempt), ``problems`` (see :class:`Problem`). After a failure to start
        only ``problems`` has content; nothing is raised.
    """
    argv = [str(Path(env_dir, "bin", "python")), "-X", "faulthandler", "-c", _PROGRAM]
    request = {
        "v": 1,
        "root": env_dir,
        "packages": list(packages),
        "imports": list(imports),
        "deep": deep,
    }
    try:
        done = processes.run(
            argv, env=rank_env, cwd=env_dir, timeout=timeout, input=json.dumps(request)
        )
        answer = json.loads(done.stdout)
    except processes.ProcessError as exc:
        return _failed(_did_not_run(env_dir, exc))
    except ValueError:
        tail = (done.stdout + done.stderr).strip().splitlines()[-1:]
        values = {"answer": " ".join(tail)}
        return _failed(Problem(ProblemCode.PYTHON_GARBLED, env_dir, values))
    problems = [
        Problem(ProblemCode[raw["code"]], raw["where"], raw["values"]) for raw in answer["problems"]
    ]
    facts = {key: answer[key] for key in ("python", "prefix", "packages", "origins")}
    return {
        **facts,
        "problems": [problem.to_json() for problem in problems],
        "origin_ok": not any(problem.code in _FOREIGN for problem in problems),
    }


def probe_line(facts: Mapping[str, object]) -> str:
    """Return the line people grep for: ``NODE hpc09 OK -> PY 3.11 torch 2.3.1 tfm 4.41.2``.

    Args:
        facts: the result of :func:`environment_facts`, and ``node``, the node's name; further
            problems, of the host for example, may have been put first into ``problems``.
    """
    problems = facts.get("problems")
    if isinstance(problems, list) and problems:
        return f"NODE {facts['node']} FAILED -> {Problem.from_json(problems[0])}"
    packages = facts.get("packages")
    versions = dict(packages) if isinstance(packages, Mapping) else {}
    installed = {name: version for name, version in versions.items() if version}
    words = [f"{SHOWN[name]} {installed[name]}" for name in SHOWN if name in installed]
    if not words:
        words = [f"{name} {version}" for name, version in list(installed.items())[:6]]
    python = ".".join(str(facts.get("python", "")).split(".")[:2])
    return " ".join([f"NODE {facts['node']} OK -> PY {python}", *words])


def check_requires(requires: Requires, host: Mapping[str, object]) -> list[Problem]:
    """Return all reasons why a bundle cannot run on a machine.

    Args:
        requires: from the bundle's manifest.
        host: the result of :func:`host_facts`.
    """
    where = str(host["hostname"])
    problems = []
    if host["machine"] != requires.machine:
        values = {"needed": requires.machine, "machine": str(host["machine"])}
        problems.append(Problem(ProblemCode.OTHER_MACHINE, where, values))
    libc, version = str(host["libc"]), str(host["libc_version"])
    if libc != requires.libc:
        needed = f"{requires.libc} {requires.libc_version}"
        values = {"needed": needed, "libc": f"{libc} {version}".rstrip()}
        problems.append(Problem(ProblemCode.OTHER_LIBC, where, values))
    elif _version(version) < _version(requires.libc_version):
        values = {"needed": f"{libc} {requires.libc_version}", "version": version or "none"}
        problems.append(Problem(ProblemCode.OLD_LIBC, where, values))
    return problems


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _did_not_run(env_dir: str, exc: processes.ProcessError) -> Problem:
    """Describe why the environment's Python gave no answer, with the module it was importing."""
    module = next((line for line in reversed(exc.tail) if line.startswith("importing ")), "")
    errors = [line for line in exc.tail if line.startswith(("Fatal Python error", "ImportError"))]
    error = errors[:1] or exc.tail[-1:]
    why = ", ".join(filter(None, [exc.reason, module, *error]))
    code = ProblemCode.PYTHON_FAILED
    if exc.code == -signal.SIGILL:
        code = ProblemCode.PYTHON_ILLEGAL_INSTRUCTION
    elif exc.code == -signal.SIGKILL and not exc.timed_out:
        code = ProblemCode.PYTHON_KILLED
    return Problem(code, env_dir, {"why": why})


def _failed(problem: Problem) -> dict[str, object]:
    return {
        "python": "",
        "prefix": "",
        "packages": {},
        "origins": {},
        "origin_ok": False,
        "problems": [problem.to_json()],
    }
