"""The pages of a package index as text: HTML (PEP 503) and JSON (PEP 691), for the same wheels.

All links are relative, so that the folder can lie anywhere. Both forms name the METADATA file that
lies beside each wheel (PEP 658), in the spelling of PEP 714 alone: pip 22.3 to 23.1, as in Debian
12, reads the older one and then finds no wheel whose name is not normalised; without it that pip
reads METADATA in the wheel.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from urllib.parse import quote

from .wheel_file import ListedWheel

_API = "1.1"
"""The version of both forms: JSON then has sizes and versions (PEP 700)."""
_UP = "../../"
"""The folder of the wheels, from a project's page."""


def pages(wheels: Iterable[ListedWheel]) -> Iterator[tuple[str, str]]:
    """Yield the path of each page below ``simple`` with its text, the list of projects last."""
    projects: dict[str, list[ListedWheel]] = {}
    for wheel in sorted(wheels, key=lambda wheel: (wheel.name, wheel.version, wheel.filename)):
        projects.setdefault(wheel.name, []).append(wheel)
    for name, listed in projects.items():
        yield f"{name}/index.html", _html(f"Links for {name}", map(_link, listed))
        yield f"{name}/index.json", _json(_project(name, listed))
    links = (f'<a href="{name}/">{name}</a>' for name in projects)
    yield "index.html", _html("Simple index", links)
    yield "index.json", _json({"projects": [{"name": name} for name in projects]})


def _html(title: str, links: Iterable[str]) -> str:
    return "\n".join(
        [
            "<!DOCTYPE html>",
            "<html>",
            "<head>",
            '<meta charset="utf-8">',
            f'<meta name="pypi:repository-version" content="{_API}">',
            f"<title>{title}</title>",
            "</head>",
            "<body>",
            *(f"{link}<br>" for link in links),
            "</body>",
            "</html>",
            "",
        ]
    )


def _link(wheel: ListedWheel) -> str:
    attributes = {"data-core-metadata": f"sha256={wheel.metadata_digest}"}
    if wheel.requires_python:
        attributes["data-requires-python"] = wheel.requires_python
    written = "".join(f' {name}="{escape(value)}"' for name, value in attributes.items())
    href = escape(f"{_url(wheel)}#sha256={wheel.sha256}")
    return f'<a href="{href}"{written}>{escape(wheel.filename)}</a>'


def _project(name: str, wheels: Sequence[ListedWheel]) -> Mapping[str, object]:
    versions = dict.fromkeys(str(wheel.version) for wheel in wheels)
    return {"name": name, "versions": list(versions), "files": [_file(wheel) for wheel in wheels]}


def _file(wheel: ListedWheel) -> Mapping[str, object]:
    entry: dict[str, object] = {
        "filename": wheel.filename,
        "url": _url(wheel),
        "hashes": {"sha256": wheel.sha256},
        "size": wheel.size,
        "core-metadata": {"sha256": wheel.metadata_digest},
    }
    if wheel.requires_python:
        entry["requires-python"] = wheel.requires_python
    return entry


def _url(wheel: ListedWheel) -> str:
    return _UP + quote(wheel.filename)


def _json(page: Mapping[str, object]) -> str:
    return json.dumps({"meta": {"api-version": _API}, **page}, indent=1) + "\n"
