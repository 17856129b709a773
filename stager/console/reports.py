"""Results of the commands without a job: a build, a bundle, a plan, an estimate, a removal."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from bundle.protocol.counts import counted, sized

from .output import Output


class Reports(Output):
    """The results of commands without a job."""

    def built(self, report: Mapping[str, Any]) -> None:
        """Show the result of ``stager build``."""
        seconds = sum(report["seconds"].values())
        self.say(
            f"{counted(report['packages'], 'package')}, {counted(report['files'], 'file')}: "
            f"{sized(report['bundle_bytes'])}, {sized(report['unpacked_bytes'])} unpacked; "
            f"{counted(report['layers_built'], 'layer')} made, {report['layers_reused']} reused; "
            f"{seconds:.1f} s",
            "good",
        )
        for line in _left_out(report):
            self.say(line)
        self.data(report["bundle"])

    def inspected(self, report: Mapping[str, Any]) -> None:
        """Show the result of ``stager inspect``."""
        self.data(f"{report['name']} {report['id']}")
        self.data(f"Python {report['python']}, {report['platform']}")
        sizes = f"{sized(report['bundle_bytes'])}, {sized(report['unpacked_bytes'])} unpacked"
        layers, files = counted(len(report["layers"]), "layer"), counted(report["files"], "file")
        self.data(f"{layers}, {files}, {sizes}")
        for line in _left_out(report):
            self.data(line)
        for layer in sorted(report["layers"], key=lambda layer: -int(layer["bytes"])):
            name = f"{layer['name']} {layer['version']}".strip()
            row = f"{sized(layer['bytes']):>9}  {sized(layer['unpacked_bytes']):>9}"
            self.data(f"  {layer['kind']:8}{name:40}{row}  {counted(layer['files'], 'file'):>12}")
        for item in report.get("listing", []):
            self.data(f"{item['sha256'][:16]} {item['size']:>12} {item['path']}")

    def planned(self, report: Mapping[str, Any]) -> None:
        """Show what ``--dry-run`` would ask of Slurm, outside of an allocation."""
        self.data(shlex.join(report["argv"]))
        self.expected(report["forecast"])
        self.say(
            f"nothing was asked of Slurm; at most {sized(report['bytes_at_most'])} would be sent: "
            "what the nodes have already is known inside an allocation",
            "good",
        )

    def submitted(self, report: Mapping[str, Any]) -> None:
        """Show a batch job that Slurm has accepted."""
        job = report["job_id"]
        self.say(f"submitted batch job {job}", "good")
        self.say(f"  logs: {report['log_dir']}; follow it: tail -F {shlex.quote(report['log'])}")
        self.say(f"  its place in the queue: squeue --jobs={job}; end it: scancel {job}")

    def expected(self, forecast: Mapping[str, Any]) -> None:
        """Show how long a job takes until its ranks run, by phase."""
        from .forecasts import phases

        where = ""
        if "nodes" in forecast:
            where = f" on {counted(forecast['nodes'], 'node')} with nothing there yet"
        self.say(f"  expected{where}: {phases(forecast['seconds'])}")
        self.say(f"  (rates {'measured on earlier jobs' if forecast['measured'] else 'assumed'})")

    def estimated(self, report: Mapping[str, Any]) -> None:
        """Show the result of ``stager estimate``."""
        from .forecasts import forecast_table, lines

        if self._on_terminal:
            self._print_table(forecast_table(report))
        else:
            for line in lines(report):
                self.data(line)
        self.data(report["verdict"])
        ranks, cpus = report["nproc_per_node"], report["cpus"]
        used = f"{counted(ranks, 'rank')} and {counted(cpus, 'CPU')} a node"
        self.say(f"seconds, for {used}; stage: send and unpack, which overlap", "dim")
        self.say(f"rates: {report['rates']['basis']}", "dim")

    def cleaned(self, report: Mapping[str, Any]) -> None:
        """Show the result of ``stager clean``."""
        for item in report["items"]:
            self.data(f"{item['place']}: {sized(item['bytes'])}  {item['path']}  {item['why']}")
        word = "would be freed" if report["dry_run"] else "freed"
        self.say(f"{sized(report['bytes'])} {word}", "good")


def _left_out(report: Mapping[str, Any]) -> list[str]:
    """Return a line about what ``environment.prune`` saved; none where it left nothing out."""
    pruned = report["pruned"]
    if not pruned["files"]:
        return []
    what = " and ".join(pruned["what"])
    much = f"{counted(pruned['files'], 'file')}, {sized(pruned['bytes'])}"
    return [f"left out: {what} of the packages, {much}"]
