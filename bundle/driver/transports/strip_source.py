"""Stripping a module of what only its readers need; each statement stays on its line.

Docstrings, comments, annotations other than those of fields (a dataclass reads its own), and the
imports that only those used are removed. The rest runs alike, and a traceback names the same lines.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator

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
