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
from dataclasses import dataclass
from pathlib import Path

from ..node.host import host_facts
from ..protocol.answers import ProbeAnswer
from ..protocol.codec import decode
from ..protocol.facts import HostFacts
from ..protocol.problem import Problem, ProblemCode
from ..protocol.requires import Requires
from ..system import processes

__all__ = ["check_requires", "environment_facts", "host_facts"]

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
    paths = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
    if not paths:  # built in or frozen
        return
    origins[module] = paths[0]
    outside = [path for path in paths if not inside(path)]
    if outside:
        problem("module-foreign", module, found=outside[0])


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
        problem("package-missing", name, root=root)
        return
    versions[name] = dist.version
    path = str(dist.locate_file(""))
    if not inside(path):
        problem("package-foreign", name, found=path)
    for module in modules_of(dist):
        spec = spec_of(module)
        if spec is None:
            problem("package-incomplete", name, module=module)
        else:
            check_origin(module, spec)


def check_import(module):
    spec = spec_of(module)
    if spec is None:
        problem("module-missing", module, python=sys.executable)
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
        problem("module-not-imported", module, why=last)


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


@dataclass(frozen=True)
class _Description:
    """An environment, as the program describes it."""

    v: int
    python: str
    prefix: str
    packages: dict[str, str | None]
    origins: dict[str, str]
    problems: tuple[Problem, ...]


def environment_facts(
    env_dir: str,
    packages: Sequence[str],
    imports: Sequence[str],
    rank_env: Mapping[str, str],
    deep: bool,
    timeout: float,
) -> ProbeAnswer:
    """Ask a staged environment for its packages and the origins of its modules.

    Args:
        env_dir: the environment.
        packages: names of distributions whose version and modules are looked up.
        imports: modules that must be there; searched for in ``env_dir``'s ``project`` too.
        rank_env: the variables a rank will have.
        deep: True to import the modules, which takes seconds; else they are only located.
        timeout: seconds for all of it.

    Returns:
        The environment in its own words. After a failure to start only ``problems`` has content;
        nothing is raised.
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
        description = decode(_Description, json.loads(done.stdout))
    except processes.ProcessError as exc:
        return ProbeAnswer(problems=(_did_not_run(env_dir, exc),))
    except ValueError:
        tail = (done.stdout + done.stderr).strip().splitlines()[-1:]
        values = {"answer": " ".join(tail)}
        return ProbeAnswer(problems=(Problem(ProblemCode.PYTHON_GARBLED, env_dir, values),))
    problems = description.problems
    return ProbeAnswer(
        python=description.python,
        prefix=description.prefix,
        packages=description.packages,
        origins=description.origins,
        origin_ok=not any(problem.code in _FOREIGN for problem in problems),
        problems=problems,
    )


def check_requires(requires: Requires, host: HostFacts) -> list[Problem]:
    """Return all reasons why a bundle cannot run on a machine.

    Args:
        requires: from the bundle's manifest.
        host: the result of :func:`host_facts`.
    """
    where = host.hostname
    problems = []
    if host.machine != requires.machine:
        values = {"needed": requires.machine, "machine": host.machine}
        problems.append(Problem(ProblemCode.OTHER_MACHINE, where, values))
    libc, version = host.libc, host.libc_version
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
