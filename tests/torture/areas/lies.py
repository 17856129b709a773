"""Bundles that lie: every digest fits, up to the id, and what they say is hostile.

A bundle whose claims do not fit is refused; what is published has the sizes and digests that its
index promises, and nothing lies outside.
"""

from __future__ import annotations

import hashlib
import io
import resource
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import zstandard

from bundle.protocol.problem import NodeError
from tests.support.bundles import BASE_PYTHON, Forgery, Raw

from ..checks import nothing_half_written
from ..product import environment, sound, stager
from ..registry import Area
from ..rounds import REFUSED, SAME, Round, require
from ..world import VERIFY, unpack_below

_MEMORY = 4 << 30  # bytes of address space in which a hostile bundle must be refused
_COMMANDS = 30  # of so many rounds one goes through the command line


@dataclass
class Lie(Forgery):
    rng: Random = field(default_factory=Random)
    must_refuse: bool = True  # whether nothing of it may be accepted
    process: bool = False  # whether a process of its own must meet it

    def entry(self) -> list[Any]:
        entry: list[Any] = self.rng.choice(self.index["files"])
        return entry


def play(round_: Round) -> str:
    lie = Lie.of(round_.world.small.path)
    lie.rng = round_.rng
    round_.strike(_LIES, lie)
    path = round_.folder / "lies.pkgs.tar"
    try:
        lie.fit_frames()
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
    for name, size, _, sha256, _ in lie.index["files"]:
        data = (made / name).read_bytes()
        listed = (len(data), hashlib.sha256(data).hexdigest()) == (size, sha256)
        require(listed, "a published file has the size and digest that its index promises", name)
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
    argv = round_.rng.choice(
        (
            ("inspect", str(path)),
            ("inspect", "--files", "--json", str(path)),
            ("exec", "--bundle", str(path), "--", "python", "-c", "pass"),
            (*VERIFY, "--bundle", str(path)),
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
    said = round_.folder / "said"
    outside = [one for one in round_.folder.rglob("*canary*") if not one.is_relative_to(said)]
    require(not outside, "nothing is written outside the environment", outside)


# --- what a bundle lies about --------------------------------------------------------------------

_NUMBERS = (-1, 0, 1, 2**31, 2**32, 2**60, 2**63, 2**64, 10**30, 1.5, True, None, "1", [], {})
_PATHS = (
    "../canary", "../../../../../../canary", "a/../../../canary", "/tmp/canary", "//canary", "",
    ".", "..", "a//canary", "a/./canary", "a/canary/..", "canary\n", "canary\0x", "\x1b[2Jcanary",
    "pyvenv.cfg", "pkgs", "pkgs/canary", "bin/python", "lib64/canary", ".stager/manifest.json",
    ".stager/layers/canary", None, 5, [], {"a": 1}, "\ud800canary", "n" * 300,
    "/".join(["d"] * 3000), "p/" * 2100 + "x", "\u202ecanary",
)  # fmt: skip


def _the_path_of_a_file(lie: Lie) -> str:
    entry = lie.entry()
    entry[0] = lie.rng.choice(_PATHS)
    return repr(entry[0])[:60]


def _the_size_of_a_file(lie: Lie) -> str:
    entry = lie.entry()
    before = entry[1]
    entry[1] = lie.rng.choice([*_NUMBERS, before + 1, before - 1, before // 2, before + 511])
    lie.must_refuse = entry[1] != before or type(entry[1]) is not int
    return f"{before} becomes {entry[1]!r}"


def _the_place_of_a_file(lie: Lie) -> str:
    entry = lie.entry()
    before = entry[4]
    entry[4] = lie.rng.choice([*_NUMBERS, before + 1, before - 1, before + 512, before - 512])
    lie.must_refuse = bool(entry[1])  # where an empty file lies makes no difference
    return f"{before} becomes {entry[4]!r}"


def _the_digest_of_a_file(lie: Lie) -> str:
    entry = lie.entry()
    other = lie.rng.choice(lie.index["files"])[3]
    entry[3], before = lie.rng.choice((other, "0" * 64, "", "x", None, 5, "A" * 64)), entry[3]
    lie.must_refuse = entry[3] != before
    return f"{before[:12]} becomes {entry[3]!r}"[:60]


def _the_mode_of_a_file(lie: Lie) -> str:
    entry = lie.entry()
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


def _links_in_a_chain(lie: Lie) -> str:
    lie.index["links"] += [["project/up/a/b", "."], ["project/esc", "up/a/b/../../../../canary"]]
    if lie.rng.random() < 0.5:
        count = lie.rng.choice((41, 3000))
        lie.index["links"] = [[f"project/l{n}", f"l{n + 1}"] for n in range(count)]
        lie.index["links"].append([f"project/l{count}", "l0"])
    return f"{len(lie.index['links'])} links"


def _a_file_twice(lie: Lie) -> str:
    entry = lie.entry()
    lie.index["files"].append(list(entry))
    if lie.rng.random() < 0.5:
        lie.index["files"][-1][0] = entry[0] + "/below"
    return str(lie.index["files"][-1][0])


def _the_shape_of_the_index(lie: Lie) -> str:
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


def _something_more(lie: Lie) -> str:
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


def _huge_counts(lie: Lie) -> str:
    count = lie.rng.choice((10_000, 200_000))
    zero = hashlib.sha256(b"").hexdigest()
    last = lie.index["files"][-1]
    lie.index["files"] += [[f"zzz/{n}", 0, 0o644, zero, last[4] + last[1]] for n in range(count)]
    return f"{count} files"


def _the_size_of_a_frame(lie: Lie) -> str:
    frame = lie.rng.choice(lie.index["frames"])
    frame[1] = lie.rng.choice([*_NUMBERS, frame[1] + 1, frame[1] - 1, frame[1] * 2, 64 << 20])
    return repr(frame[1])


def _the_bytes_of_a_frame(lie: Lie) -> str:
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


def _the_number_of_frames(lie: Lie) -> str:
    if lie.rng.random() < 0.5:
        lie.index["frames"].append(lie.index["frames"][0])
        return "one too many"
    lie.index["frames"], lie.frames = [], []
    return "none"


def _the_manifest(lie: Lie) -> str:
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


def _the_layer(lie: Lie) -> str:
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


def _a_layer_twice(lie: Lie) -> str:
    lie.late = lambda say: say["layers"].append(dict(say["layers"][0]))
    return "the same layer again"


def _the_decompressor(lie: Lie) -> str:
    """Bring a decompressor that does not do its work; it is code of the bundle's, so it may run."""
    lie.process = True
    library, other = "zstandard/_cffi.x.so", "zstandard/_cffi.y.so"
    members = lie.rng.choice(
        (None, [], ["zstandard/data.txt"], ["zstandard/backend_c.so"], [library], [library, other],
         ["zstandard/../../../_cffi.x.so"])
    )  # fmt: skip
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in members or ():
            archive.writestr(zipfile.ZipInfo(name), "x")
    lie.decompressor = b"not a zip" if members is None else wheel.getvalue()
    return "no archive" if members is None else f"an archive of {members}"


def _the_length_of_an_entry(lie: Lie) -> str:
    """Say something in the head's summary that its index does not."""
    entry = lie.entry()
    entry.append("more") if lie.rng.random() < 0.5 else entry.pop()
    return f"an entry of {len(entry)} values"


def _nothing(lie: Lie) -> str:
    lie.must_refuse = False
    return "all of it is true"


_LIES = (
    _the_path_of_a_file, _the_size_of_a_file, _the_place_of_a_file, _the_digest_of_a_file,
    _the_mode_of_a_file, _links, _links_in_a_chain, _a_file_twice, _the_shape_of_the_index,
    _something_more, _huge_counts, _the_size_of_a_frame, _the_bytes_of_a_frame,
    _the_number_of_frames, _the_manifest, _the_layer, _a_layer_twice, _the_decompressor,
    _the_length_of_an_entry, _nothing,
)  # fmt: skip

AREA = Area(play, rounds=1000, sample=4)
