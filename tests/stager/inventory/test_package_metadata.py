"""METADATA read out of bundles: from the right frames, bounded, and whatever it holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from bundle.format.archive import BundleFile
from stager.core.errors import BundleError, escape_line_feeds
from stager.core.store import Store
from stager.core.values import Target
from stager.inventory.package_metadata import (
    HEADERS_LIMIT,
    TEXT_LIMIT,
    Licence,
    PackageMetadata,
    choose_licence,
    clean,
    find_dependencies,
    parse_card_licence,
    parse_metadata,
    read_metadata,
    read_wheel_metadata,
)
from stager.pack.bundle_file import open_bundle
from tests.support.building import frames_of
from tests.support.bundles import forge, make_bundle
from tests.support.wheelhouse import make_wheel

EXTRA = """\
License-Expression: MIT
License: The MIT License
Classifier: Programming Language :: Python
Classifier: License :: OSI Approved :: MIT License
"""
EXPECTED = PackageMetadata(
    name="alpha",
    version="1.0",
    expression="MIT",
    licence="The MIT License",
    classifiers=("License :: OSI Approved :: MIT License",),
    requires=("beta>=1", "gamma; extra == 'x'"),
)


NEEDS = ["beta>=1", "gamma; extra == 'x'"]


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path, "alpha", requires=NEEDS, metadata_extra=EXTRA)


def bundle_of(folder: Path, wheel: Path) -> Path:
    return make_bundle(Store(folder / "store"), [wheel], decompressor=None).path


def read(bundle: Path) -> PackageMetadata:
    with open_bundle(bundle) as file:
        (layer,) = file.manifest.layers
        return read_metadata(file, layer)


def test_the_fields_are_those_of_the_wheel(wheel: Path, tmp_path: Path) -> None:
    assert read(bundle_of(tmp_path, wheel)) == EXPECTED
    assert read_wheel_metadata(wheel.read_bytes()) == EXPECTED


def test_it_is_found_behind_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the frames that hold it are read."""
    files = {"aa_blob.bin": bytes(17 << 20), "alpha.py": ""}
    options = {"requires": NEEDS, "metadata_extra": EXTRA, "files": files}
    large = bundle_of(tmp_path / "large", make_wheel(tmp_path / "large", "alpha", **options))
    (layer,) = (tmp_path / "large" / "store" / "layers").iterdir()
    frames = frames_of(layer)
    assert len(frames) > 1
    assert len(b"".join(frames)) > 17 << 20
    asked: list[int] = []
    real = BundleFile.frame

    def counted(self: BundleFile, offset: int, size: int, sha256: str) -> bytes:
        asked.append(offset)
        return real(self, offset, size, sha256)

    monkeypatch.setattr(BundleFile, "frame", counted)
    assert read(large) == EXPECTED
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (zstandard.ZstdCompressor().compress(b"short"), "does not hold as much as promised"),
        (b"no zstd at all", "a frame cannot be decompressed"),
    ],
)
def test_a_frame_that_does_not_fit_the_index_is_damage(
    wheel: Path, tmp_path: Path, content: bytes, said: str
) -> None:
    def frames(found: list[bytes]) -> None:
        found[:] = [content]

    forged = forge(bundle_of(tmp_path, wheel), tmp_path / "forged.pkgs.tar", frames=frames)
    with pytest.raises(BundleError, match=said):
        read(forged)


def test_only_the_beginning_of_a_long_file_counts(tmp_path: Path) -> None:
    long = "License: MIT\n" + "X-Filler: " + "x" * HEADERS_LIMIT + "\nClassifier: License :: Late\n"
    found = read(bundle_of(tmp_path, make_wheel(tmp_path, "alpha", metadata_extra=long)))
    assert (found.licence, found.classifiers) == ("MIT", ())


@pytest.mark.parametrize("data", [b"", b"PK\x05\x06", b"no zip", b"PK\x03\x04" + bytes(50)])
def test_a_decompressor_that_is_no_wheel_has_no_metadata(data: bytes) -> None:
    assert read_wheel_metadata(data) == PackageMetadata()


def test_what_a_terminal_would_obey_is_written_out() -> None:
    data = "Name: a\x1b]0;title\x07\nVersion: 1\u202e0\nLicense-Expression: \x9b2JMIT\n"
    found = parse_metadata(data.encode())
    assert found.name == r"a\x1b]0;title\x07"
    assert found.version == r"1\u202e0"
    assert "\x9b" not in found.expression
    assert clean("a\tb \n c\u2028d") == "a b c d"
    assert len(clean("\x1b" * 10_000)) == TEXT_LIMIT
    assert clean("x" * 10_000).endswith("xxx...")


@given(
    st.binary(max_size=300) | st.text(max_size=300).map(lambda text: f"License: {text}".encode())
)
def test_any_bytes_are_metadata(data: bytes) -> None:
    found = parse_metadata(data)
    for text in (found.name, found.version, found.expression, *found.classifiers):
        assert escape_line_feeds(text) == text
        assert len(text) <= TEXT_LIMIT


MIT = "Classifier: License :: OSI Approved :: MIT License"
BSD = "Classifier: License :: OSI Approved :: BSD License"
APACHE = "Classifier: License :: OSI Approved :: Apache Software License"
TEXT = "License: Copyright (c) 2026 Somebody\n        All rights reserved.\n        Permission is"


def licence(*lines: str) -> Licence:
    return choose_licence(parse_metadata("\n".join(["Name: a", *lines, ""]).encode()))


@pytest.mark.parametrize(
    ("lines", "text", "spdx", "field"),
    [
        (["License-Expression: mit or ISC"], "MIT OR ISC", True, "License-Expression"),
        (["License-Expression: LicenseRef-Own"], "LicenseRef-Own", True, "License-Expression"),
        (["License-Expression: My Licence", MIT], "MIT", True, "Classifier"),
        (["License: Apache 2.0", APACHE], "Apache-2.0", True, "License"),
        (["License: bsd-3-clause", BSD], "BSD-3-Clause", True, "License"),
        (["License: MIT License"], "MIT", True, "License"),
        (["License: Whatever", MIT], "MIT", True, "Classifier"),
        (["License: UNKNOWN", BSD], "BSD License", False, "Classifier"),
        (["License: Dual License", APACHE, BSD], "Apache Software License; BSD License", False,
         "Classifier"),
        ([MIT, "Classifier: License :: OSI Approved :: ISC License (ISCL)"], "MIT; ISC", True,
         "Classifier"),
        (["Classifier: License :: OSI Approved", MIT], "MIT", True, "Classifier"),
        ([TEXT, BSD], "BSD License", False, "Classifier"),
        ([TEXT], "Copyright (c) 2026 Somebody", False, "License"),
        (["License: " + "long words " * 100, BSD], "BSD License", False, "Classifier"),
        (["License: UNKNOWN"], "", False, ""),
        ([], "", False, ""),
    ],
)  # fmt: skip
def test_which_field_counts(lines: list[str], text: str, spdx: bool, field: str) -> None:
    found = licence(*lines)
    assert (found.text, found.spdx, found.field) == (text, spdx, field)


@pytest.mark.parametrize(
    ("card", "names", "spdx"),
    [
        ("apache-2.0", ("Apache-2.0",), True),
        ("llama3", ("llama3",), False),
        ("", (), False),
        ("apache-2.0, mit", ("Apache-2.0", "MIT"), True),  # a list in the card
        ("Lab, Inc. terms", ("Lab, Inc. terms",), False),
    ],
)
def test_the_licence_of_a_card(card: str, names: tuple[str, ...], spdx: bool) -> None:
    expected = Licence(names=names, spdx=spdx, field="card" if names else "")
    assert parse_card_licence(card) == expected


@given(st.text(max_size=400) | st.from_regex(r"[()MIT ORAND]{0,400}"))
def test_any_text_is_a_licence_that_can_be_shown_or_none(text: str) -> None:
    found = choose_licence(parse_metadata(f"License-Expression: {text}\n".encode(errors="replace")))
    assert escape_line_feeds(found.text) == found.text
    assert bool(found.names) == bool(found.field)


ENVIRONMENT = {
    name: str(value)
    for name, value in Target(python="3.11", platform="manylinux_2_28_x86_64").environment().items()
}


def graph(**requires: list[str]) -> dict[str, tuple[str, ...]]:
    return find_dependencies(requires, ENVIRONMENT)


def test_markers_are_those_of_the_target() -> None:
    found = graph(
        a=["b", "C ; sys_platform == 'linux'", "d; python_version < '3.10'", "gone>=1"],
        b=["a>=1", "b", "d; sys_platform == 'win32'"],
        c=[],
        d=[],
    )
    assert found == {"a": ("b", "c"), "b": ("a",), "c": (), "d": ()}


def test_an_extra_counts_where_it_is_asked_for() -> None:
    extra = ["d; extra == 'fast'", "e; extra == 'slow'"]
    found = graph(a=["b[fast]", "c"], b=["c", *extra], c=["b[all]"], d=[], e=[])
    assert found["b"] == ("c", "d")
    extra.append("b[slow]; extra == 'all'")
    found = graph(a=["b[fast]", "c"], b=["c", *extra], c=["b[all]"], d=[], e=[])
    assert found["b"] == ("c", "d", "e")


def test_what_nobody_can_read_is_left_out() -> None:
    nested = "b; " + "(" * 300 + "os_name == 'posix'" + ")" * 300
    found = graph(
        a=["", "b ==", "b; os_name", "b; python_version < 'abc'", "b; nosuch == '1'", "\x00", "c"],
        b=["c @ file:///x"],
        c=[nested],
    )
    assert found["a"] == ("c",)
    assert found["b"] == ("c",)


def test_only_so_many_extras_of_a_package_are_looked_at() -> None:
    """Else each of an attacker's thousand extras would ask for another thousand."""
    names = [f"x{number}" for number in range(120)]
    others = [f"c{number}" for number in range(120)]
    extras = [f"{other}; extra == '{name}'" for name, other in zip(names, others, strict=True)]
    found = graph(
        a=[f"b[{','.join(names)}]"],
        b=[*extras, f"a[{','.join(names)}]"],
        **{other: [] for other in others},
    )
    assert 0 < len(found["b"]) < 60
