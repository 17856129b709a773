"""The values that pass between the stages: targets, locked files, fetched wheels."""

from __future__ import annotations

import platform as host
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import Digest
from bundle.system.own_program import short_version

from .errors import ConfigError

if TYPE_CHECKING:
    from packaging.markers import Environment
    from packaging.tags import Tag
    from packaging.utils import NormalizedName
    from packaging.version import Version

__all__ = ["Digest", "LockedFile", "Target", "Wheel", "libc_version"]

_PLATFORM = re.compile(r"(manylinux|musllinux)_(\d+)_(\d+)_(\w+)")
_LEGACY = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
"""The platform tags before PEP 600, with the glibc that each stands for."""
_PYTHON = re.compile(r"3\.\d+")


@dataclass(frozen=True, kw_only=True)
class Target:
    """The interpreter and platform an environment is built for."""

    python: str  # version of CPython as ``major.minor``, for example ``3.11``
    platform: str  # a PEP 600 platform tag: the newest libc that the nodes have, and their machine

    def __post_init__(self) -> None:
        if not _PYTHON.fullmatch(self.python):
            raise ConfigError(
                f"environment.python: {self.python!r} is not a Python version",
                hint='write it as major.minor, for example "3.11"',
            )
        if not _PLATFORM.fullmatch(self.platform):
            raise ConfigError(
                f"environment.platform: {self.platform!r} is not a Linux platform tag",
                hint='write it as in wheel names, for example "manylinux_2_28_x86_64"',
            )

    @classmethod
    def from_host(cls) -> Target:
        """Return the target of this interpreter on this machine."""
        return cls(python=short_version(), platform=_host_platform())

    @property
    def python_tag(self) -> str:
        """Return the interpreter's wheel tag, for example ``cp311``."""
        return "cp" + self.python.replace(".", "")

    @property
    def machine(self) -> str:
        """Return the processor architecture, for example ``x86_64``."""
        return self.platform.split("_", 3)[3]

    @property
    def libc(self) -> tuple[str, tuple[int, int]]:
        """Return the C library and the newest version a wheel may need: ``("glibc", (2, 28))``."""
        kind, major, minor, _ = self.platform.split("_", 3)
        return "glibc" if kind == "manylinux" else "musl", (int(major), int(minor))

    @property
    def is_host_python(self) -> bool:
        """Return whether the running interpreter has the target's version."""
        return self.python == short_version()

    def platforms(self) -> list[str]:
        """Return every platform tag that a wheel for this target may have, best first."""
        kind, machine = self.platform.partition("_")[0], self.machine
        libc, (major, newest) = self.libc
        is_glibc = libc == "glibc"
        names = []
        for minor in range(newest, 4 if is_glibc else -1, -1):
            names.append(f"{kind}_{major}_{minor}")
            names += [name for name, at in _LEGACY.items() if is_glibc and at == (major, minor)]
        return [f"{name}_{machine}" for name in (*names, "linux")]

    def tags(self) -> Iterator[Tag]:
        """Yield every wheel tag that fits, best first, as an installer on the target does."""
        from packaging import tags

        version, platforms = tuple(map(int, self.python.split("."))), self.platforms()
        yield from tags.cpython_tags(version, platforms=platforms)
        yield from tags.compatible_tags(version, self.python_tag, platforms)

    def environment(self) -> Environment:
        """Return the values of environment markers on the target (PEP 508)."""
        full_version = host.python_version() if self.is_host_python else f"{self.python}.0"
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": full_version,
            "python_version": self.python,
            "sys_platform": "linux",
        }


@dataclass(frozen=True, kw_only=True)
class LockedFile:
    """One file of the lock: the exact distribution a package is installed from."""

    name: NormalizedName
    version: Version
    filename: str  # the file's own name, a wheel's or an sdist's
    sha256: Digest
    size: int | None = None  # its length in bytes, if the lock gives it
    url: str | None = None  # its address, without credentials
    path: Path | None = None  # its path on this machine, for a file from a directory

    @property
    def is_wheel(self) -> bool:
        """Return whether it is a wheel; an sdist is built into one first."""
        return self.filename.endswith(".whl")


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """A wheel in the offline root, its digest checked."""

    name: NormalizedName
    version: Version
    path: Path
    sha256: Digest
    size: int


def libc_version(platform: str) -> tuple[int, int] | None:
    """Return the C library's version in a platform tag (PEP 600, PEP 656 and predecessors)."""
    match = _PLATFORM.fullmatch(platform)
    if match:
        return int(match[2]), int(match[3])
    return _LEGACY.get(platform.partition("_")[0])


def _host_platform() -> str:
    from packaging import tags

    for tag in tags.platform_tags():
        if _PLATFORM.fullmatch(tag):
            return tag
    raise ConfigError(
        f"environment.platform: this machine ({host.system()} {host.machine()}) is not a Linux "
        "that wheels are made for",
        hint='name the nodes\' platform, for example platform = "manylinux_2_28_x86_64"',
    )
