from __future__ import annotations

import pytest

from bundle.protocol.enumerations import Ending, FailureClass, NodeFault
from bundle.protocol.problem import ProblemCode
from stager.incidents.node_history import incidents_of
from tests.support.incidents import FULL, LOST, UNREACHED, ended_job, problem, rank_failure


def found(*arguments: object, **changed: object) -> list[tuple[str, str]]:
    job = ended_job(*arguments, **changed)  # type: ignore[arg-type]
    return [(incident.node, incident.fault.value) for incident in incidents_of(job)]


def test_a_full_disk_is_the_nodes() -> None:
    (incident,) = incidents_of(ended_job({"n2": [FULL]}))
    assert (incident.node, incident.fault, incident.code) == ("n2", "disk-full", "no-room")
    assert incident.cause == "the environment does not fit; needs 1.4 GB, 0.2 GB are free"
    assert (incident.job_id, incident.project) == ("4711", "demo")


def test_a_node_that_was_left_out_counts_even_where_the_job_went_well() -> None:
    assert found(left_out={"n3": [FULL]}) == [("n3", "disk-full")]


def test_one_job_counts_once_for_each_kind_of_failure() -> None:
    full_too = problem(ProblemCode.ENVIRONMENT_DISK_FULL)
    assert found({"n2": [FULL, full_too, LOST]}) == [("n2", "disk-full"), ("n2", "node-failure")]


@pytest.mark.parametrize(
    ("nodes", "full", "counts"),
    [
        (("n1",), ("n1",), False),  # it may be too large for any node
        (("n1", "n2"), ("n1",), True),
        (("n1", "n2"), ("n1", "n2"), False),
        (("n1", "n2", "n3"), ("n1", "n2"), False),
        (("n1", "n2", "n3", "n4"), ("n1", "n2"), True),
    ],
)
def test_what_more_than_half_of_the_nodes_share_is_the_jobs(
    nodes: tuple[str, ...], full: tuple[str, ...], counts: bool
) -> None:
    problems = dict.fromkeys(full, (FULL,))
    assert found(problems, nodes=nodes) == [(node, "disk-full") for node in full if counts]


def test_what_nodes_share_is_counted_by_its_kind_and_over_all_phases() -> None:
    late = problem(ProblemCode.ENVIRONMENT_DISK_FULL)
    assert found({"n1": [late]}, left_out={"n2": [FULL]}) == []


def test_the_loss_of_a_node_counts_also_where_there_is_no_other() -> None:
    assert found({"n2": [LOST]}, nodes=["n2"]) == [("n2", "node-failure")]


def test_between_two_nodes_nobody_knows_whose_fault_it_is() -> None:
    assert found({"n2": [UNREACHED]}, nodes=["n1", "n2"]) == []
    assert found({"n2": [UNREACHED]}) == [("n2", "network")]


@pytest.mark.parametrize("kind", list(FailureClass))
def test_a_rank_tells_of_its_node_only_what_no_program_can_cause(kind: FailureClass) -> None:
    incidents = incidents_of(ended_job(first=rank_failure(kind)))
    assert bool(incidents) is (kind is FailureClass.NODE_FAILURE)
    assert "geheim" not in str(incidents)


@pytest.mark.parametrize(
    "code",
    [
        ProblemCode.PYTHON_KILLED,
        ProblemCode.MODULE_NOT_IMPORTED,
        ProblemCode.PACKAGE_MISSING,
        ProblemCode.RANKS_DID_NOT_END,
        ProblemCode.NO_ANSWER_FOLLOWED,
        ProblemCode.NO_ANSWER_KILLED,
        ProblemCode.NO_ANSWER_EXITED,
        ProblemCode.BUNDLE_DAMAGED,
        ProblemCode.EXCERPT_DISK_FULL,
        ProblemCode.HOST_DISK_FULL,
        ProblemCode.HOST_DISK_UNWRITABLE,
        ProblemCode.RESULTS_TOO_LARGE,
        ProblemCode.OUTPUT_DISK_FULL,
        ProblemCode.OTHER_MACHINE,
        ProblemCode.JOB_TIME_LIMIT,
        ProblemCode.JOB_PREEMPTED,
        ProblemCode.OTHER,
    ],
)
def test_what_is_the_jobs_or_the_programs_never_counts(code: ProblemCode) -> None:
    assert found({"n2": [problem(code, "n2")]}) == []


def test_a_problem_of_the_drivers_own_is_no_nodes() -> None:
    assert found({"n1": [problem(ProblemCode.NAME_UNRESOLVED)]}, of_driver=True) == []


@pytest.mark.parametrize("ending", [Ending.TIME_LIMIT, Ending.CANCELLED, Ending.PREEMPTED])
def test_what_follows_from_slurms_end_of_the_job_does_not_count(ending: Ending) -> None:
    assert found({"n2": [LOST]}, ended_by=ending.value) == []
    left = found({"n2": [LOST]}, ended_by=ending.value, left_out={"n3": [FULL]})
    assert left == [("n3", "disk-full")]


def test_a_lost_node_that_ended_the_job_counts() -> None:
    ending = problem(ProblemCode.JOB_NODE_FAILURE)
    lost = found({"n1": [ending], "n2": [LOST]}, ended_by=Ending.NODE_FAILURE.value)
    assert lost == [("n2", "node-failure")]


def test_nothing_counts_that_follows_from_ctrl_c() -> None:
    assert found({"n2": [LOST]}, interrupted=True) == []


def test_a_node_that_the_job_does_not_have_is_ignored() -> None:
    assert found({"elsewhere": [FULL]}) == []


def test_the_table_knows_only_problems_that_are_a_nodes() -> None:
    rows = [code.row for code in ProblemCode if code.row.node_fault is not None]
    for row in rows:
        assert not row.follows
        assert row.failure_class not in (
            *(FailureClass.PYTHON_ERROR, FailureClass.OUT_OF_MEMORY, FailureClass.KILLED),
            *(FailureClass.TIME_LIMIT, FailureClass.PREEMPTION, FailureClass.HANG),
            *(FailureClass.MISSING_MODULE, FailureClass.MISSING_ASSET),
        )
    assert {row.node_fault for row in rows} == set(NodeFault)
