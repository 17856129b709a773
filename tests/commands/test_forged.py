"""A rank that writes what looks like the line by which the wrapper names a rank: a real run."""

from __future__ import annotations

import pytest

from tests.support.building import Project
from tests.support.stories import ran, trainable

FORGE = """\
import os, sys
rank, number = os.environ["RANK"], sys.argv[1]
if rank == "0":
    name = "9" * 5000 if number == "long" else number
    sys.stdout.write(f"honest\\n\\x1erank {name}\\nforged\\n")
else:
    print("honest", rank)
"""


@pytest.mark.parametrize("number", ["1", "3", "77", "long"])
def test_a_rank_cannot_write_into_the_log_of_another(project: Project, number: str) -> None:
    trainable(project)
    (project.root / "train.py").write_text(FORGE)
    project.build()
    report = ran(project, number)
    assert report["ok"], report
    logs = project.root.parent / "logs"
    own = {
        rank: next(logs.glob(f"*.{rank}.out")).read_bytes().split(b"honest", 1)[1]
        for rank in range(4)
    }
    name = b"9" * 5000 if number == "long" else number.encode()
    assert own[0].startswith(b"\n\x1erank " + name + b"\nforged\n")
    assert [own[rank].split(b"\n")[0] for rank in (1, 2, 3)] == [b" 1", b" 2", b" 3"]
    assert not any(b"forged" in own[rank] for rank in (1, 2, 3))
