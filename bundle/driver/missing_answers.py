"""The driver's answers in place of a node's: it gave none, or its ranks did not end."""

from __future__ import annotations

from dataclasses import replace

from ..protocol.events import answer_class
from ..protocol.messages import Answer
from ..protocol.problem import Problem, ProblemCode
from .transports.transport import Ended


def silence(phase: str, node: str, end: Ended, log_dir: str) -> Answer:
    """Return the answer of a node, or of one of its tasks, that has not answered."""
    values = {**end.values, "phase": phase, "log_dir": log_dir}
    return answer_class(phase)(
        node=node,
        ok=False,
        problems=(Problem(end.problem, node, values),),
        exit_code=end.code,
        lost=True,
        unreachable=end.unreachable,
    )


def hanging(answer: Answer, seconds: int) -> Answer:
    """Return a node's answer with the problem that its ranks run ``seconds`` after others ended."""
    problem = Problem(ProblemCode.RANKS_DID_NOT_END, answer.node, {"seconds": str(seconds)})
    return replace(answer, ok=False, problems=(problem,))
