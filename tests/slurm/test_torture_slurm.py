"""A few rounds of the torture suite on a real cluster: faults during jobs, and what must hold."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.needs import needs
from tests.support.torture_rounds import torture

pytestmark = pytest.mark.slow

SEED = os.environ.get("STAGER_TORTURE_SEED", "70")
"""Fixed, so that a change is not refused by chance; its fault, killed agents, shows at once, while
Slurm needs minutes to notice that a node is lost."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("area", "rounds"), [("slurm", 1), pytest.param("transfer", 2, marks=pytest.mark.full)]
)
def test_no_promise_is_broken_in_a_sample_on_slurm(area: str, rounds: int) -> None:
    needs("slurm")
    done = torture(area, "--sample", "--seed", SEED, "--json", "-v")
    print(done.stderr)  # the seed, what was done, and how to play a round again
    report = json.loads(done.stdout)
    assert (report["broken"], report["absent"]) == ([], {})
    assert done.returncode == 0
    assert [row["rounds"] for row in report["areas"] if row["area"] == area] == [rounds]
