"""Package indexes, and keeping their credentials out of files and messages.

pip and uv get the options in a requirement file, whose content no process list or log shows.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from packaging.pylock import PackageVcs
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import NormalizedName, canonicalize_name

from bundle.protocol.codec import decode, encode
from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import Digest, canonical_json
from bundle.regex import compile_lazily

from ..core.processes import Runner, run
from ..core.store import digest_file

# --- One line of a requirement file, and the standard spelling of a requirement ------------------

_HASH = compile_lazily(r"--hash[=\s]\s*(\w+):(\S+)")
_HASH_OF_URL = compile_lazily(r"(?:^|&)(sha\d+|md5)=([^&;\s]+)")


@dataclass(frozen=True, kw_only=True)
class RequirementLine:
    """One requirement or constraint, as written."""

    text: str
    origin: str  # its place, for messages: ``requirements.txt:3`` or a key path
    base: Path  # the folder that relative paths in it start from
    constraint: bool = False
    metadata: bool = False  # True in a ``pyproject.toml``, where no files are named
    by_uv: bool = False  # True if uv reads it from its file, with the settings there
    options: str = ""
    hashes: tuple[str, ...] = ()  # sha256 of each file that may be installed; empty for any


def read_hashes(line: RequirementLine) -> tuple[str, ...]:
    """Return the sha256 digests of a requirement's options and URL; ValueError for others alone."""
    fragment = line.text.partition("#")[2]
    hashes = [*_HASH.findall(line.options), *_HASH_OF_URL.findall(fragment)]
    digests = tuple(value.lower() for name, value in hashes if name == "sha256")
    if hashes and not digests:
        kind = hashes[0][0]
        raise ValueError(f"a {kind} cannot be checked; give the file's sha256 (`pip hash FILE`)")
    return digests


def normalize_requirement(requirement: Requirement) -> str:
    """Return the one spelling of a requirement, the same with every version of packaging."""
    name = canonicalize_name(requirement.name)
    extras = format_extras(requirement.extras)
    versions = ",".join(sorted(str(specifier) for specifier in requirement.specifier))
    url = f" @ {requirement.url}" if requirement.url else ""
    marker = f" ; {requirement.marker}" if requirement.marker else ""
    return f"{name}{extras}{versions}{url}{marker}"


def list_names(texts: Iterable[str]) -> set[NormalizedName]:
    """Return the packages that requirements name; a text that is no requirement names none."""
    packages: set[NormalizedName] = set()
    for text in texts:
        with contextlib.suppress(InvalidRequirement):  # reported when the requirements are sorted
            packages.add(canonicalize_name(Requirement(text).name))
    return packages


def format_extras(names: Iterable[str]) -> str:
    """Return extras as they follow a name, ``[a,b]``; an empty string for no extras."""
    normalized = ",".join(sorted(canonicalize_name(name) for name in names if name))
    return f"[{normalized}]" if normalized else ""


def find_path(text: str, folders: Iterable[Path]) -> Path:
    """Return the path that a text means: the first that exists, else that in the first folder."""
    paths = [Path(os.path.normpath(folder / expand_user(text))) for folder in folders]
    return next((path for path in paths if path.exists()), paths[0])


def write_lines(path: Path, lines: Iterable[str]) -> str:
    """Write a requirement file; return its path."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def expand_user(text: str) -> Path:
    """Return a path with a leading ``~`` expanded, if there is such a user."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - Path's own raises for an unknown one


def shorten_path(path: Path, root: Path) -> str:
    """Return a path as seen from the project's folder; a path outside of it stays as it is."""
    return os.path.relpath(path, root) if path.is_relative_to(root) else str(path)


TORCH_INDEX = "https://download.pytorch.org/whl/"

# What pip and uv expand from the environment when they read a requirement file.
_VARIABLE = r"\$\{[A-Z0-9_]+\}"
_SETTING = compile_lazily(r"(:env:|[\w-]+)\.([\w-]+)=(.*)")  # a line of ``pip config list``
_UV_VARIABLES = {
    "SSL_CERT_FILE": "cert",
    "SSL_CLIENT_CERT": "client-cert",
    "UV_INSECURE_HOST": "trusted-host",
    "ALL_PROXY": "proxy",
}
_ONLY_VARIABLES = compile_lazily(rf"{_VARIABLE}(:{_VARIABLE})?")


@dataclass(frozen=True, kw_only=True)
class Indexes:
    """The places to look for packages, in the terms of pip's options."""

    index_url: str | None = None  # the first index; None for pip's own choice
    extra_index_urls: tuple[str, ...] = ()  # the best version over all of them wins, as in pip
    find_links: tuple[str, ...] = ()  # folders, or pages, that hold distribution files
    no_index: bool = False
    trusted_hosts: tuple[str, ...] = ()
    only_binary: tuple[str, ...] = ()  # never built from source; ``:all:`` for every package
    no_binary: tuple[str, ...] = ()
    pre: bool = False

    @property
    def urls(self) -> tuple[str, ...]:
        """Return the addresses of the indexes, the first one first."""
        return tuple(filter(None, (self.index_url, *self.extra_index_urls)))

    def lines(self) -> list[str]:
        """Return the options as the lines of a requirement file."""
        options = {
            "index-url": [self.index_url] if self.index_url and not self.no_index else [],
            "extra-index-url": [] if self.no_index else self.extra_index_urls,
            "find-links": list(map(_link, self.find_links)),
            "only-binary": self.only_binary,
            "no-binary": self.no_binary,
        }
        lines = [f"--{name} {value}" for name, values in options.items() for value in values]
        return ["--no-index", *lines] if self.no_index else lines

    def pip_lines(self) -> list[str]:
        """Return the same lines, with the options that only pip reads from a file."""
        lines = [*self.lines(), *(f"--trusted-host {host}" for host in self.trusted_hosts)]
        return [*lines, "--pre"] if self.pre else lines

    def merge(self, other: Indexes) -> Indexes:
        """Return both together; the other's single values win."""
        values: dict[str, Any] = {}
        for name, mine in vars(self).items():
            others = getattr(other, name)
            is_list = isinstance(mine, tuple)
            values[name] = tuple(dict.fromkeys(mine + others)) if is_list else others or mine
        return Indexes(**values)

    def find_wheel(self, name: str, sha256: str) -> Path | None:
        """Return a wheel with a digest that a folder or a mirror on this machine has."""
        mirrors = [url.rstrip("/").removesuffix("/simple") for url in self.urls]
        for folder in filter(None, map(_folder, (*self.find_links, *mirrors))):
            path = folder / name
            if path.is_file() and digest_file(path) == sha256:
                return path
        return None

    def strip_credentials(self) -> Indexes:
        """Return the same places without secrets; ``${NAME}`` stays, since it reveals nothing."""
        return self._change_places(strip_credentials)

    def restore_credentials(self, other: Indexes) -> Indexes:
        """Return the same places, each with the credentials that the other has for it."""
        full = {strip_credentials(place): place for place in (*other.urls, *other.find_links)}
        return self._change_places(lambda place: full.get(place, place))

    def _change_places(self, change: Callable[[str], str]) -> Indexes:
        return replace(
            self,
            index_url=change(self.index_url) if self.index_url else None,
            extra_index_urls=tuple(map(change, self.extra_index_urls)),
            find_links=tuple(map(change, self.find_links)),
        )

    def to_dict(self) -> dict[str, object]:
        """Return the values that are not defaults, without credentials, for a lock."""
        values = encode(self.strip_credentials())
        return {key.replace("_", "-"): value for key, value in values.items() if value}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Indexes:
        """Read the result of :meth:`to_dict`; unknown keys and values are ignored."""
        values = {key.replace("-", "_"): value for key, value in data.items()}
        return decode(cls, values, strict=False)


def _split(value: str) -> tuple[str, ...]:
    return tuple(filter(None, value.split(",")))


FLAGS = ("--no-index", "--pre")
INDEX_OPTIONS: Mapping[str, Callable[[str], Indexes]] = {
    "--index-url": lambda value: Indexes(index_url=value),
    "--extra-index-url": lambda value: Indexes(extra_index_urls=(value,)),
    "--find-links": lambda value: Indexes(find_links=(value,)),
    "--trusted-host": lambda value: Indexes(trusted_hosts=(value,)),
    "--only-binary": lambda value: Indexes(only_binary=_split(value)),
    "--no-binary": lambda value: Indexes(no_binary=_split(value)),
    "--no-index": lambda _: Indexes(no_index=True),
    "--pre": lambda _: Indexes(pre=True),
}


class PipSettings(NamedTuple):
    """The configuration of pip, from its files and from ``PIP_*`` variables."""

    indexes: Indexes
    environment: Mapping[str, str]  # certificate, proxy, time limit and key ring, for uv
    constraints: tuple[str, ...] = ()  # files (absolute paths) and URLs, also of ``UV_CONSTRAINT``
    require_hashes: bool = False


def pip_settings(run: Runner = run) -> PipSettings:
    """Return pip's configuration, to pass it to uv, which does not read it."""
    values = _pip_values(run)
    environment = {uv: " ".join(values.get(pip, "").split()) for uv, pip in _UV_VARIABLES.items()}
    environment["UV_HTTP_TIMEOUT"] = values.get("timeout") or values.get("default-timeout", "")
    if values.get("keyring-provider") == "subprocess":
        environment["UV_KEYRING_PROVIDER"] = "subprocess"
    indexes = Indexes()
    for option, make in INDEX_OPTIONS.items():
        for word in values.get(option.removeprefix("--"), "").split():
            if option not in FLAGS or is_true(word):
                indexes = indexes.merge(make(word))
    return PipSettings(
        indexes=indexes,
        environment={
            name: environment[name]
            for name in environment.keys() - os.environ.keys()
            if environment[name]
        },
        constraints=_read_places(values.get("constraint", ""), os.environ.get("UV_CONSTRAINT", "")),
        require_hashes=is_true(values.get("require-hashes", "")),
    )


def _pip_values(run: Runner) -> dict[str, str]:
    """Return pip's settings; do not start it, which takes 0.4 s, where it would read no file."""
    if os.environ.get("PIP_CONFIG_FILE") == os.devnull:
        variables = (one for one in os.environ.items() if one[0].startswith("PIP_"))
        return {name[4:].lower().replace("_", "-"): value for name, value in variables}
    argv = [sys.executable, "-m", "pip", "config", "list"]
    return _parse_config(run(argv, timeout=60, check=False).stdout)


def strip_credentials(url: str) -> str:
    """Return a URL without user, password, query (it may hold a token) and fragment, or a path."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    kept = parts.netloc if _ONLY_VARIABLES.fullmatch(user) else host
    # Not urlunsplit: it drops the slashes of git+file:///path.
    return f"{parts.scheme}://{kept}{parts.path}"


def restore_credentials(url: str, known: Iterable[str]) -> str:
    """Return a URL with the user, password and query that one of some URLs for its file has."""
    for full in known:
        if _identify_file(full) == _identify_file(url):
            ours, theirs = urlsplit(url), urlsplit(full)
            query = f"?{theirs.query}" if theirs.query else ""
            fragment = f"#{ours.fragment}" if ours.fragment else ""
            return f"{ours.scheme}://{theirs.netloc}{ours.path}{query}{fragment}"
    return url


def _identify_file(url: str) -> str:
    place = strip_credentials(url)
    path, at, _ = place.rpartition("@")
    return path if at and place.startswith("git+") else place


def _folder(place: str) -> Path | None:
    if place.startswith("file://"):
        return Path(unquote(urlsplit(place).path))
    path = Path(place).expanduser()
    return path if "://" not in place and path.is_absolute() else None


def _link(place: str) -> str:
    """Return a place for ``--find-links``: paths become URLs, as white space ends the option."""
    folder = _folder(place)
    return folder.as_uri() if folder and "://" not in place else place


def _parse_config(listing: str) -> dict[str, str]:
    """Return the settings of ``pip install``: variables win over ``[install]`` and ``[global]``."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        match = _SETTING.fullmatch(line)
        if match and match[1] in sections:
            value = str(ast.literal_eval(match[3]))  # pip writes it with repr()
            sections[match[1]][match[2].replace("_", "-")] = value
    return {name: value for section in sections.values() for name, value in section.items()}


def resolve_place_variables() -> dict[str, str]:
    """Return the variables of pip and uv that name files, for a process in another directory."""
    names = ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT", "UV_BUILD_CONSTRAINT")
    values = {name: os.environ.get(name, "") for name in names}
    return {name: " ".join(_read_places(value)) for name, value in values.items() if value}


def _read_places(*values: str) -> tuple[str, ...]:
    words = [word for value in values for word in value.split()]
    places = [word if "://" in word else str(expand_user(word).absolute()) for word in words]
    return tuple(dict.fromkeys(places))


def is_true(value: str) -> bool:
    """Return whether a variable or setting of pip or uv is switched on."""
    return value.strip().lower() in ("1", "true", "yes", "on")


# --- The commit of a package that comes from a git repository ------------------------------------


@dataclass(frozen=True, kw_only=True)
class GitPin:
    """The commit of a package that comes from a git repository."""

    name: str
    url: str
    revision: str  # the branch or tag that was asked for; empty for the repository's default
    commit: str
    subdirectory: str = ""  # the folder of the package in the repository; empty for the top

    @property
    def label(self) -> str:
        """Return the place of this very commit, without credentials."""
        return f"git+{self.url}@{self.commit}{self.fragment}"

    @property
    def fragment(self) -> str:
        """Return the end of a URL that names the folder; empty for the top."""
        return f"#subdirectory={self.subdirectory}" if self.subdirectory else ""

    @property
    def digest(self) -> Digest:
        """Return the digest that the wheel of this very commit is kept under."""
        return Digest.of(canonical_json([self.url, self.commit, self.subdirectory]))


def make_git_pin(name: str, vcs: PackageVcs) -> GitPin:
    """Return the pin of a package in a lock (PEP 751) that comes from version control."""
    return GitPin(
        name=name,
        url=strip_credentials(vcs.url or ""),
        revision=vcs.requested_revision or "",
        commit=vcs.commit_id,
        subdirectory=vcs.subdirectory or "",
    )
