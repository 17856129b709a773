"""The names in ``assets.models``, ``datasets`` and ``spaces``: repositories of a hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from itertools import filterfalse
from pathlib import PurePosixPath
from typing import Literal

from bundle.protocol.codec import decode, encode
from bundle.protocol.dataclass import dataclass
from bundle.protocol.digest import Digest
from bundle.regex import compile_lazily

Kind = Literal["model", "dataset", "space"]
_REPOSITORY = compile_lazily(
    r"(?!.*(--|\.\.|\.git$))[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?"
)
"""One name, or an owner's and one, by the hub's rules: at most 96 characters for each."""
_REVISION = compile_lazily(r"(?!.*\.\.)[A-Za-z0-9_][\w./+-]{0,199}")  # a branch, a tag or a commit
_PART = compile_lazily(r"[\w.+ -]{1,200}")
_KEYS: Mapping[Kind, tuple[str, ...]] = {
    "model": ("name", "revision", "files"),
    "dataset": ("name", "revision", "config", "split", "files"),
    "space": ("name", "revision", "files"),
}


@dataclass(frozen=True, kw_only=True)
class HubRequest:
    """One model, data set or Space that the user asks for."""

    kind: Kind
    name: str  # the repository, ``org/name`` or ``name``
    revision: str = ""
    config: str = ""  # the data set's configuration, as its card names it; empty for all
    split: str = ""
    files: tuple[str, ...] = ()  # patterns of the files to take; empty for the usual ones

    def __post_init__(self) -> None:
        if not _REPOSITORY.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not the name of a repository, as in org/name")
        if self.revision and not _REVISION.fullmatch(self.revision):
            raise ValueError(f"{self.revision!r} is not a branch, a tag or a commit")
        for text in (self.config, self.split):
            if text and not _PART.fullmatch(text):
                raise ValueError(f"{text!r} is not the name of a configuration or a split")
        if self.files and (self.config or self.split):
            raise ValueError("files goes with neither config nor split, which choose files, too")

    @property
    def label(self) -> str:
        """The name for messages: ``org/name@revision``."""
        return f"{self.name}@{self.revision}" if self.revision else self.name

    @property
    def folder(self) -> str:
        """The repository's directory in a cache, by the layout of ``huggingface_hub``."""
        return f"{self.kind}s--{self.name.replace('/', '--')}"

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> HubRequest:
        """Read what :meth:`to_json` wrote; ValueError if it did not write this."""
        fields = dict(raw)
        kind = fields.pop("type", None)
        for known in _KEYS:
            if kind == known:
                return parse_request(known, fields)
        raise ValueError(f"type is {kind!r}")

    def to_json(self) -> dict[str, object]:
        """Return what the lock keeps: only what was set."""
        fields = {name: getattr(self, name) for name in _KEYS["dataset"]}
        fields["files"] = list(self.files)
        return {"type": self.kind, **{name: value for name, value in fields.items() if value}}


def parse_request(kind: Kind, value: object) -> HubRequest:
    """Read ``org/name``, ``org/name@revision`` or a table; ValueError says what is wrong."""
    if isinstance(value, str):
        name, at, revision = value.partition("@")
        if at and not revision:
            raise ValueError("a revision is missing behind the @")
        value = {"name": name, "revision": revision}
    if not isinstance(value, dict):
        raise ValueError("neither a string nor a table")
    for key in filterfalse(_KEYS[kind].__contains__, value):
        raise ValueError(f"unknown key {key!r}; known are {', '.join(_KEYS[kind])}")
    texts = {"name": "", **value}
    files = _read_patterns(texts.pop("files", []))
    for key in (key for key, text in texts.items() if not isinstance(text, str)):
        raise ValueError(f"{key} is not a string")
    return HubRequest(kind=kind, files=files, **texts)


def _read_patterns(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise ValueError("files is not a list of patterns")
    return tuple(value)


_COMMIT = compile_lazily(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """One file of a repository at one commit."""

    path: str
    size: int
    sha256: Digest

    def __post_init__(self) -> None:
        if not is_safe(self.path) or self.size < 0:
            raise ValueError(f"{self.path!r} is not a path in a repository, or has a wrong size")


@dataclass(frozen=True, kw_only=True)
class LockedRepository:
    """A model or data set at one commit."""

    request: HubRequest
    commit: str
    licence: str = ""  # as its card names it; empty if it names none
    left_out: tuple[str, ...] = field(default=(), metadata={"json": "left-out"})  # by path
    files: tuple[HubFile, ...] = field(metadata={"json": "content"})  # those taken, by path

    def __post_init__(self) -> None:
        if not _COMMIT.fullmatch(self.commit):
            raise ValueError("commit: not 40 hexadecimal digits")
        if not self.licence.isprintable() or not self.files:
            raise ValueError("licence or content: not what a lock has there")
        if not all(map(is_safe, self.left_out)):
            raise ValueError("left-out: not a list of paths in a repository")

    @property
    def size(self) -> int:
        """Sum of the files' lengths in bytes."""
        return sum(file.size for file in self.files)

    def to_json(self) -> dict[str, object]:
        """Return the lock's entry."""
        return {**self.request.to_json(), **encode(self, omit=("request",))}


def decode_repository(data: object) -> LockedRepository:
    """Read an entry of the lock, which somebody may have edited; ValueError names the key."""
    if not isinstance(data, Mapping):
        raise ValueError("not a table")
    own = {key: data[key] for key in ("commit", "licence", "left-out", "content") if key in data}
    request = {key: value for key, value in data.items() if key not in own}
    return decode(LockedRepository, {"request": request, **own})


def is_safe(path: str) -> bool:
    """Return True for a path that stays in its repository, whatever it is joined to."""
    parts = PurePosixPath(path).parts
    plain = bool(parts) and path.isprintable() and "\\" not in path
    return plain and "/".join(parts) == path and not {"..", "/"}.intersection(parts)
