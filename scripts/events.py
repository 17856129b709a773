#!/usr/bin/env python3
"""Writes ``docs/events.md`` from the classes of events in ``bundle/protocol``.

Usage: python scripts/events.py

A test keeps the page in step.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from bundle.protocol.events import (  # noqa: E402
    OF_AGENTS,
    OF_DRIVER,
    PRINTED_ONLY,
    DriverEvent,
    JobStacks,
)
from bundle.protocol.messages import (  # noqa: E402
    AgentEvent,
    Answer,
    Heartbeat,
    OutOfReach,
    Ready,
    Relayed,
)
from bundle.protocol.problem import ProblemCode  # noqa: E402

PAGE = HERE.parent / "docs" / "events.md"
_INTRODUCTION = """\
# Events

<!-- Written by scripts/events.py from the classes in bundle/protocol. -->

A job's driver prints each event as a line of JSON, and keeps it in `events.<id>.jsonl` in the log
directory ([settings.md](settings.md#logs)). The file grows while the job runs, so `tail -f` and a
program can follow it. Times are in seconds, and sizes in bytes.

Each line has these keys, and those of its event:

| key | type | meaning |
| --- | --- | --- |
| `v` | whole number | the version of this format: 1 |
| `job_id` | text | the number of the allocation, or one made up for a local job |
| `time` | number | the time by the driver's clock, since the epoch |
| `event` | text | the name of the event, see below |
| `phase` | text | the phase, in events of nodes |

New versions may add keys and events: skip those you do not know. Lines that an older version wrote
lack keys that are null, false or empty.

A job begins with `job` and ends with `result`. Each phase is between its `begin` and `end`; what
the nodes answer in it has the name of the phase. A driver that was killed leaves no `result`. A job
that Slurm has put back into the queue continues in the same file with another `job`. Where its
ranks are started again in the same allocation, `attempt` comes within the phase `launch`, with what
nodes answered before to another `preflight`.
"""
FOR_THE_DRIVER = (Ready, OutOfReach, Heartbeat, Relayed)
"""Messages of agents to the driver alone: it never passes them on."""
_WORDS = {
    "str": "text",
    "AnyText": "text",
    "Digest": "sha256 in hexadecimal",
    "int": "whole number",
    "float": "number",
    "bool": "true or false",
    "None": "null",
    "object": "any value",
}
_SEVERAL = {"text": "texts", "whole number": "whole numbers", "number": "numbers"}


def page() -> str:
    """Return the page."""
    parts = [_INTRODUCTION]
    parts += ["## Events of the driver\n", *map(_section, OF_DRIVER)]
    parts += [
        "## Events of the nodes\n",
        "Those with `ok` are answers: the end of a node's part in a phase. They have these keys,\n"
        f"and more:\n\n{_table(Answer)}\n",
    ]
    parts += [_section(kind) for kind in OF_AGENTS if kind not in FOR_THE_DRIVER]
    parts += [
        "## The stacks of the ranks\n",
        "`stacks.<id>.json` beside the events, which `stager stacks --json` prints, is one object\n"
        f"([diagnosis.md](diagnosis.md#while-the-job-runs)):\n\n{_table(JobStacks)}",
    ]
    parts += ["## Values in events\n", *(_value_section(kind) for kind in _values())]
    return "\n".join(parts)


def _section(kind: type[DriverEvent] | type[AgentEvent]) -> str:
    notes = "It is printed and not kept.\n\n" if kind in PRINTED_ONLY else ""
    table = _table(kind, Answer if issubclass(kind, Answer) else None)
    return f"### `{kind.event}`\n\n{_plain(kind.__doc__)}\n\n{notes}{table}".rstrip() + "\n"


def _value_section(kind: type[Any]) -> str:
    return f"### {_name(kind)}\n\n{_plain(kind.__doc__)}\n\n{_table(kind)}"


def _table(kind: type[Any], base: type[Any] | None = None) -> str:
    """Return the fields of a class but those of its base; empty for none."""
    known = {field.name for field in dataclasses.fields(base)} if base else set()
    rows = [_row(kind, field) for field in dataclasses.fields(kind) if field.name not in known]
    head = ["| key | type | meaning |", "| --- | --- | --- |"]
    return "\n".join([*head, *rows, ""]) if rows else ""


def _row(kind: type[Any], field: dataclasses.Field[Any]) -> str:
    owner, text = _declaration(kind, field.name)
    described = _described(str(field.type), owner)
    key = field.metadata.get("json", field.name)
    return f"| `{key}` | {described} | {_lowered(_plain(text))} |"


@functools.cache
def _parse_class(kind: type[Any]) -> ast.ClassDef:
    source = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(source, ast.ClassDef)
    return source


def _declaration(kind: type[Any], name: str) -> tuple[type[Any], str]:
    """Return the class that declares a field, and the comment behind it, or the text below it."""
    for owner in kind.__mro__:
        source = _parse_class(owner)
        for field, text in zip(source.body, [*source.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) == name:
                line = inspect.getsource(owner).splitlines()[field.lineno - 1]
                _, mark, comment = line.partition("  # ")
                if mark:
                    return owner, comment
                assert isinstance(text, ast.Expr)
                return owner, str(ast.literal_eval(text.value))
    raise ValueError(f"{kind.__name__}.{name} is declared nowhere")


def _described(declared: str, owner: type[Any]) -> str:
    """Return a type in words, with links to the classes in it."""
    choices = re.split(r" \| (?![^\[]*\])", declared)
    if len(choices) > 1:
        return " or ".join(_described(choice, owner) for choice in choices)
    if declared in _WORDS:
        return _WORDS[declared]
    if "[" in declared:
        return _described_container(declared, owner)
    kind = _class(declared, owner)
    if issubclass(kind, enum.Enum):
        words = (word if kind is ProblemCode else word.value for word in kind)
        return "one of " + ", ".join(f"`{word}`" for word in words)
    name = kind.event if issubclass(kind, (DriverEvent, AgentEvent)) else _name(kind)
    return f"[{name}](#{name.replace(' ', '-')})"


def _described_container(declared: str, owner: type[Any]) -> str:
    name, _, inner = declared.removesuffix("]").partition("[")
    if name == "dict":
        return f"object with {_plural(inner.removeprefix('str, '), owner)}"
    if inner.endswith(", ..."):
        return f"list of {_plural(inner.removesuffix(', ...'), owner)}"
    return f"list of {' and '.join(_described(one, owner) for one in inner.split(', '))}"


def _plural(declared: str, owner: type[Any]) -> str:
    described = _described(declared, owner)
    return _SEVERAL.get(described, described)


def _class(name: str, owner: type[Any]) -> type[Any]:
    kind: type[Any] = getattr(sys.modules[owner.__module__], name)
    return kind


def _name(kind: type[Any]) -> str:
    """Return the heading of a class: its name in words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()


def _values() -> Iterator[type[Any]]:
    """Yield the classes that are only parts of events, each once, in their order."""
    waiting: list[type[Any]] = [*OF_DRIVER, *OF_AGENTS, JobStacks]
    seen = set(waiting)
    while waiting:
        kind = waiting.pop(0)
        for part in _parts(kind):
            if part not in seen:
                seen.add(part)
                waiting.append(part)
        if not issubclass(kind, (DriverEvent, AgentEvent, JobStacks)):
            yield kind


def _parts(kind: type[Any]) -> Iterator[type[Any]]:
    for field in dataclasses.fields(kind):
        owner, _ = _declaration(kind, field.name)
        for name in re.findall(r"[A-Z]\w+", str(field.type)):
            part = None if name in _WORDS else _class(name, owner)
            if part is not None and dataclasses.is_dataclass(part):
                yield part


def _plain(text: str | None) -> str:
    """Return a docstring as Markdown in one paragraph."""
    paragraph = " ".join((text or "").split("\n\n")[0].split())
    paragraph = re.sub(r":\w+:`[\w.~]*?(\w+)`", r"`\1`", paragraph)
    return paragraph.replace("``", "`").replace("|", r"\|").replace("None", "null")


def _lowered(sentence: str) -> str:
    """Return a sentence as a table has it: without its end, and with a small first letter."""
    text = sentence.removesuffix(".")
    keep = text[:2].isupper() or text.startswith(("Slurm", "PyTorch"))
    return text if keep else text[:1].lower() + text[1:]


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
