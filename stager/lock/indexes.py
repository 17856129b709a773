"""Package indexes: which ones to ask, and keeping their credentials out of files and messages.

The options are those of pip's requirement files, and are handed to pip and to uv in that form: both
read it, both expand ``${NAME}`` in it from the environment, and neither a process list nor a log
shows what stands in a file.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from ..core.processes import Runner, run

TORCH_INDEX = "https://download.pytorch.org/whl/"

# What pip and uv expand from the environment when they read a requirement file.
_VARIABLE = r"\$\{[A-Z0-9_]+\}"
_ONLY_VARIABLES = re.compile(rf"{_VARIABLE}(:{_VARIABLE})?")


@dataclass(frozen=True, kw_only=True)
class Indexes:
    """Where packages are looked for, in the terms of pip's options."""

    index_url: str | None = None
    """The first index; None for pip's own choice."""
    extra_index_urls: tuple[str, ...] = ()
    """Further indexes; the best version over all of them wins, as pip does it."""
    find_links: tuple[str, ...] = ()
    """Folders, or pages, that hold distribution files."""
    no_index: bool = False
    """Whether only ``find_links`` counts."""
    trusted_hosts: tuple[str, ...] = ()
    """Hosts that are asked without checking their certificate."""
    only_binary: tuple[str, ...] = ()
    """Packages that are never built from source; ``:all:`` for every one."""
    no_binary: tuple[str, ...] = ()
    """Packages that are always built from source."""
    pre: bool = False
    """Whether pre-releases count."""

    def lines(self) -> list[str]:
        """The options as the lines of a requirement file."""
        out = ["--no-index"] if self.no_index else []
        if self.index_url and not self.no_index:
            out.append(f"--index-url {self.index_url}")
        if not self.no_index:
            out.extend(f"--extra-index-url {url}" for url in self.extra_index_urls)
        out.extend(f"--find-links {_link(place)}" for place in self.find_links)
        out.extend(f"--only-binary {name}" for name in self.only_binary)
        out.extend(f"--no-binary {name}" for name in self.no_binary)
        return out

    def pip_lines(self) -> list[str]:
        """The same, with the options that only pip reads from a file."""
        trusted = [f"--trusted-host {host}" for host in self.trusted_hosts]
        return [*self.lines(), *trusted, *(["--pre"] if self.pre else [])]

    def plus(self, other: Indexes) -> Indexes:
        """Both together; where there can be only one, the other's wins."""
        return Indexes(
            index_url=other.index_url or self.index_url,
            extra_index_urls=_merge(self.extra_index_urls, other.extra_index_urls),
            find_links=_merge(self.find_links, other.find_links),
            no_index=self.no_index or other.no_index,
            trusted_hosts=_merge(self.trusted_hosts, other.trusted_hosts),
            only_binary=_merge(self.only_binary, other.only_binary),
            no_binary=_merge(self.no_binary, other.no_binary),
            pre=self.pre or other.pre,
        )

    def without_credentials(self) -> Indexes:
        """The same places, fit to be written down; ``${NAME}`` stays, since it tells nothing."""
        return replace(
            self,
            index_url=strip_credentials(self.index_url) if self.index_url else None,
            extra_index_urls=tuple(strip_credentials(url) for url in self.extra_index_urls),
            find_links=tuple(strip_credentials(place) for place in self.find_links),
        )

    def with_credentials_from(self, other: Indexes) -> Indexes:
        """The same places, each with the credentials that the other has for it."""
        known = [
            url for url in (other.index_url, *other.extra_index_urls, *other.find_links) if url
        ]
        full = {strip_credentials(url): url for url in known}
        return replace(
            self,
            index_url=full.get(self.index_url, self.index_url) if self.index_url else None,
            extra_index_urls=tuple(full.get(url, url) for url in self.extra_index_urls),
            find_links=tuple(full.get(place, place) for place in self.find_links),
        )

    def as_dict(self) -> dict[str, object]:
        """What is not at its default, without credentials, for a lock."""
        clean = self.without_credentials()
        values: dict[str, object] = {
            "index-url": clean.index_url,
            "extra-index-urls": list(clean.extra_index_urls),
            "find-links": list(clean.find_links),
            "no-index": clean.no_index,
            "trusted-hosts": list(clean.trusted_hosts),
            "only-binary": list(clean.only_binary),
            "no-binary": list(clean.no_binary),
            "pre": clean.pre,
        }
        return {key: value for key, value in values.items() if value}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Indexes:
        """Read what :meth:`as_dict` gave; unknown keys are left aside."""

        def texts(key: str) -> tuple[str, ...]:
            found = data.get(key)
            return tuple(str(item) for item in found) if isinstance(found, list) else ()

        url = data.get("index-url")
        return cls(
            index_url=url if isinstance(url, str) else None,
            extra_index_urls=texts("extra-index-urls"),
            find_links=texts("find-links"),
            no_index=data.get("no-index") is True,
            trusted_hosts=texts("trusted-hosts"),
            only_binary=texts("only-binary"),
            no_binary=texts("no-binary"),
            pre=data.get("pre") is True,
        )


@dataclass(frozen=True, kw_only=True)
class PipSettings:
    """What pip is configured with, in its files and in ``PIP_*`` variables."""

    indexes: Indexes
    """The places it looks in."""
    environment: Mapping[str, str]
    """Variables that give uv pip's certificate, proxy, time limit and key ring."""


def pip_settings(run: Runner = run) -> PipSettings:
    """Ask pip how it is configured, so that uv, which reads none of it, can be told.

    Raises:
        StagerError: pip cannot be started.
    """
    argv = [sys.executable, "-m", "pip", "config", "list"]
    values = _parse_config(run(argv, timeout=60, check=False).stdout)
    return PipSettings(
        indexes=Indexes(
            index_url=values.get("index-url") or None,
            extra_index_urls=tuple(values.get("extra-index-url", "").split()),
            find_links=tuple(values.get("find-links", "").split()),
            no_index=_true(values.get("no-index", "")),
            trusted_hosts=tuple(values.get("trusted-host", "").split()),
            only_binary=_names(values.get("only-binary", "")),
            no_binary=_names(values.get("no-binary", "")),
            pre=_true(values.get("pre", "")),
        ),
        environment=_uv_environment(values),
    )


def strip_credentials(url: str) -> str:
    """A URL or path without user, password, query and fragment.

    A token may stand in the query as well, and nothing that is fetched by file name needs one.
    """
    if "://" not in url:
        return url
    parts = urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    kept = f"{user}@{host}" if _ONLY_VARIABLES.fullmatch(user) else host
    # Not urlunsplit: it drops the slashes of git+file:///path.
    return f"{parts.scheme}://{kept}{parts.path}"


def _link(place: str) -> str:
    """A place for ``--find-links``; white space would end the option, so paths become URLs."""
    path = Path(place).expanduser()
    return path.as_uri() if "://" not in place and path.is_absolute() else place


def _merge(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*first, *second]))


def _parse_config(listing: str) -> dict[str, str]:
    """The settings that hold for ``pip install``: variables, then ``[install]``, ``[global]``."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listing.splitlines():
        match = re.fullmatch(r"(:env:|[\w-]+)\.([\w-]+)=(.*)", line)
        if match and match[1] in found:
            try:
                found[match[1]][match[2].replace("_", "-")] = str(ast.literal_eval(match[3]))
            except (ValueError, SyntaxError):  # a form of quoting we do not know
                continue
    return {**found["global"], **found["install"], **found[":env:"]}


def _uv_environment(values: Mapping[str, str]) -> dict[str, str]:
    """Variables that uv documents, for those of pip's settings that have one."""
    wanted = {
        "SSL_CERT_FILE": values.get("cert", ""),
        "SSL_CLIENT_CERT": values.get("client-cert", ""),
        "UV_HTTP_TIMEOUT": values.get("timeout", "") or values.get("default-timeout", ""),
        "UV_INSECURE_HOST": " ".join(values.get("trusted-host", "").split()),
        "ALL_PROXY": values.get("proxy", ""),
    }
    if values.get("keyring-provider") == "subprocess":
        wanted["UV_KEYRING_PROVIDER"] = "subprocess"
    return {name: value for name, value in wanted.items() if value and name not in os.environ}


def _names(value: str) -> tuple[str, ...]:
    return tuple(name for name in re.split(r"[\s,]+", value) if name)


def _true(value: str) -> bool:
    return value.strip().lower() in ("1", "true", "yes", "on")
