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

SKIPPED_FILE = "STAGER_TEST_SKIPPED"  # names a file to which each run of pytest adds
OTHERS = "other reasons"
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"  # real data, beside the repository
_PLACES = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
"""Slurm's daemons are not on every user's ``PATH``."""
_VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
_HEADERS = f"python{_VERSION}-dev"

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Programs or files of which one shows that a Debian package is here, if it is not its own name.
_PROOFS = {
    "chromium": BROWSERS,
    "iproute2": ("ip",),
    "libc6-dev": ("/usr/include/stdlib.h",),
    "munge": ("munged",),
    "openssh-client": ("ssh-keygen",),
    "openssh-server": ("sshd",),
    "procps": ("pgrep",),
    _HEADERS: (f"{sysconfig.get_paths()['include']}/Python.h",),
    "slurm-client": ("srun",),
    "squashfs-tools": ("mksquashfs",),
}


@dataclass(frozen=True)
class Requirement:
    title: str  # as in "needs a compiler"
    packages: tuple[str, ...] = ()  # the Debian packages that bring it
    root: bool = False
    namespaces: bool = False
    files: tuple[Path, ...] = ()
    advice: str = ""  # what to do where no package helps
    optional: bool = False  # in CI, too, a test may be skipped for lack of it

    def missing(self) -> str:
        if self.root and os.geteuid() != 0:
            return f"this is user {os.geteuid()}"
        lacking = absent(self.packages)
        if lacking:
            return f"not found: {', '.join(_list_proofs(package)[0] for package in lacking)}"
        for file in self.files:
            if not file.is_file():
                return f"there is no {file}"
        return namespaces_refused() if self.namespaces else ""

    def remedy(self) -> str:
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
_SLURM = ("slurmctld", "slurmd", "slurm-client", "munge")
_SQUASHFS = ("squashfs-tools", "squashfuse")
_PYENV = "install one, with pyenv for example"
# By the name that tests use.
REQUIREMENTS = {
    "access times": Requirement(
        "a temporary directory that keeps access times",
        advice="set TMPDIR to a directory on a local file system not mounted with noatime",
        optional=True,
    ),
    "browser": Requirement("a browser", ("chromium",)),
    "cgroups": Requirement("control groups", advice="mount /sys/fs/cgroup writable", optional=True),
    "compiler": Requirement("a compiler", ("gcc", "libc6-dev", _HEADERS)),
    "data": Requirement(
        "the real test data",
        files=(DATA / "ag_news.csv",),
        advice="it is no part of the repository; the files go into shared/data beside it",
    ),
    "each python": Requirement(
        "other versions of Python", advice="install them, with pyenv for example", optional=True
    ),
    "git": Requirement("git", ("git",)),
    "index": Requirement(
        "a package index", advice="let pip reach one, see: python -m pip config list"
    ),
    "ip": Requirement("ip", ("iproute2",)),
    "ipv6": Requirement("IPv6", advice="enable it on the loopback interface", optional=True),
    "linked python": Requirement(
        "a Python that needs libraries of the system",
        advice="run the tests with one that pyenv or the distribution has built",
    ),
    "movable python": Requirement(
        "another Python that can be moved",
        advice="install one, with uv or pyenv: uv python install 3.12",
    ),
    "namespaces": Requirement("namespaces", root=True, namespaces=True),
    "older python": Requirement("a Python older than 3.9", advice=_PYENV),
    "other python": Requirement("a second version of Python", advice=_PYENV),
    "pip": Requirement(
        "pip in the installed Python", advice="apt-get install python3-pip", optional=True
    ),
    "root": Requirement("root", root=True),
    "slurm": Requirement("Slurm", (*_SLURM, *_HOSTS), root=True, namespaces=True),
    "squashfs": Requirement("squashfs images", _SQUASHFS, root=True, namespaces=True),
    "ssh": Requirement("an SSH server", ("openssh-server", *_HOSTS), root=True, namespaces=True),
    "ssh-keygen": Requirement("ssh-keygen", ("openssh-client",)),
    "sshd": Requirement("sshd", ("openssh-server",), root=True),
    "strace": Requirement("strace", ("strace",)),
    "system python": Requirement("the system's Python", files=(Path("/usr/bin/python3"),)),
    "tar": Requirement("tar", ("tar",)),
    "zstd": Requirement("zstd", ("zstd",)),
}


def found(proof: str) -> bool:
    if proof.startswith("/"):
        return Path(proof).is_file()
    return shutil.which(proof, path=_PLACES) is not None


def absent(packages: Iterable[str]) -> list[str]:
    return [package for package in packages if not any(map(found, _list_proofs(package)))]


def _list_proofs(package: str) -> Sequence[str]:
    return _PROOFS.get(package, (package,))


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
    added: Counter[str] = Counter()
    for line in file.read_text("utf-8").splitlines():
        added.update(json.loads(line))
    return added


def main(arguments: Sequence[str]) -> None:
    """Print the missing packages, one a line; or with a file, the summary of what it holds."""
    if arguments:
        print(summary(total(Path(arguments[0]))))
    else:
        packages = {name for one in REQUIREMENTS.values() for name in one.packages}
        for package in absent(sorted(packages)):
            print(package)


if __name__ == "__main__":
    main(sys.argv[1:])
