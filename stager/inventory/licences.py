"""The licence of a package as its metadata declares it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from .package_metadata import TEXT_LIMIT, PackageMetadata, clean

_NO_LICENCE = (
    *("", "unknown", "none", "n/a", "license", "dual license", "see license", "see license file"),
)
"""Texts in the field of a licence that name none, in lower case."""
_SPDX = {
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache license version 2.0": "Apache-2.0",
    "apache-2.0 license": "Apache-2.0",
    "bsd 2-clause": "BSD-2-Clause",
    "bsd 3-clause": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "boost software license 1.0 (bsl-1.0)": "BSL-1.0",
    "cc0 1.0 universal (cc0 1.0) public domain dedication": "CC0-1.0",
    "gnu affero general public license v3 or later (agplv3+)": "AGPL-3.0-or-later",
    "gnu general public license v2 or later (gplv2+)": "GPL-2.0-or-later",
    "gnu general public license v3 or later (gplv3+)": "GPL-3.0-or-later",
    "gnu lesser general public license v2 or later (lgplv2+)": "LGPL-2.0-or-later",
    "gnu lesser general public license v3 or later (lgplv3+)": "LGPL-3.0-or-later",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mit no attribution license (mit-0)": "MIT-0",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "mpl 2.0": "MPL-2.0",
    "the mit license": "MIT",
    "the unlicense (unlicense)": "Unlicense",
}
"""Names that mean exactly one licence of SPDX. Many classifiers do not: "BSD License", or "Apache
Software License", leave the version open (PEP 639), and stay the names that they are."""

_HUB_ID = re.compile(r"[\w.+-]+")
"""An id of a licence, as the hub's cards have them; a name of a card's own has spaces."""


@dataclass(frozen=True, kw_only=True)
class Licence:
    """A licence as somebody has declared it."""

    names: tuple[str, ...] = ()
    """One licence expression of SPDX; or the names that were given; empty for no licence."""
    spdx: bool = False
    """True if each name is a licence expression of SPDX."""
    field: str = ""
    """Where it is declared: ``License-Expression``, ``License``, ``Classifier`` or ``card``."""

    @property
    def text(self) -> str:
        """The names in one line; empty for no licence."""
        return "; ".join(self.names)


def licence_of(metadata: PackageMetadata) -> Licence:
    """Return the licence of a package, from the field that says it most exactly.

    An expression of SPDX wins wherever it stands, then ``License-Expression``, a short ``License``,
    classifiers, and at last the first line of the licence's text.
    """
    lines = [line for line in metadata.licence.splitlines() if line.strip()]
    is_name = len(lines) == 1 and len(lines[0]) <= TEXT_LIMIT
    classified = [text.rpartition(" :: ")[2] for text in metadata.classifiers]
    candidates = [
        _licence("License-Expression", [metadata.expression]),
        _licence("License", lines if is_name else []),
        _licence("Classifier", [name for name in classified if name != "OSI Approved"]),
        _licence("License", lines[:1]),
    ]
    declared = [one for one in candidates if one.names]
    exact = [one for one in declared if one.spdx]
    return next(iter([*exact, *declared]), Licence())


def licence_of_card(text: str) -> Licence:
    """Return the licence, or the licences, that the card of a model or data set names."""
    names = text.split(", ")
    return _licence("card", names if all(map(_HUB_ID.fullmatch, names)) else [text])


def _licence(field: str, texts: Sequence[str]) -> Licence:
    cleaned = [name for name in map(clean, texts) if name.lower() not in _NO_LICENCE]
    exact = [_expression(name) for name in cleaned]
    names = tuple(dict.fromkeys(found or name for found, name in zip(exact, cleaned, strict=True)))
    return Licence(names=names, spdx=bool(names) and all(exact), field=field if names else "")


def _expression(name: str) -> str:
    """Return the SPDX expression of a licence's name; empty for none."""
    try:
        return str(canonicalize_license_expression(_SPDX.get(name.lower(), name)))
    except (InvalidLicenseExpression, RecursionError):
        return ""
