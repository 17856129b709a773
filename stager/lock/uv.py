"""Resolving with ``uv pip compile``, for any Python and platform.

uv gets pip's indexes, and stops at the first that has a package's name: a stranger's package on
another one is not taken. The user's settings of uv hold, and those of a named project.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from packaging.pylock import Pylock
from packaging.utils import canonicalize_name

from bundle.redaction.secrets import strip_url_secrets
from bundle.regex import compile_lazily
from bundle.system.processes import CompletedCommand

from ..core import toml
from ..core.errors import ResolveError
from ..core.values import Target
from .build_source import advise_on_failed_build, extract_build_output, list_build_variables
from .indexes import (
    TORCH_INDEX,
    GitPin,
    Indexes,
    make_git_pin,
    resolve_place_variables,
    write_lines,
)
from .pip import HOUR, ResolvedFile, is_unreachable, keep_end, unreachable_index_error
from .pylock import drop_other_files, parse_pylock, select
from .resolver import NoSolution, ResolveRequest, UnavailablePackage, find_names
from .uv_project import UvLock

# The platforms `uv pip compile --help` lists: the newest that is not newer than the target's.
_GLIBC = (17, 28, *range(31, 41))
_NO_WHEEL = compile_lazily(
    r"([\w.-]+?)(?:==[^\s,]+)? ha(?:s|ve) no (?:usable )?wheels|wheels for `([\w.-]+)`"
)
_REDIRECTING = (  # these make uv lock something else
    *("UV_EXCLUDE", "UV_OVERRIDE", "UV_PRERELEASE", "UV_PROJECT"),
    *("UV_RESOLUTION", "UV_TORCH_BACKEND", "UV_WORKING_DIR"),
)
ANSWER = "pylock.toml"  # the file that uv writes its answer to, in the scratch folder
_COMMON = (
    *("--format", "pylock.toml", "--no-header", "--color", "never", "--quiet", "--no-progress"),
    *("--python", sys.executable),  # a .python-version may name one that is not here
)
_FIRST_INDEX = compile_lazily(
    r"`?([\w.-]+?)`? was found on (\S+), but not at the requested version .*?"
    r"on a subsequent index \(e\.g\., (\S+?)\)"
)
_UNKNOWN = compile_lazily(r"([\w.-]+) was not found in the package registry")


def require_uv() -> list[str]:
    """Return the command of uv, which an installation of stager brings."""
    return [sys.executable, "-m", "uv"]


def solve(request: ResolveRequest) -> list[ResolvedFile]:
    """Resolve with uv, take the files that fit best; NoSolution if requirements cannot be met."""
    target = _list_target_options(request.spec.target)
    done = _compile(request, target)
    if done.returncode != 0:
        raise _explain(request, done)
    # uv does not keep the commits of branches: those that have another one now are overridden.
    moved = _find_moved_pins(request)
    if moved:
        lines = [f"{pin.name} @ {pin.label}" for pin in moved]
        commits = write_lines(request.pip.scratch / "commits.txt", lines)
        done = _compile(request, [*target, "--overrides", commits])
        if done.returncode != 0:  # a commit is gone, for example
            moved = []
            _compile(request, target)
    files, unavailable = _select_files(request, moved)
    if unavailable:
        raise NoSolution("no file fits the target", blamed=request.names, absent=unavailable)
    return files


def _find_moved_pins(request: ResolveRequest) -> list[GitPin]:
    packages = _read(request)[0].packages
    taken = [make_git_pin(package.name, package.vcs) for package in packages if package.vcs]
    changed = {replace(now, commit="") for now in taken if now not in request.git}
    return [pin for pin in request.git if replace(pin, commit="") in changed]


def _compile(request: ResolveRequest, options: Sequence[str]) -> CompletedCommand:
    _refuse_redirection()
    settings, indexes = request.settings, request.pip.indexes
    if not request.pip.offline:
        indexes = _list_indexes(settings.indexes, request)
    lines = [*indexes.lines(), *request.requirements]
    requirements = write_lines(request.pip.scratch / "requirements.in", lines)
    # uv prefers the versions that it finds in its output file.
    pins = (pin.partition("==") for pin in request.pins)
    packages = [{"name": name, "version": version} for name, _, version in pins]
    earlier = {"lock-version": "1.0", "created-by": "stager", "packages": packages}
    (request.pip.scratch / ANSWER).write_text(toml.dumps(earlier), encoding="utf-8")
    # uv looks for a project's settings in this folder and upwards, and stops at the first file.
    write_lines(request.pip.scratch / "uv.toml", [])
    env = {**settings.environment, **resolve_place_variables(), "UV_CONSTRAINT": ""}
    env |= {"UV_PYTHON_DOWNLOADS": "never", **request.spec.builds.variables}
    if request.packages is not None:
        env |= list_build_variables(request.packages)
    if indexes.index_url:  # a variable would win over the file, the opposite of pip's order
        env |= {"UV_INDEX_URL": "", "UV_DEFAULT_INDEX": ""}
    argv = [*require_uv(), *_arguments(request, indexes), *options]
    argv += [word for place in settings.constraints for word in ("--constraints", place)]
    argv += ["-o", ANSWER, requirements]
    return request.pip.run(argv, timeout=HOUR, env=env, cwd=request.pip.scratch, check=False)


def _explain(request: ResolveRequest, done: CompletedCommand) -> Exception:
    output = strip_url_secrets(done.stderr)
    if "No solution found" not in output or is_unreachable(output):
        return _describe_failure(output)
    for name in _UNKNOWN.findall(output):
        # uv does not report that an index refused to answer; pip does.
        request.pip.list_existing_files(name)
    body = output.partition("cause:")[2] or output
    reason = " ".join(body.partition("\nhint:")[0].split())
    required = " ".join(re.findall(r"you require(.*?)(?:, we can|$)", reason))
    blamed = find_names(required, request.names) or find_names(reason, request.names)
    not_searched = []
    for name, first, other in _FIRST_INDEX.findall(" ".join(output.split())):
        not_searched += [
            f"{name} was looked for only on {first}, the first index that has one",
            f"{name} was not looked for on {other}",
        ]
    return NoSolution(reason, blamed, _all_unavailable(request, output), not_searched)


def _all_unavailable(request: ResolveRequest, output: str) -> list[UnavailablePackage]:
    """Return every package without a file for the target: uv stops at the first."""
    names = {canonicalize_name(a or b) for a, b in _NO_WHEEL.findall(output)}
    unavailable: list[UnavailablePackage] = []
    if names:  # for every platform at once, nothing is left out for want of a wheel
        version = request.spec.target.environment()["python_full_version"]
        done = _compile(request, ["--universal", "--python-version", version])
        unavailable = [] if done.returncode else _select_files(request)[1]
    return unavailable or [UnavailablePackage(requirement=name) for name in sorted(names)]


def _arguments(request: ResolveRequest, indexes: Indexes) -> list[str]:
    argv = ["pip", "compile", *_COMMON, "--generate-hashes", "--no-annotate"]
    if request.spec.uv_project:
        argv += request.spec.uv_project.arguments(request.pip.scratch)
    if request.pip.offline:
        argv.append("--offline")
    constraints = write_lines(request.pip.scratch / "constraints.txt", request.constraints)
    valued: dict[str, Sequence[str | None]] = {
        "--index-strategy": [request.spec.index_strategy],
        "--torch-backend": [None if indexes.no_index else request.torch_backend],
        "--prerelease": ["allow" if indexes.pre else None],
        "--exclude-newer": [request.exclude_newer],
        "--no-build-isolation-package": sorted(request.spec.builds.in_environment),
        "--allow-insecure-host": indexes.trusted_hosts,
        "--constraints": [constraints if request.constraints else None],
    }
    return argv + [
        word
        for option, values in valued.items()
        for value in filter(None, values)
        for word in (option, value)
    ]


def _refuse_redirection() -> None:
    names = [name for name in _REDIRECTING if os.environ.get(name)]
    if names:
        raise ResolveError(
            f"{', '.join(names)}: set in the environment, so uv would lock something else",
            hint="unset it; limit versions with environment.constraints, choose PyTorch's index "
            "with environment.torch-backend, allow pre-releases with --pre in a requirement file",
        )


def _list_target_options(target: Target) -> list[str]:
    version = ["--python-version", target.environment()["python_full_version"]]
    libc, (_, minor) = target.libc
    if libc == "musl":
        return [*version, "--python-platform", f"{target.machine}-unknown-linux-musl"]
    known = [number for number in _GLIBC if number <= minor]
    if target.machine in ("x86_64", "aarch64") and known:
        return [*version, "--python-platform", f"{target.machine}-manylinux_2_{known[-1]}"]
    if target == Target.from_host():
        return version
    raise ResolveError(
        f"uv cannot resolve for {target.platform}",
        hint="run stager on such a machine, or choose another environment.platform",
    )


def _list_indexes(configured: Indexes, request: ResolveRequest) -> Indexes:
    project = request.spec.uv_project
    if project and project.has_default_index:  # uv would take another one in place of that
        configured = replace(configured, index_url=None)
    indexes = configured.merge(request.pip.indexes)
    torch = TORCH_INDEX + (request.torch_backend or "")  # uv takes PyTorch's packages only from it
    others = tuple(url for url in indexes.extra_index_urls if url != torch)
    return replace(indexes, extra_index_urls=others) if request.torch_backend else indexes


def _read(request: ResolveRequest) -> tuple[Pylock, list[UnavailablePackage]]:
    return parse_pylock(toml.read(request.pip.scratch / ANSWER), "uv's answer")


def _select_files(
    request: ResolveRequest, kept: Sequence[GitPin] = ()
) -> tuple[list[ResolvedFile], list[UnavailablePackage]]:
    lock, empty = _read(request)
    revisions = {pin.name: pin.revision or None for pin in kept}
    packages = [
        drop_other_files(package, request.spec.hashes.get(package.name, ()))
        if package.vcs is None or package.name not in revisions
        else replace(package, vcs=replace(package.vcs, requested_revision=revisions[package.name]))
        for package in lock.packages
    ]
    lock, base = replace(lock, packages=packages), request.pip.scratch
    files, unavailable = select(
        lock, request.spec.target, base=base, source="uv's answer", build=request.build
    )
    return files, [*empty, *unavailable]


def _describe_failure(output: str) -> ResolveError:
    if is_unreachable(output):
        return unreachable_index_error(output)
    build = re.search(r"Failed to build `?([\w.-]+?)(?:==[^`\s]+)?`?\s", output)
    if build:
        return ResolveError(
            f"{build[1]} has to be built from source to learn what it depends on, which failed",
            hint=advise_on_failed_build(build[1], output),
            context=extract_build_output(output),
        )
    return ResolveError(
        "uv could not resolve the requirements",
        hint="correct what uv names; --resolver pip-tools asks another program",
        context=[keep_end(output.replace("error:", ""))],
    )


# --- Reading a ``uv.lock`` with ``uv export``, which writes it in the standard's form (PEP 751)


def export(lock: UvLock, request: ResolveRequest) -> toml.Table:
    """Return a uv.lock in the standard's form; its relative paths start at the scratch folder."""
    scratch, env = request.pip.scratch, {"UV_PYTHON_DOWNLOADS": "never"}
    answer = scratch / "pylock.uv.toml"
    start = [*require_uv(), *_list_export_arguments(lock, request), "-o", str(answer)]

    def ask(check: str) -> CompletedCommand:
        return request.pip.run([*start, check], timeout=HOUR, env=env, cwd=scratch, check=False)

    done = ask("--locked")
    # Without a Python or build requirements, uv cannot check if the lock is stale.
    may_be_unchecked = request.pip.offline or not request.spec.target.is_host_python
    if done.returncode != 0 and may_be_unchecked and not _is_stale(done.stderr, request):
        done = ask("--frozen")
    if done.returncode != 0:
        raise _export_failure(lock, request, strip_url_secrets(done.stderr))
    return toml.read(answer)


def _is_stale(output: str, request: ResolveRequest) -> bool:
    # Offline, uv resolves only where the lock is stale, and fails.
    unsolved = request.pip.offline and "No solution found" in output
    return "needs to be updated" in output or unsolved


def _list_export_arguments(lock: UvLock, request: ResolveRequest) -> list[str]:
    argv = ["export", *_COMMON, "--no-editable"]
    if request.pip.offline:
        argv.append("--offline")
    project = lock.project
    if project.is_script:
        return [*argv, "--script", str(project.file)]
    argv += ["--project", str(project.file.parent)]
    if not lock.itself:
        argv.append("--no-emit-project")
    argv += [word for extra in project.extras for word in ("--extra", extra)]
    group_option = "--group" if project.dependencies else "--only-group"
    argv += [word for group in project.groups for word in (group_option, group)]
    if "dev" not in project.groups:
        argv.append("--no-dev")
    return argv


def _export_failure(lock: UvLock, request: ResolveRequest, output: str) -> ResolveError:
    if _is_stale(output, request):
        file = lock.project.file
        source = f"the block of {file.name}" if lock.project.is_script else "its pyproject.toml"
        return ResolveError(
            f"{lock.file} is out of date: {source} has changed",
            hint=f"run `{lock.command}` there, and this command again",
        )
    if is_unreachable(output):
        return unreachable_index_error(output)
    return ResolveError(
        f"uv cannot read {lock.file}",
        hint=f"`{lock.command}` makes it again; one of a newer uv needs `pip install -U uv`",
        context=[keep_end(output.replace("error:", ""))],
    )
