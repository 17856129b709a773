"""Results of the commands without a job: a build, a bundle, a plan, an estimate, a removal."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bundle.protocol.codec import encode
from bundle.protocol.counts import counted, sized

from .output import Output

if TYPE_CHECKING:
    from ..building.build import BuildResult
    from ..cleanup.result import CleanResult
    from ..forecast.results import Estimate, PlannedJob
    from ..incidents.node_history import NodesResult
    from ..jobs.summary import SubmittedJob
    from ..layers.prune import Pruned
    from ..pack.inspect import Inspection


class Reports(Output):
    """The results of commands without a job."""

    def built(self, result: BuildResult) -> None:
        """Show the result of ``stager build``."""
        packages, files = counted(result.packages, "package"), counted(result.files, "file")
        layers = f"{counted(result.layers_built, 'layer')} made, {result.layers_reused} reused"
        sizes = f"{sized(result.bundle_bytes)}, {sized(result.unpacked_bytes)} unpacked"
        seconds = sum(result.seconds.values())
        self.say(f"{packages}, {files}: {sizes}; {layers}; {seconds:.1f} s", "good")
        for line in _left_out(result.pruned):
            self.say(line)
        self.data(str(result.bundle))

    def inspected(self, result: Inspection) -> None:
        """Show the result of ``stager inspect``."""
        from ..pack.inspect import InspectionWithFiles

        self.data(f"{result.name} {result.id}")
        self.data(f"Python {result.python}, {result.platform}")
        sizes = f"{sized(result.bundle_bytes)}, {sized(result.unpacked_bytes)} unpacked"
        layers, files = counted(len(result.layers), "layer"), counted(result.files, "file")
        self.data(f"{layers}, {files}, {sizes}")
        for line in _left_out(result.pruned):
            self.data(line)
        for layer in sorted(result.layers, key=lambda layer: -layer.bytes):
            name = f"{layer.name} {layer.version}".strip()
            row = f"{sized(layer.bytes):>9}  {sized(layer.unpacked_bytes):>9}"
            self.data(f"  {layer.kind:8}{name:40}{row}  {counted(layer.files, 'file'):>12}")
        rest = result.bundle_bytes - sum(layer.bytes for layer in result.layers)
        self.data(f"  {'stager':8}{'manifest, node program, decompressor':40}{sized(rest):>9}")
        for file in result.listing if isinstance(result, InspectionWithFiles) else ():
            self.data(f"{file.sha256[:16]} {file.size:>12} {file.path}")

    def planned(self, job: PlannedJob) -> None:
        """Show what ``--dry-run`` would ask of Slurm, outside of an allocation."""
        for line in shlex.join(job.argv).split("\n"):  # to be pasted as it is
            self.data(line)
        self.expected(encode(job.forecast))
        self.say(
            f"nothing was requested from Slurm; at most {sized(job.bytes_at_most)} would be sent: "
            "what the nodes already have can be seen only inside an allocation",
            "good",
        )

    def submitted(self, job: SubmittedJob) -> None:
        """Show a batch job that Slurm has accepted."""
        number = job.job_id
        self.say(f"submitted batch job {number}", "good")
        self.say(f"  logs: {job.log_dir}; follow it: tail -F {shlex.quote(str(job.log))}")
        self.say(f"  its place in the queue: squeue --jobs={number}; end it: scancel {number}")

    def expected(self, forecast: Mapping[str, Any]) -> None:
        """Show how long a job takes until its ranks run, by phase."""
        from .forecasts import phases

        where = ""
        if "nodes" in forecast:
            where = f" on {counted(forecast['nodes'], 'node')} that have nothing of it yet"
        self.say(f"  expected{where}: {phases(forecast['seconds'])}")
        self.say(f"  (rates {'measured on earlier jobs' if forecast['measured'] else 'assumed'})")

    def estimated(self, estimate: Estimate) -> None:
        """Show the result of ``stager estimate``."""
        from .forecasts import forecast_table, lines

        if self._on_terminal:
            self._print_table(forecast_table(estimate))
        else:
            for line in lines(estimate):
                self.data(line)
        self.data(estimate.verdict)
        ranks, cpus = counted(estimate.nproc_per_node, "rank"), counted(estimate.cpus, "CPU")
        self.say(
            f"seconds, for {ranks} and {cpus} a node; stage: send and unpack, which overlap", "dim"
        )
        self.say(f"rates: {estimate.rates.basis}", "dim")

    def failed_nodes(self, result: NodesResult) -> None:
        """Show the result of ``stager nodes``."""
        from .failed_nodes import lines, table

        if result.forgotten is not None:
            self.say(f"forgotten: {counted(result.forgotten, 'failure')}", "good")
        if not result.nodes:
            self.say(
                f"no node is remembered to have failed in the last {counted(result.days, 'day')}"
            )
            self.say(
                "  jobs on Slurm leave here what failed because of a node: a full disk, no answer, "
                "a wrong clock; failures of programs do not count"
            )
            return
        if self._on_terminal:
            self._print_table(table(result))
        else:
            for line in lines(result):
                self.data(line)
        self.say("leave them out: --avoid-bad; after a repair: stager nodes --forget NODE", "dim")

    def cleaned(self, result: CleanResult) -> None:
        """Show the result of ``stager clean``."""
        for item in result.items:
            self.data(f"{item.place}: {sized(item.bytes)}  {item.path}  {item.why}")
        word = "would be freed" if result.dry_run else "freed"
        self.say(f"{sized(result.bytes)} {word}", "good")


def _left_out(pruned: Pruned) -> list[str]:
    """Return a line about what ``environment.prune`` saved; none where it left nothing out."""
    if not pruned.files:
        return []
    what = " and ".join(pruned.words)
    much = f"{counted(pruned.files, 'file')}, {sized(pruned.size)}"
    return [f"left out: {what} of the packages, {much}"]
