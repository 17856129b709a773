"""The preparation of a job: settings, bundle, command, source of the nodes."""

from __future__ import annotations

import ast
import difflib
import os
import posixpath
import re
import shutil
import sys
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bundle.driver.code_store import compute_software_digest
from bundle.driver.transports.slurm_text import CREDENTIALS
from bundle.format.manifest import Manifest
from bundle.protocol.counts import format_count
from bundle.protocol.enumerations import Action, Allocation, CompileCache
from bundle.protocol.job import CodeStore, Job
from bundle.redaction.secret_names import remove_secret_variables

from ..building.current_bundle import (
    Listener,
    current_bundle,
    describe_imports,
    newest_bundle,
    offline_root,
)
from ..config import inline_script
from ..config.job_settings import JobOptions
from ..config.load import Config, NoSettingsError, find, load
from ..config.template import make_default_config
from ..core.errors import ConfigError
from ..core.store import Store
from ..pack.bundle_file import (
    ChosenBundle,
    find_by_id,
    is_made_here,
    layer_paths,
    open_bundle,
    read_manifest,
)
from ..slurm import request
from ..slurm.request import Source
from ..trust import decide_trust, read_signers
from .allocation import Hosts, check_options_inside, find_hosts, list_options_without_slurm
from .driver import DriverStart
from .job_description import apply_options, make_job, refuse_launcher

_MAX_SHOWN = 200  # characters of a name that are shown
_SUFFIXES = (".py", ".pyw", ".pyc", ".pyz")
_PROJECT = "project/"  # the folder of the project in an environment
_PACKAGES = re.compile(r"lib/python3\.\d+t?/site-packages/")
_EXEC = "run starts Python scripts and modules; for other programs: stager exec --"


def refuse_missing_program(command: Sequence[str], bundle: Path) -> None:
    """Refuse what Python cannot start, before the bundle is sent to any node."""
    if command[0] == "-m":
        _refuse_absent_module(command[1], bundle)
    elif not _is_here(command[0]):
        _refuse_absent_script(command[0], bundle)
    elif not _is_python(Path(command[0])):
        raise ConfigError(
            f"{_shorten_name(command[0])} is not a Python script", hint=f"{_EXEC} {command[0]}"
        )


def _refuse_absent_script(name: str, bundle: Path) -> None:
    if name.startswith("/") and name.endswith(_SUFFIXES):  # it may be on the nodes
        return
    path = posixpath.normpath(name)
    with open_bundle(bundle) as held:
        staged = {file.removeprefix(_PROJECT) for file in layer_paths(held, "project")}
    is_named_so = path.endswith(_SUFFIXES) or not posixpath.splitext(path)[1]
    if name and (f"{path}/__main__.py" in staged or (path in staged and is_named_so)):
        return
    what = f"there is no script {_shorten_name(name)}"
    where = "neither here nor in the project in the bundle"
    raise ConfigError(f"{what}: {where}", hint=_suggest_script(path, staged))


def _refuse_absent_module(name: str, bundle: Path) -> None:
    top, place = name.partition(".")[0], name.replace(".", "/")
    if top in sys.stdlib_module_names or top == "trainer":  # every bundle brings the latter
        return
    wanted = {f"{place}.py", f"{place}/__main__.py"}
    with open_bundle(bundle) as held:
        staged = set(layer_paths(held, "project"))
        own = {path.removeprefix(_PROJECT).removeprefix("src/") for path in staged}
        installed = (_PACKAGES.sub("", path, count=1) for path in layer_paths(held, "wheel"))
        here = () if staged else filter(os.path.isfile, wanted)
        if not wanted.isdisjoint(chain(own, here, installed)):
            return
    modules = [file[:-3].replace("/", ".") for file in own if file.endswith(".py")]
    absent = "check the name; a package that can be started has a __main__.py"
    what = f"there is no module {_shorten_name(name)} to start"
    where = "neither in the project nor in the packages of the bundle"
    raise ConfigError(f"{what}: {where}", hint=_suggest_similar(name, modules) or absent)


def make_project_path(name: str, project: Path) -> str:
    """Return a script's path in the project, which hosts have a copy of; else its name as it is."""
    if not (name.startswith("/") or ".." in Path(name).parts) or not _is_here(name):
        return name
    path, root = Path(name).parent.resolve() / Path(name).name, project.resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else name


def prefer_local_script(name: str, project: Path) -> str:
    """Return a name that means the script here: ranks look at the top of the project first."""
    if not (_is_here(name) and _is_here(str(project / name))):
        return name
    place = make_project_path(str(Path(name).absolute()), project)
    return name if place.startswith("/") else place


def _shorten_name(name: str) -> str:
    if name.isprintable() and " " not in name and 0 < len(name) <= _MAX_SHOWN:
        return name
    return repr(name[:_MAX_SHOWN])


def _suggest_similar(name: str, known: Collection[str]) -> str:
    similar = difflib.get_close_matches(name[:_MAX_SHOWN], sorted(known), n=1)
    return f"did you mean {similar[0]}?" if similar else ""


def _suggest_script(path: str, staged: Collection[str]) -> str:
    scripts = {file for file in staged if file.endswith(".py")}
    with suppress(OSError):  # this directory was removed, or may not be read
        scripts |= {file.name for file in Path.cwd().glob("*.py")}
    if similar := _suggest_similar(path, scripts):
        return similar
    if path and shutil.which(path) is not None:
        return f"{_EXEC} {path}"
    check = "check the name, and the quotes around it" if " " in path else "check the name"
    return f"{check}; project.exclude and .gitignore keep files out of the bundle"


def _is_here(name: str) -> bool:
    path = Path(name)
    try:
        return path.is_file() or (path / "__main__.py").is_file()
    except (OSError, ValueError):
        return False


def _is_python(path: Path) -> bool:
    if path.suffix in _SUFFIXES or path.is_dir():
        return True
    try:
        content = path.read_bytes()
        first = content[:_MAX_SHOWN].partition(b"\n")[0]
        if first.startswith(b"#!"):
            return b"python" in first or b"uv run" in first
        return zipfile.is_zipfile(path) or (not path.suffix and ast.parse(content) is not None)
    except (OSError, ValueError, SyntaxError):
        return False


# --- The preparation of a job: settings, bundle, source of the nodes, command of the driver ------


class Prepared(NamedTuple):
    """A job that only has to be started."""

    config: Config
    bundle: Path
    source: Source
    job: Job
    notes: tuple[str, ...]


def load_project(
    bundle: Path | None,
    asked: str = "",
    start: Path | None = None,
    command: Sequence[str] = (),
) -> Config:
    """Return the settings for a directory, or those of the command's script (PEP 723).

    With a bundle named by its path or id (``asked``), a folder without settings will do.
    """
    start = start or Path.cwd()
    if find(start) is None:
        if bundle is not None or asked:
            return make_default_config(start)
        path = inline_script.find_script(command)
        if path is not None:
            return inline_script.load_script(path)
        inline_script.refuse_missing_script(command)
    try:
        return load(start)
    except NoSettingsError as exc:
        bundles = describe_imports(Store(offline_root(make_default_config(start))))
        if not bundles:
            raise
        hint = "take an imported bundle with --id, or go to the project's folder"
        raise ConfigError(exc.message, hint=hint, context=[*exc.context, *bundles]) from exc


def get_current_bundle(
    config: Config, bundle: Path | None, listener: Listener, asked: str = ""
) -> tuple[Path, Manifest]:
    """Return the bundle that is named, else the project's newest, made current if need be.

    ``asked`` is the id it must have, or its first digits.
    """
    if bundle is not None or asked:
        return get_named_bundle(config, bundle, asked)
    if config.trust.allowed_signers is not None:
        read_signers(config.trust.allowed_signers)  # a build would be for nothing without it
    chosen = current_bundle(config, listener)
    return chosen.path, read_manifest(chosen.path, chosen.id)


def get_named_bundle(config: Config, bundle: Path | None, asked: str = "") -> tuple[Path, Manifest]:
    """Return the bundle that is named, else the project's newest, whatever has changed since."""
    chosen = choose_bundle(config, bundle, asked)
    return chosen.path, read_manifest(chosen.path, chosen.id)


def choose_bundle(config: Config, bundle: Path | None, asked: str) -> ChosenBundle:
    """Return the bundle that is named, else the project's newest; none of them is opened here."""
    if bundle is not None:
        return ChosenBundle(path=bundle.absolute(), id=asked)
    if asked:
        return find_by_id(Store(offline_root(config)), asked)
    return newest_bundle(config)


def choose_source(options: JobOptions, config: Config, *, batch: bool) -> Source:
    """Return the source of the nodes, decided by what this machine has."""
    hosts = None
    if options.hosts or options.host_file or options.allocation in ("auto", "ssh"):
        hosts = find_hosts(options, config, os.environ)
    return request.choose_source(
        options.allocation,
        nodes=(options.nodes or config.cluster.nodes)[0],
        batch=batch,
        inside=os.environ.get("SLURM_JOB_ID", ""),
        found=[name for name in request.COMMANDS if shutil.which(name)],
        hosts_from=hosts.origin if hosts else "",
    )


def prepare(
    config: Config,
    options: JobOptions,
    bundle: tuple[Path, Manifest],
    *,
    action: Action,
    source: Source,
) -> Prepared:
    """Return a job that only has to be started."""
    # Before anything else: what follows leads to the start of a program that is in the bundle.
    store, (path, manifest) = Store(offline_root(config)), bundle
    verdict, trust = decide_trust(config, store, path, manifest.id)
    notes = [] if verdict is None else [f"{path.name}: {verdict.words}"]
    if action is Action.RUN:
        config, options, converted = _convert_command(config, options)
        notes += converted
        if options.bundle is None and not options.bundle_id:
            command = options.command or config.project.command
            notes += inline_script.explain_ignored_block(config, command)
    where = _ALLOCATIONS.get(source, Allocation.SLURM)
    if source == "inside":
        notes += check_options_inside(options, os.environ)
    elif where is not Allocation.SLURM:
        notes += list_options_without_slurm(options, where)
    if where is Allocation.SSH:
        options = _use_staged_script(config, _add_hosts(config, options))
    job = make_job(config, replace(options, allocation=where), path, manifest, action)
    job = replace(job, trusted_bundle=is_made_here(store, path, job.bundle_id), trust=trust)
    settled = apply_options(config, options)
    if action is Action.RUN:
        refuse_missing_program(job.launch.command, path)
        job = replace(job, code_store=_choose_code_store(settled, store, manifest))
    return Prepared(
        config=settled,
        bundle=path,
        source=source,
        job=job,
        notes=(*notes, *_list_notes(job, source, manifest)),
    )


def _choose_code_store(config: Config, store: Store, manifest: Manifest) -> CodeStore | None:
    """Return the place of compiled code; None if it is not wanted, or nothing would compile."""
    launch, software = config.launch, compute_software_digest(manifest)
    is_elsewhere = "TORCHINDUCTOR_CACHE_DIR" in os.environ  # ranks compile there
    is_wanted = launch.compile_cache is not CompileCache.OFF and not config.trust.require
    if not is_wanted or software is None or is_elsewhere:  # such code has no signature
        return None
    return CodeStore(
        path=str(store.compiled_code),
        software=software,
        limit=launch.compile_cache_limit if launch.compile_cache is CompileCache.AUTO else 0,
        caches=config.assets.caches,
    )


def _list_notes(job: Job, source: Source, manifest: Manifest) -> Iterator[str]:
    absent = [name for name in job.launch.pass_env if name not in os.environ]
    if absent and source != "inside":
        yield f"pass-env: {', '.join(absent)} not set here, so no rank gets a value"
    if job.tracked and job.allocation is not Allocation.LOCAL:
        yield f"brought back if they are written: {', '.join(job.tracked)} (trackers)"
    if job.action is Action.RUN:
        yield from _list_withheld_variables(job.launch.pass_env, os.environ)
    if job.action is Action.VERIFY:
        try:  # nodes that pass could still start no rank
            refuse_launcher(job.launch.launcher, manifest, slurm=job.allocation is Allocation.SLURM)
        except ConfigError as exc:
            yield f"`stager run` cannot start ranks like this: {exc.message}; {exc.hint}"


def _list_withheld_variables(passed: Collection[str], env: Mapping[str, str]) -> Iterator[str]:
    """Yield notes that name variables which ranks do not get, and never their values."""
    if place := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in env]:
        yield f"{' and '.join(place)} of this shell not used: each job has its own"
    names = sorted(env.keys() - remove_secret_variables(env, (*CREDENTIALS, *passed)).keys())
    if names:
        which = f"it with --pass-env {names[0]}" if len(names) == 1 else "one with --pass-env NAME"
        yield f"not given to the ranks: {', '.join(names)} (give {which})"


_ALLOCATIONS: Mapping[Source, Allocation] = {"local": Allocation.LOCAL, "ssh": Allocation.SSH}


def _add_hosts(config: Config, options: JobOptions) -> JobOptions:
    hosts = find_hosts(options, config, os.environ) or Hosts(names=(), origin="the hosts")
    spares = config.cluster.spares if options.spares is None else options.spares
    count = max(0, len(hosts.names) - spares)
    # Hosts on the command line count more than a number in the settings.
    is_free = any((options.hosts, options.host_file, config.cluster.nodes == (1, 1)))
    least, most = options.nodes or ((count, count) if is_free else config.cluster.nodes)
    needed = options.min_nodes or config.cluster.min_nodes or max(1, least)
    if count < needed:
        there = format_count(len(hosts.names), "host")
        besides = f" and {spares} spare ones" if spares else ""
        raise ConfigError(
            f"{hosts.origin}: {there} for a job that needs {needed}{besides}",
            hint="name more hosts, or ask for fewer with --nodes",
        )
    most = min(most, count)
    return replace(options, hosts=hosts.names[: most + spares], nodes=(min(least, most), most))


def _use_staged_script(config: Config, options: JobOptions) -> JobOptions:
    """Name a script of the project by its path there: hosts have a copy of the project."""
    command = options.command or config.project.command
    if not command or config.project.path is None:
        return options
    script = make_project_path(command[0], config.project.path)
    return replace(options, command=(script, *command[1:]))


def make_driver_start(prepared: Prepared, env: Mapping[str, str]) -> DriverStart:
    """Return the command that starts the driver: here, or by ``salloc``."""
    if prepared.source != "salloc":
        return DriverStart()
    from ..slurm.batch_script import make_submit_environment

    asked = request.make_request(prepared.config, env, prepared.job.bundle_id)
    return DriverStart(
        argv=request.make_salloc_argv(asked),
        environment=make_submit_environment(env, prepared.job.launch.pass_env),
    )


def _convert_command(
    config: Config, options: JobOptions
) -> tuple[Config, JobOptions, tuple[str, ...]]:
    from .conversion import convert

    command = options.command or config.project.command
    if not command:
        return config, options, ()
    converted = convert(command)
    command, notes = converted.command, converted.notes
    if options.command and config.project.path is not None:
        command = (prefer_local_script(command[0], config.project.path), *command[1:])
    if converted.nnodes and options.nodes not in (None, converted.nnodes):
        notes = (*notes, "the command's number of nodes is left out: --nodes counts")
    options = replace(
        options,
        command=command,
        nodes=options.nodes or converted.nnodes,
        nproc_per_node=options.nproc_per_node or converted.nproc_per_node,
        backend=options.backend or converted.backend,
    )
    return _set_restarts(config, converted.max_restarts), options, notes


def _set_restarts(config: Config, restarts: int | None) -> Config:
    if restarts in (None, config.launch.max_restarts):
        return config
    if config.is_fixed("launch.max-restarts"):
        what = f"--max-restarts={restarts}: launch.max-restarts is fixed by your site"
        raise ConfigError(what, hint="leave it out of the command")
    return replace(config, launch=replace(config.launch, max_restarts=restarts))
