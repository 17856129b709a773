"""Bundles that lie: every digest fits, up to the id, and what they say is hostile."""

from __future__ import annotations

import hashlib
import io
import json
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import zstandard

from bundle.format.archive import BundleFile
from bundle.format.manifest import count_padding, member_header
from bundle.protocol.digest import Digest, canonical_json
from bundle.protocol.problem import NodeError
from tests.support.bundles import _HEAD, BASE_PYTHON, forged_head

from ..checks import nothing_half_written
from ..product import environment, sound, stager
from ..registry import Area
from ..rounds import REFUSED, SAME, Round, require
from ..world import unpack_below

_MEMORY = 4 << 30
"""Bytes of address space in which a hostile bundle must be refused."""
_COMMANDS = 30
"""Of so many rounds one goes through the command line."""
Raw = dict[str, Any]


@dataclass
class Lie:
    """A bundle of one layer, taken apart."""

    rng: Random
    manifest: Raw
    layer: Raw
    index: Raw
    node: bytes
    decompressor: bytes | None
    frames: list[bytes]
    origin: tuple[bytes, ...] = ()
    """What stands before the index in the layer's head, if anything does."""
    late: Callable[[Raw], None] = lambda raw: None
    """Changes the manifest when all the rest of it is true."""
    must_refuse: bool = True
    """Whether nothing of it may be accepted."""
    process: bool = False
    """Whether a process of its own must meet it."""

    def write(self, path: Path) -> str:
        """Put it together with true digests; return its id."""
        frames = [list(frame) for frame in self.index["frames"]]
        for frame, piece in zip(frames, self.frames, strict=False):
            frame[0], frame[2] = len(piece), Digest.of(piece)
        raw = {**self.index, "frames": frames}
        head = forged_head(raw, sum(map(len, self.frames)), *self.origin)
        body = b"".join(self.frames)
        sizes = [item[1] for item in raw["files"] if isinstance(item, list) and len(item) > 1]
        self.layer |= {
            "head": Digest.of(head),
            "head_size": len(head),
            "size": len(head) + len(body),
            "unpacked_size": max(0, sum(one for one in sizes if type(one) is int)) % 2**63,
            "files": len(raw["files"]),
        }
        say = {**self.manifest, "layers": [self.layer]}
        say["node"] = {**say["node"], "sha256": Digest.of(self.node), "size": len(self.node)}
        if self.decompressor is not None:
            part = {"sha256": Digest.of(self.decompressor), "size": len(self.decompressor)}
            say["decompressor"] = {**say["decompressor"], **part}
        self.late(say)
        say["id"] = Digest.of(canonical_json(say))
        name = self.layer["id"]
        members = [("manifest.json", canonical_json(say)), ("node.pyz", self.node)]
        if self.decompressor is not None:
            members.append((self.manifest["decompressor"]["name"], self.decompressor))
        members += [(f"heads/{name}", head), (f"layers/{name}.tar.zst", body)]
        with path.open("wb") as out:
            for member, data in members:
                out.write(member_header(member, len(data)))
                out.write(data + bytes(count_padding(len(data))))
            out.write(bytes(1024))
        return str(say["id"])


def play(round_: Round) -> str:
    """Make a bundle lie, and try to make an environment of it."""
    assert round_.world.small is not None
    lie = _taken_apart(round_.world.small.path, round_.rng)
    kind = round_.rng.choice(sorted(_LIES))
    round_.did(f"{kind}: {_LIES[kind](lie)}")
    path = round_.folder / "lies.pkgs.tar"
    try:
        identity = lie.write(path)
    except (ValueError, OverflowError, UnicodeEncodeError):
        return SAME  # it cannot even be written
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    if round_.number % _COMMANDS == _COMMANDS - 1:
        return _by_command(round_, path, lie)
    if lie.process:
        return _by_process(round_, path, lie)
    try:
        made = unpack_below(round_.nodes, path, identity)
    except NodeError as exc:
        require(bool(exc.problem.what and exc.problem.why), "the problem says what and why", exc)
        _nothing_left(round_)
        return REFUSED
    require(not lie.must_refuse, "a bundle that lies like that is refused")
    _as_listed(made, lie)
    return SAME


def _by_process(round_: Round, path: Path, lie: Lie) -> str:
    round_.nodes.mkdir()
    program = round_.folder / "node.pyz"
    program.write_bytes(lie.node)
    argv = [sys.executable, "-I", "-S", str(program), "unpack", str(path), str(round_.nodes)]
    argv += ["--python", BASE_PYTHON]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=600, env=environment(round_)
    )
    said = f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    require("Traceback" not in done.stderr, "no traceback", said)
    if done.returncode:
        require(done.returncode in (1, 2), "the exit code is 1 or 2", said)
        require(done.stderr.startswith("stager: "), "there is one error message", said)
        _nothing_left(round_)
        return REFUSED
    require(not lie.must_refuse, "a bundle that lies like that is refused", said)
    return SAME


def _by_command(round_: Round, path: Path, lie: Lie) -> str:
    round_.use("project", "home")
    round_.nodes.mkdir()
    argv = round_.rng.choice(
        (
            ("inspect", str(path)),
            ("inspect", "--files", "--json", str(path)),
            ("exec", "--bundle", str(path), "--", "python", "-c", "pass"),
            ("verify", "--allocation", "local", "--bundle", str(path)),
        )
    )
    round_.did(f"stager {' '.join(argv)}")
    done = sound(stager(round_, *argv))
    if done.code == 0:
        only_looks = argv[0] == "inspect"
        require(only_looks or not lie.must_refuse, "a bundle that lies like that is refused", done)
        return SAME
    require("error: " in done.err or "stager: " in done.err or done.code == 3, "it says why", done)
    _nothing_left(round_)
    return REFUSED


def _nothing_left(round_: Round) -> None:
    nothing_half_written(round_.nodes, "envs")
    outside = [
        str(one)
        for one in round_.folder.rglob("*canary*")
        if not one.is_relative_to(round_.folder / "said")
    ]
    require(not outside, "nothing is written outside the environment", outside)


def _as_listed(env: Path, lie: Lie) -> None:
    """Hold that what was published is what the index says, to the byte."""
    for path, size, _mode, sha256, _offset in lie.index["files"]:
        data = (env / path).read_bytes()
        listed = (len(data), hashlib.sha256(data).hexdigest()) == (size, sha256)
        require(listed, "a published file has the size and digest that its index promises", path)


def _taken_apart(path: Path, rng: Random) -> Lie:
    with BundleFile(str(path)) as opened:
        whole = opened.manifest
        (layer,) = whole.layers
        head = opened.head(layer)
        packed = head.index(zstandard.FRAME_HEADER)
        index = json.loads(zstandard.ZstdDecompressor().decompress(head[packed:]))
        start = opened.offset(layer.member)
        frames = []
        for size, _, _ in index["frames"]:
            frames.append(opened.read(start, size))
            start += size
        say = json.loads(whole.to_bytes())
        del say["id"]
        return Lie(
            rng=rng,
            manifest=say,
            layer=say["layers"][0],
            index=index,
            node=opened.read_part(whole.node),
            decompressor=opened.read_part(whole.decompressor) if whole.decompressor else None,
            frames=frames,
            origin=(head[_HEAD.size : packed],) if packed > _HEAD.size else (),
        )


# --- what a bundle lies about --------------------------------------------------------------------

_NUMBERS = (-1, 0, 1, 2**31, 2**32, 2**60, 2**63, 2**64, 10**30, 1.5, True, None, "1", [], {})
_PATHS = (
    "../canary", "../../../../../../canary", "a/../../../canary", "/tmp/canary", "//canary", "",
    ".", "..", "a//canary", "a/./canary", "a/canary/..", "canary\n", "canary\0x", "\x1b[2Jcanary",
    "pyvenv.cfg", "pkgs", "pkgs/canary", "bin/python", "lib64/canary", ".stager/manifest.json",
    ".stager/layers/canary", None, 5, [], {"a": 1}, "\ud800canary", "n" * 300,
    "/".join(["d"] * 3000), "p/" * 2100 + "x", "\u202ecanary",
)  # fmt: skip


def _entry(lie: Lie) -> list[Any]:
    entry: list[Any] = lie.rng.choice(lie.index["files"])
    return entry


def _paths(lie: Lie) -> str:
    entry = _entry(lie)
    entry[0] = lie.rng.choice(_PATHS)
    return repr(entry[0])[:60]


def _size(lie: Lie) -> str:
    entry = _entry(lie)
    before = entry[1]
    entry[1] = lie.rng.choice([*_NUMBERS, before + 1, before - 1, before // 2, before + 511])
    lie.must_refuse = entry[1] != before or type(entry[1]) is not int
    return f"{before} becomes {entry[1]!r}"


def _offset(lie: Lie) -> str:
    entry = _entry(lie)
    before = entry[4]
    entry[4] = lie.rng.choice([*_NUMBERS, before + 1, before - 1, before + 512, before - 512])
    lie.must_refuse = bool(entry[1])  # where an empty file lies makes no difference
    return f"{before} becomes {entry[4]!r}"


def _sha(lie: Lie) -> str:
    entry = _entry(lie)
    other = lie.rng.choice(lie.index["files"])[3]
    entry[3], before = lie.rng.choice((other, "0" * 64, "", "x", None, 5, "A" * 64)), entry[3]
    lie.must_refuse = entry[3] != before
    return f"{before[:12]} becomes {entry[3]!r}"[:60]


def _mode(lie: Lie) -> str:
    entry = _entry(lie)
    entry[2] = lie.rng.choice((0o4755, 0o777, 0, -1, 0o666, "644", None, 2**70, 0o120777, 420.0))
    return repr(entry[2])


def _links(lie: Lie) -> str:
    link: list[Any] = lie.rng.choice(
        (
            ["project/canary", "/etc/passwd"], ["project/x", "../../canary"], ["x", "y"],
            ["project/a", "a"], ["project/a", "b/../../.."], ["../canary", "x"], ["project/x", ""],
            ["project/x", "a\0b"], ["project/x", None], ["project/x"], [], "x", None,
            [lie.index["files"][0][0], "y"], ["bin/python", "/bin/true"], ["pkgs", "elsewhere"],
            ["project/x", "../lib/../../canary"],
        )
    )  # fmt: skip
    lie.index["links"].append(link)
    lie.must_refuse = link != ["x", "y"]
    return repr(link)


def _chain(lie: Lie) -> str:
    lie.index["links"] += [["project/up/a/b", "."], ["project/esc", "up/a/b/../../../../canary"]]
    if lie.rng.random() < 0.5:
        count = lie.rng.choice((41, 3000))
        lie.index["links"] = [[f"project/l{n}", f"l{n + 1}"] for n in range(count)]
        lie.index["links"].append([f"project/l{count}", "l0"])
    return f"{len(lie.index['links'])} links"


def _twice(lie: Lie) -> str:
    entry = _entry(lie)
    lie.index["files"].append(list(entry))
    if lie.rng.random() < 0.5:
        lie.index["files"][-1][0] = entry[0] + "/below"
    return str(lie.index["files"][-1][0])


def _shape(lie: Lie) -> str:
    key = lie.rng.choice(("files", "links", "frames", "format", "format"))
    value = lie.rng.choice((None, 5, "x", {}, [[]], [None], [["a"]], [[1, 2, 3, 4, 5, 6]], True))
    if key in ("files", "frames") and not isinstance(value, list):
        value = [value]
    if key == "files":
        value = [*lie.index["files"], *value]
    lie.must_refuse = (lie.index[key] != value) or type(lie.index[key]) is not type(value)
    lie.index[key] = value
    if key == "frames":
        lie.index[key] = [frame if isinstance(frame, list) else [frame] for frame in value]
        lie.index[key] = [[*frame, 0, 0, 0][: max(3, len(frame))] for frame in lie.index[key]]
    return f"{key} is {value!r}"[:80]


def _extra(lie: Lie) -> str:
    """Say more than a reader knows, in the index or the manifest."""
    where = lie.rng.choice(("index", "manifest", "layer", "requires"))
    if where == "index":
        lie.index["more"] = 1
        lie.must_refuse = False
    elif where == "manifest":
        lie.late = lambda say: say.update(more=1)
        lie.must_refuse = False
    elif where == "layer":
        lie.late = lambda say: say["layers"][0].update(more=1)
    else:
        lie.late = lambda say: say["requires"].update(more=1)
    return where


def _many(lie: Lie) -> str:
    count = lie.rng.choice((10_000, 200_000))
    zero = hashlib.sha256(b"").hexdigest()
    last = lie.index["files"][-1]
    lie.index["files"] += [[f"zzz/{n}", 0, 0o644, zero, last[4] + last[1]] for n in range(count)]
    return f"{count} files"


def _frame_sizes(lie: Lie) -> str:
    frame = lie.rng.choice(lie.index["frames"])
    frame[1] = lie.rng.choice([*_NUMBERS, frame[1] + 1, frame[1] - 1, frame[1] * 2, 64 << 20])
    return repr(frame[1])


def _frame_bytes(lie: Lie) -> str:
    """Change the compressed bytes, with digests that fit."""
    at = lie.rng.randrange(len(lie.frames))
    piece = zstandard.ZstdDecompressor().decompress(lie.frames[at])
    kind = lie.rng.choice(("garbage", "empty", "bomb", "trailing", "two frames", "content", "cut"))
    packer = zstandard.ZstdCompressor()
    if kind == "garbage":
        lie.frames[at] = lie.rng.randbytes(100)
    elif kind == "empty":
        lie.frames[at] = b""
    elif kind == "bomb":
        lie.frames[at] = packer.compress(bytes(256 << 20))
    elif kind == "trailing":
        lie.frames[at] += lie.rng.randbytes(lie.rng.choice((1, 100)))
    elif kind == "two frames":
        half = len(piece) // 2
        lie.frames[at] = packer.compress(piece[:half]) + packer.compress(piece[half:])
    elif kind == "cut":
        lie.frames[at] = lie.frames[at][:-3]
    else:
        changed = bytearray(piece)
        name, size, _, _, offset = max(lie.index["files"], key=lambda entry: entry[1])
        changed[offset + lie.rng.randrange(size)] ^= 1
        lie.frames[at] = packer.compress(bytes(changed))
        return f"{kind} of {name}"
    return kind


def _frame_count(lie: Lie) -> str:
    if lie.rng.random() < 0.5:
        lie.index["frames"].append(lie.index["frames"][0])
        return "one too many"
    lie.index["frames"], lie.frames = [], []
    return "none"


def _manifest_values(lie: Lie) -> str:
    paths: list[tuple[str, ...]] = [
        ("name",), ("format",), ("packages",), ("imports",), ("node",), ("node", "name"),
        ("decompressor",), ("decompressor", "name"), ("layers",), ("requires",),
        ("requires", "python"), ("requires", "machine"), ("requires", "libc"),
        ("requires", "libc_version"),
    ]  # fmt: skip
    path = lie.rng.choice(paths)
    values = [
        *_NUMBERS, "../canary", "/canary", "x" * 200, "\x1b[2J", "\n", "9." * 2500 + "9",
        "9" * 5000,
        "2", "2.x", "2.-1", ".", "", "3.11.1", "3.9999", "node.pyz", "manifest.json",
        [["x"]], ["x"] * 3, {"name": "x"},
    ]  # fmt: skip
    value = lie.rng.choice(values)

    def change(say: Raw) -> None:
        at: Any = say
        for key in path[:-1]:
            at = at[key]
        if isinstance(at, dict):
            at[path[-1]] = value

    lie.late = change
    lie.must_refuse = False  # a name may be any text; what is done with it must be harmless
    lie.process = path[0] == "requires"
    return f"{'.'.join(path)} is {str(value)[:40]!r}"


def _layer_values(lie: Lie) -> str:
    key = lie.rng.choice(
        ("id", "kind", "name", "version", "head", "head_size", "size", "unpacked_size", "files")
    )
    values = [*_NUMBERS, "../canary", "0" * 64, "f" * 63, "\n", "wheel", "x" * 5000]
    value = lie.rng.choice(values)
    lie.late = lambda say: say["layers"][0].update({key: value})
    lie.must_refuse = key not in ("name", "version", "kind")
    if key == "files" and value == len(lie.index["files"]):
        lie.must_refuse = False
    return f"{key} is {str(value)[:40]!r}"


def _layers_twice(lie: Lie) -> str:
    lie.late = lambda say: say["layers"].append(dict(say["layers"][0]))
    return "the same layer again"


def _decompressor(lie: Lie) -> str:
    """Bring a decompressor that does not do its work; it is code of the bundle's, so it may run."""
    lie.process = True
    kinds = {
        "no archive": b"not a zip",
        "empty": _wheel({}),
        "no module": _wheel({"zstandard/data.txt": ""}),
        "another module": _wheel({"zstandard/backend_c.so": "x"}),
        "no library": _wheel({"zstandard/_cffi.x.so": "x"}),
        "two": _wheel({"zstandard/_cffi.x.so": "x", "zstandard/_cffi.y.so": "x"}),
        "escapes": _wheel({"zstandard/../../../_cffi.x.so": "x"}),
    }
    kind = lie.rng.choice(sorted(kinds))
    lie.decompressor = kinds[kind]
    return kind


def _wheel(files: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return out.getvalue()


def _summary(lie: Lie) -> str:
    """Say something in the head's summary that its index does not."""
    entry = _entry(lie)
    entry.append("more") if lie.rng.random() < 0.5 else entry.pop()
    return f"an entry of {len(entry)} values"


def _truth(lie: Lie) -> str:
    lie.must_refuse = False
    return "all of it is true"


_LIES: dict[str, Callable[[Lie], str]] = {
    "a file's path": _paths,
    "a file's size": _size,
    "a file's place": _offset,
    "a file's digest": _sha,
    "a file's mode": _mode,
    "links": _links,
    "links in a chain": _chain,
    "a file twice": _twice,
    "the index's shape": _shape,
    "something more": _extra,
    "huge counts": _many,
    "a frame's size": _frame_sizes,
    "a frame's bytes": _frame_bytes,
    "the number of frames": _frame_count,
    "the manifest": _manifest_values,
    "the layer": _layer_values,
    "a layer twice": _layers_twice,
    "the decompressor": _decompressor,
    "an entry's length": _summary,
    "nothing": _truth,
}

AREA = Area(
    name="lies",
    promise="a bundle whose digests fit and whose claims do not is refused; what is published has "
    "the sizes and digests that its index promises, and nothing lies outside",
    play=play,
    rounds=1000,
    sample=25,
)
