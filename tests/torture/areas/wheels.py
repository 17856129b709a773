"""Hostile and damaged wheels: refused while their layer is made, or installed as they say.

A refusal has the wheel's name. Nothing is written outside its place, and nothing of a wheel runs
during a build.
"""

from __future__ import annotations

import multiprocessing
import re
import shutil
import stat
import struct
import subprocess
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from unittest.mock import patch

from bundle.protocol.problem import NodeError
from stager.core.errors import StagerError
from stager.core.store import Store
from stager.layers.layer_build import make_layers
from tests.support.building import source_of
from tests.support.bundles import HERE, make_bundle
from tests.support.wheelhouse import Member, Parts, parts

from ..damage import change_bytes
from ..product import sound, stager
from ..registry import Area
from ..rounds import REFUSED, SAME, Round, called, require
from ..world import unpack_below

_TOKEN = "canary"  # part of the name of everything that must not appear outside an environment
_WHOLE = 40  # of so many rounds one goes through the whole command line


@dataclass
class Draft:
    rng: Random
    folder: Path
    base: Parts
    must_refuse: bool = False  # whether nothing of it may be accepted
    rows: list[list[str]] | bytes | None = None  # RECORD, if it is not the true one
    raw: Callable[[bytearray], object] | None = None

    def add(self, name: str, data: bytes = b"X = 1\n", attributes: int = 0o644 | stat.S_IFREG):
        member = Member(name=name, data=data, attributes=attributes << 16)
        self.base = self.base.with_members(member)

    def add_one_of(self, *groups: tuple[str, ...], data: bytes = b"X = 1\n") -> None:
        for name in self.rng.choice(groups):
            self.add(name, data)

    def drop(self, part: str) -> None:
        kept = (member for member in self.base.members if part not in member.name)
        self.base = replace(self.base, members=tuple(kept))

    def write(self) -> Path:
        path = self.base.write(self.folder, self.rows)
        if self.raw is not None:
            data = bytearray(path.read_bytes())
            self.raw(data)
            path.write_bytes(data)
        return path


def play(round_: Round) -> str:
    rng = round_.rng
    files: dict[str, str | bytes] = {
        "bad/__init__.py": f"open({str(round_.folder / 'ran')!r}, 'w')\n",
        "bad/part.py": "VALUE = 1\n",
        "bad/data.bin": rng.randbytes(rng.choice((0, 10, 5000))),
    }
    base = parts("bad", files=files, entry_points="[console_scripts]\nbad-run = bad.part:main\n")
    draft = Draft(rng=rng, folder=round_.folder / "hostile", base=base)
    for fault in rng.sample(_FAULTS, 1 if rng.random() < 0.8 else 2):
        round_.did(f"a wheel: {called(fault)}")
        fault(draft)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = draft.write()
    if round_.number % _WHOLE == _WHOLE - 1:
        return _by_command(round_, path)
    return _by_call(round_, draft, path)


def _by_call(round_: Round, draft: Draft, path: Path) -> str:
    store = Store(round_.offline)
    path = shutil.copy(path, store.wheels)
    # A fork of this process instead of one of a server's: as fresh, and many times as quick.
    fork = multiprocessing.get_context("fork")
    try:
        with store.lock(), patch.object(multiprocessing, "get_context", lambda kind: fork):
            make_layers([source_of(Path(path))], store=store, target=HERE, jobs=1)
    except StagerError as exc:
        told = bool(exc.message and exc.hint)
        require(told, "the message says what is wrong and what to do", exc)
        left = [*store.layers.iterdir(), *(store.root / "tmp").glob("*")]
        require(not left, "nothing is left behind", left)
        _nothing_outside(round_, None)
        return REFUSED
    require(not draft.must_refuse, "a wheel like that is refused")
    return _unpacked(round_, store, Path(path))


def _unpacked(round_: Round, store: Store, path: Path) -> str:
    """Hold that an accepted wheel can be unpacked, and installs what its archive holds."""
    packed = make_bundle(store, [path], decompressor=round_.world.zstandard)
    try:
        env = unpack_below(round_.nodes, packed.path, packed.manifest.id)
    except NodeError as exc:
        require(False, "a wheel that no node can hold is refused when its layer is made", exc)
    _nothing_outside(round_, env)
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            elsewhere = (".data/", ".dist-info/", "__pycache__")
            if member.is_dir() or any(part in member.filename for part in elsewhere):
                continue
            there = env / "pkgs" / member.filename
            same = there.is_file() and there.read_bytes() == archive.read(member)
            require(same, "each member is installed with its bytes", member.filename)
            mode = there.stat().st_mode & 0o7777
            require(mode in (0o644, 0o755), "modes are 0644 or 0755", f"{there}: {mode:o}")
    return SAME


def _by_command(round_: Round, path: Path) -> str:
    """Let ``stager build`` meet the wheel, in a project that asks for it by a file's name."""
    round_.use("project", "offline", "home")
    text = f'[environment]\nrequirements = ["{path.name.split("-")[0]} @ file://{path}"]\n'
    (round_.project / "stager.toml").write_text(text)
    (round_.project / "pylock.toml").unlink()
    done = sound(stager(round_, "build", "--no-prove", process=True))
    _nothing_outside(round_, None)
    left = [str(one) for one in (round_.offline / "tmp").glob("*")]
    require(not left or done.code == 0, "nothing is left in the store's tmp", left)
    if done.code:
        require("error: " in done.err, "there is an error message", done)
        return REFUSED
    sound(stager(round_, "exec", "--", "python", "-c", "import bad"))
    return SAME


def _nothing_outside(round_: Round, env: Path | None) -> None:
    # Not os.walk: a tree may be deeper than Python's stack.
    argv = ["find", str(round_.folder), "-name", f"*{_TOKEN}*"]
    found = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    escaped = [path for path in found if env is None or not path.startswith(f"{env}/")]
    require(not escaped, "nothing is written outside the environment", escaped)
    require(not (round_.folder / "ran").exists(), "nothing of a wheel runs during a build")


# --- what is done to a wheel ---------------------------------------------------------------------


def _a_name_that_leads_outside(draft: Draft) -> None:
    outside = str(draft.folder.parent / _TOKEN)
    up = "../" * draft.rng.randint(1, 12)
    names = [
        f"{up}{_TOKEN}", f"bad/{up}{up}{_TOKEN}", outside, f"/{outside}", f"./{_TOKEN}",
        f"bad//{_TOKEN}", f"bad/./{_TOKEN}", f"bad/{_TOKEN}/..", f"..\\{_TOKEN}", f"bad\\{_TOKEN}",
        f"C:\\{_TOKEN}", f"{_TOKEN}\n", f"bad/{_TOKEN}\x07", f"bad/\x1b[2J{_TOKEN}",
        f"bad/\u202e{_TOKEN}", f"bad-1.0.data/purelib/{up}{_TOKEN}",
        f"bad-1.0.data/data/{up}{_TOKEN}", f"bad-1.0.data/data/{outside}",
        f"bad-1.0.data/scripts/{up}{_TOKEN}", f"bad-1.0.data/headers/{up}{_TOKEN}",
        f"bad-1.0.dist-info/{up}{_TOKEN}",
    ]  # fmt: skip
    draft.add(draft.rng.choice(names))
    draft.must_refuse = True


def _a_link_device_pipe_or_socket(draft: Draft) -> None:
    kind = draft.rng.choice((stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK))
    target = draft.rng.choice((b"/etc/passwd", b"../../..", b"part.py", b""))
    draft.add(f"bad/{_TOKEN}", target, attributes=kind | 0o777)
    draft.must_refuse = True


def _odd_modes(draft: Draft) -> None:
    mode = draft.rng.choice((0o4755, 0o2755, 0o1777, 0o7777, 0o000, 0o200, 0o666))
    draft.add("bad/odd-mode", attributes=mode | stat.S_IFREG)


def _a_member_twice(draft: Draft) -> None:
    name = draft.rng.choice(("bad/part.py", "bad/data.bin", "bad-1.0.dist-info/METADATA"))
    draft.add(name, draft.rng.choice((b"VALUE = 2\n", b"VALUE = 1\n")))
    draft.must_refuse = True


def _almost_the_same_name(draft: Draft) -> None:
    draft.add_one_of(
        ("bad/Part.py",),
        ("bad/caf\u00e9.py", "bad/cafe\u0301.py"),
        ("bad-1.0.data/purelib/bad/part.py",),
        ("bad-1.0.data/platlib/x.py", "bad-1.0.data/purelib/x.py"),
        (f"bad-1.0.data/data/lib/python{HERE.python}/site-packages/bad/part.py",),
        (f"bad-1.0.data/data/lib64/python{HERE.python}/site-packages/bad/part.py",),
        ("bad-1.0.data/scripts/bad-run",),
        data=draft.rng.choice((b"VALUE = 1\n", b"VALUE = 2\n")),
    )


def _a_file_where_a_folder_is(draft: Draft) -> None:
    draft.add_one_of(
        ("bad/x", "bad/x/y"),
        ("bad/part.py/z",),
        ("bad-1.0.data/data/bin/x", "bad-1.0.data/scripts/x/y"),
        ("bad-1.0.dist-info/METADATA/x",),
    )
    draft.must_refuse = True


def _a_wrong_record(draft: Draft) -> None:
    rng = draft.rng
    rows = draft.base.record()
    at = rng.randrange(len(rows) - 1)
    other = "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU"
    kind = rng.choice(
        ("hash", "size", "unlisted", "ghost", "md5", "sha1", "no hash", "twice", "odd size",
         "odd hash", "columns", "empty")
    )  # fmt: skip
    if kind == "hash":
        rows[at][1] = other if rows[at][1] != other else "sha256=" + "A" * 43
    elif kind == "size":
        rows[at][2] = str(int(rows[at][2]) + rng.choice((1, 10**30)))
    elif kind == "unlisted":
        del rows[at]
    elif kind == "ghost":
        rows.insert(0, [rng.choice(("bad/ghost.py", "../ghost", "/ghost")), other, "0"])
    elif kind in ("md5", "sha1"):
        rows[at][1] = f"{kind}=XUFAKrxLKna5cZ2REBfFkg"
    elif kind == "no hash":
        rows[at][1] = ""
    elif kind == "twice":
        rows.insert(0, [rows[at][0], other, "0"])
    elif kind == "odd size":
        rows[at][2] = rng.choice(("-1", "x", "1e3", "9" * 5000, " 1", "\u0661"))
    elif kind == "odd hash":
        rows[at][1] = rng.choice(("sha256", "=", "sha256=", "nosuch=AAAA", "sha256=!!!", "a=b=c"))
    elif kind == "columns":
        rows[at] = rng.choice((["bad"], ["a", "b"], ["a", "b", "c", "d"], []))
    else:
        rows = []
    draft.rows = rows
    draft.must_refuse = kind not in ("no hash", "odd size", "twice")


def _a_record_without_sense(draft: Draft) -> None:
    draft.rows = draft.rng.choice(
        (b"\xff\xfe\x00", b"\x00" * 100, b'"unclosed', b"a,b\n" * 1000, b",,\n", b'"' * 200_001)
    )
    draft.must_refuse = True


def _data_schemes(draft: Draft) -> None:
    stem = "bad-1.0.data"
    python = HERE.python
    refuse = [
        f"{stem}/nosuch/{_TOKEN}", f"{stem}/data/pyvenv.cfg", f"{stem}/data/pkgs",
        f"{stem}/data/.stager/manifest.json", f"{stem}/data/.stager/layers/x",
        f"{stem}/data/bin/python", f"{stem}/scripts/python",
        f"{stem}/scripts/python3", f"{stem}/scripts/python{python}",
        f"{stem}/data/lib/python{python}/site-packages/_stager_imports.pth",
        "_stager_patches.py", "_stager_imports.pth", f"{stem}", f"{stem}/",
        f"{stem}/purelib", f"{stem}/data", f"{stem}/scripts", f"{stem}/headers",
        f"{stem}/platlib",
    ]  # fmt: skip
    accept = [
        f"{stem}/data/share/x", f"{stem}/data/etc/passwd", f"{stem}/headers/x.h",
        f"{stem}/scripts/a-script", f"{stem}/platlib/platform.py", f"{stem}/data/x",
        f"{stem}/data/lib/x.so", f"{stem}/data/bin/tool", f"{stem}/data/lib64/x",
        f"{stem}/data/pkgs/x.py", f"{stem}/data/project/x.py", f"{stem}/data/assets/x",
    ]  # fmt: skip
    draft.must_refuse = draft.must_refuse or draft.rng.random() < 0.6
    name = draft.rng.choice(refuse if draft.must_refuse else accept)
    if name.endswith("/"):
        draft.must_refuse = False
    draft.add(name, b"#!python\nprint(1)\n")


def _deep_long_or_wide(draft: Draft) -> None:
    kind = draft.rng.choice(("levels", "name", "path", "wide"))
    if kind == "levels":
        levels = draft.rng.choice((50, 900, 1100, 3000))
        draft.add("bad/" + "d/" * levels + "x.py")
        draft.must_refuse = draft.must_refuse or levels > 1000
    elif kind == "name":
        length = draft.rng.choice((200, 255, 256, 300, 5000))
        draft.add("bad/" + "n" * length)
        draft.must_refuse = draft.must_refuse or length > 255
    elif kind == "path":
        length = draft.rng.choice((3000, 4200, 20_000))
        draft.add(("bad/" + ("p" * 200 + "/") * 200)[:length].rstrip("/") + "x")
        draft.must_refuse = draft.must_refuse or length > 4096
    else:
        for number in range(draft.rng.choice((10, 600))):
            draft.add(f"bad/wide/{number}/x.txt", b"")


_CENTRAL, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"


def _the_bytes_of_the_archive(draft: Draft) -> None:
    rng = draft.rng
    if draft.raw is not None:  # what was to be done to the bytes is not done
        draft.must_refuse = False
    headers = {"central": (_CENTRAL, 46), "end": (b"PK\x05\x06", 22)}
    kind = rng.choice(("bytes",) * 5 + ("central", "end", "swap"))

    def change(data: bytearray) -> None:
        if kind == "bytes":
            change_bytes(data, rng)
        elif kind == "swap":
            one, two = sorted(rng.sample(range(len(data) - 64), 2))
            first, second = data[one : one + 32], data[two : two + 32]
            data[one : one + 32], data[two : two + 32] = second, first
        else:
            _put_a_number(data, rng, *headers[kind])

    draft.raw = change


def _put_a_number(data: bytearray, rng: Random, mark: bytes, size: int) -> None:
    """Put a number of an adversary's choice into one of the zip's own headers."""
    places = [found.start() for found in re.finditer(re.escape(mark), data)]
    start = rng.choice(places) + rng.randrange(4, size - 4)
    value = rng.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0xFFFF, len(data), 0xFFFFFFFE))
    struct.pack_into("<I", data, min(start, len(data) - 4), value)


def _encrypted(draft: Draft) -> None:
    def change(data: bytearray) -> None:
        for mark, at in ((_CENTRAL, 8), (_LOCAL, 6)):
            data[data.find(mark) + at] |= 1

    draft.raw = change
    draft.must_refuse = True


def _a_compression_method(draft: Draft) -> None:
    if draft.rng.random() < 0.5:
        method = draft.rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
        first, *others = draft.base.members
        draft.base = replace(draft.base, members=(replace(first, method=method), *others))
        return
    unknown = draft.rng.choice((1, 6, 9, 10, 93, 95, 97, 98, 99, 255))

    def change(data: bytearray) -> None:
        for mark, at in ((_CENTRAL, 10), (_LOCAL, 8)):
            struct.pack_into("<H", data, data.find(mark) + at, unknown)

    draft.raw = change
    draft.must_refuse = True


def _zeros_and_a_wrong_size(draft: Draft) -> None:
    size = draft.rng.choice((1 << 20, 16 << 20))
    draft.add("bad/zeros", bytes(size))
    if draft.rng.random() < 0.5 or draft.raw is not None:  # one change of the bytes is enough
        return
    claimed = draft.rng.choice((0, 10, size // 2, size + 1, 0xFFFFFFFF, 0x7FFFFFFF))

    def change(data: bytearray) -> None:
        name = data.rfind(b"bad/zeros")  # in the central directory
        struct.pack_into("<I", data, name - 46 + 24, claimed)

    draft.raw = change


def _entry_points(draft: Draft) -> None:
    rng = draft.rng
    lines = [
        f"../{_TOKEN} = bad:main", f"/{_TOKEN} = bad:main", f"a/{_TOKEN} = bad:main",
        "python = bad:main", "python3 = bad:main", "x = bad", "x =", "= bad:main",
        "x = bad:main.a.b", "x = bad;import os:main", "x = bad:main()", "x = bad:__import__('os')",
        "two words = bad:main", "x = bad:main [extra]", f"{'n' * 300} = bad:main", ".. = bad:main",
        ". = bad:main", "x = b\u00e4d:main", "\u202ex = bad:main", "x = bad:main\nx = bad:other",
        "x\x00y = bad:main", "pip = bad:main", "bad-run = bad:main",
    ]  # fmt: skip
    section = rng.choice(("[console_scripts]", "[gui_scripts]", "[console_scripts"))
    data = f"{section}\n{rng.choice(lines)}\n".encode()
    if rng.random() < 0.1:
        data = rng.choice((b"\xff\xfe", b"[", b"\x00" * 50, b"x" * 100_000))
    draft.drop("entry_points")
    draft.add(f"{draft.base.dist_info}/entry_points.txt", data)


def _metadata(draft: Draft) -> None:
    rng = draft.rng
    name = rng.choice(("METADATA", "WHEEL", "top_level.txt", "direct_url.json", "INSTALLER"))
    data = rng.choice(
        (b"", b"\xff\xfe\xfd", b"Name: other\nVersion: 9\n", b"Wheel-Version: 99.0\n", b"\x00" * 9,
         b"Wheel-Version: x\n", b"Name: bad\nVersion: 1.0\nRequires-Dist: ???\n",
         b"Root-Is-Purelib: maybe\n", b"Name: " + b"n" * 100_000)
    )  # fmt: skip
    draft.drop(f"/{name}")
    if rng.random() < 0.8:
        draft.add(f"{draft.base.dist_info}/{name}", data)


def _a_second_dist_info(draft: Draft) -> None:
    other = draft.rng.choice(("other-1.0", "bad-2.0", "BAD-1.0", "bad-1.0.0"))
    draft.add(f"{other}.dist-info/METADATA", b"Name: other\nVersion: 1.0\n")
    draft.add(f"{other}.dist-info/WHEEL", b"Wheel-Version: 1.0\n")


def _sources_that_do_not_compile(draft: Draft) -> None:
    ran = str(draft.folder.parent / "ran")
    sources = [
        b"\xff\xfe = 1\n", b"x = \x00\n", b"(" * 5000, b"x = " + b"-" * 50_000 + b"1\n",
        b"x = " + b"1" * 5000 + b"\n", b"# -*- coding: nosuch -*-\n", b"\xef\xbb\xbfx = 1\n",
        b"x = " + b"[" * 150 + b"]" * 150, b"print 'two'\n", b"\x0c\nx=1", b"'''" + b"a" * 100_000,
        b"x = 9**9**9\n", b"x = 'a' * 10**12\n", b"assert 0, '\\N{nosuch}'\n", b"",
        b"if 1:\n" + b"".join(b" " * n + b"if 1:\n" for n in range(1, 120)),
    ]  # fmt: skip
    draft.add("bad/odd.py", draft.rng.choice(sources))
    if draft.rng.random() < 0.4:
        line = f"import os; open({ran!r}, 'w')\n".encode()
        draft.add(draft.rng.choice(("bad.pth", "sitecustomize.py", "usercustomize.py")), line)
    if draft.rng.random() < 0.4:
        draft.add("bad/__pycache__/part.cpython-311.pyc", draft.rng.randbytes(100))
        draft.add("bad/part.pyc", draft.rng.randbytes(100))


def _odd_names(draft: Draft) -> None:
    names = ("\u65e5\u672c.txt", "with space.txt", "-rf", "~", "$HOME", "'quote\".txt", "%s%n",
             "*.txt", "con", "a:b", ".hidden", "...", "x..y", "\U0001f40d.py")  # fmt: skip
    draft.add(f"bad/{draft.rng.choice(names)}")


def _names_that_are_no_text(draft: Draft) -> None:
    """Write a member's name in bytes that are no UTF-8, with the flag that says they are."""
    draft.add("bad/abcdefgh.txt")
    if draft.raw is not None:  # one change of the bytes is enough
        return

    def change(data: bytearray) -> None:
        data[:] = data.replace(b"bad/abcdefgh.txt", b"bad/\xff\xfe\xc0\x80efgh.txt")
        for mark, at in ((_CENTRAL, 9), (_LOCAL, 7)):
            for found in list(re.finditer(re.escape(mark), data)):
                data[found.start() + at] |= draft.rng.choice((0, 8))

    draft.raw = change


_FAULTS = (
    _a_name_that_leads_outside, _a_link_device_pipe_or_socket, _odd_modes, _a_member_twice,
    _almost_the_same_name, _a_file_where_a_folder_is, _a_wrong_record, _a_record_without_sense,
    _data_schemes, _deep_long_or_wide, _the_bytes_of_the_archive, _encrypted,
    _a_compression_method, _zeros_and_a_wrong_size, _entry_points, _metadata,
    _a_second_dist_info, _sources_that_do_not_compile, _odd_names, _names_that_are_no_text,
)  # fmt: skip

AREA = Area(play, rounds=1200, sample=4)
