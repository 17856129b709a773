"""From a wheel to the files of a layer: sound wheels come out right, unsound ones not at all."""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import importlib.util
import io
import random
import subprocess
import zipfile
import zlib
from base64 import urlsafe_b64encode
from dataclasses import replace
from pathlib import Path

import pytest

from stager.core.errors import WheelError
from stager.layers.layer_file import LayerWriter, Unread
from stager.layers.wheel import add_wheel
from stager.layers.wheel_members import LARGE, ChangedMemberError, LargeMember
from tests.support.building import (
    HOST,
    ORIGIN,
    SITE,
    contents,
    fake_installation,
    index_of,
    layer_of,
)
from tests.support.wheelhouse import DAMAGED, Member, make_wheel, parts

FAULTS = {
    "truncated": "damaged or cut short",
    "no-record": "no RECORD",
    "wrong-hash": "bad/__init__.py does not have the size and hash",
    "wrong-size": "bad/__init__.py does not have the size and hash",
    "unlisted": "bad/extra.py is not mentioned in RECORD",
    "missing": "bad/ghost.py is in RECORD but not in the wheel",
    "parent": "'../escaped.py'",
    "inner-parent": "'bad/../../escaped.py'",
    "absolute": "'/tmp/escaped.py'",
    "symlink": "bad/link.py is a symbolic link",
    "device": "bad/null is a device",
    "fifo": "bad/pipe is a device or special file",
    "duplicated": "bad/__init__.py occurs twice",
    "wrong-dist-info": ".dist-info directory doesn't match",
}
"""What the message about each kind of damaged wheel has to say."""


def refusal(folder, wheel):
    with LayerWriter(folder) as writer, pytest.raises(WheelError) as caught:
        add_wheel(writer, wheel, HOST)
    assert caught.value.message.startswith(f"{wheel.name}: ")
    assert caught.value.hint
    return caught.value


def story(error):
    return "\n".join([error.message, *error.context])


def test_scripts_run_from_wherever_the_environment_lies(tmp_path, wheelhouse):
    names = ("cli_tool-1.0-py3-none-any.whl", "schemes-1.0-py3-none-any.whl")
    layers = [layer_of(wheelhouse / name) for name in names]
    first = tmp_path / "one place"
    fake_installation(layers, first)
    for place in (first, tmp_path / "an'other \"place"):
        if place != first:
            first.rename(place)
        for name, said in (
            ("cli-tool", "cli-tool ran\n"),
            ("cli-tool-gui", "cli-tool ran\n"),
            ("schemes-script", f"schemes {place}\n"),
            ("schemes-shell", "schemes-shell\n"),
        ):
            link = tmp_path / "link-to-it"
            link.unlink(missing_ok=True)
            link.symlink_to(place / "bin" / name)
            for program in (place / "bin" / name, link):
                done = subprocess.run([program], capture_output=True, text=True, check=True)
                assert done.stdout == said


def test_the_installed_record_is_what_importlib_metadata_reads(tmp_path, wheelhouse):
    names = ("cli_tool-1.0-py3-none-any.whl", "schemes-1.0-py3-none-any.whl")
    fake_installation([layer_of(wheelhouse / name) for name in names], tmp_path / "env")
    found = importlib.metadata.distributions(path=[str(tmp_path / "env" / SITE)])
    there = {dist.metadata["Name"]: dist for dist in found}
    assert set(there) == {"cli-tool", "schemes"}
    for dist in there.values():
        files = dist.files or []
        assert len(files) > 5
        for file in files:
            data = Path(str(file.locate())).read_bytes()
            if file.hash is not None:
                digest = urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
                assert (file.hash.value, file.size) == (digest, len(data))
            else:
                assert file.name == "RECORD" or file.suffix == ".pyc"
        assert dist.read_text("INSTALLER") == "stager\n"
    entry = {point.name: point.value for point in there["cli-tool"].entry_points}
    assert entry == {"cli-tool": "cli_tool:main", "cli-tool-gui": "cli_tool:main"}


def test_bytecode_is_never_compared_with_its_source(tmp_path, wheelhouse):
    layer = layer_of(wheelhouse / "alpha-1.0-py3-none-any.whl")
    python = fake_installation([layer], tmp_path / "env")
    source = tmp_path / "env" / SITE / "alpha" / "__init__.py"
    compiled = Path(importlib.util.cache_from_source(str(source)))
    before = compiled.stat().st_mtime_ns
    source.write_text("VERSION = 'from the changed source'\n")  # another time, another content
    code = "import alpha; print(alpha.VERSION)"
    done = subprocess.run([python, "-v", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1.0\n"
    assert f"code object from '{compiled}'" in done.stderr
    assert compiled.stat().st_mtime_ns == before


def test_bytecode_in_a_wheel_is_not_trusted(tmp_path):
    files = {"p/__init__.py": "", "p/__pycache__/evil.cpython-311.pyc": b"evil"}
    found = contents(layer_of(make_wheel(tmp_path, "p", files=files)))
    assert not any(data == b"evil" for data in found.values())


def test_better_digests_than_sha256_count_and_others_prove_nothing(tmp_path):
    base = parts("strong", files={"strong/data.bin": b"data", "strong/__init__.py": ""})
    lying = replace(base, members=(replace(base.members[0], data=b"else"), *base.members[1:]))
    for algorithm in ("sha384", "sha512"):
        assert contents(layer_of(base.write(tmp_path, base.record(algorithm))))
        wheel = lying.write(tmp_path, base.record(algorithm))
        assert "strong/data.bin does not have the size and hash" in story(refusal(tmp_path, wheel))
    assert "md5" in story(refusal(tmp_path, base.write(tmp_path, base.record("md5"))))


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_wheel_is_refused_by_name_and_fault(kind, tmp_path):
    error = refusal(tmp_path, DAMAGED[kind](tmp_path))
    assert FAULTS[kind] in story(error)


def test_all_members_that_do_not_fit_record_are_named_at_once(tmp_path):
    base = parts("bad", files={f"bad/{name}": f"x = {name == 'd'}\n" for name in "abcd"})
    rows = base.record()
    rows[0][1] = rows[2][1] = rows[3][1]  # a and c get d's hash
    assert story(refusal(tmp_path, base.write(tmp_path, rows))).count("does not have the size") == 2
    rows = [["bad/ghost1", "sha256=x", "1"], ["bad/ghost2", "sha256=x", "1"], *base.record()[2:]]
    error = refusal(tmp_path, base.write(tmp_path, rows))
    assert "`wheel pack` write its RECORD anew" in error.hint
    for name in ("bad/ghost1", "bad/ghost2", "bad/a", "bad/b"):
        assert name in story(error)


def test_all_hostile_members_are_named_at_once(tmp_path):
    more = [Member(name=name, data=b"") for name in ("../one", "/two", "bad\\three", "bad/\n")]
    text = story(refusal(tmp_path, parts("bad").with_members(*more).write(tmp_path)))
    for name in ("../one", "/two", "three", "\\n"):
        assert name in text


@pytest.mark.parametrize(
    "place",
    ["pyvenv.cfg", "bin/python", f"bin/python{HOST.python}", "pkgs", "project", "assets", "lib64",
     ".stager/manifest.json", f"{SITE}/_stager_patches.pth", "pkgs/_stager_imports.py"],
)  # fmt: skip
def test_parts_of_the_environment_itself_are_not_overwritten(place, tmp_path):
    wheel = make_wheel(tmp_path, "bad", data={f"data/{place}": "mine", "data/.stager/too": ""})
    text = story(refusal(tmp_path, wheel))
    assert "would overwrite" in text
    assert place.split("/", maxsplit=1)[0] in text
    assert ".stager/too" in text, "the second one is not reported"


def test_data_may_lie_where_the_environment_has_directories(tmp_path):
    names = ("assets/a", "project/conf.yaml", "python/x", "lib64/y", "pkgs/z")
    wheel = make_wheel(tmp_path, "good", data={f"data/{name}": "" for name in names})
    found = contents(layer_of(wheel))
    assert {"assets/a", "project/conf.yaml", "python/x", "lib/y", f"{SITE}/z"} <= set(found)


def test_scripts_mean_what_they_mean_without_lines_for_a_shell(tmp_path):
    """The names ``python-*`` are not the environment's own; an entry point wins over a script."""
    scripts = {
        "python-doc": '#!python\n"""What it does."""\nprint(__doc__)\n',
        "python3-future": '#!python\n"""Doc."""\nfrom __future__ import annotations\n'
        "print(__import__('sys').argv)\n",
        "latin": "#!python\n# -*- coding: latin-1 -*-\nprint(ascii('caf\u00e9'))\n".encode(
            "latin-1"
        ),
        "both": "#!python\nprint('the script')\n",
    }
    points = "[console_scripts]\nboth = t:main\n"
    files = {"t/__init__.py": "def main():\n    print('the entry point')\n"}
    wheel = make_wheel(tmp_path, "t", files=files, scripts=scripts, entry_points=points)
    env = tmp_path / "env"
    fake_installation([layer_of(wheel)], env)
    said = {}
    for name in scripts:
        done = subprocess.run([env / "bin" / name, "x"], capture_output=True, text=True, check=True)
        said[name] = done.stdout.strip()
    assert said["python-doc"] == "What it does."
    assert said["python3-future"].endswith("python3-future', 'x']")
    assert said["latin"] == r"'caf\xe9'"
    assert said["both"] == "the entry point"
    assert "../../../libexec/latin,sha256=" in (env / SITE / "t-1.0.dist-info/RECORD").read_text()


def test_scripts_and_entry_points_cannot_take_the_interpreters_place(tmp_path):
    points = "[console_scripts]\npython3 = bad:main\n../../up = bad:main\n"
    wheel = make_wheel(tmp_path, "bad", scripts={"python": "#!python\n"}, entry_points=points)
    text = story(refusal(tmp_path, wheel))
    for name in ("python3", "'../../up'", "python"):
        assert name in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"entry_points": "[console_scripts]\nx = a:%(b\n"}, "not a valid wheel"),
        ({"entry_points": "no section\n"}, "not a valid wheel"),
        ({"entry_points": "[console_scripts]\nx = a:b\nx = c:d\n"}, "not a valid wheel"),
        ({"entry_points": "[console_scripts]\ngood = a:b\nx = no_function\n"}, "x = no_function"),
        ({"files": {"m.py": "a = 1\n"}, "data": {"purelib/m.py": "a = 2\n"}}, "m.py occurs twice"),
    ],
)
def test_entry_points_and_places_that_make_no_sense(options, said, tmp_path):
    assert said in story(refusal(tmp_path, make_wheel(tmp_path, "bad", **options)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["bad-1.0.data", "bad-1.0.data/purelib"])
def test_a_data_directory_or_scheme_that_is_a_file_does_not_hang(tmp_path, name):
    wheel = parts("bad").with_members(Member(name=name, data=b"")).write(tmp_path)
    assert f"{name} is a file, where a directory is expected" in story(refusal(tmp_path, wheel))


def test_an_encrypted_member(tmp_path):
    wheel = make_wheel(tmp_path, "bad")
    data = bytearray(wheel.read_bytes())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + place] |= 1
    wheel.write_bytes(data)
    assert "encrypted" in story(refusal(tmp_path, wheel))


@pytest.mark.parametrize("change", [b"Wheel-Version: 2.0", b"Wheel-Version: "])
def test_a_wheel_of_another_format(change, tmp_path):
    base = parts("bad")
    members = tuple(
        replace(m, data=m.data.replace(b"Wheel-Version: 1.0", change)) for m in base.members
    )
    wheel = replace(base, members=members).write(tmp_path)
    assert "Wheel-Version" in story(refusal(tmp_path, wheel))


def test_any_changed_bit_is_harmless_or_refused(tmp_path, wheelhouse):
    wheel = wheelhouse / "cli_tool-1.0-py3-none-any.whl"
    raw, good = wheel.read_bytes(), contents(layer_of(wheel))
    chance = random.Random(20240607)
    refused = 0
    for _ in range(400):
        data = bytearray(raw)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        wheel.write_bytes(data)
        try:
            layer = layer_of(wheel)
        except WheelError:
            refused += 1
            continue
        index = {entry.path: entry.sha256 for entry in index_of(layer).files}
        changed = {
            path for path in good if index.get(path) != hashlib.sha256(good[path]).hexdigest()
        }
        # Only RECORD itself has no digest; what it says is made anew from what was found.
        assert not changed
    assert refused > 100


# --- Large members of wheels: the same bytes as through ``zipfile``, and all damage noticed


NOISE = random.Random(5).randbytes(LARGE + 12345)
ZEROS = bytes(3 * LARGE + 1)
MIXED = NOISE + ZEROS + NOISE[:100]


def member(path, content, method):
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("before", b"x" * 10)
        archive.writestr("a/large", content)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("a/large")
    digest = hashlib.sha256(content).digest()
    return LargeMember(wheel=path, member=info, size=info.file_size, sha256=digest)


def changed(large, **changes):
    """The same entry of the archive's directory, with other values."""
    info = copy.copy(large.member)
    for name, value in changes.items():
        setattr(info, name, value)
    return {"member": info}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("content", [b"", b"x", NOISE, ZEROS, MIXED, NOISE[:LARGE] + ZEROS[:LARGE]])
def test_content_comes_in_pieces_of_one_length(tmp_path, content, method):
    """Frames end at pieces, so their lengths may depend on nothing else."""
    chunks = list(member(tmp_path / "a.zip", content, method).chunks(LARGE))
    assert b"".join(chunks) == content
    assert all(len(chunk) == LARGE for chunk in chunks[:-1])
    assert len(chunks) == -(-len(content) // LARGE)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_member_that_is_not_what_was_promised_is_noticed(tmp_path, method):
    whole = member(tmp_path / "a.zip", MIXED, method)
    stored = member(tmp_path / "b.zip", b"\xff" * LARGE, zipfile.ZIP_STORED)
    elsewhere = changed(whole, header_offset=stored.member.header_offset)
    elsewhere["wheel"] = stored.wheel
    sizes = [{"size": size} for size in (0, LARGE, len(MIXED) - 1, len(MIXED) + 1)]
    short = changed(whole, compress_size=whole.member.compress_size // 3)
    for change in ({"sha256": bytes(32)}, *sizes, short, elsewhere):
        with pytest.raises((ChangedMemberError, EOFError, zlib.error)):
            list(replace(whole, **change).chunks(LARGE))
    data = whole.wheel.read_bytes()
    cut = whole.member.header_offset + whole.member.compress_size // 2
    whole.wheel.write_bytes(data[:cut])
    with pytest.raises(EOFError):
        list(whole.chunks(LARGE))


def row_of(content):
    """What RECORD says of a large file."""
    return parts("lib", files={"lib/large.so": content}).record()[0]


def large_wheel(tmp_path, row=None):
    """A wheel with a large file, of which RECORD says this."""
    base = parts("lib", files={"lib/large.so": MIXED})
    return base.write(tmp_path, [row or row_of(MIXED), *base.record()[1:]])


def test_a_layer_is_the_same_as_from_a_spool(tmp_path, monkeypatch):
    source = large_wheel(tmp_path)
    unread = layer_of(source).read_bytes()
    monkeypatch.setattr("stager.layers.wheel.LARGE", 1 << 40)
    assert layer_of(source).read_bytes() == unread


@pytest.mark.parametrize(
    "row",
    [
        row_of(NOISE),
        [*row_of(NOISE)[:2], str(len(MIXED))],
        [*row_of(MIXED)[:2], "5"],
        ["lib/large.so", "sha256=no digest", str(len(MIXED))],
    ],
)
def test_a_large_member_is_compared_with_record(tmp_path, row):
    with pytest.raises(WheelError, match="does not have the size and hash") as raised:
        layer_of(large_wheel(tmp_path, row))
    assert raised.value.message.startswith("lib-1.0-py3-none-any.whl: lib/large.so")


def test_a_wheel_that_is_cut_while_its_layer_is_written(tmp_path):
    source = large_wheel(tmp_path)
    with LayerWriter(tmp_path) as writer:
        add_wheel(writer, source, HOST)
        source.write_bytes(source.read_bytes()[:LARGE])
        with pytest.raises(WheelError, match="damaged or cut short"):
            writer.write(tmp_path / "layer", ORIGIN)


def test_a_file_that_is_read_later_clashes_like_others(tmp_path):
    digest = hashlib.sha256(b"one").digest()
    later = Unread(size=3, sha256=digest, chunks=lambda _length: iter([b"one"]))
    with LayerWriter(tmp_path) as writer:
        writer.add("a/file", io.BytesIO(b"one"))
        writer.add("a/file", later)  # the same content
        with pytest.raises(WheelError, match="twice"):
            writer.add("a/file", io.BytesIO(b"two"))
        with pytest.raises(WheelError, match="unsafe"):
            writer.add("../file", later)
