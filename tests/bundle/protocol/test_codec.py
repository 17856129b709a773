"""The codec turns dataclasses into JSON and back, and says where a value is wrong."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import pytest

from bundle.protocol.codec import AnyText, DecodeError, decode, encode
from bundle.protocol.digest import Digest


class Colour(str, enum.Enum):
    """An enumeration."""

    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Span:
    """A dataclass with a form of its own."""

    first: int
    last: int

    def to_json(self) -> str:
        """Return ``first-last``."""
        return f"{self.first}-{self.last}"

    @classmethod
    def from_json(cls, raw: str) -> Span:
        """Read ``first-last``."""
        first, last = raw.split("-")
        return cls(int(first), int(last))


@dataclass(frozen=True)
class Leaf:
    """A dataclass inside another."""

    size: int
    name: str = ""


@dataclass(frozen=True)
class Tree:
    """A dataclass with a field of each type."""

    KIND: ClassVar[str] = "tree"

    colour: Colour
    leaves: tuple[Leaf, ...]
    place: tuple[float, str] | None
    by_name: dict[str, tuple[int, ...]]
    interface: str | dict[str, str]
    free: object
    span: Span
    digest: Digest
    kind: str = field(default="oak", metadata={"json": "class"})
    dead: bool = False
    nested: Leaf | None = None
    listed: dict[str, int] = field(default_factory=dict)


TREE = Tree(
    colour=Colour.RED,
    leaves=(Leaf(1), Leaf(2, "two")),
    place=(1.5, "x"),
    by_name={"a": (1, 2), "b": ()},
    interface={"n[1-2]": "eth0"},
    free=[1, {"any": None}],
    span=Span(3, 4),
    digest=Digest("0" * 64),
)
RAW = {
    "colour": "red",
    "leaves": [{"size": 1, "name": ""}, {"size": 2, "name": "two"}],
    "place": [1.5, "x"],
    "by_name": {"a": [1, 2], "b": []},
    "interface": {"n[1-2]": "eth0"},
    "free": [1, {"any": None}],
    "span": "3-4",
    "digest": "0" * 64,
    "class": "oak",
    "dead": False,
    "nested": None,
    "listed": {},
}


def test_a_dataclass_becomes_json_and_json_the_same_dataclass() -> None:
    assert encode(TREE) == RAW
    assert decode(Tree, json.loads(json.dumps(RAW))) == TREE
    raw = {key: value for key, value in RAW.items() if key not in ("colour", "free")}
    with pytest.raises(DecodeError, match=r"^tree: colour, free: missing$"):
        decode(Tree, raw, "tree")
    leaves = [{"size": 1, "new": 3}, {"size": 2, "name": "two"}]
    assert decode(Tree, {**RAW, "more": 1, "leaves": leaves}, strict=False) == TREE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "green"}, "colour: is 'green', none of red, blue"),
        ({"leaves": {}}, "leaves: is {}, not a list"),
        ({"leaves": [{"size": 1}, {"size": True}]}, "leaves[1].size: is True, not a whole number"),
        ({"leaves": [{"size": 1, "x": 2}]}, "leaves[0]: x: unknown"),
        ({"leaves": [3]}, "leaves[0]: is 3, not an object"),
        ({"place": [1.0]}, "place: is [1.0], not tuple[float, str] | None"),
        ({"place": [float("nan"), "x"]}, "place[0]: is nan, not a finite number"),
        ({"by_name": {"a": [1, None]}}, "by_name.a[1]: is None, not a whole number"),
        ({"by_name": []}, "by_name: is [], not an object"),
        ({"interface": 4}, "interface: is 4, not str | dict[str, str]"),
        ({"class": "a\0b"}, "class: is 'a\\x00b', not a text"),
        ({"span": "3"}, "span: is '3', not enough values to unpack"),
        ({"digest": "0"}, "digest: is '0', not a sha256"),
        ({"dead": 0}, "dead: is 0, not true or false"),
        ({"nested": {"size": 10**30}}, "nested.size: is 1000000"),
        ({"more": 1, "other": 2}, "more, other: unknown"),
    ],
)
def test_a_wrong_value_is_named_by_its_key_path(change: dict[str, object], message: str) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(Tree, {**RAW, **change})
    assert str(caught.value).startswith(message)


@dataclass(frozen=True)
class Note:
    """A dataclass with a path, a program's text, and a field that stays here."""

    path: Path
    printed: AnyText = ""
    seen: bool = field(default=False, metadata={"json": None})


def test_a_path_becomes_text_that_of_programs_is_any_and_fields_may_stay_out() -> None:
    note = Note(Path("/a/b"), "a\0b", seen=True)
    assert encode(note) == {"path": "/a/b", "printed": "a\0b"}
    assert encode(note, omit=("printed",)) == {"path": "/a/b"}
    assert decode(Note, encode(note)) == replace(note, seen=False)
    for key, value, why in (("seen", True, "unknown"), ("printed", 5, "is 5, not a text")):
        with pytest.raises(DecodeError, match=f"^{key}: {why}$"):
            decode(Note, {"path": "/a/b", key: value})
