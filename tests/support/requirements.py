"""What some tests need beyond Python: how it is recognised, and how to get it.

``scripts/test`` runs this file before it fills the environment: only the standard library is here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SKIPPED_FILE = "STAGER_TEST_SKIPPED"
"""A variable that names a file to which every run of pytest adds what it skipped."""
OTHERS = "other reasons"
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
"""Real data, beside the repository."""
_PLACES = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
"""Slurm's daemons are not on every user's ``PATH``."""
_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
_HEADERS = f"python{_VERSION}-dev"

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_PROOFS = {
    "chromium": BROWSERS,
    "gcc": ("gcc",),
    "git": ("git",),
    "iproute2": ("ip",),
    "libc6-dev": ("/usr/include/stdlib.h",),
    "munge": ("munged",),
    "openssh-client": ("ssh-keygen",),
    "openssh-server": ("sshd",),
    "procps": ("pgrep",),
    _HEADERS: (f"{sysconfig.get_paths()['include']}/Python.h",),
    "slurm-client": ("srun",),
    "slurmctld": ("slurmctld",),
    "slurmd": ("slurmd",),
    "squashfs-tools": ("mksquashfs",),
    "squashfuse": ("squashfuse",),
    "strace": ("strace",),
    "tar": ("tar",),
    "zstd": ("zstd",),
}
"""A Debian package, and programs or files of which one shows that nobody needs to install it."""


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """Something that not every machine has."""

    title: str
    """As in "needs a compiler"."""
    packages: tuple[str, ...] = ()
    """The Debian packages that bring it."""
    root: bool = False
    namespaces: bool = False
    files: tuple[Path, ...] = ()
    advice: str = ""
    """What to do where no package helps."""
    optional: bool = False
    """In CI, too, a test may be skipped for lack of it."""

    def missing(self) -> str:
        if self.root and os.geteuid() != 0:
            return f"this is user {os.geteuid()}"
        lacking = absent(self.packages)
        if lacking:
            return f"not found: {', '.join(_PROOFS[package][0] for package in lacking)}"
        for file in self.files:
            if not file.is_file():
                return f"there is no {file}"
        return namespaces_refused() if self.namespaces else ""

    def remedy(self) -> str:
        """Say what to do on this machine."""
        steps = [self.advice] if self.advice else []
        if self.root and os.geteuid() != 0:
            steps.append("run scripts/test as root")
        elif self.namespaces and namespaces_refused():
            steps.append("in a container: give it --privileged")
        lacking = absent(self.packages)
        if lacking:
            steps.append(f"apt-get install {' '.join(lacking)}")
        return "; ".join(steps)


_HOSTS = ("iproute2", "procps")
_PYENV = "install one, with pyenv for example"
REQUIREMENTS = {
    "access times": Requirement(
        title="a temporary directory that keeps access times",
        advice="set TMPDIR to a directory on a local file system not mounted with noatime",
        optional=True,
    ),
    "browser": Requirement(title="a browser", packages=("chromium",)),
    "cgroups": Requirement(
        title="control groups", advice="mount /sys/fs/cgroup writable", optional=True
    ),
    "compiler": Requirement(title="a compiler", packages=("gcc", "libc6-dev", _HEADERS)),
    "data": Requirement(
        title="the real test data",
        files=(DATA / "ag_news.csv",),
        advice="it is no part of the repository; the files go into shared/data beside it",
    ),
    "each python": Requirement(
        title="other versions of Python",
        advice="install them, with pyenv for example",
        optional=True,
    ),
    "git": Requirement(title="git", packages=("git",)),
    "index": Requirement(
        title="a package index", advice="let pip reach one, see: python -m pip config list"
    ),
    "ip": Requirement(title="ip", packages=("iproute2",)),
    "ipv6": Requirement(title="IPv6", advice="enable it on the loopback interface", optional=True),
    "linked python": Requirement(
        title="a Python that needs libraries of the system",
        advice="run the tests with one that pyenv or the distribution has built",
    ),
    "movable python": Requirement(
        title="another Python that can be moved",
        advice="install one, with uv or pyenv: uv python install 3.12",
    ),
    "namespaces": Requirement(title="namespaces", root=True, namespaces=True),
    "older python": Requirement(title="a Python older than 3.9", advice=_PYENV),
    "other python": Requirement(title="a second version of Python", advice=_PYENV),
    "pip": Requirement(
        title="pip in the installed Python", advice="apt-get install python3-pip", optional=True
    ),
    "root": Requirement(title="root", root=True),
    "slurm": Requirement(
        title="Slurm",
        packages=("slurmctld", "slurmd", "slurm-client", "munge", *_HOSTS),
        root=True,
        namespaces=True,
    ),
    "squashfs": Requirement(
        title="squashfs images",
        packages=("squashfs-tools", "squashfuse"),
        root=True,
        namespaces=True,
    ),
    "ssh": Requirement(
        title="an SSH server", packages=("openssh-server", *_HOSTS), root=True, namespaces=True
    ),
    "ssh-keygen": Requirement(title="ssh-keygen", packages=("openssh-client",)),
    "sshd": Requirement(title="sshd", packages=("openssh-server",), root=True),
    "strace": Requirement(title="strace", packages=("strace",)),
    "system python": Requirement(title="the system's Python", files=(Path("/usr/bin/python3"),)),
    "tar": Requirement(title="tar", packages=("tar",)),
    "zstd": Requirement(title="zstd", packages=("zstd",)),
}
"""By the name that tests use."""


def found(proof: str) -> bool:
    """Tell whether a program, or a file with its full path, is here."""
    if proof.startswith("/"):
        return Path(proof).is_file()
    return shutil.which(proof, path=_PLACES) is not None


def absent(packages: Iterable[str]) -> list[str]:
    """Those packages of which nothing is found here."""
    return [package for package in packages if not any(map(found, _PROOFS[package]))]


@cache
def namespaces_refused() -> str:
    """Describe why no namespaces can be made here; empty if they can."""
    argv = ["unshare", "--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "true"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False).stderr.strip()
    except OSError as exc:
        return str(exc)


def reason(name: str, detail: str) -> str:
    """Say why a test is skipped; :func:`title_of` finds the requirement in it."""
    required = REQUIREMENTS[name]
    remedy = required.remedy()
    return f"needs {required.title} ({detail}){remedy and ': '}{remedy}"


def title_of(reason: str) -> str:
    """The title of the requirement for which a test was skipped."""
    said = reason.removeprefix("Skipped: ")
    for required in REQUIREMENTS.values():
        if said.startswith(f"needs {required.title} ("):
            return required.title
    return OTHERS


def summary(skipped: Counter[str]) -> str:
    """Say in one line how many tests were skipped for what, and what would bring them back."""
    remedies = {required.title: required.remedy() for required in REQUIREMENTS.values()}
    parts = []
    for title, number in skipped.most_common():
        verb = "for" if title == OTHERS else "needs" if number == 1 else "need"
        remedy = remedies.get(title, "said above")
        parts.append(f"{number} {verb} {title}{remedy and f' ({remedy})'}")
    return f"skipped: {', '.join(parts)}" if parts else "skipped: none"


def note(skipped: Counter[str]) -> None:
    """Append the numbers to the file that ``scripts/test`` adds up at the end."""
    if SKIPPED_FILE in os.environ:
        with Path(os.environ[SKIPPED_FILE]).open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(skipped) + "\n")


def total(file: Path) -> Counter[str]:
    """Add up what several runs of pytest noted."""
    added: Counter[str] = Counter()
    for line in file.read_text("utf-8").splitlines():
        added.update(json.loads(line))
    return added


def main(arguments: Sequence[str]) -> None:
    """Print the missing packages, one a line; or with a file, the summary of what it holds."""
    if arguments:
        print(summary(total(Path(arguments[0]))))
    else:
        for package in absent(_PROOFS):
            print(package)


if __name__ == "__main__":
    main(sys.argv[1:])
