"""Stager itself as it comes along with a bundle: its wheels, and what installs them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

from ..config.load import Config, parse
from ..core.errors import StagerError
from ..core.store import Store
from ..core.values import Target
from ..layers.wheel import record_hash
from ..lock.lock import ResolveOptions, make_lock
from ..lock.spec import read_spec
from ..pack.node_program import make_zip
from ..wheels import Progress, WheelSource

if TYPE_CHECKING:
    from importlib.abc import Traversable

_PACKAGES = ("stager", "bundle", "trainer")
_CARRIED_EXTRAS = ("hub", "sbom")
_WHEEL = "Wheel-Version: 1.0\nGenerator: stager\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def collect_tool(
    config: Config, store: Store, scratch: Path, *, offline: bool, progress: Progress
) -> tuple[list[Path], bytes]:
    """Collect stager's wheels and pip's for a project's target, and a zip that installs them.

    The store's lock must be held.
    """
    own, spec = _write_own_wheel(scratch), read_spec(config)
    target = {"python": config.environment.python, "platform": config.environment.platform}
    settings: dict[str, object] = {key: value for key, value in target.items() if value is not None}
    settings["requirements"] = [*_dependencies(), "pip"]
    tool = parse({"environment": settings}, root=scratch, source=scratch / "stager.toml")
    wanted = replace(read_spec(tool), indexes=spec.indexes, index_strategy=spec.index_strategy)
    options = ResolveOptions(offline=offline)
    lock = make_lock(wanted, path=scratch / "pylock.toml", store=store, options=options)
    source = WheelSource(spec=wanted, store=store, offline=offline, progress=progress)
    wheels = source.fetch(lock)
    return [own, *(wheel.path for wheel in wheels)], install_program(spec.target)


def _dependencies() -> list[str]:
    found = []
    for text in _distribution().requires or ():
        needed = Requirement(text)
        if needed.marker is None or "extra" not in str(needed.marker):
            found.append(text)
            continue
        carried = any(needed.marker.evaluate({"extra": extra}) for extra in _CARRIED_EXTRAS)
        if carried and any(metadata.distributions(name=needed.name)):
            needed.marker = None
            found.append(str(needed))
    return found


def _distribution() -> metadata.Distribution:
    try:
        return metadata.distribution("stager")
    except metadata.PackageNotFoundError:
        raise StagerError(
            "stager itself cannot come along: it runs from a folder, and is not installed",
            hint="install it with pip or uv, and export again; or leave out --with-tool",
        ) from None


def _write_own_wheel(folder: Path) -> Path:
    distribution = _distribution()
    info = f"stager-{distribution.version}.dist-info"
    content = {
        path: data for name in _PACKAGES for path, data in _files(resources.files(name), name)
    }
    for name in ("METADATA", "entry_points.txt"):
        content[f"{info}/{name}"] = (distribution.read_text(name) or "").encode()
    content[f"{info}/WHEEL"] = _WHEEL.encode()
    rows = [
        f"{path},sha256={record_hash(hashlib.sha256(data).digest()).value},{len(data)}"
        for path, data in content.items()
    ]
    content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    wheel = folder / f"stager-{distribution.version}-py3-none-any.whl"
    wheel.write_bytes(make_zip(content))
    return wheel


def _files(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.is_dir() and item.name != "__pycache__":
            yield from _files(item, f"{path}/{item.name}")
        elif item.is_file():
            yield f"{path}/{item.name}", item.read_bytes()


def install_program(target: Target) -> bytes:
    """Return what ``python3 FILE install`` runs, as a zip: Python finds it at a file's end."""
    text = (resources.files(__package__) / "install_program.py").read_bytes()
    described = {"python": target.python, "machine": target.machine}
    return make_zip({"__main__.py": text, "target.json": json.dumps(described).encode()})
