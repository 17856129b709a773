"""The words of problems with a job: its allocation, its ranks, its output, its end."""

from __future__ import annotations

from collections.abc import Mapping

from .enumerations import FailureClass
from .problem import ProblemCode
from .wording import Wording

_SEE_CODES = "the ranks have ended as their exit codes say; run it again if the logs matter"
_KEPT = "what arrived in full is kept; the rest is still on the node, if the node is up"
_ROOM_THERE = "make room there; {files} still at {source}"

JOB_WORDINGS: Mapping[ProblemCode, Wording] = {
    # Its description and its allocation.
    ProblemCode.JOB_OF_OTHER_VERSION: Wording(
        "the job description cannot be read",
        fix="start the job with the same version of stager that built the bundle",
    ),
    ProblemCode.JOB_UNREADABLE: Wording("the job description cannot be read", fix="start it again"),
    ProblemCode.REQUEST_UNREADABLE: Wording(
        "the request cannot be read",
        fix="start the job with the same version of stager that built the bundle",
    ),
    ProblemCode.LOG_DIR_UNWRITABLE: Wording(
        "the log directory cannot be written", fix="name another one with --log-dir"
    ),
    ProblemCode.NO_ALLOCATION: Wording(
        "there is no Slurm allocation",
        "SLURM_JOB_ID and SLURM_JOB_NODELIST are not both set",
        "start it with salloc or sbatch, or use --allocation local",
    ),
    ProblemCode.ALLOCATION_UNUSABLE: Wording(
        "the Slurm allocation cannot be used",
        fix="find out what has set SLURM_JOB_ID and SLURM_JOB_NODELIST: the values are not "
        "Slurm's own",
    ),
    ProblemCode.TOO_FEW_NODES: Wording(
        "the allocation has too few nodes",
        "job {job} has {nodes}, and {least} are required",
        "use --nodes {nodes}, or ask Slurm for more",
    ),
    ProblemCode.TOO_FEW_CPUS: Wording(
        "the allocation has too few CPUs",
        "job {job} has {cpus} on a node, and {setting} = {asked} needs {asked}",
        "ask Slurm for more (--cpus-per-task={asked}), or make {setting} smaller in stager.toml",
        meaning="the allocation that `stager` runs in has less; no node failed",
    ),
    ProblemCode.NODE_LIST_UNREADABLE: Wording(
        "the node list cannot be read",
        fix="write it as Slurm does, for example n[01-03,07],login1",
    ),
    ProblemCode.SRUN_NOT_STARTED: Wording(
        "srun cannot be started", fix="check whether the allocation still exists"
    ),
    ProblemCode.RELAY_NOT_STARTED: Wording(
        "the relay of the bundle cannot be started",
        fix="the node gets it without the relay; check its addresses (--interface)",
    ),
    ProblemCode.SLURM_COMMAND_FAILED: Wording(
        "{command} failed",
        fix="run it where Slurm's commands are on PATH and the controller answers",
    ),
    ProblemCode.SENT_LOCALLY: Wording("nothing is sent on one machine", "", "use --stage auto"),
    ProblemCode.FETCHED_LOCALLY: Wording("nothing is fetched on one machine", ""),
    # Its ranks.
    ProblemCode.BACKEND_UNUSABLE: Wording("the backend cannot be used", fix="use --backend gloo"),
    ProblemCode.LAUNCHER_NOT_STARTED: Wording(
        "the launcher cannot start", fix="stage the environment again"
    ),
    ProblemCode.PIPES_NOT_MADE: Wording(
        "the ranks' pipes cannot be made", fix="check the free space and the inodes there"
    ),
    ProblemCode.PIPES_DISK_FULL: Wording(
        "the ranks' pipes cannot be made",
        fix="check the free space and the inodes there",
        failure_class=FailureClass.DISK_FULL,
    ),
    ProblemCode.PIPES_OVER_LIMIT: Wording(
        "the ranks' pipes cannot be made",
        "{why}: a pipe is needed for {ranks}, and the limit is {limit}",
        "raise the hard limit of open files (ulimit -Hn) on the nodes, or start fewer ranks",
    ),
    ProblemCode.RANKS_DID_NOT_END: Wording(
        "the ranks did not end",
        "other nodes had ended {seconds} s before; a thread, an exit handler or a process pool may "
        "hang",
        "end them before the program ends, or give them longer with SLURM_WAIT=SECONDS",
        FailureClass.HANG,
        meaning="some nodes had ended well, and ten minutes later these had not. If they are "
        "really working, for example on a very long save at the end, set `SLURM_WAIT` to another "
        "number of seconds, or to 0 for no limit",
    ),
    ProblemCode.RANKS_CANNOT_TALK: Wording(
        "the ranks cannot talk",
        fix="check the network between the nodes (cable, MTU, firewall), name the interface with "
        "[launch] interface in stager.toml, or leave the node out with --exclude",
    ),
    ProblemCode.NOTHING_MEASURED: Wording(
        "the ranks measured nothing",
        "none of their lines begins with {prefix}",
        "see the logs in {log_dir}",
    ),
    # Its output and its results.
    ProblemCode.OUTPUT_LOST: Wording(
        "output of {source} is lost",
        "it did not come through srun intact, and was no longer there to be sent again",
        _SEE_CODES,
    ),
    ProblemCode.OUTPUT_NOT_LOGGED: Wording("output of {source} is lost", fix=_SEE_CODES),
    ProblemCode.OUTPUT_DISK_FULL: Wording(
        "output of {source} is lost", fix=_SEE_CODES, failure_class=FailureClass.DISK_FULL
    ),
    ProblemCode.RUN_DIR_MISSING: Wording(
        "the outputs cannot be collected",
        fix="check whether the job, or a cleanup of temporary files, removed it",
    ),
    ProblemCode.TOO_MANY_OUTPUTS: Wording(
        "the outputs could not be sent",
        "there are too many of them",
        "name directories, not every file",
    ),
    ProblemCode.OUTPUTS_NOT_SENT: Wording(
        "the outputs could not be sent", fix="find out why the other end closed the connection"
    ),
    ProblemCode.NO_RESULTS: Wording(
        "no results arrived",
        fix="see the node's log; the results are still on the node, if it is up",
    ),
    ProblemCode.NO_PLACE_FOR_RESULTS: Wording("no place for results", fix=_ROOM_THERE),
    ProblemCode.RESULTS_TOO_LARGE: Wording(
        "the results do not fit", fix=_ROOM_THERE, failure_class=FailureClass.DISK_FULL
    ),
    ProblemCode.RESULTS_UNWRITABLE: Wording(
        "the results cannot be written", fix="check the permissions and the free space there"
    ),
    ProblemCode.RESULTS_INCOMPLETE: Wording("the results are not complete", fix=_KEPT),
    ProblemCode.RESULTS_CUT_BY_DISK: Wording(
        "the results are not complete",
        fix=f"make room there; {_KEPT}",
        failure_class=FailureClass.DISK_FULL,
    ),
    ProblemCode.OUTPUT_NOT_PLACED: Wording(
        "an output could not be put in place", fix="it is in {path}"
    ),
    # Its end, where Slurm made it.
    ProblemCode.JOB_TIME_LIMIT: Wording(
        "the time limit was reached, and Slurm ended the job",
        "",
        "ask for more with --time (cluster.time); a script that resumes from its checkpoint can "
        "be requeued: stager script --requeue",
        FailureClass.TIME_LIMIT,
        meaning="Slurm checks every half minute, so the end may come a little late",
    ),
    ProblemCode.JOB_CANCELLED: Wording(
        "the job was cancelled from outside (scancel)",
        "",
        "`sacct --jobs={job} --format=JobID,State%30` shows which user cancelled it",
        FailureClass.KILLED,
    ),
    ProblemCode.JOB_REQUEUED: Wording(
        "Slurm put the job back into the queue (scontrol requeue, or a failed node)",
        "",
        "it starts again by itself; `squeue --start --jobs={job}` shows when",
        FailureClass.KILLED,
    ),
    ProblemCode.JOB_NODE_FAILURE: Wording(
        "a node of the job was lost",
        "",
        "leave it out with --exclude, or let the job continue without it: --nodes MIN:MAX",
        FailureClass.NODE_FAILURE,
    ),
    ProblemCode.JOB_PREEMPTED: Wording(
        "another job took the nodes (preemption)",
        "",
        "submit it with `stager script --requeue`, or in a partition that is not preempted",
        FailureClass.PREEMPTION,
    ),
    ProblemCode.JOB_ENDED: Wording(
        "Slurm ended the job: {ending}",
        "",
        "`scontrol show job {job}` may say more",
        FailureClass.UNKNOWN,
    ),
    # Of another version: its words are its values.
    ProblemCode.OTHER: Wording("{what}", "{why}", "{fix}", FailureClass.UNKNOWN),
}
"""By code."""
