"""Counts in messages: one of a thing is not called by its plural."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from bundle.protocol.counts import format_count, format_size
from trainer.config import format_count as counted_in_trainer

REPO = Path(__file__).resolve().parents[3]
PLURAL = re.compile(
    r" (?:more |other |local )?(?:packages|files|layers|nodes|ranks|rows|steps|epochs|lines|logs"
    r"|wheels|entries|bundles|problems|pairs|jobs|tasks|images|GPUs|CPUs|members|requirements)\b"
)
ALWAYS_SEVERAL = {
    "stager/slurm/request.py": "nodes",  # one node is no reason to ask for Slurm
    "stager/pack/bundle_file.py": "len(found)",
    "stager/console/job_result.py": "count",
    "stager/layers/wheel.py": "len(self._faults)",
    "stager/layers/layer_build.py": "len(faults)",
    "stager/layers/project.py": "len(problems)",
    "bundle/driver/phases.py": "world_size",
}
"""Where one of a thing is said in other words, or cannot be: the one value that may stand there."""


def test_a_count_has_its_noun_and_bytes_a_unit() -> None:
    for words in (format_count, counted_in_trainer):
        assert [words(number, "layer") for number in (0, 1, 2)] == [
            "0 layers",
            "1 layer",
            "2 layers",
        ]
        assert [words(number, "entry", "entries") for number in (1, 3)] == ["1 entry", "3 entries"]
    assert [format_size(number) for number in (0, 1, 999, 1000, 1_380_000_000, 2 * 10**15)] == [
        "0 bytes", "1 byte", "999 bytes", "1.0 kB", "1.4 GB", "2000000.0 GB",
    ]  # fmt: skip


def counts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Values that stand right before a plural in an f-string, with their lines."""
    for text in ast.walk(tree):
        parts = text.values if isinstance(text, ast.JoinedStr) else []
        for value, rest in itertools.pairwise(parts):
            if not isinstance(value, ast.FormattedValue) or not isinstance(rest, ast.Constant):
                continue
            if PLURAL.match(str(rest.value)):
                yield value.lineno, ast.unparse(value.value)


def test_no_message_calls_one_by_the_plural() -> None:
    found = []
    for side in ("stager", "bundle", "trainer"):
        for file in sorted((REPO / side).rglob("*.py")):
            shown = file.relative_to(REPO).as_posix()
            for line, value in counts(ast.parse(file.read_text(encoding="utf-8"))):
                if value.isupper() or ALWAYS_SEVERAL.get(shown) == value:
                    continue
                found.append(f"{shown}:{line}: {{{value}}}: use counted()")
    assert found == []
