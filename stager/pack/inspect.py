"""Looking into a bundle without unpacking it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bundle.format.manifest import Manifest

from ..layers.layer_file import decompress_index
from ..layers.prune import noted
from .existing import opened


def inspect(path: Path, *, files: bool, asked: str = "") -> dict[str, Any]:
    """Return the content of a bundle, as the JSON object of ``stager inspect``.

    Args:
        path: the bundle.
        files: true to list every file.
        asked: the id it must have.

    Raises:
        BundleError: it cannot be read, or is damaged.
    """
    with opened(path, asked) as bundle:
        report = _summary(path, bundle.manifest) | {"pruned": noted(bundle).to_json()}
        if files:
            report["listing"] = [
                {
                    "layer": layer.name,
                    "path": entry.path,
                    "size": entry.size,
                    "sha256": entry.sha256,
                }
                for layer in bundle.manifest.layers
                for entry in bundle.index(layer, bundle.head(layer), decompress_index).files
            ]
    return report


def _summary(path: Path, manifest: Manifest) -> dict[str, Any]:
    needs = manifest.requires
    pure = needs.libc_version == "0.0"
    libc = f"any {needs.libc}" if pure else f"{needs.libc} {needs.libc_version} or newer"
    return {
        "bundle": str(path),
        "id": manifest.id,
        "name": manifest.name,
        "python": needs.python,
        "platform": f"{needs.machine}, {libc}",
        "bundle_bytes": path.stat().st_size,
        "unpacked_bytes": manifest.unpacked_size,
        "files": manifest.files,
        "imports": list(manifest.imports),
        "layers": [
            {
                "kind": layer.kind,
                "name": layer.name,
                "version": layer.version,
                "bytes": layer.size,
                "unpacked_bytes": layer.unpacked_size,
                "files": layer.files,
                "id": layer.id,
            }
            for layer in manifest.layers
        ],
    }
