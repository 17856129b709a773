"""Small real bundles, made as ``stager build`` makes them, and forged ones with true digests."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zstandard

from bundle.environment import unpack
from bundle.environment.unpack import Environment
from bundle.format.archive import BundleFile
from bundle.format.layer import _HEAD as HEAD
from bundle.format.layer import _SKIPPABLE as SKIPPABLE
from bundle.format.layer import get_packed_index, read_origin
from bundle.format.manifest import count_padding, estimate_room, member_header
from bundle.node import node_root
from bundle.protocol.digest import Digest, canonical_json
from bundle.protocol.problem import NodeError
from stager.core.store import Store
from stager.core.values import Target, Wheel
from stager.layers.layer_build import make_layers
from stager.layers.project import project_files
from stager.layers.source import LayerSource
from stager.pack.bundle import Contents, Packed, pack
from stager.pack.bundle_file import seal
from stager.pack.decompressor import decompressor_lock
from stager.pack.members import copy_to
from tests.support.building import ORIGIN, fetch, wheel_of
from tests.support.processes import run

HERE = Target.from_host()
BASE_PYTHON = os.path.realpath(Path(sys.base_prefix, "bin", f"python{HERE.python}"))
OWN = f"stager-{os.geteuid()}"
CLEAN = {"PATH": os.defpath, "LANG": "C.UTF-8"}


Pair = tuple[Packed, Packed]  # two bundles that differ in one layer


def fetch_decompressor(store: Store) -> Wheel | None:
    """The real zstandard wheel for this interpreter; None from Python 3.14 on."""
    lock = decompressor_lock(HERE)
    return fetch(lock, store)[0] if lock else None


def make_bundle(
    store: Store,
    wheels: Sequence[Path],
    *,
    decompressor: Wheel | None,
    project: Path | None = None,
    thin: bool = False,
    **says: Any,
) -> Packed:
    found = tuple(map(wheel_of, wheels))
    sources = [LayerSource.from_wheel(one) for one in found]
    if project is not None:
        files = project_files(project, [])
        sources.append(LayerSource.from_tree("project", "demo", files, "project"))
    with store.lock():
        made = make_layers(sources, store=store, target=HERE, jobs=2)
        fields: dict[str, Any] = {"name": "demo", "packages": (), "imports": (), **says}
        contents = Contents(
            target=HERE, wheels=found, layers=made.layers, decompressor=decompressor, **fields
        )
        packed = pack(contents, store)
    return packed if thin else whole(store, packed)


def whole(store: Store, packed: Packed) -> Packed:
    copy_to(packed.path, packed.path)
    seal(store, packed.path, packed.manifest)
    return packed


def node_program(bundle: Path, folder: Path) -> Path:
    path = folder / "node.pyz"
    with BundleFile(str(bundle)) as opened:
        path.write_bytes(opened.read_part(opened.manifest.node))
    return path


def run_node(
    program: Path, *arguments: object, python: str = sys.executable, env: Mapping[str, str] = CLEAN
) -> subprocess.CompletedProcess[str]:
    """Run ``node.pyz`` as it is run on a node; a traceback fails the test."""
    argv = [python, "-I", "-S", program, *arguments]
    done = run(argv, env=env)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def stage(
    bundle: Packed | Path, base: Path, source: unpack.Source | None = None, file: Path | None = None
) -> Environment:
    """Unpack a bundle, from another file if one is named, in this process as its command does."""
    path = str(bundle if isinstance(bundle, Path) else bundle.path)
    with BundleFile(path) as opened:
        manifest = opened.manifest
    node_root.choose_base(str(base), {}, estimate_room(manifest.layers, manifest))
    return unpack.unpack(
        str(file or path),
        root=node_root.make_secure_root(str(base)),
        expected=manifest.id,
        python=BASE_PYTHON,
        processes=2,
        source=source or unpack.Source(),
    )


def refuses(bundle: Path, base: Path) -> str:
    with pytest.raises(NodeError) as caught:
        stage(bundle, base)
    assert left_over(base) == []
    return str(caught.value)


def left_over(base: Path) -> list[str]:
    root = base / OWN
    found = [*root.glob("envs/*"), *root.glob("incoming/*")]
    return sorted(path.relative_to(root).as_posix() for path in found)


def rot(path: Path) -> None:
    """Change one byte of a file as a failing disk does: its length and its times stay."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    with path.open("r+b") as handle:  # the same inode
        handle.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def tree(folder: Path) -> dict[str, tuple[str, object]]:
    """All but directories and the listing: the kind or mode, and the content, target or mode."""
    found: dict[str, tuple[str, object]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_file() and name != ".stager/listing":
            found[name] = (f"{path.stat().st_mode & 0o777:o}", path.read_bytes())
        elif not path.is_dir() and not path.is_file():
            found[name] = ("special", path.stat().st_mode)
    return found


# --- forged bundles ------------------------------------------------------------------------------

Raw = dict[str, Any]


@dataclass
class Forgery:
    """A bundle of one layer, taken apart; put together, it has digests of whatever it says."""

    manifest: Raw
    index: Raw
    node: bytes
    decompressor: bytes | None
    frames: list[bytes]
    origin: bytes
    late: Callable[[Raw], object] = lambda raw: None  # changes the manifest before its id is set

    @classmethod
    def of(cls, real: Path) -> Forgery:
        with BundleFile(str(real)) as opened:
            whole = opened.manifest
            (layer,) = whole.layers
            head, start = opened.head(layer), opened.offset(layer.member)
            index = json.loads(zstandard.ZstdDecompressor().decompress(get_packed_index(head)))
            frames = []
            for size, _, _ in index["frames"]:
                frames.append(opened.read(start, size))
                start += size
            say = json.loads(whole.to_bytes())
            del say["id"]
            parts = (whole.node, whole.decompressor)
            node, zstd = (part and opened.read_part(part) for part in parts)
            return cls(say, index, node, zstd, frames, read_origin(head).to_bytes())

    def fit_frames(self) -> None:
        for frame, piece in zip(self.index["frames"], self.frames, strict=False):
            frame[0], frame[2] = len(piece), Digest.of(piece)

    def write(self, path: Path) -> str:
        body = b"".join(self.frames)
        head = forged_head(self.index, len(body), self.origin)
        (layer,) = self.manifest["layers"]
        layer |= {
            "head": Digest.of(head),
            "head_size": len(head),
            "size": len(head) + len(body),
            "unpacked_size": _total(self.index),
            "files": len(self.index["files"]),
        }
        name = layer["id"]
        parts = {"node": self.node, "decompressor": self.decompressor}
        members = {}
        for part, data in parts.items():
            if data is not None:
                self.manifest[part] |= {"sha256": Digest.of(data), "size": len(data)}
                members[self.manifest[part]["name"]] = data
        members |= {f"heads/{name}": head, f"layers/{name}.tar.zst": body}
        say = copy.deepcopy(self.manifest)
        self.late(say)
        say["id"] = Digest.of(canonical_json(say))
        with path.open("wb") as out:
            for member, data in {"manifest.json": canonical_json(say), **members}.items():
                out.write(member_header(member, len(data)))
                out.write(data + bytes(count_padding(len(data))))
            out.write(bytes(1024))
        return str(say["id"])


def forge(
    real: Path,
    target: Path,
    *,
    index: Callable[[Raw], None] = lambda raw: None,
    manifest: Callable[[Raw], None] = lambda raw: None,
    frames: Callable[[list[bytes]], None] = lambda frames: None,
) -> Path:
    forgery = Forgery.of(real)
    frames(forgery.frames)
    forgery.fit_frames()
    index(forgery.index)
    forgery.late = manifest
    forgery.write(target)
    return target


def forged_head(raw: Raw, behind: int, made_from: bytes = ORIGIN.to_bytes()) -> bytes:
    """A layer's head for an index that need not make sense."""
    body = made_from + zstandard.ZstdCompressor().compress(json.dumps(raw).encode())
    size = HEAD.size + len(body)
    counts = (_total(raw), len(raw["files"]), len(made_from))
    return HEAD.pack(SKIPPABLE, size - 8, size + behind, *counts) + body


def _total(raw: Raw) -> int:
    sizes = [item[1] for item in raw["files"] if isinstance(item, list) and len(item) > 1]
    return max(0, sum(size for size in sizes if type(size) is int)) % 2**63
