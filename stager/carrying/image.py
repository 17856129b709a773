"""``stager export --squashfs``: the environment of a bundle as an image that sites mount.

It holds what a node unpacks, and ``run``, which starts a command in it; what depends on the place
or the time is left out, so the same bundle gives the same bytes.
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from bundle.environment import listing
from bundle.environment.listing import OWN_PYTHON, STATE
from bundle.format.manifest import Manifest, estimate_room
from bundle.launch.exec_command import LOOKING
from bundle.protocol.dataclass import dataclass

from ..building.current_bundle import Listener, current_bundle, offline_root
from ..config.load import Config
from ..core.errors import StagerError
from ..core.files import ANOTHER_OUTPUT, IMAGE_SUFFIX, write_output
from ..core.processes import CommandError, run
from ..core.store import Store, digest_file
from ..pack.bundle_file import ChosenBundle, is_made_here, node_program, open_bundle
from ..pack.members import project_folder, refuse_in_project, unpack_here
from ..trust import decide_trust

PROGRAM = "mksquashfs"
_PLACES = ("/usr/sbin", "/sbin")  # where some distributions have it, beside PATH
_SECONDS = 6 * 3600.0
_VARIABLES = {"SOURCE_DATE_EPOCH": "315532800"}  # 1980: the earliest that a zip can hold
_LEVEL = "9"
_MEMORY = "1G"  # for its queues; by default a quarter of the machine's, however many share it

_RUN = f"""\
#!/bin/sh
# Runs a command in this environment, wherever it is mounted:
#     run python train.py       run torchrun --nproc-per-node 2 train.py       run train.py
here=$(dirname -- "$(realpath -- "$0")")
old=$IFS; IFS=:
for folder in "$here/{OWN_PYTHON}/bin" $PATH /usr/local/bin /usr/bin; do
    IFS=$old
    for python in "$folder/python@VERSION@" "$folder/python3"; do
        if [ -x "$python" ] && {LOOKING}=1 "$python" -I -S -c \\
            'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
            exec "$python" -I -S "$here/{STATE}/node.pyz" mounted "$here" -- "$@"
        fi
    done
done
echo "stager: $here needs a Python 3.9 or newer on PATH, or in /usr/bin" >&2
exit 127
"""
_PYTHON = f"""\
#!/bin/sh
# Not an interpreter: the node's own, or the one in this image, is started by ../run.
[ -z "${LOOKING}" ] || exit 1
exec "$(dirname -- "$(realpath -- "$0")")/../run" python "$@"
"""


@dataclass(frozen=True, kw_only=True)
class ImageResult:
    """The result of ``stager export --squashfs``."""

    file: Path
    id: str
    sha256: str
    bytes: int
    brings_python: bool  # true if the bundle's own Python is in it; else the machine must have one
    python: str  # the version of Python that it is for


def export_image(
    config: Config, output: Path | None, listener: Listener, chosen: ChosenBundle | None = None
) -> ImageResult:
    """Write the environment of a bundle to a squashfs image."""
    tool = _find_tool()
    if output is not None:
        refuse_in_project(output, project_folder(config), IMAGE_SUFFIX)
    chosen = chosen or current_bundle(config, listener)
    store = Store(offline_root(config))
    with open_bundle(chosen.path, chosen.id) as bundle:
        manifest = bundle.manifest
        program = bundle.read_part(manifest.node)
    whole = ChosenBundle(path=chosen.path, id=manifest.id)
    decide_trust(config, store, whole.path, whole.id)  # its program is about to run
    name = f"{manifest.name}-{manifest.id[:12]}{IMAGE_SUFFIX}"
    output = (output or Path(name)).absolute()
    needed, inodes = estimate_room(manifest.layers, manifest)
    store.require_space(needed, "the environment, before it is an image", inodes)
    # The file is opened first: a place that cannot be written is known before anything is unpacked.
    with store.scratch_without_lock("export") as scratch, write_output(output) as target:
        listener.begin("unpack")
        trusted = is_made_here(store, whole.path, whole.id)
        unpacker = node_program(whole.path, store, whole.id)
        tree = unpack_here(unpacker, whole, scratch, trusted=trusted)
        _make_movable(tree, manifest, program)
        listener.begin("squashfs")
        _make_image(tool, tree, Path(target.name), output)
    return ImageResult(
        file=output,
        id=manifest.id,
        sha256=digest_file(output),
        bytes=output.stat().st_size,
        brings_python=manifest.requires.bundled_python,
        python=manifest.requires.python,
    )


def _find_tool() -> str:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_PLACES])
    found = shutil.which(PROGRAM, path=path)
    if found is None:
        raise StagerError(
            f"--squashfs needs {PROGRAM}, which is not on PATH",
            hint="install the package squashfs-tools, or ask your site to do so",
        )
    return found


def _make_movable(tree: Path, manifest: Manifest, program: bytes) -> None:
    for name in ("pyvenv.cfg", listing.PATH, "bin/python"):
        (tree / name).unlink()
    (tree / STATE / "node.pyz").write_bytes(program)
    for name, text in (("run", _RUN), ("bin/python", _PYTHON)):
        path = tree / name
        path.write_text(text.replace("@VERSION@", manifest.requires.python))
        path.chmod(0o755)
    # For all to read, with the bundle's modes: without the umask, and a shared root's setgid bit.
    for folder, _, files in os.walk(tree):
        Path(folder).chmod(0o755)
        for name in files:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644)


def _make_image(tool: str, tree: Path, image: Path, output: Path) -> None:
    argv = [  # mksquashfs refuses options for times if SOURCE_DATE_EPOCH is set
        *(tool, str(tree), str(image), "-noappend", "-no-progress", "-quiet"),
        *("-comp", "zstd", "-Xcompression-level", _LEVEL, "-all-root", "-no-xattrs"),
        *("-processors", str(len(os.sched_getaffinity(0))), "-mem", _MEMORY),
    ]
    try:
        run(argv, timeout=_SECONDS, env=_VARIABLES)
    except CommandError as exc:
        raise StagerError(
            f"{output} cannot be written: {PROGRAM} failed",
            hint=f"free some space, or {ANOTHER_OUTPUT}; or install squashfs-tools 4.4 or newer",
            context=exc.context,
        ) from exc
