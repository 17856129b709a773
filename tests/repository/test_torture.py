"""A sample of the torture suite: some rounds of each area, all of which are described."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.support.torture_rounds import torture
from tests.torture.registry import MODULES, areas

REPO = Path(__file__).resolve().parents[2]
SEED = os.environ.get("STAGER_TORTURE_SEED", "1")
"""Fixed, so that a change is not refused by chance; ``scripts/torture`` chooses one by itself."""


def test_no_promise_is_broken_in_a_sample_of_all_areas() -> None:
    done = torture("--sample", "--seed", SEED, "--json")
    print(done.stderr)  # the seed, and how to play a round again
    report = json.loads(done.stdout)
    assert report["broken"] == []
    assert done.returncode == 0
    assert {row["area"] for row in report["areas"]} == {*MODULES, "all"} - {"slurm", "transfer"}


def test_every_area_says_what_it_promises_and_is_described() -> None:
    text = (REPO / "docs" / "reliability.md").read_text()
    for area in areas():
        assert area.promise
        assert area.rounds > 0
        assert f"| `{area.name}` |" in text
