"""Everything that is asked of pip, always as a process of its own.

Requirements and options go to pip in files, never on its command line: a process list and a log
show the latter, and a URL may hold a password.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from bundle.redaction.masking import without_url_secrets

from ..core.errors import ResolveError
from ..core.processes import Completed, Runner, run
from ..core.values import Target
from .indexes import Indexes

HOUR = 3600.0
# The first moment a zip archive can hold, so that a wheel built twice has the same bytes.
EPOCH = "315532800"

_UNREACHABLE = re.compile(
    r"connection broken by|NewConnectionError|Name or service not known|Max retries exceeded|"
    r"Temporary failure in name resolution|ConnectTimeout|Failed to fetch|error sending request|"
    r"dns error|Request failed after|connection error:|"
    r"40[13] (?:Client )?Error|\(40[13] (?:Unauthorized|Forbidden)\)",
    re.IGNORECASE,
)
_LINK = re.compile(r"(?:https?|file)://[^\s\"'<>]+?\.(?:whl|tar\.gz|zip)(?=[\s#?)]|$)")
_NOISE = re.compile(r"^\s*(WARNING|DEPRECATION|\[notice\])|^\s*$|for help visit|^Traceback|^  File")


@dataclass(frozen=True, kw_only=True)
class Pip:
    """How to call pip: what for, where to look, and with which means."""

    target: Target
    """The interpreter and platform that files are chosen for."""
    indexes: Indexes
    """Index options on top of pip's own configuration."""
    scratch: Path
    """A private folder for the files that are handed to pip."""
    offline: bool = False
    """Whether pip's own configuration is left out and only ``indexes.find_links`` counts."""
    run: Runner = run
    """Starts the process."""

    def call(
        self,
        command: str,
        options: Sequence[str],
        lines: Iterable[str],
        *,
        env: Mapping[str, str] | None = None,
    ) -> Completed:
        """Run one pip command over some requirement lines; its exit status is the caller's to read.

        Raises:
            CommandError: pip took more than an hour.
            StagerError: it cannot be started.
        """
        listed = self.scratch / "pip-requirements.txt"
        listed.write_text("\n".join([*self.indexes.pip_lines(), *lines]) + "\n", encoding="utf-8")
        argv = [sys.executable, "-m", "pip", command, "--disable-pip-version-check", "--no-input"]
        return self.run(
            [*argv, *options, "-r", str(listed)],
            timeout=HOUR,
            env={**self.environment(), **(env or {})},
            cwd=self.scratch,
            check=False,
        )

    def environment(self) -> dict[str, str]:
        """Variables for pip: offline, they silence its configuration."""
        plain = {"PIP_NO_COLOR": "1", "PYTHONWARNINGS": "ignore"}
        if not self.offline:
            return plain
        alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
        return {**plain, **alone, "PIP_INDEX_URL": "", "PIP_EXTRA_INDEX_URL": ""}

    def target_options(self) -> list[str]:
        """What makes pip choose files for the target; nothing where it is this very machine."""
        if self.target == Target.of_host():
            return []
        platforms = [word for tag in self.target.platforms() for word in ("--platform", tag)]
        return [*platforms, "--python-version", self.target.python, "--implementation", "cp"]

    def choose(self, pins: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
        """Ask which file pip would install for each pin, without downloading wheels.

        Args:
            pins: requirement lines, each for exactly one version, without hashes: with them pip
                downloads every file whole.

        Returns:
            The ``install`` entries of pip's installation report (its format 1), and the pins that
            no file fits.

        Raises:
            ResolveError: pip failed for another reason.
        """
        report = self.scratch / "report.json"
        options = ["--dry-run", "--ignore-installed", "--no-deps", "--report", str(report), "-q"]
        left = list(pins)
        missing: list[str] = []
        while left:
            done = self.call("install", [*options, *self.away()], left)
            if done.returncode == 0:
                found = json.loads(report.read_text(encoding="utf-8"))
                return found.get("install", []), missing
            failed = re.search(r"No matching distribution found for (\S+)", done.stderr)
            blamed = [pin for pin in left if failed and pin.partition(" ")[0] == failed[1]]
            if unreachable(done.stderr):
                raise index_unreachable(done.stderr)
            if not blamed:
                raise ResolveError(
                    "pip cannot choose files for what was resolved",
                    context=[condense(done.stderr)],
                )
            missing += blamed
            left = [pin for pin in left if pin not in blamed]
        return [], missing

    def download(self, lines: Iterable[str], folder: Path) -> Completed:
        """Download exactly the files that requirement lines name into a folder.

        Where a line carries ``--hash``, pip requires one of every line, and checks them.
        """
        options = ["--no-deps", "-q", "-d", str(folder)]
        return self.call("download", [*options, *self.target_options()], lines)

    def build(self, line: str, folder: Path) -> Completed:
        """Build one requirement line's wheel, without its dependencies, into a folder.

        The same source gives the same bytes with every build backend that honours
        SOURCE_DATE_EPOCH; pip's cache is left out, since what it holds was built without.
        """
        options = ["--no-deps", "--no-cache-dir", "-q", "-w", str(folder)]
        env = {"SOURCE_DATE_EPOCH": EPOCH}
        done = self.call("wheel", options, [line], env=env)
        if done.returncode != 0 and self.offline:
            # No index to take the build backend from: the one beside this tool may do.
            done = self.call("wheel", [*options, "--no-build-isolation"], [line], env=env)
        return done

    def existing(self, name: str) -> list[str]:
        """The names of all files that exist for a package, whatever they fit.

        Raises:
            ResolveError: nothing was found, but an index could not be asked either.
        """
        # No version is below 0.dev0, so pip lists every link it sees and takes none.
        done = self.call(
            "install",
            ["--dry-run", "--no-deps", "--ignore-installed", "-vv", *self.away()],
            [f"{name}<0.dev0"],
        )
        told = done.stdout + done.stderr
        links = _LINK.findall(told)
        if not links and unreachable(told):
            raise index_unreachable(told)
        files = {unquote(urlsplit(link).path.rpartition("/")[2]) for link in links}
        return sorted(files)

    def away(self) -> list[str]:
        """Target options for ``pip install``, which wants a place for files of other platforms."""
        options = self.target_options()
        return [*options, "--target", str(self.scratch / "nowhere")] if options else []


def unreachable(output: str) -> bool:
    """Whether a tool's output says that an index did not answer, or refused to."""
    return bool(_UNREACHABLE.search(output))


def condense(output: str) -> str:
    """A tool's complaint as one paragraph: no warnings, no traceback, no credentials."""
    lines = [line for line in without_url_secrets(output).splitlines() if not _NOISE.search(line)]
    told = [line.strip().removeprefix("ERROR: ") for line in lines]
    start = next((i for i, line in enumerate(lines) if line.lstrip().startswith("ERROR")), 0)
    text = re.sub(r"\s+", " ", " ".join(told[start:])).strip()
    return text if len(text) <= 1200 else text[:1200] + "..."


def index_unreachable(output: str) -> ResolveError:
    """The error for an index that does not answer, with the lines of a tool that say so."""
    lines = [line.strip() for line in without_url_secrets(output).splitlines() if unreachable(line)]
    return ResolveError(
        "a package index cannot be reached, or refuses the request",
        hint="check the network and pip's configuration (`pip config list`), or use --offline "
        "when the wheels are already in the offline root",
        context=list(dict.fromkeys(lines))[:3],
    )
