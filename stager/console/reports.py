"""Results of the commands without a job: a build, a bundle, a plan, an estimate, a removal."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from bundle.protocol.counts import format_count, format_size
from bundle.protocol.enumerations import TransferWay
from bundle.protocol.problem import format_problem

from ..core.errors import escape_invisible, escape_line_feeds
from .output import Output

if TYPE_CHECKING:
    from ..building.build import BuildResult
    from ..building.project_lock import LockResult
    from ..carrying.exports import ExportResult
    from ..carrying.image import ImageResult
    from ..carrying.imports import ImportResult
    from ..carrying.mirror import MirrorResult
    from ..cleanup import CleanNodeResult, CleanResult
    from ..config.load import ConfigResult
    from ..forecast import Estimate, PlannedJob
    from ..incidents.node_history import NodesResult
    from ..inventory.inventory import LicenceList, LicensedComponent, SbomResult
    from ..jobs.outcome import SubmittedJob
    from ..layers.prune import Pruned
    from ..lock.pylock import PackageChanges
    from ..pack.members import InspectedSignature, Inspection
    from ..tracing import TracedBuildResult
    from ..trust import SignResult

_SOME = 10  # names in a line; more are counted


def _format_changes(changes: PackageChanges) -> str:
    names = {
        "added": [f"{one.name} {one.new}" for one in changes.added],
        "removed": [one.name for one in changes.removed],
        "changed": [f"{one.name} {one.old} -> {one.new}" for one in changes.changed],
    }
    parts = [f"{word} {_some(some, len(some))}" for word, some in names.items() if some]
    return "; ".join(parts) or "none changed"


# --- The licences in a bundle, as lines of at most 80 columns ------------------------------------

_COLUMNS = 80
_NAME, _VERSION = 30, 16  # the widest that a column gets for the sake of one long entry
_LABELS = {"decompressor": "decompressor ", "model": "model ", "dataset": "data set "}
_COMMIT = 12  # digits of a commit that are shown


def licence_lines(result: LicenceList) -> Iterator[str]:
    """Yield a line for each component; then how many name no licence, and which."""
    rows = [
        (escape_line_feeds(_LABELS.get(one.kind, "") + one.name), _version(one), one.licence)
        for one in result.components
    ]
    names = min(_NAME, max((len(name) for name, _, _ in rows), default=0))
    versions = min(_VERSION, max((len(version) for _, version, _ in rows), default=0))
    licensed = len(rows) - result.without_licence
    for name, version, licence in rows[:licensed]:
        yield from _row(f"{name:{names}}  {version:{versions}}", licence, names + versions + 4)
    if result.without_licence:
        yield f"{format_count(result.without_licence, 'component')} without a licence:"
    for name, version, _ in rows[licensed:]:
        yield from _row(f"{name:{names}}", version, names + 2)


def _version(one: LicensedComponent) -> str:
    is_commit = one.kind in ("model", "dataset")
    return escape_line_feeds(one.version[:_COMMIT] if is_commit else one.version)


def _row(start: str, text: str, column: int) -> Iterator[str]:
    if len(start) + 2 > column:
        yield from textwrap.wrap(start.rstrip(), _COLUMNS)
        start = ""
    wrapper = textwrap.TextWrapper(
        _COLUMNS, initial_indent=f"{start:{column}}", subsequent_indent=" " * column
    )
    yield from wrapper.wrap(escape_line_feeds(text)) or [start.rstrip()]


# --- Results of the commands without a job: a build, a bundle, a plan, an estimate, a removal ----

_WAYS: Mapping[TransferWay, str] = {
    TransferWay.AUTO: "at most {bytes} would be sent",
    TransferWay.RELAY: "at most {bytes} would be sent, by the nodes to each other",
    TransferWay.SBCAST: "at most {bytes} would be sent by sbcast",
    TransferWay.SHARED: "each node would read the bundle where it lies",
}
"""What a dry run says of the way in which nodes get the bundle."""


class Reports(Output):
    """The results of commands without a job."""

    def show_build(self, result: BuildResult) -> None:
        """Show the result of ``stager build``."""
        packages = format_count(result.packages, "package")
        files = format_count(result.files, "file")
        layers = f"{format_count(result.layers_built, 'layer')} made, {result.layers_reused} reused"
        seconds = sum(result.seconds.values())
        self.say(f"{packages}, {files}: {_format_sizes(result)}; {layers}; {seconds:.1f} s", "good")
        for line in _format_pruned(result.pruned):
            self.say(line)
        for name, phase, what in (
            ("packages", "lock", _format_changes(result.changes)),
            ("wheels", "wheels", ""),
            ("layers", "layers", f"{format_size(result.changes.bytes)} new to nodes"),
            ("bundle", "bundle", f"copy: {result.output}" if result.output else ""),
            ("proof", "proof", "nothing is missing offline" if result.proved else "not proved"),
        ):
            took = f"{result.seconds[phase]:.1f} s" if phase in result.seconds else ""
            if what or took:
                self.say(f"  {name}: {'; '.join(filter(None, (what, took)))}")
        self.data(str(result.output or result.bundle))

    def show_trace(self, result: TracedBuildResult) -> None:
        """Show the result of ``stager build --trace``: the build, and what was not read."""
        from .tables import format_trace, propose_pruning, summarize_trace

        for line in format_trace(result.trace):
            self.data(line)
        for line in summarize_trace(result.trace):
            self.say(line)
        for line in propose_pruning(result.trace):
            self.data(line)
        self.show_build(result)

    def show_lock(self, result: LockResult) -> None:
        """Show the result of ``stager lock``."""
        counts = {"model": result.models, "data set": result.datasets, "Space": result.spaces}
        hub = [format_count(count, kind) for kind, count in counts.items() if count]
        parts = ", ".join([format_count(result.packages, "package"), *hub])
        self.say(f"locked {parts} in {result.lock}", "good")
        for name, files in result.left_out.items():
            self.say(f"  {escape_invisible(name)} without {_some(files, len(files))}")
        if not result.first:
            self.say(f"  packages: {_format_changes(result.changes)}")
        rest = "none of it" if result.first else "the rest"
        self.say(f"  {format_size(result.changes.bytes)} to send to a node that has {rest}")

    def show_config(self, result: ConfigResult) -> None:
        """Show the result of ``stager config``: a line for each setting, which greps well."""
        from ..core.toml import dump_inline

        for setting in result.settings:
            value = setting.value
            text = "unset" if value is None else dump_inline(value)
            place = f" {setting.place}" if setting.place else ""
            line = " ".join(text.split()) if "\n" in text.strip() else text.strip()
            self.data(f"{setting.key} = {line}  # {setting.origin}{place}")

    def show_inspection(self, result: Inspection) -> None:
        """Show the result of ``stager inspect``."""
        from ..pack.members import InspectionWithFiles

        self.data(f"{result.name} {result.id}")
        self.data(f"Python {result.python}, {result.platform}")
        counts = (
            f"{format_count(len(result.layers), 'layer')}, {format_count(result.files, 'file')}"
        )
        self.data(f"{counts}, {_format_sizes(result)}")
        for line in _format_pruned(result.pruned):
            self.data(line)
        self.data(_format_signature(result.signature))
        for found in result.hub:
            licence = escape_invisible(found.licence) or "no licence named"
            size = format_size(found.unpacked_bytes)
            name = f"{found.type} {escape_invisible(found.name)} {found.commit[:12]}"
            self.data(f"{name}, {size}, {licence}")
            if found.left_out:
                self.data(f"  without {_some(found.left_out_files, found.left_out)}")
        for layer in sorted(result.layers, key=lambda layer: -layer.bytes):
            name = f"{layer.name} {layer.version}".strip()
            row = f"{format_size(layer.bytes):>9}  {format_size(layer.unpacked_bytes):>9}"
            self.data(f"  {layer.kind:8}{name:40}{row}  {format_count(layer.files, 'file'):>12}")
        for code in result.compiled:
            made = f"{format_size(code.bytes)}, {format_count(code.kernels, 'kernel')}"
            machine, job = map(escape_invisible, (code.machine, code.job_id))
            self.data(f"compiled code of job {job}: {made}, for {machine}")
        rest = result.bundle_bytes - sum(layer.bytes for layer in result.layers)
        what = "manifest, node program, decompressor"
        self.data(f"  {'stager':8}{what:40}{format_size(rest):>9}")
        for file in result.listing if isinstance(result, InspectionWithFiles) else ():
            self.data(f"{file.sha256[:16]} {file.size:>12} {file.path}")

    def show_licences(self, result: LicenceList) -> None:
        """Show the result of ``stager inspect --licenses``."""
        self.data_lines(list(licence_lines(result)))

    def show_missing_sources(self, names: Sequence[str], packages: int) -> None:
        """Say of how many packages a bill of materials does not tell the source."""
        if names:
            them = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            self.say(
                f"no lock beside the bundle or in this project says where {them} came from "
                f"({len(names)} of {format_count(packages, 'package')})"
            )

    def show_sbom(self, result: SbomResult) -> None:
        """Show the result of ``stager inspect --sbom`` with a file."""
        assets = f", {format_count(result.assets, 'asset')}" if result.assets else ""
        self.say(f"{format_count(result.packages, 'package')}{assets}: CycloneDX 1.6", "good")
        self.data(str(result.file))

    def show_signature(self, result: SignResult) -> None:
        """Show the result of ``stager sign``."""
        self.say(f"signed {result.bundle.name} with {result.key}", "good")
        self.data(str(result.signature))

    def show_export(self, result: ExportResult) -> None:
        """Show the result of ``stager export``."""
        layers = format_count(result.layers, "layer")
        if result.base:
            layers += f", {result.layers_left_out} left out that {result.base[:12]} has"
        layers += ", its signature" if result.signed else ""
        tool = ", and stager itself" if result.with_tool else ""
        self.say(f"{format_size(result.bytes)}: {layers}{tool}", "good")
        self.say(f"  sha256 {result.sha256}")
        name = shlex.quote(result.file.name)
        install = f"python3 {name} install; " if result.with_tool else ""
        self.say(f"  on the other side: {install}stager import {name}")
        self.data(str(result.file))

    def show_image(self, result: ImageResult) -> None:
        """Show the result of ``stager export --squashfs``."""
        own = "brings its Python" if result.brings_python else f"needs Python {result.python} there"
        self.say(f"{format_size(result.bytes)}: an image that {own}", "good")
        self.say(f"  sha256 {result.sha256}")
        name = shlex.quote(result.file.name)
        self.say(f"  to use it: mount -o loop {name} /opt/env; /opt/env/run python train.py")
        self.data(str(result.file))

    def show_import(self, result: ImportResult) -> None:
        """Show the result of ``stager import``."""
        if result.already_here:
            self.say(f"{result.name} {result.id[:12]} was here already", "good")
        else:
            here = f", {result.layers_here} were here" if result.layers_here else ""
            size = f"{format_size(result.bytes)}, {format_count(result.layers, 'layer')}{here}"
            self.say(f"{result.name} {result.id[:12]}: {size}", "good")
        self.say(f"  {_format_signature(result.signature)}")
        self.say(f"  next: stager verify --id {result.id[:12]}")
        if result.project is not None:
            self.say(f"  its code: {result.project}; edit it, and run `stager build` there")
        for line in result.notes:
            self.note(line)
        self.data(str(result.bundle))

    def show_mirror(self, result: MirrorResult) -> None:
        """Show the result of ``stager mirror``."""
        for name in result.missing:
            self.say(f"  {name} is gone from there, and is no longer listed")
        for name in result.replaced:
            self.say(f"  {name} was damaged or another one, and is replaced")
        added, wheels = (
            format_count(len(result.added), "wheel"),
            format_count(result.wheels, "wheel"),
        )
        have = f"{wheels} of {format_count(result.packages, 'package')}"
        self.say(f"added {added}: the mirror has {have}, {format_size(result.bytes)}", "good")
        self.say(f"  pip install --index-url {result.index} NAME")
        self.say(f"  uv pip install --default-index {result.index} NAME")
        self.data(result.index)

    def show_plan(self, job: PlannedJob) -> None:
        """Show what ``--dry-run`` would ask of Slurm, outside of an allocation."""
        for line in shlex.join(job.argv).split("\n"):  # to be pasted as it is
            self.data(line)
        forecast, sent = job.forecast, format_size(job.bytes_at_most)
        seconds = asdict(forecast.seconds)
        self.show_expected_time(seconds, measured=forecast.measured, nodes=forecast.nodes)
        self.say(
            f"nothing was requested from Slurm; {_WAYS[job.transfer].format(bytes=sent)}: what the "
            "nodes already have can be seen only inside an allocation",
            "good",
        )

    def submitted(self, job: SubmittedJob) -> None:
        """Show a batch job that Slurm has accepted."""
        number = job.job_id
        self.say(f"submitted batch job {number}", "good")
        log_dir = shlex.quote(str(job.log_dir))
        self.say(f"  follow it: stager logs {number} --follow --log-dir {log_dir}")
        self.say(f"  its place in the queue: squeue --jobs={number}; end it: scancel {number}")

    def show_expected_time(
        self, seconds: Mapping[str, float], *, measured: bool, nodes: int | None = None
    ) -> None:
        """Show the seconds until a job's ranks run; ``nodes`` if they have none of the bundle."""
        from .tables import format_phases

        cold = nodes and f" on {format_count(nodes, 'node')} that have nothing of it yet"
        self.say(f"  expected{cold or ''}: {format_phases(seconds)}")
        self.say(f"  (rates {'measured on earlier jobs' if measured else 'assumed'})")

    def show_estimate(self, estimate: Estimate) -> None:
        """Show the result of ``stager estimate``."""
        from .tables import format_forecast

        for line in (*format_forecast(estimate), estimate.verdict):
            self.data(line)
        ranks = format_count(estimate.nproc_per_node, "rank")
        each = f"{ranks} and {format_count(estimate.cpus, 'CPU')} a node"
        self.say(f"seconds, for {each}; stage: send and unpack, which overlap", "dim")
        self.say(f"rates: {estimate.rates.basis}", "dim")

    def show_failed_nodes(self, result: NodesResult) -> None:
        """Show the result of ``stager nodes``."""
        from .tables import format_failed_nodes

        if result.forgotten is not None:
            self.say(f"forgotten: {format_count(result.forgotten, 'failure')}", "good")
        if not result.nodes:
            days = format_count(result.days, "day")
            self.say(f"no node is remembered to have failed in the last {days}")
            self.say(
                "  jobs on Slurm leave here what failed because of a node: a full disk, no answer, "
                "a wrong clock; failures of programs do not count"
            )
            return
        for line in format_failed_nodes(result, whole=self._is_on_terminal):
            self.data(line)
        self.say("leave them out: --avoid-bad; after a repair: stager nodes --forget NODE", "dim")

    def show_clean(self, result: CleanResult) -> None:
        """Show the result of ``stager clean``."""
        seals = [item for item in result.items if item.kind == "seal"]
        summed = seals if len(seals) > 1 else []  # each is a line of text: their sum says it all
        for item in result.items:
            if item not in summed:
                self.data(f"{item.place}: {format_size(item.bytes)}  {item.path}  {item.why}")
        if summed:
            size, folder = format_size(sum(item.bytes for item in seals)), seals[0].path.parent
            whose = f"{format_count(len(seals), 'seal')} of bundles that are gone"
            self.data(f"{seals[0].place}: {size}  {folder}  {whose}")
        word = "would be freed" if result.dry_run else "freed"
        self.say(f"{format_size(result.bytes)} {word}", "good")

    def show_clean_node(self, result: CleanNodeResult) -> None:
        """Show the result of ``stager clean-node``."""
        from bundle.environment.clean import describe

        for root in result.roots:
            self.data(describe(root, result.dry_run))
            for problem in root.problems:
                self._write(f"error: {format_problem(problem, ()).line}", "error")
        if not result.roots:
            self.say("no node root is here")


def _format_sizes(result: BuildResult | Inspection) -> str:
    return f"{format_size(result.bundle_bytes)}, {format_size(result.unpacked_bytes)} unpacked"


def _format_signature(made: InspectedSignature | None) -> str:
    if made is None:
        return "not signed"
    if made.accepted:
        return f"signed by {escape_invisible(made.signer)} ({made.key})"
    return f"signed with {made.key}: {made.why}" if made.key else f"signature: {made.why}"


def _some(names: Sequence[str], count: int) -> str:
    shown = [escape_invisible(name) for name in names[:_SOME]]
    rest = [f"{count - len(shown)} more"] if count > len(shown) else []
    return ", ".join([*shown, *rest])


def _format_pruned(pruned: Pruned) -> list[str]:
    if not pruned.files:
        return []
    words = [word for word in pruned.words if ":" not in word]
    count = len(pruned.words) - len(words)
    what = [" and ".join(words) + " of the packages"] if words else []
    if count:
        what.append(f"what {format_count(count, 'pattern')} {'matches' if count == 1 else 'match'}")
    much = f"{format_count(pruned.files, 'file')}, {format_size(pruned.size)}"
    return [f"left out: {' and '.join(what)}, {much}"]
