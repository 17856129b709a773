"""Refusals of a resolver's answer that does not match the project's requirements."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from packaging.utils import canonicalize_name

from ..core.errors import ResolveError
from ..core.values import LockedFile
from .resolver import ResolvedFile
from .spec import Spec

_CUDA_NAME = re.compile(r"nvidia-.+|triton|pytorch-triton.*|cuda-.+")
_CUDA_LOCAL = re.compile(r"(cu|rocm)\d")


def refuse_cuda(files: Sequence[ResolvedFile], requested: Collection[str]) -> None:
    """Refuse CUDA packages, several GB that a CPU build of PyTorch does not need."""
    versions = dict(file.identity for file in files)
    packages = []
    for name, version in sorted(versions.items()):
        if _CUDA_NAME.fullmatch(name) or _CUDA_LOCAL.match(version.local or ""):
            packages.append(f"{name} {version}")
    named = [name for name in sorted(versions) if name in requested and _CUDA_NAME.fullmatch(name)]
    if named and all(package.partition(" ")[0] in named for package in packages):
        raise ResolveError(
            f'torch-backend is "cpu", but the requirements name {", ".join(named)}, which is for '
            "GPUs only",
            hint="leave it out of the requirements, or set environment.torch-backend to what the "
            "nodes have",
            context=packages,
        )
    if packages:
        raise ResolveError(
            f'torch-backend is "cpu", but the lock pulls {len(packages)} CUDA packages',
            hint="pin a CPU build that your indexes or --find-links folders have "
            "(torch==VERSION+cpu), or set environment.torch-backend to what the nodes have",
            context=packages,
        )


def refuse_other_build(
    files: Sequence[ResolvedFile], backend: str | None, silent: str | None
) -> None:
    """Refuse another build of PyTorch, chosen because the index of the right one did not answer."""
    if silent is None or backend == "cpu":
        return
    torch = dict(file.identity for file in files).get(canonicalize_name("torch"))
    if torch is not None and torch.local != backend:
        raise ResolveError(
            f'torch-backend is "{backend}", but only torch {torch} is available, which is a '
            "different build",
            hint=f"give an index or a --find-links folder with torch {torch.public}+{backend}",
        )


def refuse_other_files(files: Sequence[LockedFile], spec: Spec, built: Collection[str]) -> None:
    """Refuse files with other hashes, or without required ones unless built of checked sources."""
    others = [
        f"{file.filename}: its sha256 is {file.sha256}, which is not among the hashes given"
        for file in files
        if not _is_allowed(file, spec)
    ]
    if others:
        raise ResolveError(
            "the hashes in the requirement files do not allow these files",
            hint="an index offers a different file of that version: name the index that the "
            "hashes come from with --index-url in the requirement file, or regenerate the hashes",
            context=others,
        )
    bare = [file for file in files if file.name not in spec.hashes and file.filename not in built]
    if spec.require_hashes and bare:
        raise ResolveError(
            f"{spec.require_hashes} requires a hash of every file, also of those that others need",
            hint="write all packages with their hashes, for example with `uv pip compile "
            "--generate-hashes`",
            context=[f"{f.name}=={f.version} has no hash in the requirements" for f in bare],
        )


def _is_allowed(file: LockedFile, spec: Spec) -> bool:
    """Apply the hashes; unless they are required, pass the build that torch-backend asks for."""
    if file.name not in spec.hashes or file.sha256 in spec.hashes[file.name]:
        return True
    if spec.require_hashes:
        return False
    return spec.torch_backend is not None and file.version.local == spec.torch_backend
