"""The names in ``assets.models``, ``datasets`` and ``spaces``: repositories of a hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["model", "dataset", "space"]
_REPOSITORY = re.compile(
    r"(?!.*(--|\.\.|\.git$))[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?"
)
"""One name, or an owner's and one, by the hub's rules: at most 96 characters for each."""
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][\w./+-]{0,199}")
"""A branch, a tag or a commit: no ``..``, and nothing that a path of the cache could not hold."""
_PART = re.compile(r"[\w.+ -]{1,200}")
"""A configuration or a split."""
_KEYS: Mapping[Kind, tuple[str, ...]] = {
    "model": ("name", "revision", "files"),
    "dataset": ("name", "revision", "config", "split", "files"),
    "space": ("name", "revision", "files"),
}


@dataclass(frozen=True, kw_only=True)
class HubRequest:
    """One model, data set or Space that the user asks for."""

    kind: Kind
    """``model``, ``dataset`` or ``space``."""
    name: str
    """The repository, ``org/name`` or ``name``."""
    revision: str = ""
    """A branch, tag or commit; empty for the default branch."""
    config: str = ""
    """The data set's configuration, as its card names it; empty for all."""
    split: str = ""
    """The data set's split; empty for all."""
    files: tuple[str, ...] = ()
    """Patterns of the files to take; empty to leave that to :mod:`stager.hub.selection`."""

    @property
    def label(self) -> str:
        """The name for messages: ``org/name@revision``."""
        return f"{self.name}@{self.revision}" if self.revision else self.name

    @property
    def folder(self) -> str:
        """The repository's directory in a cache, by the layout of ``huggingface_hub``."""
        return f"{self.kind}s--{self.name.replace('/', '--')}"

    def to_dict(self) -> dict[str, object]:
        """Return what the lock keeps: only what was set."""
        fields = {name: getattr(self, name) for name in _KEYS["dataset"]}
        fields["files"] = list(self.files)
        return {"type": self.kind, **{name: value for name, value in fields.items() if value}}


def parse_request(kind: Kind, value: object) -> HubRequest:
    """Read one entry: a string ``org/name`` or ``org/name@revision``, or a table.

    Raises:
        ValueError: it is neither; the message says what is wrong with it.
    """
    if isinstance(value, str):
        name, at, revision = value.partition("@")
        if at and not revision:
            raise ValueError("a revision is missing behind the @")
        value = {"name": name, "revision": revision}
    if not isinstance(value, dict):
        raise ValueError("neither a string nor a table")
    for key in value:
        if key not in _KEYS[kind]:
            raise ValueError(f"unknown key {key!r}; known are {', '.join(_KEYS[kind])}")
    texts = {key: _text(value, key) for key in _KEYS[kind] if key != "files"}
    request = HubRequest(kind=kind, files=_patterns(value.get("files", [])), **texts)
    _check(request)
    return request


def request_from(data: Mapping[str, object]) -> HubRequest:
    """Read what :meth:`HubRequest.to_dict` wrote.

    Raises:
        ValueError: it did not write this.
    """
    fields = dict(data)
    kind = fields.pop("type", None)
    for known in get_args(Kind):
        if kind == known:
            return parse_request(known, fields)
    raise ValueError(f"type is {kind!r}")


def _text(table: Mapping[str, object], key: str) -> str:
    value = table.get(key, "")
    if not isinstance(value, str):
        raise ValueError(f"{key} is not a string")
    return value


def _patterns(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ValueError("files is not a list of patterns")
    return tuple(value)


def _check(request: HubRequest) -> None:
    if not _REPOSITORY.fullmatch(request.name):
        raise ValueError(f"{request.name!r} is not the name of a repository, as in org/name")
    if request.revision and not _REVISION.fullmatch(request.revision):
        raise ValueError(f"{request.revision!r} is not a branch, a tag or a commit")
    for text in (request.config, request.split):
        if text and not _PART.fullmatch(text):
            raise ValueError(f"{text!r} is not the name of a configuration or a split")
    if request.files and (request.config or request.split):
        raise ValueError("files goes with neither config nor split, which choose files themselves")
