"""The options of a job, as values that the job takes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from bundle.protocol.enumerations import Backend, Launcher, Stage, TransferWay

from .batch import BatchFlags
from .bundle import PlaceFlags
from .launch import LaunchFlags
from .request import RequestFlags, SlurmFlags
from .values import checked, each, member_of, one_of

if TYPE_CHECKING:
    from ...jobs.job_description import JobOptions

_WAITED_FOR = BatchFlags()


def job_options(
    slurm: SlurmFlags,
    launch: LaunchFlags,
    place: PlaceFlags,
    batch: BatchFlags = _WAITED_FOR,
    *,
    verbose: bool = False,
) -> JobOptions:
    """Return the options of a job; a value that cannot be used is a usage error."""
    from ...config import checks
    from ...config.sections import output
    from ...slurm.request import ALLOCATIONS

    name = checks.matching(checks.VARIABLE)
    batch.check()
    return replace(
        _request(slurm),
        nproc_per_node=ranks(launch.nproc_per_node),
        launcher=member_of(Launcher, launch.launcher, "--launcher"),
        backend=member_of(Backend, launch.backend, "--backend"),
        interface=checked(
            checks.interface_name, launch.interface, "--interface", "an interface's name"
        ),
        stage=member_of(Stage, launch.stage, "--stage"),
        transfer=member_of(TransferWay, launch.transfer, "--transfer"),
        min_nodes=checked(checks.whole(1), launch.min_nodes, "--min-nodes", checks.COUNT),
        log_dir=launch.log_dir,
        outputs=each(output, launch.outputs, "--outputs", "a path or pattern inside this folder"),
        pass_env=each(name, launch.pass_env, "--pass-env", "a name, without a value"),
        container_image=checked(
            checks.word, launch.container_image, "--container-image", "one word"
        ),
        container_mounts=each(
            checks.mount, launch.container_mounts, "--container-mounts", "SOURCE:TARGET"
        ),
        allocation=cast("str", one_of(ALLOCATIONS, place.allocation, "--allocation")),
        hosts=_hosts(place.hosts),
        host_file=place.host_file,
        bundle=place.bundle,
        bundle_id=place.asked,
        batch=batch.batch,
        wait=batch.wait,
        dry_run=batch.dry_run,
        on_failure=checked(checks.command, batch.on_failure, "--on-failure", checks.COMMAND) or (),
        show_all=verbose,
    )


def ranks(text: str | None) -> int | str | None:
    """Return the value of ``--nproc-per-node``; one that cannot be used is a usage error."""
    from ...config import checks

    number = int(text) if text and text.isascii() and text.isdecimal() else text
    return checked(checks.ranks, number, "--nproc-per-node", checks.RANKS)


def _hosts(text: str | None) -> tuple[str, ...]:
    """Return the list of hosts; an empty one is a usage error, not none."""
    from ...config import checks

    listed = 'hosts without blanks, as in "node[01-08],user@gpu9"'
    return () if text is None else (str(checked(checks.word, text, "--hosts", listed)),)


def _request(slurm: SlurmFlags) -> JobOptions:
    from ...config import checks
    from ...jobs.job_description import JobOptions

    nodes = f"N or MIN:MAX, from 1 to {checks.MOST}"
    listed = 'a node list without blanks, as in "node02,node[05-07]"'
    return JobOptions(
        nodes=checked(checks.node_range, slurm.nodes, "--nodes", nodes),
        partition=checked(checks.word, slurm.partition, "--partition", "one word"),
        time=checked(checks.slurm_time, slurm.time, "--time", checks.TIME),
        exclude=checked(checks.node_list, slurm.exclude, "--exclude", listed),
        avoid_bad=slurm.avoid_bad if isinstance(slurm, RequestFlags) else None,
        nodelist=checked(checks.node_list, slurm.nodelist, "--nodelist", listed),
        account=checked(checks.word, slurm.account, "--account", "one word"),
        qos=checked(checks.word, slurm.qos, "--qos", "one word"),
        constraint=checked(checks.word, slurm.constraint, "--constraint", "one word"),
        reservation=checked(checks.word, slurm.reservation, "--reservation", "one word"),
        mem=checked(checks.memory, slurm.mem, "--mem", checks.MEMORY),
        cpus_per_task=checked(
            checks.whole(1), slurm.cpus_per_task, "--cpus-per-task", checks.COUNT
        ),
        gpus_per_node=checked(checks.gpus, slurm.gpus_per_node, "--gpus-per-node", checks.GPUS),
        salloc_args=each(checks.text, slurm.salloc_arg, "--salloc-arg", "an option of salloc"),
    )
