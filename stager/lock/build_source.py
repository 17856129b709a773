"""The source files of a local project, their digest, and a copy of them.

What git ignores, and what builds leave behind, does not count, or a build would change its own
input. Git is asked: a tracked file counts, whatever the patterns; a user's global excludes do not.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shutil
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import filterfalse
from pathlib import Path

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    NormalizedName,
    parse_sdist_filename,
    parse_wheel_filename,
)

from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import canonical_json
from bundle.regex import compile_lazily

from ..core import toml
from ..core.errors import ResolveError, StagerError
from ..core.processes import run
from ..core.store import digest_file
from ..core.values import Digest
from .indexes import Indexes


@dataclass(frozen=True, kw_only=True)
class SourceRequirement:
    """A source that is built into a wheel before anything is resolved."""

    requirement: str  # the path or URL that pip builds; may hold credentials
    label: str  # as the user wrote it, without credentials
    digest: Digest  # digest of its content, or of its URL where the content is elsewhere
    suffix: str = ""
    marker: str = ""
    moving: bool = False  # True if its content may change, as for a branch


_LEFT_BEHIND = (
    *(".git", ".hg", ".svn", ".tox", ".nox", ".venv", ".mypy_cache", ".ruff_cache"),
    *(".pytest_cache", "__pycache__", "node_modules", "build", "dist", "*.egg-info", "*.pyc"),
    *("pylock.toml", "pylock.*.toml"),
)
_FROM_GIT = compile_lazily(
    rb"setuptools[-_](scm|git)|use_scm_version|hatch[-_]vcs|versioneer|versioningit|dunamai|"
    rb"dynamic-versioning|\bpbr\b|git.{0,4}describe|source *= *[\"']scm[\"']"
)
_NAMES_AT_ONCE = 1000


def _list_files(root: Path, *, skip: Iterable[Path] = ()) -> list[Path]:
    skipped = tuple(skip)
    counted = []
    for relative in _list_git_files(root) or _walk(root):
        path = root / relative
        left_out = any(map(path.is_relative_to, skipped))
        left_out = left_out or any(map(_is_left_behind, relative.parts))
        if not left_out and (path.is_file() or path.is_symlink()):
            counted.append(relative)
    return sorted(counted)


def digest_content(path: Path, *, skip: Iterable[Path] = ()) -> Digest:
    """Return the digest of a file, or of names, contents and executable bits of a project."""
    if path.is_file():
        return digest_file(path)
    state = hashlib.sha256()
    for name in _list_files(path, skip=skip):
        file = path / name
        executable = "x" if os.access(file, os.X_OK) else "-"
        link = f"link {file.readlink()}" if file.is_symlink() else ""
        line = f"{name.as_posix()}\0{link or f'{executable} {digest_file(file)}'}\n"
        state.update(line.encode(errors="surrogateescape"))
    return Digest(state.hexdigest())


def copy_to_build(root: Path, to: Path) -> Path:
    """Copy a project, with git's history if its version needs it: builds write into it."""
    found = (folder for folder in (root, *root.parents) if (folder / ".git").exists())
    repository = next(found, None) if _is_versioned_by_git(root) else None
    top = repository or root
    copied = to / (top.name or "repository")
    folder = copied / root.relative_to(top)
    for name in _list_files(root):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, folder / name, follow_symlinks=False)
    if repository is not None:
        _add_history(repository, copied, to / "history")
    return folder


def _is_versioned_by_git(root: Path) -> bool:
    files = (root / name for name in ("pyproject.toml", "setup.py", "setup.cfg"))
    return any(path.is_file() and _FROM_GIT.search(path.read_bytes()) for path in files)


def _add_history(top: Path, copied: Path, scratch: Path) -> None:
    """Make a copy of a repository's files a work tree that is at the same commit."""

    def git(*argv: str) -> str:
        return run(["git", "-C", str(copied), *argv], timeout=600, check=False).stdout

    git("clone", "-q", "--shared", "--no-checkout", str(top), str(scratch))
    if not (scratch / ".git").is_dir():  # not ours, or no repository: the build says what it needs
        return
    (scratch / ".git").rename(copied / ".git")
    git("reset", "-q")
    # What was not copied is not to count as removed: each version would be that of a change.
    missing = list(filter(None, git("ls-files", "-d", "-z").split("\0")))
    for start in range(0, len(missing), _NAMES_AT_ONCE):
        names = missing[start : start + _NAMES_AT_ONCE]
        git("update-index", "--skip-worktree", "--", *names)


def _is_left_behind(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in _LEFT_BEHIND)


def _list_git_files(root: Path) -> list[Path]:
    """Return the files git tracks or would track; none outside of a work tree or without git."""
    if not any((folder / ".git").exists() for folder in (root, *root.parents)):
        return []
    argv = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = run(argv, timeout=60).stdout
    except StagerError:
        return []
    return [Path(name) for name in dict.fromkeys(listing.split("\0")) if name]


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        kept = filterfalse(_is_left_behind, folders)
        folders[:] = [name for name in kept if not (here / name / "pyvenv.cfg").exists()]
        linked = [name for name in folders if (here / name).is_symlink()]
        for name in (*names, *linked):
            yield here.relative_to(root) / name


# --- Building from source: what a build is given, what it needs, and what to do where it fails

NEED_NVCC = {  # their builds call NVIDIA's compiler, and take an hour
    *("apex", "causal-conv1d", "cumm", "flash-attn", "flash-attn-3", "grouped-gemm", "mamba-ssm"),
    *("natten", "spconv", "torch-cluster", "torch-scatter", "torch-sparse", "torch-spline-conv"),
    *("transformer-engine-torch", "vllm-flash-attn"),
}
BUILT_AGAINST = {  # a build without isolation may take headers or code from these
    *("torch", "torchvision", "torchaudio", "triton", "jax", "jaxlib", "tensorflow", "numpy"),
    *("scipy", "pyarrow", "cython", "pybind11", "nanobind", "cffi", "mpi4py", "setuptools"),
}
TAIL_LINES = 12
_CUDA_SETUP = compile_lazily(rb"CUDAExtension|\bnvcc\b")
_PART = compile_lazily(r"^\W*\[\d+ lines of output\]\s*$|^\s*\[end of output\]\s*$")
_LARGEST = 1 << 20  # bytes that are read of a file of a source


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """The settings of builds from source."""

    in_environment: frozenset[NormalizedName] = frozenset()  # packages built without isolation
    variables: Mapping[str, str] = field(default_factory=dict)
    launcher: tuple[str, ...] = ()

    def key(self, name: str, source: Digest, against: Sequence[str]) -> str:
        """Return the name of a built wheel's folder: its source's digest, and how it was built."""
        used = list(against) if name in self.in_environment else []
        if not self.variables and not used:
            return source
        made_with = Digest.of(canonical_json([dict(self.variables), used]))
        return f"{source}.{made_with[:12]}"


def list_build_variables(packages: Path) -> dict[str, str]:
    """Return the variables with which a build finds the packages, and the programs, of a folder."""
    programs = os.pathsep.join([str(packages / "bin"), os.environ.get("PATH", os.defpath)])
    return {"PYTHONPATH": str(packages), "PATH": programs}


def find_nvcc(env: Mapping[str, str]) -> str | None:
    """Return the path of NVIDIA's compiler; None where it is not found."""
    homes = [env[name] for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    folders = [env.get("PATH", os.defpath), *(f"{home}/bin" for home in homes)]
    return shutil.which("nvcc", path=os.pathsep.join([*folders, "/usr/local/cuda/bin"]))


def refuse_without_nvcc(names: Iterable[str], builds: BuildSettings) -> None:
    """Refuse packages whose build needs NVIDIA's compiler, if it is missing."""
    needing = sorted(names)
    if not needing or builds.launcher or any("SKIP_CUDA" in name for name in builds.variables):
        return
    if find_nvcc({**os.environ, **builds.variables}) is not None:
        return
    raise ResolveError(
        f"{', '.join(needing)}: to be built from source, which needs NVIDIA's compiler, and there "
        "is no nvcc on this machine",
        hint="load it (module load cuda, or CUDA_HOME in environment.build-env), build with "
        "--on-node, or name a place of a prebuilt wheel in environment.find-links",
    )


def list_certain_builds(
    requested: Iterable[NormalizedName], builds: BuildSettings, indexes: Indexes
) -> list[str]:
    """Return requested packages that need nvcc and must come from source: PyPI has no wheels."""
    places = indexes.find_links
    wheels, sources = list_distributions(places)
    is_remote = bool(indexes.urls) or not all(map(is_folder, places))
    certain = NEED_NVCC & builds.in_environment if is_remote else NEED_NVCC
    unbuilt = [name for name in dict.fromkeys(requested) if name not in wheels]
    return [
        name for name in unbuilt if name in certain or any(map(_names_cuda, sources.get(name, ())))
    ]


def is_folder(place: str) -> bool:
    """Tell whether a place for links is a folder of this machine, and no URL."""
    try:
        return "://" not in place and os.access(place, os.R_OK | os.X_OK) and Path(place).is_dir()
    except (OSError, ValueError):
        return False


def needs_nvcc(name: NormalizedName, path: Path | None) -> bool:
    """Tell whether the build of a package calls NVIDIA's compiler, by its name or its source."""
    return name in NEED_NVCC or (path is not None and _names_cuda(path))


def extract_build_output(output: str) -> list[str]:
    """Return the last lines that a failed build has written, without what pip puts around them."""
    lines = output.splitlines()
    marks = [number for number, line in enumerate(lines) if _PART.match(line)]
    if len(marks) >= 2:
        lines = lines[marks[0] + 1 : marks[1]]
    kept = [re.sub(r"^\s*(│|\|)?\s{0,6}", "", line).rstrip() for line in lines]
    return [line for line in kept if line][-TAIL_LINES:]


_ADVICE = {
    r"nvcc|CUDA_HOME": "load NVIDIA's compiler (module load cuda), or build on a node: "
    "stager build --on-node",
    r"(?i)Killed|signal 9|cannot allocate memory|out of memory": "it ran out of memory: set "
    'build-env = { MAX_JOBS = "2" } in [environment]',
    r"gcc|g\+\+|cc1plus|Python\.h": "a compiler or header is missing or failed: install it, or "
    "build on a node: --on-node",
    "": "name a folder with a prebuilt wheel in environment.find-links, or ask for another version",
}


def advise_on_failed_build(name: str, output: str) -> str:
    """Return what to do about a failed build."""
    missing = re.search(r"No module named '([\w.]+)'", output)
    if missing:
        return (
            f'its build imports {missing[1]}: write no-build-isolation = ["{name}"] into '
            f"[environment], and {missing[1].partition('.')[0]} among the requirements"
        )
    return next(advice for words, advice in _ADVICE.items() if re.search(words, output))


def build_requires(source: Path) -> list[str]:
    """Return what the build of a source tree or sdist asks to be installed first (PEP 518)."""
    try:
        document = toml.loads(_member(source, "pyproject.toml").decode("utf-8", "replace"), source)
    except StagerError:
        document = {}
    listed = toml.get_table(document, "build-system").get("requires")
    return [str(text) for text in listed] if isinstance(listed, list) else ["setuptools", "wheel"]


def list_distributions(places: Iterable[str]) -> tuple[set[str], dict[str, list[Path]]]:
    """Return the packages that folders have wheels of, and the sdists of each in them."""
    wheels: set[str] = set()
    sources: dict[str, list[Path]] = {}
    for folder in (Path(place) for place in places if is_folder(place)):
        for path in sorted(folder.iterdir()):
            try:
                if path.suffix == ".whl":
                    wheels.add(parse_wheel_filename(path.name)[0])
                elif path.name.endswith((".tar.gz", ".zip")):
                    sources.setdefault(parse_sdist_filename(path.name)[0], []).append(path)
            except (InvalidWheelFilename, InvalidSdistFilename):
                continue
    return wheels, sources


def _names_cuda(path: Path) -> bool:
    return bool(_CUDA_SETUP.search(_member(path, "setup.py")))


def _member(path: Path, name: str) -> bytes:
    try:
        if path.is_dir():
            return (path / name).read_bytes()[:_LARGEST]
        if path.name.endswith(".zip"):
            with zipfile.ZipFile(path) as archive:
                return archive.read(f"{path.name.removesuffix('.zip')}/{name}")[:_LARGEST]
        with tarfile.open(path) as tar:
            member = tar.extractfile(f"{path.name.removesuffix('.tar.gz')}/{name}")
            return b"" if member is None else member.read(_LARGEST)
    except (OSError, KeyError, tarfile.TarError, zipfile.BadZipFile):
        return b""
