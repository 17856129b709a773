"""Proof that nothing is missing offline, made at build time, when it can still be corrected.

The bundle is unpacked into a scratch environment by the very program that will do it on the nodes,
with the network taken away; every requirement in every package's metadata must be met inside, and
the declared modules must import.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import NormalizedName, canonicalize_name

from bundle.format.manifest import PYTHON, Manifest, room_for
from bundle.node.location import ROOT_VARIABLE
from bundle.protocol.digest import Digest, canonical_json
from bundle.protocol.problem import Problem, ProblemCode

from ..core.errors import BundleError, SpaceError, StagerError
from ..core.processes import CommandError, Runner, run
from ..core.store import STORE_HINT, Store
from ..core.values import Target
from ..interpreter.start import faults_elsewhere
from .existing import ChosenBundle, node_program

PROBE_SECONDS = 1200.0
_START_SECONDS = 60.0
"""Time that a program gets to start and end, also on a machine that is busy with other builds."""
_USER = "environment.requirements"
_OF_THE_STORE = (
    ProblemCode.PATH_NOT_EXAMINED,
    ProblemCode.NO_PLACE,
    ProblemCode.NO_PLACE_WITH_ROOM,
    ProblemCode.NODE_ROOT_REFUSED,
    ProblemCode.NODE_ROOT_BASE_REFUSED,
    ProblemCode.NO_ROOM,
    ProblemCode.ENVIRONMENT_DISK_FULL,
    ProblemCode.ENVIRONMENT_UNWRITABLE,
)
"""Problems with the scratch directory, which lies in the store."""
_HINT = (
    "add what is missing to environment.requirements (in a project of uv: `uv add NAME`), or "
    "correct environment.imports, and build again; --no-prove skips this check"
)
_NOWHERE = "http://127.0.0.1:9"
"""The discard port: nothing listens there."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """Result of the far side's probe of the scratch environment."""

    path: Path
    """The environment."""
    problems: list[Problem]
    """Every problem in it."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Outcome of a proof."""

    done: bool
    """True if it was made now or before; False if this machine cannot run the environment."""
    how: str
    """One line for the user."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What an environment has to meet."""

    requirements: Sequence[str]
    """The user's requirements, with extras."""
    overridden: Collection[str] = ()
    """Packages that the user takes against what other packages ask for."""


def prove(
    bundle: Path,
    manifest: Manifest,
    *,
    store: Store,
    target: Target,
    wanted: Wanted,
    run: Runner = run,
) -> Proof:
    """Unpack a bundle with the network denied, and check that it is complete.

    Args:
        bundle: the file.
        manifest: its manifest.
        store: the offline root, to unpack in and to keep proofs: the same layers are proved once.
        target: the target it was built for.
        wanted: what the environment has to meet.
        run: starts processes.

    Raises:
        BundleError: requirements that are not met, or modules that do not import; all of them.
        SpaceError: no room to unpack.
    """
    record = store.proofs / _key(manifest, wanted)
    if record.is_file():
        return Proof(done=True, how="nothing is missing: proved before, with the same packages")
    obstacle = _obstacle(manifest, target, run)
    if obstacle:
        return Proof(done=False, how=f"not proved that nothing is missing: {obstacle}")
    needed, inodes = room_for(manifest.layers, manifest)
    store.require_space(needed, "the proof that nothing is missing", inodes)
    with store.scratch("prove") as scratch:
        denied, how = _deny_network(run)
        program = node_program(bundle, store, manifest.id)
        result = _probe(program, ChosenBundle(path=bundle, id=manifest.id), scratch, denied, run)
        if manifest.requires.bundled_python:
            _require_relocatable(faults_elsewhere(result.path, target.python, denied))
        faults = [f"{fault.where}: {fault.what}: {fault.why}" for fault in result.problems]
        site = result.path / "lib" / f"python{target.python}" / "site-packages"
        faults += unmet(site, wanted.requirements, target, wanted.overridden)
    if faults:
        raise BundleError(
            "the environment is not complete: it would fail on a node",
            hint=_HINT,
            context=faults,
        )
    with store.publishing(record) as partial:
        partial.write_text(how + "\n")
    return Proof(done=True, how=f"nothing is missing: {how}")


def _require_relocatable(faults: Sequence[str]) -> None:
    """Refuse a Python that takes anything from the place that it was taken from."""
    if faults:
        raise BundleError(
            "the Python that the bundle brings is not relocatable: it would fail on a node",
            hint="name another one with environment.interpreter, such as one of uv's (uv python "
            "install); --no-prove skips this check",
            context=faults,
        )


def _obstacle(manifest: Manifest, target: Target, run: Runner) -> str:
    """Return why this machine cannot run the environment, whatever it holds; empty if it can."""
    host, needs = Target.of_host(), manifest.requires
    if (target.machine, needs.libc) != (host.machine, host.libc[0]):
        return f"this machine is not {target.machine} with {needs.libc}"
    if tuple(map(int, needs.libc_version.split("."))) > host.libc[1]:
        return f"{needs.libc} is older than {needs.libc_version} here"
    if needs.bundled_python or target.is_host_python or _has_python(target, run):
        return ""
    return f"there is no Python {target.python} here"


def _has_python(target: Target, run: Runner) -> bool:
    """Return whether the target's Python is on PATH and starts."""
    argv = [f"python{target.python}", "-I", "-S", "-c", "import sys; print(sys.version)"]
    try:  # a version manager's shim may be on PATH and start nothing
        return run(argv, timeout=_START_SECONDS).stdout.startswith(f"{target.python}.")
    except StagerError:
        return False


def _faults(
    parent: str, requirement: Requirement, distribution: importlib.metadata.Distribution | None
) -> Iterator[str]:
    """Yield the fault of a requirement that the installed distribution, if any, does not meet."""
    name = canonicalize_name(requirement.name)
    if distribution is None:
        yield f"{name} is missing; {parent} needs it"
    elif not _has_version(distribution, requirement):
        needed = f"{requirement.name}{requirement.specifier}"
        yield f"{name} is {distribution.version}; {parent} needs {needed}"


def unmet(
    site: Path,
    requirements: Iterable[str],
    target: Target,
    overridden: Collection[str] = (),
) -> list[str]:
    """Return every requirement that is not met in a site-packages directory.

    Extras count if something requests them: the user, or a package that is itself needed.

    Args:
        site: the directory.
        requirements: the user's requirements.
        target: decides the markers.
        overridden: packages that the user takes against what other packages ask for; what these
            ask for, and what is asked of them, does not count.
    """
    installed, faults = _installed(site)
    wanted = [Requirement(text) for text in requirements]
    pending = [(_USER, requirement) for requirement in wanted if _applies(requirement, "", target)]
    pending += [(name, Requirement(name)) for name in sorted(installed)]
    seen: set[tuple[NormalizedName, str]] = set()
    while pending:
        parent, requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        distribution = installed.get(name)
        if not {name, parent} & {*overridden}:
            faults += _faults(parent, requirement, distribution)
        if distribution is None:
            continue
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                pending += [(name, needed) for needed in _needs(distribution, extra, target)]
    return sorted(set(faults))


def _has_version(distribution: importlib.metadata.Distribution, requirement: Requirement) -> bool:
    """Return whether a distribution is of a version that a requirement accepts."""
    return requirement.specifier.contains(distribution.version, prereleases=True)


def _installed(
    site: Path,
) -> tuple[dict[NormalizedName, importlib.metadata.Distribution], list[str]]:
    """Return the distributions in a directory by name, and a fault if any has no name."""
    distributions = list(importlib.metadata.distributions(path=[str(site)]))
    installed = {}
    for distribution in distributions:
        if distribution.name and distribution.version:
            installed[canonicalize_name(distribution.name)] = distribution
    faults = []
    if len(installed) < len(distributions):
        faults.append("a package has metadata without name and version")
    return installed, faults


def _needs(
    distribution: importlib.metadata.Distribution, extra: str, target: Target
) -> Iterable[Requirement]:
    """Yield the requirements of a distribution, or of one of its extras."""
    for text in distribution.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # old metadata; the resolver could not read it either
        if _applies(requirement, extra, target):
            yield requirement


def _applies(requirement: Requirement, extra: str, target: Target) -> bool:
    """Return whether a requirement's marker holds for an extra on the target."""
    if requirement.marker is None:
        return not extra
    environment = cast("dict[str, str]", dict(target.environment()))
    return requirement.marker.evaluate({**environment, "extra": extra})


def _key(manifest: Manifest, wanted: Wanted) -> str:
    proved = ("wheel", PYTHON)
    parts = {
        "layers": sorted(layer.head for layer in manifest.layers if layer.kind in proved),
        "imports": manifest.imports,
        "requirements": sorted(wanted.requirements),
    }
    if wanted.overridden:
        parts["overridden"] = sorted(wanted.overridden)
    parts["node"] = manifest.node.sha256
    return Digest.of(canonical_json(parts))


def _deny_network(run: Runner) -> tuple[list[str], str]:
    """Return a command prefix that denies the network by a namespace, if the kernel allows it."""
    for options in (["-n"], ["-r", "-n"]):
        try:
            run(["unshare", *options, "true"], timeout=_START_SECONDS)
        except StagerError:
            continue
        return ["unshare", *options, "--"], "unpacked and imported in a namespace with no network"
    return [], "unpacked and imported with all proxies set to an address without a server"


def _probe(
    program: Path, bundle: ChosenBundle, scratch: Path, denied: list[str], run: Runner
) -> ProbeResult:
    """Let the far side unpack and import; it prints one JSON object."""
    names = ("http_proxy", "https_proxy", "all_proxy")
    proxies = dict.fromkeys([*names, *map(str.upper, names)], _NOWHERE)
    env = {**proxies, "no_proxy": "", "NO_PROXY": "", "PIP_NO_INDEX": "1"}
    env[ROOT_VARIABLE] = str(scratch)
    python = getattr(sys, "_base_executable", sys.executable)
    argv = [*denied, sys.executable, "-I", "-S", str(program), "probe", str(bundle.path)]
    # The build has just checked the digest of each file in its index.
    argv += [str(scratch), "--id", bundle.id, "--trusted", "--json", "--python", python]
    done = run(argv, timeout=PROBE_SECONDS, env=env, check=False)
    try:
        report = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise CommandError(done, reason="the node program gave no answer") from None
    if "problem" in report:
        raise _probe_failed(Problem.from_json(report["problem"]))
    problems = [Problem.from_json(problem) for problem in report["problems"]]
    return ProbeResult(path=Path(report["path"]), problems=problems)


def _probe_failed(problem: Problem) -> StagerError:
    """Return the error for a problem that stopped the probe."""
    why = problem.why.replace(f"${ROOT_VARIABLE} = ", "")  # set here, and not by the user
    text = f"it could not be proved that nothing is missing: {problem.where}: {problem.what}: {why}"
    if problem.code in _OF_THE_STORE:
        return SpaceError(text, hint=STORE_HINT)
    return BundleError(text, hint=problem.fix)
