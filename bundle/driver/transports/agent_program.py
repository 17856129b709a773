"""The program of a step's agents, and their first request.

The program has not the driver's modules, those of phases that the step has not, bytecode, and what
only readers need of a source; and it is compressed as one. It travels in variables of the step:
Slurm passes them on with the step's start, from node to node along a tree, whereas ``srun`` itself
sends standard input to each task, one by one. Where variables cannot take it, it comes there. On a
node :mod:`bundle.channel.bootstrap` takes both.
"""

from __future__ import annotations

import ast
import binascii
import copy
import dataclasses
import functools
import io
import json
import os
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import AbstractSet, Any

from ...channel.agent_channel import PACKED
from ...environment.listing import HOOK_MODULES, HOOKS
from ...protocol.codec import encode
from ...protocol.job import Job
from ...protocol.messages import RelayStart, StepMessage
from .transport import Requests

# --- Stripping a module of what only its readers need; each statement stays on its line ----------

# Docstrings, comments, annotations other than those of fields (a dataclass reads its own), and the
# imports that only those used are removed. The rest runs alike, and a traceback names the same
# lines.

_Span = tuple[int, int, int, int, bytes]
"""The line and column where it begins and where it ends, and the bytes that replace it."""
_NOTHING = b"pass"
"""A statement that does nothing."""
_END_OF_LINE = 1 << 20
"""A column behind that of any character."""


def stripped(source: bytes) -> bytes:
    """Return the source of a module without what only readers need."""
    nodes = list(ast.walk(ast.parse(source)))
    spans = [*_docstrings(nodes), *_annotations(source, nodes), *_comments(source, nodes)]
    brief = _replaced(source, spans)
    return _replaced(brief, _unused_imports(ast.parse(brief)))


def _replaced(source: bytes, spans: Iterable[_Span]) -> bytes:
    """Replace spans of a source; every line keeps its number."""
    lines = source.split(b"\n")
    for first, begin, last, end, replacement in sorted(spans, reverse=True):
        whole = lines[first - 1][:begin] + replacement + lines[last - 1][end:]
        lines[first - 1 : last] = [whole.rstrip(), *[b""] * (last - first)]
    return b"\n".join(lines)


def _end(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0)


def _statement(node: ast.stmt, replacement: bytes) -> _Span:
    return (node.lineno, node.col_offset, *_end(node), replacement)


def _docstrings(nodes: list[ast.AST]) -> Iterator[_Span]:
    """Find strings that are statements: docstrings, and those below a constant or a field."""
    for node in nodes:
        body = getattr(node, "body", ())
        if not isinstance(body, list):
            continue  # of a lambda
        texts = [statement for statement in body if _is_text(statement)]
        replacement = _NOTHING if len(texts) == len(body) else b""
        for text in texts:
            yield _statement(text, replacement)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _annotations(source: bytes, nodes: list[ast.AST]) -> Iterator[_Span]:
    """Find annotations except those of fields."""
    lines = source.split(b"\n")
    fields: set[ast.AST] = set()
    for node in nodes:  # a class comes before what is in it
        if isinstance(node, ast.ClassDef):
            fields.update(node.body)
        elif isinstance(node, ast.arg):
            yield from _of_argument(node)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _of_result(node, lines)
        elif isinstance(node, ast.AnnAssign) and node not in fields:
            yield _of_variable(node)


def _of_argument(node: ast.arg) -> Iterator[_Span]:
    if node.annotation is not None:
        column = node.col_offset + len(node.arg.encode())
        yield (node.lineno, column, *_end(node.annotation), b"")


def _of_result(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[bytes]) -> Iterator[_Span]:
    if node.returns is not None:
        line = node.returns.lineno
        column = lines[line - 1].rindex(b"->", 0, node.returns.col_offset)
        yield (line, column, *_end(node.returns), b"")


def _of_variable(node: ast.AnnAssign) -> _Span:
    if node.value is None:
        return _statement(node, _NOTHING)
    return (*_end(node.target), *_end(node.annotation), b"")


def _comments(source: bytes, nodes: list[ast.AST]) -> Iterator[_Span]:
    texts = _text_columns(nodes)
    for number, line in enumerate(source.split(b"\n"), 1):
        column = line.find(b"#")
        while any(begin <= column < end for begin, end in texts.get(number, ())):
            column = line.find(b"#", column + 1)
        if column >= 0:
            yield number, column, number, len(line), b""


def _text_columns(nodes: list[ast.AST]) -> dict[int, list[tuple[int, int]]]:
    columns: dict[int, list[tuple[int, int]]] = {}
    for node in nodes:
        if not isinstance(node, (ast.Constant, ast.JoinedStr)):
            continue
        last, end = _end(node)
        for line in range(node.lineno, last + 1):
            begin = node.col_offset if line == node.lineno else 0
            columns.setdefault(line, []).append((begin, end if line == last else _END_OF_LINE))
    return columns


def _unused_imports(tree: ast.Module) -> Iterator[_Span]:
    """Find the imports of a module that nothing uses; what ``__all__`` names is used."""
    used = _used_names(tree)
    for node in tree.body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)) or _is_future(node):
            continue
        kept = [alias for alias in node.names if _bound_name(alias) in used]
        if len(kept) < len(node.names):
            shorter = copy.copy(node)
            shorter.names = kept
            yield _statement(node, ast.unparse(shorter).encode() if kept else b"")


def _used_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Constant):
            names.add(str(node.value))
    return names


def _is_future(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _bound_name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


STRIPPED = "stripped/"
"""The folder of a program that holds its agents' modules as they are sent, if it has been made."""
NOT_FOR_AGENTS = frozenset(
    f"bundle/{name}"
    for name in (
        *("__main__", "protocol/events", "protocol/log_names"),
        *("protocol/problem_table", "protocol/node_wordings"),
        *("checks/findings", "checks/cuda", "launch/exec_command", "channel/ssh_fanout"),
        *("redaction/known_values", "transfer/forecast", "transfer/plan"),
    )
)
"""The modules outside ``driver/`` that no agent of a step uses."""
OF_PHASES = {
    "collect": ("results/stream", "results/selection"),
    "results": (
        *("launch/earlier_results", "results/receive", "results/publish"),
        *("results/stream", "results/selection"),
    ),
    "clean": ("environment/clean", "protocol/reports"),
    "deep": ("checks/deep", "protocol/reports"),
    "relay": (
        *("transfer/relay", "transfer/relay_chunks", "transfer/relay_handshake"),
        *("transfer/relay_peers", "transfer/relay_process", "transfer/relay_receiver"),
    ),
    "signature": ("checks/signature",),
    "processes": ("launch/rank_processes",),
    "launch": (
        *("launch/wrapper", "launch/watch", "launch/commands", "launch/output_reader"),
        *("launch/rank_monitor", "launch/run_ranks", "launch/rank_results", "protocol/reports"),
    ),
}
"""The modules that only agents of one phase use.

``relay`` stands for a way of transfer, ``processes`` for a launcher, ``signature`` for a job that
requires one, and ``results`` for one that may be sent earlier results.
"""
MAIN = b"""import sys
from bundle.agent.agent import command
sys.exit(command(sys.argv[1:]))
"""
"""The main module, for a request that names another Python than the bootstrap program's own."""
VARIABLE = "STAGER_PROGRAM_"
"""The beginning of the names of the variables that carry a program."""
_LONGEST_VARIABLE = 100_000
"""Characters of one of them; Linux refuses 128 KiB (``MAX_ARG_STRLEN`` in execve(2))."""
_ROOM = 1 << 19
"""Bytes that arguments and variables of a step may take besides those that are there already."""
_AGENT_KNOWS = {"node", "node_rank"}
"""The fields of a request that an agent fills in by itself."""


def agent_modules(program: bytes) -> dict[str, bytes]:
    """Return the agents' modules by path; making them takes 1/3 s if the program lacks them."""
    with zipfile.ZipFile(io.BytesIO(program)) as archive:
        names = archive.namelist()
        ready = [name for name in names if name.startswith(STRIPPED)]
        if ready:
            return {name[len(STRIPPED) :]: archive.read(name) for name in ready}
        return {name: _as_sent(name, archive.read(name)) for name in names if _is_for_agents(name)}


def _is_for_agents(name: str) -> bool:
    if not name.startswith("bundle/") or not name.endswith(".py"):
        return False
    return not name.startswith("bundle/driver/") and name[: -len(".py")] not in NOT_FOR_AGENTS


def _as_sent(name: str, source: bytes) -> bytes:
    # Environments hold the source of these, which must be the same whoever makes them.
    hooks = [f"bundle/environment/{hook}.py" for hook in (*HOOKS, *HOOK_MODULES)]
    return source if name in hooks else stripped(source)


class AgentProgram:
    """The program of agents; it is compressed once for all steps of the same phases.

    Attributes:
        bootstrap: the source of what runs first on a node.
    """

    def __init__(self, program: bytes) -> None:
        self._modules = agent_modules(program)
        self.bootstrap = self._modules["bundle/channel/bootstrap.py"].decode()
        self._packed = functools.lru_cache(maxsize=None)(self._pack)

    def variables(self, phases: Collection[str]) -> dict[str, str]:
        """Return the variables that carry the program of a step that has these phases."""
        text = binascii.b2a_base64(self._packed(frozenset(phases)), newline=False).decode()
        starts = range(0, len(text), _LONGEST_VARIABLE)
        return {
            f"{VARIABLE}{number}": text[start : start + _LONGEST_VARIABLE]
            for number, start in enumerate(starts)
        }

    def step_input(
        self,
        phases: Collection[str],
        message: StepMessage,
        *,
        carried: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> bytes:
        """Return the input of a step that has these phases, and these requests first."""
        program = b"" if carried else self._packed(frozenset(phases))
        packed = zlib.compress(json.dumps(encode(message, short=True)).encode(), 9)
        sent = zlib.compress(json.dumps(dict(variables)).encode()) if variables else b""
        head = b"%d %d %d\n" % (len(program), len(packed), len(sent))
        return head + program + packed + sent

    def _pack(self, phases: frozenset[str]) -> bytes:
        used = _modules_of(OF_PHASES.keys() & phases)
        unused = _modules_of(OF_PHASES.keys() - phases) - used
        modules = {"__main__.py": MAIN, **self._modules}
        return compressed({name: modules[name] for name in sorted(modules.keys() - unused)})


def _modules_of(phases: Collection[str]) -> set[str]:
    return {f"bundle/{name}.py" for phase in phases for name in OF_PHASES[phase]}


def may_carry(environment: Mapping[str, str]) -> bool:
    """Return whether a command may get a program in its variables besides those that it has.

    Their total is limited by a quarter of the stack's limit, which Slurm applies on nodes, too.
    """
    held = sum(len(name) + len(value) for name, value in environment.items())
    return held + _ROOM < os.sysconf("SC_ARG_MAX")


def compressed(modules: Mapping[str, bytes]) -> bytes:
    """Return modules as the bootstrap program takes them: a line of names and sizes, then all."""
    head = json.dumps([[name, len(data)] for name, data in modules.items()]).encode()
    return zlib.compress(head + b"\n" + b"".join(modules.values()), 9)


def request_line(message: StepMessage) -> str:
    """Return a further request as a line: compressed where that is shorter."""
    return min(json.dumps(encode(message, short=True)), packed(message), key=len)


def packed(message: StepMessage | RelayStart) -> str:
    """Return a message to agents, compressed, as a line or a part of one."""
    text = json.dumps(encode(message, short=True)).encode()
    return PACKED + binascii.b2a_base64(zlib.compress(text, 9), newline=False).decode()


def factored(requests: Requests, known: Job | None = None) -> StepMessage:
    """Return many requests as one, common fields once; without the job if the agents know it."""
    each = list(requests.values())
    names = {field.name for field in dataclasses.fields(each[0])} - _AGENT_KNOWS
    common, own = _factored(each, names)
    if each[0].job == known:
        common.pop("job", None)
    return StepMessage(
        phase=each[0].phase,
        common=common,
        own={node: items for node, items in zip(requests, own) if items},
    )


def _factored(
    values: Sequence[Any], names: AbstractSet[str]
) -> tuple[dict[str, object], list[dict[str, object]]]:
    """Split dataclasses into common and differing JSON fields; nested ones may be in both."""
    first = values[0]
    shared = {name for name in names if _is_shared(name, values)}
    common = encode(first, short=True, names=shared)
    parted = {name for name in names - shared if _is_parted(name, values)}
    own = [encode(value, short=True, names=names - shared - parted) for value in values]
    for name in sorted(parted):
        inner = [getattr(value, name) for value in values]
        fields = {field.name for field in dataclasses.fields(inner[0])}
        common[name], rest = _factored(inner, fields)
        for items, more in zip(own, rest):
            if more:
                items[name] = more
    return common, own


def _is_shared(name: str, values: Sequence[object]) -> bool:
    value = getattr(values[0], name)
    return all(getattr(other, name) == value for other in values)


def _is_parted(name: str, values: Sequence[object]) -> bool:
    kinds = {type(getattr(value, name)) for value in values}
    kind = kinds.pop()
    return not kinds and dataclasses.is_dataclass(kind) and not hasattr(kind, "to_json")
