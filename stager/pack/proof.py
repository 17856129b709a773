"""The requirements in the metadata of packages that are not met in an environment."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import NormalizedName, canonicalize_name

from bundle.format.manifest import PYTHON, Manifest, estimate_room
from bundle.node.node_root import ROOT_VARIABLE
from bundle.protocol.counts import format_size
from bundle.protocol.digest import Digest, canonical_json
from bundle.protocol.problem import Problem
from bundle.system.processes import CompletedCommand

from ..core.errors import BundleError, SpaceError, StagerError
from ..core.processes import CommandError, follow_command, run
from ..core.store import STORE_HINT, Store
from ..core.values import Target
from ..interpreter import list_faults_elsewhere
from .bundle import open_stored_tar
from .bundle_file import ChosenBundle, node_program

_USER = "environment.requirements"
_METADATA = re.compile(r"lib/python[^/]+/site-packages/([^/]+\.dist-info)/METADATA")


def _write_metadata(manifest: Manifest, store: Store, site: Path) -> None:
    for layer in (one for one in manifest.layers if one.kind == "wheel"):
        metadata = {}
        with open_stored_tar(store, layer) as tar:
            for entry in tar.index.files:
                if match := _METADATA.fullmatch(entry.path):
                    metadata[match[1]] = tar.file(entry, 0, entry.size)
        for name, text in metadata.items():
            (site / name).mkdir(parents=True)
            (site / name / "METADATA").write_bytes(text)


def list_unmet(
    site: Path, requirements: Iterable[str], target: Target, overridden: Collection[str] = ()
) -> list[str]:
    """Return the requirements that an environment does not meet, except of ``overridden``."""
    installed = _read_distributions(site)
    faults: list[str] = []
    wanted = map(Requirement, requirements)
    pending = [(_USER, requirement) for requirement in wanted if _applies(requirement, "", target)]
    pending += [(name, Requirement(name)) for name in sorted(installed)]
    seen: set[tuple[NormalizedName, str]] = set()
    while pending:
        parent, requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        distribution = installed.get(name)
        if not {name, parent} & {*overridden}:
            faults += _faults(parent, requirement, distribution)
        extras = {(name, extra) for extra in {"", *requirement.extras}} - seen
        if distribution is not None:
            seen |= extras
            for _, extra in extras:
                needed = _list_requirements(distribution, extra, target)
                pending += [(name, one) for one in needed]
    return sorted(set(faults))


def _faults(
    parent: str, requirement: Requirement, distribution: importlib.metadata.Distribution | None
) -> Iterator[str]:
    name = canonicalize_name(requirement.name)
    if distribution is None:
        yield f"{name} is missing; {parent} needs it"
    elif not requirement.specifier.contains(distribution.version, prereleases=True):
        needed = f"{requirement.name}{requirement.specifier}"
        yield f"{name} is {distribution.version}; {parent} needs {needed}"


def _read_distributions(site: Path) -> dict[NormalizedName, importlib.metadata.Distribution]:
    distributions = importlib.metadata.distributions(path=[str(site)])
    return {canonicalize_name(one.name): one for one in distributions if one.name and one.version}


def _list_requirements(
    distribution: importlib.metadata.Distribution, extra: str, target: Target
) -> Iterable[Requirement]:
    for text in distribution.requires or ():
        with suppress(InvalidRequirement):  # old metadata, which the resolver ignores, too
            requirement = Requirement(text)
            if _applies(requirement, extra, target):
                yield requirement


def _applies(requirement: Requirement, extra: str, target: Target) -> bool:
    if requirement.marker is None:
        return not extra
    environment = cast("dict[str, str]", dict(target.environment()))
    return requirement.marker.evaluate({**environment, "extra": extra})


# --- Proof that nothing is missing offline: the bundle is unpacked and imported without a network

_START_SECONDS = 60.0  # also on a busy machine
_HINT = (
    "add what is missing to environment.requirements (in a project of uv: `uv add NAME`), or "
    "correct environment.imports, and build again; --no-prove skips this check"
)
_INCOMPLETE = "the environment is not complete"
_OTHER_PYTHON = (
    "name another one with environment.interpreter, such as one of uv's (uv python install); "
    "--no-prove skips this check"
)
_NOWHERE = "http://127.0.0.1:9"  # the discard port: nothing listens there


class Proof(NamedTuple):
    """Outcome of a proof."""

    done: bool  # False if this machine cannot run the environment
    how: str


class Wanted(NamedTuple):
    """The requirements that an environment has to meet."""

    requirements: Sequence[str]
    overridden: Collection[str] = ()  # taken against what other packages ask for
    python: Path | None = None  # of another version than the running one


def prove(
    bundle: Path,
    manifest: Manifest,
    *,
    store: Store,
    target: Target,
    wanted: Wanted,
    step: Callable[[str, int, int], None],
) -> Proof:
    """Unpack a bundle with the network denied, and check that it is complete."""
    record = store.proofs / _key(manifest, wanted)
    if record.is_file():
        return Proof(done=True, how="nothing is missing: proved before, with the same packages")
    obstacle = _find_obstacle(manifest, target, wanted)
    if obstacle:
        with store.scratch("prove") as site:  # by metadata alone
            _write_metadata(manifest, store, site)
            unmet = list_unmet(site, wanted.requirements, target, wanted.overridden)
            _refuse(unmet, _INCOMPLETE, _HINT)
        there = "each package that another one asks for is there"
        return Proof(done=False, how=f"{there}, but not proved by importing any: {obstacle}")
    needed, inodes = estimate_room(manifest.layers, manifest)
    store.require_space(needed, "the proof that nothing is missing", inodes)
    with store.scratch("prove") as scratch:
        denied, how = _deny_network()
        python = wanted.python or Path(getattr(sys, "_base_executable", sys.executable))
        if wanted.python and not manifest.requires.bundled_python:
            how += f", by {python}"
        chosen = ChosenBundle(path=bundle, id=manifest.id)
        program = node_program(bundle, store, manifest.id)
        step(f"unpacking {format_size(manifest.unpacked_size)}", 0, 0)
        env_dir, problems = _probe(
            [*denied, sys.executable, "-I", "-S", str(program)], chosen, scratch, python, step
        )
        if manifest.requires.bundled_python:
            faults = list_faults_elsewhere(env_dir, target.python, denied)
            what = "the Python that the bundle brings is not relocatable"
            _refuse(faults, what, _OTHER_PYTHON)
        faults = [f"{fault.where}: {fault.what}: {fault.why}" for fault in problems]
        site = env_dir / "lib" / f"python{target.python}" / "site-packages"
        faults += list_unmet(site, wanted.requirements, target, wanted.overridden)
    _refuse(faults, _INCOMPLETE, _HINT)
    with store.publish(record) as partial:
        partial.write_text(how + "\n")
    return Proof(done=True, how=f"nothing is missing: {how}")


def _refuse(faults: Sequence[str], what: str, hint: str) -> None:
    if faults:
        raise BundleError(f"{what}: it would fail on a node", hint=hint, context=faults)


def _find_obstacle(manifest: Manifest, target: Target, wanted: Wanted) -> str:
    host, needs = Target.from_host(), manifest.requires
    if (target.machine, needs.libc) != (host.machine, host.libc[0]):
        return f"this machine is not {target.machine} with {needs.libc}"
    if tuple(map(int, needs.libc_version.split("."))) > host.libc[1]:
        return f"{needs.libc} is older than {needs.libc_version} here"
    if needs.bundled_python or target.is_host_python or wanted.python:
        return ""
    return f"there is no Python {target.python} here"


def _key(manifest: Manifest, wanted: Wanted) -> str:
    proved = ("wheel", PYTHON)
    parts = {
        "layers": sorted(layer.head for layer in manifest.layers if layer.kind in proved),
        "imports": manifest.imports,
        "requirements": sorted(wanted.requirements),
        "node": manifest.node.sha256,
        "overridden": sorted(wanted.overridden),
    }
    return Digest.of(canonical_json(parts))


def _deny_network() -> tuple[list[str], str]:
    for options in (["-n"], ["-r", "-n"]):
        with suppress(StagerError):
            run(["unshare", *options, "true"], timeout=_START_SECONDS)
            how = "unpacked and imported in a namespace with no network"
            return ["unshare", *options, "--"], how
    return [], "unpacked and imported with all proxies set to an address without a server"


def _probe(
    program: Sequence[str],
    bundle: ChosenBundle,
    scratch: Path,
    python: Path,
    step: Callable[[str, int, int], None],
) -> tuple[Path, list[Problem]]:
    names = ("http_proxy", "https_proxy", "all_proxy")
    proxies = dict.fromkeys([*names, *map(str.upper, names)], _NOWHERE)
    env = {**os.environ, **proxies, "no_proxy": "", "NO_PROXY": "", "PIP_NO_INDEX": "1"}
    env[ROOT_VARIABLE] = str(scratch)
    # The build has just checked the digest of each file in its index.
    argv = [*program, "probe", str(bundle.path), str(scratch), "--id", bundle.id, "--trusted"]
    argv += ["--json", "--python", str(python)]
    answers, said = [""], list[str]()

    def show(line: str) -> None:
        match line.split(" "):
            case ["importing", module, number, count]:
                step(f"importing {module}", int(number), int(count))
            case _:
                said.append(line)

    done = follow_command(argv, answers.append, on_talk=show, environment=env)
    if done.interrupted:
        raise KeyboardInterrupt
    with suppress(ValueError):
        match json.loads(answers[-1]):
            case {"problem": problem}:
                raise _probe_failed(Problem.from_json(problem))
            case {"path": path, "problems": problems}:
                return Path(path), list(map(Problem.from_json, problems))
    completed = CompletedCommand(tuple(argv), done.returncode, answers[-1], "\n".join(said))
    raise CommandError(completed, reason="the node program gave no answer")


def _probe_failed(problem: Problem) -> StagerError:
    why = problem.why.replace(f"${ROOT_VARIABLE} = ", "")  # set here, and not by the user
    text = f"it could not be proved that nothing is missing: {problem.where}: {problem.what}: {why}"
    if ROOT_VARIABLE in problem.fix:  # of the scratch directory, which lies in the store
        return SpaceError(text, hint=STORE_HINT)
    return BundleError(text, hint=problem.fix)
