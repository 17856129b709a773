"""Proof that nothing is missing offline, made at build time, where it can still be mended.

The bundle is unpacked into a scratch environment by the very program that will do it on the nodes,
with the network taken away; every requirement in every package's metadata must be met inside, and
the declared modules must import.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import NormalizedName, canonicalize_name

from bundle.format.manifest import Manifest, room_for
from bundle.protocol.digest import Digest, canonical_json
from bundle.protocol.problem import Problem
from bundle.system.files import ROOT_VARIABLE

from ..core.deletion import remove
from ..core.errors import BundleError, SpaceError, StagerError
from ..core.processes import CommandError, Runner, run
from ..core.store import STORE_HINT, Store
from ..core.values import Target
from .existing import Chosen, node_program

PROBE_SECONDS = 1200.0
_USER = "environment.requirements"
_NOWHERE = "http://127.0.0.1:9"
"""The discard port: nothing listens there."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the far side found in the scratch environment."""

    path: Path
    """The environment."""
    problems: list[Problem]
    """Everything that is wrong with it."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What was proved, and how."""

    done: bool
    """Whether it was done now or before; False where this machine cannot run the environment."""
    how: str
    """One line for the user."""


def prove(
    bundle: Path,
    manifest: Manifest,
    *,
    store: Store,
    target: Target,
    requirements: Sequence[str],
    run: Runner = run,
) -> Proof:
    """Unpack a bundle with the network denied, and check that it is complete.

    Args:
        bundle: the file.
        manifest: what is in it.
        store: where to unpack, and where proofs are kept: the same layers are proved once.
        target: what it was built for.
        requirements: what the user asked for, with extras.
        run: starts processes.

    Raises:
        BundleError: requirements that are not met, or modules that do not import; all of them.
        SpaceError: no room to unpack.
    """
    record = store.proofs / _key(manifest, requirements)
    if record.is_file():
        return Proof(done=True, how="closure proved before: the same packages")
    obstacle = _obstacle(manifest, target, run)
    if obstacle:
        return Proof(done=False, how=f"closure not proved: {obstacle}")
    needed, inodes = room_for(manifest.layers, manifest)
    store.require_space(needed, "the proof of closure", inodes)
    scratch = store.scratch("prove")
    try:
        denied, how = _deny_network(run)
        program = node_program(bundle, store, manifest.id)
        found = _probe(program, Chosen(path=bundle, id=manifest.id), scratch, denied, run)
        faults = [f"{fault.where}: {fault.what}: {fault.why}" for fault in found.problems]
        site = found.path / "lib" / f"python{target.python}" / "site-packages"
        faults += unmet(site, requirements, target)
    finally:
        remove(scratch)
    if faults:
        raise BundleError(
            "the environment is not complete: it would fail on a node",
            hint="add what is missing to environment.requirements and build again; "
            "--no-prove skips this check",
            context=faults,
        )
    with store.publishing(record) as partial:
        partial.write_text(how + "\n")
    return Proof(done=True, how=f"closure proved: {how}")


def _obstacle(manifest: Manifest, target: Target, run: Runner) -> str:
    """Why the environment cannot run on this machine, whatever it holds; empty if it can."""
    host, needs = Target.of_host(), manifest.requires
    if (target.machine, needs.libc) != (host.machine, host.libc[0]):
        return f"this machine is no {target.machine} with {needs.libc}"
    if tuple(map(int, needs.libc_version.split("."))) > host.libc[1]:
        return f"{needs.libc} is older here than {needs.libc_version}"
    if target.is_host_python:
        return ""
    ask = [f"python{target.python}", "-I", "-S", "-c", "import sys; print(sys.version)"]
    try:  # what is on PATH may be a version manager's stand-in that starts nothing
        found = run(ask, timeout=10).stdout.startswith(f"{target.python}.")
    except StagerError:
        found = False
    return "" if found else f"there is no Python {target.python} here"


def unmet(site: Path, requirements: Iterable[str], target: Target) -> list[str]:
    """Every requirement that is not met in a site-packages directory.

    Extras count where somebody asks for them: the user, or a package that is itself needed.

    Args:
        site: the directory.
        requirements: what the user asked for.
        target: decides the markers.
    """
    there = list(importlib.metadata.distributions(path=[str(site)]))
    found = {canonicalize_name(item.name): item for item in there if item.name and item.version}
    faults = ["a package has metadata without name and version"] * (len(found) < len(there))
    roots = [Requirement(text) for text in requirements]
    waiting = [(_USER, one) for one in roots if _applies(one, "", target)]
    waiting += [(name, Requirement(name)) for name in sorted(found)]
    seen: set[tuple[NormalizedName, str]] = set()
    while waiting:
        asker, wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        item = found.get(name)
        if item is None:
            faults.append(f"{name} is missing; {asker} needs it")
            continue
        if wanted.specifier and not wanted.specifier.contains(item.version, prereleases=True):
            text = f"{wanted.name}{wanted.specifier}"
            faults.append(f"{name} is {item.version}; {asker} needs {text}")
        for extra in {"", *wanted.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [(name, one) for one in _needs(item, extra, target)]
    return sorted(set(faults))


def _needs(
    item: importlib.metadata.Distribution, extra: str, target: Target
) -> Iterable[Requirement]:
    for text in item.requires or ():
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue  # old metadata; the resolver could not read it either
        if _applies(wanted, extra, target):
            yield wanted


def _applies(wanted: Requirement, extra: str, target: Target) -> bool:
    if wanted.marker is None:
        return not extra
    environment = cast("dict[str, str]", dict(target.environment()))
    without = wanted.marker.evaluate({**environment, "extra": ""})
    return without if not extra else wanted.marker.evaluate({**environment, "extra": extra})


def _key(manifest: Manifest, requirements: Sequence[str]) -> str:
    wheels = sorted(layer.head for layer in manifest.layers if layer.kind == "wheel")
    parts = {"layers": wheels, "imports": manifest.imports, "requirements": sorted(requirements)}
    parts["node"] = manifest.node.sha256
    return Digest.of(canonical_json(parts))


def _deny_network(run: Runner) -> tuple[list[str], str]:
    """A prefix that takes the network away: a namespace without any, where the kernel allows it."""
    for options in (["-n"], ["-r", "-n"]):
        try:
            run(["unshare", *options, "true"], timeout=10)
        except StagerError:
            continue
        return ["unshare", *options, "--"], "unpacked and imported in a namespace with no network"
    return [], "unpacked and imported with all proxies leading nowhere"


def _probe(program: Path, bundle: Chosen, scratch: Path, denied: list[str], run: Runner) -> Answer:
    """Let the far side unpack and import; what it says on standard output is one JSON object."""
    names = ("http_proxy", "https_proxy", "all_proxy")
    away = dict.fromkeys([*names, *map(str.upper, names)], _NOWHERE)
    env = {**away, "no_proxy": "", "NO_PROXY": "", "PIP_NO_INDEX": "1"}
    env[ROOT_VARIABLE] = str(scratch)
    python = getattr(sys, "_base_executable", sys.executable)
    argv = [*denied, sys.executable, "-I", "-S", str(program), "probe", str(bundle.path)]
    # What its index says of each file was said a moment ago, by the build.
    argv += [str(scratch), "--id", bundle.id, "--trusted", "--json", "--python", python]
    done = run(argv, timeout=PROBE_SECONDS, env=env, check=False)
    try:
        said = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise CommandError(done, reason="the node program gave no answer") from None
    if "problem" in said:
        problem = Problem.from_json(said["problem"])
        why = problem.why.replace(f"${ROOT_VARIABLE} = ", "")  # set here, and not by the user
        text = f"the proof of closure failed: {problem.where}: {problem.what}: {why}"
        if ROOT_VARIABLE in problem.fix:
            raise SpaceError(text, hint=STORE_HINT)
        raise BundleError(text, hint=problem.fix)
    return Answer(
        path=Path(said["path"]), problems=[Problem.from_json(p) for p in said["problems"]]
    )
