"""Problems: one sentence for people, one object for JSON, and one table for the words of both."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from bundle.protocol.enumerations import Ending
from bundle.protocol.problem import Problem, ProblemCode, make_ending_problem
from tests.support.golden import check_golden

REPO = Path(__file__).resolve().parents[3]
FULL = Problem(ProblemCode.NO_ROOM, "/tmp", {"why": "needs 2 GB, 1 GB are free"})
TEXT = (
    "/tmp: the environment does not fit; needs 2 GB, 1 GB are free; free some, or name another "
    "place with [cluster] node-root or $STAGER_NODE_ROOT"
)


def test_reads_as_one_sentence() -> None:
    assert str(FULL) == TEXT
    assert str(Problem(ProblemCode.FETCHED_LOCALLY, "")) == "nothing is fetched on one machine"
    with pytest.raises(KeyError, match="why"):
        str(Problem(ProblemCode.NO_ROOM, "/tmp"))
    # Advice names the place even where the sentence does not begin with it.
    lost = Problem(ProblemCode.NO_ANSWER_UNREACHABLE, "n7", {"why": "gone", "phase": "launch"})
    assert str(lost) == f"n7: {lost.sentence}"
    assert lost.sentence.startswith("launch gave no answer; ")
    assert "ping n7" in lost.sentence


def test_the_words_of_all_codes_which_travel() -> None:
    """A golden file; the class and the longer explanation are in docs/troubleshooting.md too."""
    lines = []
    for code in sorted(ProblemCode, key=str):
        problem = Problem(code, "<where>", {name: f"<{name}>" for name in code.names})
        assert Problem.from_json(problem.to_json()) == problem
        assert hash(Problem.from_json(problem.to_json())) == hash(problem)
        assert problem.what
        assert all(f"<{name}>" in str(problem) for name in code.names)
        fields = [str(code), code.row.failure_class, problem.what, problem.why, problem.fix]
        lines.append(" | ".join([*fields, *(["follows"] if code.row.follows else [])]))
        assert str(problem) == f"<where>: {'; '.join(filter(None, fields[2:]))}"
    check_golden("problems.txt", "".join(f"{line}\n" for line in lines))


def test_a_problem_of_another_version_keeps_its_words() -> None:
    raw = {"code": "no-coffee", "where": "n1", "values": {"cups": "0"}}
    words = {"what": "the pot is empty", "why": "0 cups", "fix": "brew some"}
    problem = Problem.from_json({**raw, **words})
    assert str(problem) == "n1: the pot is empty; 0 cups; brew some"
    assert problem.to_json()["code"] == "other"
    assert Problem.from_json(problem.to_json()) == problem
    assert str(Problem.from_json({"where": "n1", **words})) == str(problem)  # without any code
    lacking = {"code": "no-room", "where": "n1", "values": {}}  # its words then needed no value
    assert str(Problem.from_json({**lacking, **words})) == str(problem)


@pytest.mark.parametrize(
    "raw", ["text", None, {}, {"code": "no-coffee"}, {"what": 3}, {**FULL.to_json(), "where": 3}]
)
def test_what_is_no_problem_is_refused(raw: Any) -> None:
    with pytest.raises((KeyError, TypeError)):
        Problem.from_json(raw)


def test_every_ending_is_a_problem_also_one_of_another_version() -> None:
    for ending in Ending:
        problem = make_ending_problem(ending.value, "4711")
        assert str(problem.code) == f"job-{ending}"
        assert problem.is_end_of_job
        assert problem.where == "job 4711"
    problem = make_ending_problem("power-cut", "4711")
    assert problem.what == "Slurm ended the job: power-cut"
    assert problem.fix == "`scontrol show job 4711` may say more"
    assert problem.is_end_of_job


@functools.cache
def sources() -> dict[str, ast.Module]:
    paths = sorted((REPO / "bundle").rglob("*.py"))
    return {path.relative_to(REPO).as_posix(): ast.parse(path.read_text()) for path in paths}


def code_of(node: ast.AST) -> str:
    """The name of the code that an expression is; empty if it is none."""
    is_code = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "ProblemCode"
    return node.attr if isinstance(node, ast.Attribute) and is_code else ""


def keys_of(node: ast.AST) -> set[str] | None:
    """The keys of a dictionary that is written out; None for any other expression."""
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {key.value for key in node.keys if isinstance(key, ast.Constant)}
    return None


def test_each_code_is_used() -> None:
    used = {code_of(node) for tree in sources().values() for node in ast.walk(tree)}
    probed = (REPO / "bundle/checks/description.py").read_text()  # it runs by itself, without codes
    used |= {code.name for code in ProblemCode if f'"{code}"' in probed}
    used |= {f"JOB_{ending.name}" for ending in Ending}  # see make_ending_problem
    assert {code.name for code in ProblemCode} - used == set()


def test_each_place_gives_the_values_that_its_words_need() -> None:
    """Where code and values are written out, or the values one line before."""
    places: dict[str, int] = defaultdict(int)
    for path, tree in sources().items():
        for function in ast.walk(tree):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            local = assigned(function)
            for call in ast.walk(function):
                if not is_problem(call):
                    continue
                code, given = code_of(call.args[0]), values_of(call, local)
                if not code or given is None:
                    continue
                places[code] += 1
                assert given == ProblemCode[code].names, f"{path}:{call.lineno} {code}"
    assert len(places) > 60


def is_problem(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "Problem"


def assigned(function: ast.AST) -> dict[str, list[set[str]]]:
    """The dictionaries that a function gives names to."""
    names: dict[str, list[set[str]]] = defaultdict(list)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            keys = keys_of(node.value)
            if keys is not None:
                names[node.targets[0].id].append(keys)
    return names


def values_of(call: Any, local: dict[str, list[set[str]]]) -> set[str] | None:
    """The names of the values of a call; None where they cannot be read off."""
    if len(call.args) < 3:
        return set()
    keys = keys_of(call.args[2])
    if keys is None and isinstance(call.args[2], ast.Name):
        known = local.get(call.args[2].id, [])
        keys = known[0] if len(known) == 1 else None
    return keys
