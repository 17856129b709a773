"""Jobs of the past, as the forecast remembers them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bundle.driver.forecast import Nodes, forecast_staging, forecast_step
from bundle.protocol.events import StagingWork
from stager.forecast import MeasuredJob

WORK = StagingWork(sent=300_000_000, bytes=1_400_000_000, files=34_000)
SEEN = MeasuredJob(nodes=3, cpus=4, work=WORK, step=0.5, stage=6.0, send=2.5, unpack=4.0)


def as_expected(nodes: int = 3, factor: float = 1.0, **changed: Any) -> MeasuredJob:
    where = Nodes(nodes, cpus=4)
    made = forecast_staging(WORK, where, relayed=changed.get("relayed", SEEN.relayed))
    seen = replace(
        SEEN,
        nodes=nodes,
        step=forecast_step(where) * factor,
        stage=(made.seconds + forecast_step(where)) * factor,
        send=made.send * factor,
        unpack=made.unpack * factor,
    )
    return replace(seen, **changed)
