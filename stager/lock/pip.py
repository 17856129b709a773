"""Calls of pip, as a process. URLs may hold a password: files, not command lines, have them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.utils import NormalizedName, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from bundle.node import interpreter
from bundle.protocol.dataclass import dataclass
from bundle.protocol.problem import NodeError
from bundle.redaction.secrets import strip_url_secrets
from bundle.regex import compile_lazily
from bundle.system.processes import CompletedCommand

from ..core.errors import ResolveError, SpaceError, StagerError
from ..core.processes import Runner, run
from ..core.store import remove
from ..core.values import Target
from .build_source import BuildSettings, build_requires, list_build_variables
from .indexes import Indexes, resolve_place_variables, strip_credentials, write_lines

HOUR = 3600.0
LONGEST_ERROR = 1200
# The first moment a zip archive can hold, so that a wheel built twice has the same bytes.
EPOCH = "315532800"

_UNREACHABLE = compile_lazily(
    r"connection broken by|NewConnectionError|Name or service not known|Max retries exceeded|"
    r"Temporary failure in name resolution|ConnectTimeout|Failed to fetch|error sending request|"
    r"dns error|Request failed after|connection error:|"
    r"40[13] (?:Client )?Error|\(40[13] (?:Unauthorized|Forbidden)\)",
    re.IGNORECASE,
)
_GONE = compile_lazily(
    r"\b(404|410)\b[ :(]*(Client Error|Not Found|Gone)|HTTP error 404", re.IGNORECASE
)
_VERSIONS = compile_lazily(r"\(from versions: [^)]*?, ((?:[^,)]+, ){4}[^,)]+)\)")  # cut to five
_LINK = compile_lazily(r"(?:https?|file)://[^\s\"'<>]+?\.(?:whl|tar\.gz|zip)(?=[\s#?)]|$)")
_FULL = compile_lazily(r".*(?:No space left on device|Disk quota exceeded).*")
_TRACEBACK = compile_lazily(r"^Traceback .*\n(?:[ \t].*\n|\n)*", re.MULTILINE)
_NOISE = compile_lazily(
    r"^\s*(WARNING|DEPRECATION|\[notice\])|^\s*$|for help visit|^Traceback|^  File"
)


@dataclass(frozen=True, kw_only=True)
class ResolvedFile:
    """The file a resolver chose for a package; None for what it does not know."""

    filename: str
    url: str | None = None
    path: Path | None = None
    sha256: str | None = None
    size: int | None = None

    @property
    def identity(self) -> tuple[NormalizedName, Version]:
        """Package and version by the name; ValueError for none, or one that leaves its folder."""
        if "/" in self.filename or not self.filename.isprintable():
            raise ValueError(f"{self.filename!r} is not the name of a file")
        if self.filename.endswith(".whl"):
            return parse_wheel_filename(self.filename)[:2]
        return parse_sdist_filename(self.filename)


class NoNodeError(StagerError):
    """Slurm gave no node for a build; the context has what ``srun`` said."""


@dataclass(frozen=True, kw_only=True)
class Pip:
    """The settings of pip calls: target, indexes, scratch folder."""

    target: Target
    indexes: Indexes
    scratch: Path
    offline: bool = False  # True ignores pip's configuration
    builds: BuildSettings = field(default_factory=BuildSettings)
    run: Runner = run

    def call(
        self,
        command: str,
        options: Sequence[str],
        lines: Iterable[str],
        *,
        env: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> CompletedCommand:
        """Run one pip command over some requirement lines; the caller checks its exit status."""
        lines = [*self.indexes.pip_lines(), *lines]
        listed = write_lines(self.scratch / "pip-requirements.txt", lines)
        argv = [*launcher, sys.executable, "-m", "pip", command]
        argv += ["--disable-pip-version-check", "--no-input"]
        done = self.run(
            [*argv, *options, "-r", listed],
            timeout=HOUR,
            env={**self.environment(), **(env or {})},
            cwd=self.scratch,
            check=False,
        )
        full = _FULL.findall(done.stderr)
        if full and done.returncode != 0:
            raise SpaceError(
                "pip has no space left for what it writes",
                hint="free some; TMPDIR, PIP_CACHE_DIR and OFFLINE_ROOT choose other places",
                context=[full[-1].strip()[-LONGEST_ERROR:]],
            )
        return done

    def environment(self) -> dict[str, str]:
        """Return variables for pip; offline, they disable its configuration."""
        plain = {"PIP_NO_COLOR": "1", "PYTHONWARNINGS": "ignore", **resolve_place_variables()}
        if not self.offline:
            return plain
        alone = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
        return {**plain, **alone, "PIP_INDEX_URL": "", "PIP_EXTRA_INDEX_URL": ""}

    def target_options(self) -> list[str]:
        """Return options that choose files for the target; none if it is this machine."""
        if self.target == Target.from_host():
            return []
        platforms = [word for tag in self.target.platforms() for word in ("--platform", tag)]
        return [*platforms, "--python-version", self.target.python, "--implementation", "cp"]

    def choose(self, pins: Sequence[str]) -> tuple[list[ResolvedFile], list[str]]:
        """Return the file for each pin, and the pins without one. Hashes make pip download all."""
        report = self.scratch / "report.json"
        options = ["--dry-run", "--ignore-installed", "--no-deps", "--report", str(report), "-q"]
        left = list(pins)
        missing: list[str] = []
        while left:
            done = self.call("install", [*options, *self.other_target_options()], left)
            if done.returncode == 0:
                return _read_report(report), missing
            if is_unreachable(done.stderr):
                raise unreachable_index_error(done.stderr)
            found = re.findall(r"No matching distribution found for (\S+)", done.stderr)[:1]
            unmatched = [pin for pin in left if pin.partition(" ")[0] in found]
            if not unmatched:
                raise ResolveError(
                    "pip cannot choose files for what was resolved", context=[condense(done.stderr)]
                )
            missing += unmatched
            left = [pin for pin in left if pin not in unmatched]
        return [], missing

    def download(self, lines: Iterable[str], folder: Path) -> CompletedCommand:
        """Download the files that requirement lines name; where one has ``--hash``, each must."""
        options = ["--no-deps", "-q", "-d", str(folder)]
        return self.call("download", [*options, *self.target_options()], lines)

    def build(self, line: str, folder: Path, packages: Path | None = None) -> CompletedCommand:
        """Build one line's wheel into a folder, with the same bytes each time."""
        options = ["--no-deps", "--no-cache-dir", "-q", "-w", str(folder)]
        env = {"SOURCE_DATE_EPOCH": EPOCH, **self.builds.variables}
        if self.builds.launcher:
            return self._build_on_node(line, options, env, packages)
        if packages is not None:
            env |= list_build_variables(packages)
            return self.call("wheel", [*options, "--no-build-isolation"], [line], env=env)
        done = self._build_isolated(options, line, env)
        if done.returncode != 0 and self.offline:
            # No index to take the build backend from: the one in this environment may do.
            done = self.call("wheel", [*options, "--no-build-isolation"], [line], env=env)
        return done

    def _build_isolated(
        self, options: Sequence[str], line: str, env: Mapping[str, str]
    ) -> CompletedCommand:
        """Build with the target's Python, else with the running one: that wheel must fit any."""
        if self.target.is_host_python:
            return self.call("wheel", options, [line], env=env)
        try:
            python = interpreter.find_base_python(self.target.python)
        except NodeError:
            return self.call("wheel", [*options, "--ignore-requires-python"], [line], env=env)
        return self.call("wheel", options, [line], env={**env, "PIP_PYTHON": python})

    def _build_on_node(
        self, line: str, options: Sequence[str], env: Mapping[str, str], packages: Path | None
    ) -> CompletedCommand:
        """Build on a node, perhaps without a network: fetch here first what the build needs."""
        here = dict(env) if packages is None else {**env, **list_build_variables(packages)}
        source, fetched = _find_folder(line), self.scratch / "source"
        if source is None:  # pip compares the digest
            remove(fetched)
            fetching = ["--no-deps", "-q", "-d", str(fetched)]
            if packages is not None:
                fetching.append("--no-build-isolation")
            done = self.call("download", fetching, [line], env=here)
            if done.returncode != 0:
                return done
            (source,) = fetched.iterdir()
        if packages is None:
            packages = self.scratch / "build-requires"
            remove(packages)
            done = self.call("install", ["-q", "--target", str(packages)], build_requires(source))
            if done.returncode != 0:
                return done
        there = [*options, "--no-build-isolation", "--no-index"]
        env = {**env, **list_build_variables(packages)}
        launcher = self.builds.launcher
        done = self.call("wheel", there, [source.as_uri()], env=env, launcher=launcher)
        if done.returncode != 0:
            _refuse_without_node(done.stderr)
        return done

    def list_existing_files(self, name: str) -> list[str]:
        """Return the names of all files that exist for a package, for any target."""
        # No version is below 0.dev0, so pip lists every link it sees and takes none.
        done = self.call(
            "install",
            ["--dry-run", "--no-deps", "--ignore-installed", "-vv", *self.other_target_options()],
            [f"{name}<0.dev0"],
        )
        output = done.stdout + done.stderr
        links = _LINK.findall(output)
        if not links and is_unreachable(output):
            raise unreachable_index_error(output)
        files = {unquote(urlsplit(link).path.rpartition("/")[2]) for link in links}
        return sorted(files)

    def other_target_options(self) -> list[str]:
        """Return target options for ``pip install``, which needs a folder for other platforms."""
        options = self.target_options()
        return [*options, "--target", str(self.scratch / "nowhere")] if options else []


def _read_report(report: Path) -> list[ResolvedFile]:
    files = []
    for entry in json.loads(report.read_text(encoding="utf-8"))["install"]:
        info = entry["download_info"]
        url = info["url"]
        path, is_local = unquote(urlsplit(url).path), url.startswith("file://")
        file = ResolvedFile(
            filename=path.rpartition("/")[2],
            url=None if is_local else strip_credentials(url),
            path=Path(path) if is_local else None,
            sha256=info.get("archive_info", {}).get("hashes", {}).get("sha256"),
        )
        files.append(file)
    return files


def is_unreachable(output: str) -> bool:
    """Return whether a tool's output says that an index did not answer, or refused to."""
    found = {match[0].lower() for match in _UNREACHABLE.finditer(output)}
    if found == {"failed to fetch"} and _GONE.search(output):
        return False  # it has answered
    return bool(found)


def condense(output: str) -> str:
    """Return a tool's error as one paragraph without warnings, traceback and credentials."""
    output = _TRACEBACK.split(strip_url_secrets(output))[-1]
    lines = [line.strip() for line in output.splitlines() if not _NOISE.search(line)]
    first = next((number for number, line in enumerate(lines) if line.startswith("ERROR")), 0)
    paragraph = " ".join(line.removeprefix("ERROR: ") for line in lines[first:])
    return keep_end(_VERSIONS.sub(r"(from versions: ..., \1)", paragraph))


def keep_end(text: str) -> str:
    """Return a text as one line: its end, where tools name the cause; all if it is not long."""
    text = re.sub(r"\s+", " ", text).strip()
    return text if len(text) <= LONGEST_ERROR else "..." + text[-LONGEST_ERROR:]


def unreachable_index_error(output: str) -> ResolveError:
    """Return the error for an index that does not answer, with the lines of a tool that say so."""
    output = strip_url_secrets(output)
    lines = [line.strip() for line in output.splitlines() if is_unreachable(line)]
    return ResolveError(
        "a package index cannot be reached, or refuses the request",
        hint="check the network and pip's configuration (`pip config list`), or use --offline "
        "when the wheels are already in the offline root",
        context=list(dict.fromkeys(lines))[:3],
    )


def _find_folder(line: str) -> Path | None:
    place = line.partition(" --hash=")[0].rpartition(" ")[2]
    path = Path(unquote(urlsplit(place).path))
    return path if place.startswith("file://") and path.is_dir() else None


def _refuse_without_node(output: str) -> None:
    """Raise NoNodeError if only ``srun`` has printed anything, and nothing about a task."""
    lines = list(filter(str.strip, output.splitlines()))
    if lines and all(line.startswith("srun: ") and ": task " not in line for line in lines):
        raise NoNodeError("Slurm gave no node for the build", context=lines)
