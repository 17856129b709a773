"""What must hold of a store and a node root, whatever was done to them."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import zstandard

from bundle.format.archive import BundleFile
from bundle.format.layer import LayerError
from bundle.protocol.problem import NodeError
from tests.support.building import frames_of

from .product import Done, sound, stager
from .rounds import Broken, Round, require
from .world import ANSWER, EXEC


def runs_right(round_: Round) -> Done:
    done = sound(stager(round_, *EXEC))
    require(done.code == 0, "`stager exec` succeeds afterwards", done)
    require(done.out == ANSWER, "what runs is what was built", done)
    return done


def whole_store(offline: Path, *, bundles: bool = True) -> None:
    """Hold that nothing in the store is half of what its name says."""
    for path in sorted((offline / "wheels").glob("*.whl")):
        with zipfile.ZipFile(path) as archive:
            require(archive.testzip() is None, "a wheel in the store is whole", path)
    for path in sorted((offline / "programs").glob("*.pyz")):
        if "." in path.stem:  # compiled from another, which is checked
            require(zipfile.is_zipfile(path), "a program in the store is whole", path)
            continue
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        require(digest == path.stem, "a program in the store has the digest of its name", path)
    for path in sorted((offline / "layers").glob("*.tar.zst") if bundles else ()):
        try:
            frames_of(path)
        except (AssertionError, LayerError, zstandard.ZstdError) as exc:
            raise Broken("a layer in the store is whole", f"{path}: {exc!r}") from exc
    for path in sorted((offline / "bundles").glob("*.pkgs.tar") if bundles else ()):
        try:
            with BundleFile(str(path)) as bundle:
                for layer in bundle.manifest.layers:
                    bundle.head(layer)
                bundle.read_part(bundle.manifest.node)
                named = bundle.manifest.id[:12] in path.name
        except NodeError as exc:
            raise Broken("a bundle in the store is whole", exc) from exc
        require(named, "a bundle in the store has the id of its name", path)


def nothing_half_written(nodes: Path, *more: str) -> None:
    """Hold that unpacking left nothing behind but environments and locks; ``more``: not these."""
    for root in (*nodes.glob("stager-*"), *nodes.glob("stager-*/nodes/*/stager-*")):
        left = [path for name in ("incoming", "jobs", *more) for path in root.glob(f"{name}/*")]
        require(not left, "nothing half-written is left on the node", left)


def nothing_in_tmp(offline: Path) -> None:
    left = list((offline / "tmp").glob("*"))
    require(not left, "nothing is left in the store's tmp", left)


def files_of(folder: Path) -> list[Path]:
    paths = (Path(top, name) for top, _, names in os.walk(folder) for name in names)
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())
