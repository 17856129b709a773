"""The source of a module without what only its readers need, each statement on the line it was on.

Left out are docstrings, comments, annotations but for those of fields (a dataclass reads its own),
and the imports that only those used. What is left runs alike, and a traceback names the same lines.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator

_Span = tuple[int, int, int, int, bytes]
"""The line and column where it begins and where it ends, and what comes in its place."""
_NOTHING = b"pass"
"""A statement that does nothing."""


def stripped(source: bytes) -> bytes:
    """Return the source of a module without what only readers need."""
    tree = ast.parse(source)
    found = [*_texts(tree), *_annotations(source, tree), *_comments(source, tree)]
    brief = _replaced(source, found)
    return _replaced(brief, _unused_imports(ast.parse(brief)))


def _replaced(source: bytes, spans: Iterable[_Span]) -> bytes:
    lines = source.split(b"\n")
    for first, begin, last, end, instead in sorted(spans, reverse=True):
        whole = lines[first - 1][:begin] + instead + lines[last - 1][end:]
        lines[first - 1 : last] = [whole.rstrip(), *[b""] * (last - first)]
    return b"\n".join(lines)


def _end(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "end_lineno", 0), getattr(node, "end_col_offset", 0)


def _whole(node: ast.stmt, instead: bytes) -> _Span:
    return (node.lineno, node.col_offset, *_end(node), instead)


def _texts(tree: ast.AST) -> Iterator[_Span]:
    """Find texts that are statements: docstrings, and those below a constant or a field."""
    for node in ast.walk(tree):
        body = getattr(node, "body", ())
        if not isinstance(body, list):
            continue  # of a lambda
        texts = [
            one for one in body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
        ]
        for text in texts:
            yield _whole(text, _NOTHING if len(texts) == len(body) else b"")


def _annotations(source: bytes, tree: ast.AST) -> Iterator[_Span]:
    fields: set[ast.AST] = set()
    lines = source.split(b"\n")
    for node in ast.walk(tree):  # a class comes before what is in it
        if isinstance(node, ast.ClassDef):
            fields.update(node.body)
        elif isinstance(node, ast.arg) and node.annotation is not None:
            at = node.col_offset + len(node.arg.encode())
            yield (node.lineno, at, *_end(node.annotation), b"")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns:
            line = node.returns.lineno
            at = lines[line - 1].rindex(b"->", 0, node.returns.col_offset)
            yield (line, at, *_end(node.returns), b"")
        elif isinstance(node, ast.AnnAssign) and node not in fields:
            if node.value is None:
                yield _whole(node, _NOTHING)
            else:
                yield (*_end(node.target), *_end(node.annotation), b"")


def _comments(source: bytes, tree: ast.AST) -> Iterator[_Span]:
    inside: dict[int, list[tuple[int, int]]] = {}  # where texts are, by line
    for node in ast.walk(tree):
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            last, end = _end(node)
            for line in range(node.lineno, last + 1):
                begin = node.col_offset if line == node.lineno else 0
                inside.setdefault(line, []).append((begin, end if line == last else 1 << 20))
    for line, text in enumerate(source.split(b"\n"), 1):
        at = text.find(b"#")
        while any(begin <= at < end for begin, end in inside.get(line, ())):
            at = text.find(b"#", at + 1)
        if at >= 0:
            yield line, at, line, len(text), b""


def _unused_imports(tree: ast.Module) -> Iterator[_Span]:
    """Find the imports of a module that nothing uses; what ``__all__`` names is used."""
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    for node in tree.body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        kept = [one for one in node.names if (one.asname or one.name.partition(".")[0]) in used]
        if len(kept) < len(node.names):
            shorter = copy.copy(node)
            shorter.names = kept
            yield _whole(node, ast.unparse(shorter).encode() if kept else b"")
