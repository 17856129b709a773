"""The logs of many ranks, under the limit of open files that users have."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.support.jobs import PLAIN

REPO = Path(__file__).resolve().parents[3]
NODES, EACH = 128, 64
PROGRAM = """
import json, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
from bundle.driver.logs import Logs
from bundle.driver.output_logs import OutputLogs
from bundle.protocol.agent_events import RankOutput
from bundle.protocol.job import Job
job = Job.from_json(json.loads(sys.stdin.read()))
logs = Logs(job)
output = OutputLogs(logs)
nodes, each = int(sys.argv[1]), int(sys.argv[2])
ranks = [(f"n{rank // each:04}", rank) for rank in range(nodes * each)]
for node, rank in ranks:
    logs.begin(node, rank)
most = 0
for line in range(2):
    for node, rank in ranks:
        output.write(RankOutput(node, rank, b"rank %d line %d\\n" % (rank, line), True), rank)
    most = max(most, len(os.listdir("/proc/self/fd")))
print(json.dumps({"open": most, "fault": logs.fault, "lost": len(output.losses())}))
"""


def test_8192_ranks_have_their_logs_with_1024_open_files(tmp_path: Path) -> None:
    job = replace(PLAIN, log_dir=str(tmp_path / "logs"))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(NODES), str(EACH)],
        input=json.dumps(job.to_json()),
        capture_output=True,
        text=True,
        check=True,
        cwd=REPO,
    )
    said = json.loads(done.stdout)
    assert (said["fault"], said["lost"]) == ("", 0)
    assert 8 < said["open"] < 1024
    for rank in range(NODES * EACH):
        log = tmp_path / "logs" / f"demo.4711.n{rank // EACH:04}.{rank}.out"
        assert log.read_text() == f"rank {rank} line 0\nrank {rank} line 1\n"
    order = (tmp_path / "logs" / "order.4711.tsv").read_text().splitlines()
    assert len(order) == 2 * NODES * EACH
