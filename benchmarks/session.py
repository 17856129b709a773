"""One run of the benchmark: where, with what, how often; and what it has made so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stager.core.store import Store
from stager.pack.node_program import find_compiled_program

from . import ours, process
from .peers import Argv, Wanted
from .place import Place
from .process import Command, Ran
from .reference import Prepared
from .rounds import Samples
from .tools import Tools


@dataclass(kw_only=True)
class Made:
    """The products of a build, for the rows that come after it."""

    root: Path | None = None
    """The offline root with the bundles."""
    bundles: dict[str, Path] = field(default_factory=dict)
    """Our bundles: ``first``, and ``changed`` with another version of one package."""
    archives: dict[str, Path] = field(default_factory=dict)
    """The peers' archives: ``pip`` (tar.gz), ``uv`` (tar.zst), ``squashfs``."""
    trees: dict[str, Path] = field(default_factory=dict)
    """The folders they were made from, as long as they are there."""


@dataclass(kw_only=True)
class Session:
    """The things that every row's measurement is given."""

    place: Place
    """Where."""
    tools: Tools
    """With what."""
    prepared: Prepared
    """The environment that is measured."""
    rounds: int
    """How often."""
    say: Callable[[str], None]
    """Takes progress, one line at a time."""
    pex: bool = True
    """Whether pex is measured, too."""
    names: frozenset[str] = frozenset()
    """The names of the values that the rows need; empty for all."""
    samples: Samples = field(default_factory=Samples)
    """What has been measured."""
    made: Made = field(default_factory=Made)
    """What has been built."""

    @property
    def stager(self) -> str:
        """Our program."""
        return self.tools.program("stager")

    @property
    def node_python(self) -> str:
        """The interpreter of a node, outside of any environment."""
        return str(self.tools.base)

    @property
    def wanted(self) -> Wanted:
        """The packages that the peers install."""
        return Wanted(wheels=self.prepared.wheels, requirements=self.prepared.requirements)

    def env(self, **more: str) -> dict[str, str]:
        """The variables of a measured command."""
        home = self.place.disk / "home"
        home.mkdir(exist_ok=True)
        return process.clean_environment(home, [self.tools.bin], **more)

    def run(
        self,
        argv: Argv,
        *,
        cwd: Path | None = None,
        until: str = "",
        more: Mapping[str, str] | None = None,
    ) -> Ran:
        """Run a measured command.

        Args:
            argv: what.
            cwd: where; the scratch directory unless it matters.
            until: a piece of a line whose coming is timed.
            more: further variables.

        Raises:
            BenchError: it fails.
        """
        env = self.env(**(more or {}))
        return process.run(Command(argv=argv, cwd=cwd or self.place.disk, env=env, until=until))

    def build(self, root: Path, *, prove: bool = False) -> Ran:
        """``stager build`` of the project as it is, into an offline root."""
        argv = ours.build(self.stager, prove=prove)
        return self.run(argv, cwd=self.prepared.project, more={"OFFLINE_ROOT": str(root)})

    def program(self, bundle: Path) -> Path:
        """The far side's program, out of a bundle, with bytecode as nodes are sent it."""
        folder = self.place.fresh(f"program-{bundle.stem[:60]}")
        self.run(ours.program_of(bundle, folder))
        return find_compiled_program(folder / "node.pyz", Store(folder))
