"""Our dataclasses behave as the standard ones do, but that nothing keeps a field from a change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import pytest

from bundle.protocol.dataclass import dataclass as ours

BOTH = pytest.mark.parametrize("decorate", [dataclasses.dataclass, ours])


@BOTH
def test_what_a_frozen_one_does(decorate: Callable[..., Any]) -> None:
    @decorate(frozen=True)
    class Point:
        x: int
        name: str = field(default="", compare=False)
        seen: dict[str, int] = field(default_factory=dict, hash=False, repr=False)

    @decorate(frozen=True)
    class Further(Point):
        y: int = 0

    point = Point(1, seen={"a": 1})
    assert repr(point).endswith("Point(x=1, name='')")
    assert point == Point(1, "other", {"a": 1}) != Point(1)
    assert hash(point) == hash(Point(1))
    assert Further(1) != Point(1)
    assert dataclasses.replace(Further(1, y=2), x=3) == Further(3, y=2)
    assert repr(Further(1)).endswith("Further(x=1, name='', y=0)")
    assert (Point(1) == 1) is False


@BOTH
def test_one_that_changes_or_is_only_itself(decorate: Callable[..., Any]) -> None:
    @decorate
    class Count:
        n: int = 0

    @decorate(eq=False, repr=False)
    class Self:
        n: int = 0

        def __repr__(self) -> str:
            return "me"

    count = Count()
    count.n += 1
    assert count == Count(1)
    with pytest.raises(TypeError):
        hash(count)
    assert Self() != Self()
    assert (str(Self()), len({Self(), Self()})) == ("me", 2)


@BOTH
def test_its_fields_are_known_before_and_without_an_instance(decorate: Callable[..., Any]) -> None:
    @decorate(kw_only=True)
    class Base:
        kind: ClassVar[str] = "base"
        names: list[str] = field(default_factory=list)
        size: int = field(default=1)

        def __post_init__(self) -> None:
            self.size += 1

    @decorate
    class Empty(Base):
        pass

    class Plain(Empty):
        def __init__(self) -> None:
            super().__init__(size=5)

    assert (Base.size, hasattr(Base, "names")) == (1, False)
    assert [each.name for each in dataclasses.fields(Plain)] == ["names", "size"]
    assert (Plain().size, Empty(names=["x"]).names, Base().names) == (6, ["x"], [])
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        Empty(other=1)
