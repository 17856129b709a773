"""A package's licence: the field that says it most exactly wins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stager.core.errors import in_one_line
from stager.inventory.package_metadata import Licence, licence_of, licence_of_card, parse_metadata

MIT = "Classifier: License :: OSI Approved :: MIT License"
BSD = "Classifier: License :: OSI Approved :: BSD License"
APACHE = "Classifier: License :: OSI Approved :: Apache Software License"
TEXT = "License: Copyright (c) 2026 Somebody\n        All rights reserved.\n        Permission is"


def licence(*lines: str) -> Licence:
    return licence_of(parse_metadata("\n".join(["Name: a", *lines, ""]).encode()))


@pytest.mark.parametrize(
    ("lines", "text", "spdx", "field"),
    [
        (["License-Expression: mit or ISC"], "MIT OR ISC", True, "License-Expression"),
        (["License-Expression: LicenseRef-Own"], "LicenseRef-Own", True, "License-Expression"),
        (["License-Expression: My Licence", MIT], "MIT", True, "Classifier"),
        (["License-Expression: My Licence"], "My Licence", False, "License-Expression"),
        (["License: Apache 2.0", APACHE], "Apache-2.0", True, "License"),
        (["License: bsd-3-clause", BSD], "BSD-3-Clause", True, "License"),
        (["License: MIT License"], "MIT", True, "License"),
        (["License: BSD", BSD], "BSD", False, "License"),
        (["License: Whatever", MIT], "MIT", True, "Classifier"),
        (["License: UNKNOWN", BSD], "BSD License", False, "Classifier"),
        (["License: Dual License", APACHE, BSD], "Apache Software License; BSD License", False,
         "Classifier"),
        ([BSD, BSD], "BSD License", False, "Classifier"),
        ([MIT, "Classifier: License :: OSI Approved :: ISC License (ISCL)"], "MIT; ISC", True,
         "Classifier"),
        (["Classifier: License :: OSI Approved", MIT], "MIT", True, "Classifier"),
        ([TEXT, BSD], "BSD License", False, "Classifier"),
        ([TEXT], "Copyright (c) 2026 Somebody", False, "License"),
        (["License: " + "long words " * 100, BSD], "BSD License", False, "Classifier"),
        (["License: UNKNOWN"], "", False, ""),
        (["Classifier: Topic :: Software Development"], "", False, ""),
        ([], "", False, ""),
    ],
)  # fmt: skip
def test_which_field_counts(lines: list[str], text: str, spdx: bool, field: str) -> None:
    found = licence(*lines)
    assert (found.text, found.spdx, found.field) == (text, spdx, field)


def test_the_licence_of_a_card() -> None:
    assert licence_of_card("apache-2.0") == Licence(names=("Apache-2.0",), spdx=True, field="card")
    assert licence_of_card("llama3") == Licence(names=("llama3",), field="card")
    assert licence_of_card("") == Licence()
    both = licence_of_card("apache-2.0, mit")  # a list in the card
    assert both == Licence(names=("Apache-2.0", "MIT"), spdx=True, field="card")
    assert licence_of_card("Lab, Inc. terms").names == ("Lab, Inc. terms",)


@given(st.text(max_size=400) | st.from_regex(r"[()MIT ORAND]{0,400}"))
def test_any_text_is_a_licence_that_can_be_shown_or_none(text: str) -> None:
    found = licence_of(parse_metadata(f"License-Expression: {text}\n".encode(errors="replace")))
    assert in_one_line(found.text) == found.text
    assert bool(found.names) == bool(found.field)
