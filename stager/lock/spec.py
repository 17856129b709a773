"""The spec: every requirement of ``[environment]``, read and put in one form.

An entry of ``environment.requirements`` is one of

* a requirement file (``requirements.txt``, ``requirements.in``), in pip's format;
* a requirement string (PEP 508): ``numpy>=2``, ``name @ https://...``;
* ``pyproject.toml``: the dependencies it declares; ``pyproject.toml[extra1,extra2]``: these and the
  extras'; ``pyproject.toml:group1,group2``: only those dependency groups (PEP 735);
* a script with a block of its own (PEP 723), and alone with the lock of uv beside it;
* ``uv.lock``, ``uv.lock[extra]``, ``uv.lock:group``, alone (:mod:`stager.lock.uv_lock`);
* ``pylock.toml`` or ``pylock.NAME.toml`` (PEP 751), alone: it is taken as it is;
* a folder (``./mylib``, ``./mylib[extra]``), an sdist or a wheel file.

Folders, sdist files and everything from version control are *sources*: they are built into wheels
before anything is resolved, since no index has them. A bare name that is a file's is refused
(:mod:`stager.config.foreign_files`), and so are settings that would be left out in silence
(:mod:`stager.lock.tool_settings`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from bundle.protocol.counts import counted
from bundle.protocol.digest import canonical_json

from ..config.load import Config
from ..config.sections import EnvironmentConfig
from ..core.errors import ConfigError
from ..core.processes import Runner, run
from ..core.store import sha256_of
from ..core.values import Digest, Target
from .indexes import Indexes
from .located import SourceRequirement
from .source_builds import BuildSettings
from .spec_reader import SpecReader
from .uv_lock import UvLock
from .uv_project import UvProject


@dataclass(frozen=True, kw_only=True)
class Spec:
    """All that determines a lock, read from disk."""

    root: Path
    """The project's folder."""
    requirements: tuple[str, ...]
    """PEP 508 requirements, normalised, each once, in the order they were read."""
    constraints: tuple[str, ...]
    """PEP 508 requirements that limit versions only."""
    target: Target
    """The interpreter and platform to lock for."""
    torch_backend: str | None
    """Name of the PyTorch index to add; None for none, ``auto`` for one by the drivers."""
    local_projects: tuple[SourceRequirement, ...]
    """The sources to build into wheels first."""
    indexes: Indexes
    """The index options in the requirement files."""
    hashes: Mapping[str, tuple[str, ...]]
    """The sha256 of each file that may be installed, for each package that has hashes."""
    require_hashes: str
    """What asks for a hash of every file, a line or a variable; empty for nothing."""
    pylock: Path | None
    """A lock that the user supplied; then there are no requirements."""
    uv_lock: UvLock | None
    """A lock of uv that the user supplied; then there are no requirements, either."""
    uv_project: UvProject | None
    """The project whose settings only uv honours, where there is one."""
    index_strategy: str | None
    """uv's rule for packages that several indexes have; None for its own choice."""
    digest: Digest
    """Covers everything above except paths on this machine, and the content of local folders."""
    builds: BuildSettings
    """What builds from source are given; does not affect the lock."""
    prune: tuple[str, ...]
    """Kinds of files left out of the wheels' layers; does not affect the lock."""
    remarks: tuple[str, ...] = ()
    """What a person should know about the requirements, a line each; does not affect the lock."""

    @property
    def all_indexes(self) -> Indexes:
        """Return the indexes in the requirement files, and those that a project of uv names.

        Files that a lock names are fetched from them, each with its digest.
        """
        project = self.uv_lock.project if self.uv_lock else self.uv_project
        urls = project.indexes if project else ()
        return self.indexes.plus(Indexes(extra_index_urls=urls))

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the addresses of single files and repositories, with their credentials."""
        texts = (*self.requirements, *(source.requirement for source in self.local_projects))
        places = (text.rpartition(" @ ")[2].partition(" ")[0] for text in texts)
        return tuple(place for place in places if "://" in place)

    @property
    def overridden(self) -> frozenset[str]:
        """Return the packages that are taken against what other packages ask for."""
        of_uv = self.uv_lock or self.uv_project
        return of_uv.overridden if of_uv else frozenset()


def read_spec(config: Config, *, run: Runner = run) -> Spec:
    """Read every requirement a project names.

    Raises:
        ConfigError: files that are missing, requirements that are malformed or refused; one
            context line for each, with file and line.
    """
    environment = config.environment
    target = _target(environment.python, environment.platform)
    reader = SpecReader(config, target.python, run)
    pylock = reader.read()
    if reader.problems:
        many = counted(len(reader.problems), "problem")
        raise ConfigError(
            f"{config.source}: {many} in the requirements",
            hint=f"correct what is named above, in {config.source.name} or in a file it names; the "
            "stager.toml that `stager init` writes lists what environment.requirements takes",
            context=reader.problems,
        )
    return Spec(
        root=config.root,
        requirements=tuple(dict.fromkeys(reader.requirements)),
        constraints=tuple(dict.fromkeys(reader.constraints)),
        target=target,
        torch_backend=environment.torch_backend,
        local_projects=tuple(reader.located.sources),
        indexes=reader.indexes,
        hashes=reader.located.hashes,
        require_hashes=reader.require_hashes,
        pylock=pylock,
        uv_lock=reader.uv_lock,
        uv_project=reader.uv_project,
        index_strategy=environment.index_strategy,
        builds=_builds(environment),
        prune=environment.prune,
        remarks=tuple(reader.remarks),
        digest=_spec_digest(reader, target, pylock),
    )


def _builds(environment: EnvironmentConfig) -> BuildSettings:
    return BuildSettings(
        in_environment=frozenset(map(canonicalize_name, environment.no_build_isolation)),
        variables=dict(environment.build_env),
    )


def _target(python: str | None, platform: str | None) -> Target:
    if python and platform:
        return Target(python=python, platform=platform)
    host = Target.of_host()
    return Target(python=python or host.python, platform=platform or host.platform)


def _spec_digest(reader: SpecReader, target: Target, pylock: Path | None) -> Digest:
    indexes = reader.indexes.as_dict()
    content: dict[str, object] = {
        "format": 1,
        "requirements": [reader.portable(text) for text in dict.fromkeys(reader.requirements)],
        "constraints": list(dict.fromkeys(reader.constraints)),
        "target": [target.python, target.platform],
        "torch-backend": reader.config.environment.torch_backend,
        "wheels": reader.located.wheels,
        "projects": [
            [source.digest, source.suffix, source.marker] for source in reader.located.sources
        ],
        "indexes": {key: reader.portable(json.dumps(value)) for key, value in indexes.items()},
        "pylock": sha256_of(pylock) if pylock else None,
    }
    if reader.located.hashes:
        content["hashes"] = reader.located.hashes
    if reader.require_hashes:
        content["require-hashes"] = True
    if reader.config.environment.index_strategy:
        content["index-strategy"] = reader.config.environment.index_strategy
    content |= reader.of_uv()
    return Digest.of(canonical_json(content))
