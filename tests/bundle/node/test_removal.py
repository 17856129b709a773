"""Deleting trees on a node's disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.namespaces import REPO

INTERRUPTED = """\
import os, signal, sys
from bundle.node import removal
from bundle.system import signals

signals.end_on_signals()
tree = sys.argv[1]
unlink, deleted = os.unlink, []

def unlink_one_and_get_a_signal(*arguments, **options):
    deleted.append(arguments)
    unlink(*arguments, **options)
    if len(deleted) == 10:
        signal.raise_signal(signal.SIGTERM)

os.unlink = unlink_one_and_get_a_signal
try:
    removal.delete_as_far_as_possible(tree)
except signals.Stopped:
    print("stopped after", len(deleted))
"""


def test_a_signal_to_end_leaves_nothing_of_a_swept_tree(tmp_path: Path) -> None:
    """The last rank of a job ends while Slurm stops the step because another one failed."""
    tree = tmp_path / "jobs" / "3.0.0"
    for number in range(30):
        (tree / f"folder{number}").mkdir(parents=True)
        (tree / f"folder{number}" / "file").write_text("content")
    argv = [sys.executable, "-c", INTERRUPTED, str(tree)]
    done = subprocess.run(argv, cwd=REPO, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("stopped after 30\n", "")
    assert list(tree.parent.iterdir()) == []
