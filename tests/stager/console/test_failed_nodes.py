"""The table of ``stager nodes``, on a terminal of 80 columns."""

from __future__ import annotations

import io

from rich.console import Console

from bundle.protocol.enumerations import NodeFault
from stager.console.tables import make_failed_node_table
from stager.incidents.node_history import FaultHistory, NodeHistory, NodesResult


def test_a_nodes_name_is_never_shortened() -> None:
    """Nor the name of its cluster, which is told where there are several."""
    fault = FaultHistory(
        fault=NodeFault.DISK_FULL,
        times=3,
        last=0.0,
        job_id="5872090791784171",
        project="demo",
        code="no-room",
        cause="the environment does not fit; needs 2 GB, 1 GB are free",
    )
    nodes = tuple(
        NodeHistory(
            node="gpu-a100-rack17-node0042", cluster=name, times=3, last=0.0, faults=(fault,)
        )
        for name in ("alpha", "beta")
    )
    shown = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    with shown.capture() as captured:
        shown.print(make_failed_node_table(NodesResult(days=7, nodes=nodes, forgotten=None)))
    text = captured.get()
    assert "…" not in text
    names = "".join(line[:24].strip() for line in text.splitlines())
    assert names.count("gpu-a100-rack17-node0042") == 2
    assert "(alpha)" in text
    assert "5872090791784171" in text
