"""The size of a project, beside that of the packages it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bundle.format.manifest import Layer
from bundle.protocol.counts import counted, sized

_MANY_FILES, _MANY_BYTES = 5_000, 50 << 20
"""A project with fewer files and bytes is small, however few its packages have."""


def project_is_large(layers: Sequence[Layer]) -> Iterator[str]:
    """Yield a note where the project has more files or bytes than the packages it needs."""
    files, size = _extent(layers, "project")
    package_files, package_size = _extent(layers, "wheel")
    if files < _MANY_FILES and size < _MANY_BYTES:
        return
    if files > package_files or size > package_size:
        yield (
            f"the project is larger than its packages: {counted(files, 'file')}, {sized(size)}; "
            f"they have {package_files}, {sized(package_size)}. Name what ranks do not need in "
            "project.exclude, and data in assets.paths"
        )


def _extent(layers: Sequence[Layer], kind: str) -> tuple[int, int]:
    chosen = [layer for layer in layers if layer.kind == kind]
    return sum(layer.files for layer in chosen), sum(layer.unpacked_size for layer in chosen)
