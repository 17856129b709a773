"""What a rank's record keeps of its variables: bounded, without secrets, and without its code."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from bundle.launch.rank_results import hide_secret_variables
from bundle.launch.wrapper import describe_state
from bundle.protocol.codec import decode
from bundle.protocol.messages import FailureRecord


def _refuse(*_args: object, **_kwargs: object) -> Any:
    raise SystemError("code of the program was called")


class Meta(type):
    __eq__ = __hash__ = __instancecheck__ = _refuse


class Wild(metaclass=Meta):
    """An object of which no method and no property may be used."""

    __repr__ = __str__ = __len__ = __iter__ = __eq__ = __hash__ = _refuse
    __getattr__ = _refuse
    shape = dtype = property(_refuse)


class Batch(list[int]):
    __iter__ = __len__ = __repr__ = _refuse


class Table(np.ndarray[Any, Any]):
    """An array whose class is the program's: it may have changed anything."""

    shape = property(_refuse)


class Pair(NamedTuple):
    first: int


def circle() -> list[object]:
    value: list[object] = [1]
    value.append(value)
    return value


def fail(value: object, **named: object) -> None:
    step = 17
    raise ValueError(step)


def keep(call: Callable[[], object]) -> FailureRecord:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - any
        call()
    known = {"node": "n1", "rank": 0, "exit_code": 1, "time": 1.0}
    record = decode(FailureRecord, {**known, **describe_state(raised.value)}, strict=True)
    return hide_secret_variables(record)


def innermost(record: FailureRecord) -> dict[str, str]:
    return {one.name: f"{one.type} {one.text}".strip() for one in record.variables[0].values}


SHOWN: list[tuple[Callable[[], object], str]] = [
    (lambda: 3, "int 3"),
    (lambda: True, "bool True"),
    (lambda: None, "NoneType None"),
    (lambda: float("nan"), "float nan"),
    (lambda: 10**100, "int of 333 bits"),
    (lambda: "a\nb", r"str 'a\nb'"),
    (lambda: b"\0", r"bytes b'\x00'"),
    (lambda: Path("/data"), "PosixPath '/data'"),
    (lambda: [1, "x", 2.5], "list [1, 'x', 2.5]"),
    (lambda: (1, (2, (3, [4]))), "tuple (1, (2, (3, list of 1)))"),
    (lambda: {"lr": 0.1, "steps": [1]}, "dict {'lr': 0.1, 'steps': [1]}"),
    (lambda: range(3), "range"),
    (set, "set {}"),
    (lambda: list(range(9)), "list [0, 1, 2, 3, 4, 5, 6, 7, ... (9)]"),
    (circle, "list [1, [1, [1, list of 2]]]"),
    (lambda: Pair(1), "Pair"),
    (lambda: Batch([1]), "Batch"),
    (Wild, "Wild"),
    (lambda: [Wild(), 1], "list [Wild, 1]"),
    (lambda: {"a": Batch([1])}, "dict {'a': Batch}"),
    (lambda: np.zeros((2, 3), np.float32), "ndarray float32 [2, 3]"),
    (lambda: np.zeros(2).view(Table), "Table"),
    (lambda: [np.zeros(2)], "list [ndarray float64 [2]"),
]


@pytest.mark.parametrize(("make", "shown"), SHOWN)
def test_only_plain_values_are_shown(make: Callable[[], object], shown: str) -> None:
    text = innermost(keep(lambda: fail(make())))["value"]
    assert text.startswith(shown)
    if "ndarray" not in shown:  # NumPy 2 has a device, too
        assert text == shown


@pytest.mark.parametrize(
    "value", ["x" * 10_000, ["y" * 500] * 50, dict.fromkeys(range(9), "z" * 90)]
)
def test_each_is_short(value: object) -> None:
    found = {one.name: one.text for one in keep(lambda: fail(value)).variables[0].values}
    text = found["value"]
    assert 90 < len(text) <= 120
    assert "..." in text


def test_frames_and_names_are_few_and_those_of_the_line_come_first() -> None:
    def deep(other: int, left: int) -> None:
        if left:
            deep(other, left - 1)
        raise KeyError(left)

    record = keep(lambda: deep(1, 5))
    assert [frame.place.split()[-1] for frame in record.variables] == ["deep"] * 3
    assert record.variables[0].place.startswith(f"{__file__}:")
    assert record.variables[0].values[0].name == "left"

    source = "\n".join(f"name{at:02} = {at}" for at in range(30)) + "\nraise ValueError(name29)"
    code = compile(source, "/work/script.py", "exec")
    module = keep(lambda: exec(code, {"__name__": "__main__", "json": types, "f": fail}))
    assert len(module.variables[0].values) == 20
    assert module.variables[0].more == 10


def test_no_secret_is_kept() -> None:
    settings = {"lr": 1, "password": "hunter2x", "n": ["--api-key", "abc123def456"]}
    words = ['Esc4ped"With"Quotes99', "Llama-3.1-8B-Instruct", "shard-00017-of-00128.tar"]
    assert innermost(keep(lambda: fail(words)))["value"] == f"list ['***', {str(words[1:])[1:]}"
    record = keep(
        lambda: fail(settings, hf_token="hf_0123456789abcdef", url="https://u:secret99@h/x")
    )
    assert "hunter2x" not in str(record)
    assert "abc123def456" not in str(record)
    shown = innermost(record)
    assert shown["value"].startswith("dict {'lr': 1, 'password': '***'")

    def connect(hf_token: str, url: str) -> None:
        raise ValueError

    shown = innermost(keep(lambda: connect("hf_0123456789abcdef", "https://u:secret99@h/x")))
    assert shown == {"hf_token": "str", "url": "str 'https://h/x'"}


def test_steps_are_numbers_of_the_own_frames() -> None:
    def train(global_step: int, epoch: object, iteration: bool) -> None:
        fail(1)

    record = keep(lambda: train(4711, 2.5, iteration=True))
    assert record.step == {"step": 17, "global_step": 4711, "epoch": 2.5}
    assert keep(lambda: train(1 << 60, Wild(), iteration=True)).step == {"step": 17}


def test_a_state_that_cannot_be_read_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bundle.launch.wrapper.traceback.walk_tb", _refuse)
    assert describe_state(ValueError()) == {}
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONHASHSEED", "3")
    assert keep(lambda: fail(1)).seeds["PYTHONHASHSEED"] == "3"
