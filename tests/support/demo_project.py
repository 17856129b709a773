"""The settings and the manifest of a project named ``demo``, without a bundle behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bundle.format.manifest import Layer, Manifest, Part
from bundle.protocol.digest import Digest
from bundle.protocol.job import Requires
from stager.config.load import Config, parse

ZERO = Digest("0" * 64)


def config(root: Path, **tables: Any) -> Config:
    raw = {"environment": {"requirements": ["torch"]}, "project": {"name": "demo"}, **tables}
    return parse(raw, root=root, source=root / "stager.toml")


def manifest(*packages: str) -> Manifest:
    """A manifest of such packages, each of two files that hold a million bytes."""
    return Manifest(
        name="demo",
        requires=Requires(python="3.11", machine="x86_64", libc="glibc", libc_version="2.28"),
        node=Part(name="node.pyz", sha256=ZERO, size=1),
        decompressor=None,
        layers=tuple(
            Layer(id=ZERO, kind="wheel", name=name, version="1", head=ZERO, head_size=1, size=2,
                  unpacked_size=1_000_000, files=2)
            for name in packages
        ),
        packages=packages,
        imports=("torch",),
    )  # fmt: skip
