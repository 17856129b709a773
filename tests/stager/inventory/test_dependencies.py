"""The graph of packages: markers of the target, extras that somebody asks for, nonsense."""

from __future__ import annotations

from stager.core.values import Target
from stager.inventory.package_metadata import dependencies

ENVIRONMENT = {
    name: str(value)
    for name, value in Target(python="3.11", platform="manylinux_2_28_x86_64").environment().items()
}


def graph(**requires: list[str]) -> dict[str, tuple[str, ...]]:
    return dependencies(requires, ENVIRONMENT)


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
