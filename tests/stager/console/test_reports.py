"""The table of licences: 80 columns, and nothing that a terminal would obey."""

from __future__ import annotations

from pathlib import Path

from stager.console.reports import licence_lines
from stager.inventory.inventory import LicenceList, LicensedComponent


def one(name: str, version: str, licence: str, kind: str = "package") -> LicensedComponent:
    return LicensedComponent(
        kind=kind, name=name, version=version, licence=licence, spdx=False, declared_in=""
    )


def lines(*components: LicensedComponent) -> list[str]:
    without = sum(not component.licence for component in components)
    listed = LicenceList(
        bundle=Path("x"), id="0" * 64, components=components, without_licence=without
    )
    return list(licence_lines(listed))


def test_columns_models_and_those_without() -> None:
    assert lines(
        one("alpha", "1.0", "MIT"),
        one("org/tiny", "0123456789abcdef", "Apache-2.0", "model"),
        one("zstandard", "0.25.0", "BSD-3-Clause", "decompressor"),
        one("beta", "2.0", ""),
        one("org/news", "f" * 40, "", "dataset"),
    ) == [
        "alpha                   1.0           MIT",
        "model org/tiny          0123456789ab  Apache-2.0",
        "decompressor zstandard  0.25.0        BSD-3-Clause",
        "2 components without a licence:",
        "beta                    2.0",
        "data set org/news       ffffffffffff",
    ]


def test_no_line_is_longer_than_80_columns_and_nothing_is_lost() -> None:
    licence = " OR ".join(f"LicenseRef-{n}" for n in range(20))
    shown = lines(
        one("a" * 28, "1.0", licence),
        one("b" * 190, "1." + "2" * 190, "MIT"),
        one("c", "1.0", "x" * 190),
        one("d" * 190, "1.0", ""),
    )
    assert max(map(len, shown)) <= 80
    joined = "".join(line.strip() for line in shown)
    for text in (licence.replace(" ", ""), "b" * 190, "2" * 190, "x" * 190, "d" * 190):
        assert text in joined.replace(" ", "")


def test_control_characters_are_written_out() -> None:
    (line,) = lines(one("a\x1b[2J", "1\n0", "M\u202eIT"))
    assert line.isprintable()
    assert r"\u202e" in line
