"""The values a batch script is made from, and a small program in the place of the far side's."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace
from typing import Any

from bundle.protocol.digest import Digest
from stager.slurm.batch_script import ScriptFacts
from stager.slurm.request import Request
from tests.support.jobs import LAUNCH, PLAIN

EXAMPLES = ("run", "requeue")

JOB = replace(
    PLAIN,
    id="",
    nodes=(),
    bundle="/shared/bundles/demo-abababababab.pkgs.tar",
    bundle_id=Digest("ab" * 32),
    room=(1_600_000_000, 36_000),
    run_dir="/shared/work",
    log_dir="/shared/slurm_logs",
    python_hints=("/usr/bin/python3.11",),
    launch=replace(LAUNCH, command=("train.py", "--epochs", "3"), nproc_per_node=2),
    cpus_per_task=4,
)
FACTS = ScriptFacts(
    job=JOB,
    program=b"stands in for the far side's program, which is a zip file" * 3,
    bundle_bytes=395_000_000,
    request=Request(name=JOB.name, nodes=(3, 3), cpus_per_task=4),
    version="0.1.0",
)


def asking(facts: ScriptFacts, **changed: Any) -> ScriptFacts:
    return replace(facts, request=replace(facts.request, **changed))


DRIVER = """
import json, os, signal, sys, time
assert sys.argv[1] == "drive" and sys.flags.isolated and sys.flags.no_site
json.load(open(sys.argv[2]))
here = os.path.dirname(sys.argv[2])
assert os.stat(here).st_mode & 0o777 == 0o700
def end(number, frame):
    for other in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(other, lambda number, frame: None)
    os.write(1, b"signal %s\\n" % signal.Signals(number).name.encode())
    time.sleep(0.2)
    sys.exit(130)
for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), end)
print("driver", here, flush=True)
if "DRIVER_WAITS" in os.environ:
    time.sleep(3600)
sys.exit(int(os.environ.get("DRIVER_CODE", "0")))
"""


def driver(padding: bytes = b"") -> bytes:
    """A program that stands where the far side's would; what it does itself is tested elsewhere."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        # Without the time of day: the same bytes whenever it is made.
        archive.writestr(zipfile.ZipInfo("__main__.py"), DRIVER)
        archive.writestr(zipfile.ZipInfo("padding"), padding)
    return held.getvalue()
