"""The words of problems with a bundle, and with the environment that is made from it on a node."""

from __future__ import annotations

from collections.abc import Mapping

from .enumerations import FailureClass
from .problem import ProblemCode
from .wording import Wording

_REBUILD = "stage it again; if this persists, build the bundle again"
_SEE_SPACE = (
    "check the free space, the inodes and the permissions there, or name another place with "
    "[cluster] node-root or $STAGER_NODE_ROOT"
)
_SEE_PTH = "unset PYTHONPATH and check the environment for .pth files"
_OR_EXCLUDE = "; or leave the node out with --exclude={where}"

ENVIRONMENT_WORDINGS: Mapping[ProblemCode, Wording] = {
    # The bundle as a file.
    ProblemCode.BUNDLE_UNREADABLE: Wording(
        "the bundle cannot be read", fix="check the path, or make the bundle with `stager build`"
    ),
    ProblemCode.BUNDLE_DISK_FAULT: Wording(
        "the bundle cannot be read", fix="check that disk for errors (dmesg)"
    ),
    ProblemCode.BUNDLE_DAMAGED: Wording(
        "the bundle is damaged or not a bundle",
        fix="copy it again, or build it again with `stager build`",
        failure_class=FailureClass.DAMAGED_COPY,
        meaning="the file changed after it was built. Copy it again",
    ),
    ProblemCode.STORED_LAYER_UNUSABLE: Wording(
        "the bundle refers to a layer in the offline root that cannot be used",
        "{layer}: {why}",
        "build again with `stager build`, which makes the layer; to use a bundle away from its "
        "offline root, write all of it with `stager build --output FILE`",
        FailureClass.DAMAGED_COPY,
    ),
    ProblemCode.ANOTHER_BUNDLE: Wording(
        "this is another bundle than the job was made for",
        "its id is {id}, expected {expected}",
        "stage the right file, or start the job again",
        FailureClass.DAMAGED_COPY,
    ),
    ProblemCode.SIGNATURE_REFUSED: Wording(
        "the bundle's signature is not accepted",
        fix="see whether the signer's key has expired since the job was submitted, and whether the "
        "node's clock is right; then start the job again",
        meaning="`[trust] require` is set, and what the login side has accepted does not hold on "
        "the node: nothing of the bundle has run there",
    ),
    ProblemCode.BUNDLE_OF_OTHER_VERSION: Wording(
        "the bundle was made by another version of stager",
        fix="build it again with `stager build`, or use the version that made it",
    ),
    ProblemCode.NO_ZSTD: Wording(
        "this Python has no zstd and the bundle brings none",
        "Python {version}",
        "run the node program with the Python that the bundle was made for",
    ),
    ProblemCode.DECOMPRESSOR_UNUSABLE: Wording(
        "the bundle's zstd decompressor {how}",
        "{name} under Python {version}: {why}",
        "use a node root that allows execution, or build for this machine's platform",
    ),
    ProblemCode.PROGRAM_INCOMPLETE: Wording(
        "the node program is incomplete", "no source", "build again"
    ),
    # Its way to the nodes.
    ProblemCode.BUNDLE_INVISIBLE: Wording(
        "the bundle cannot be read there, and staging is off",
        "--stage never lets every node read the bundle where it lies",
        "use --stage auto, or put the offline root on a file system that every node sees",
    ),
    ProblemCode.NOTHING_TO_SEND: Wording(
        "the first node cannot see the bundle, so it cannot be sent to the others",
        "a batch job is driven from its first node",
        "run it from the login node without --batch (it then uses salloc), or put the offline "
        "root on a file system that the nodes see; where a later build has replaced the bundle, "
        "print or submit the script again",
    ),
    ProblemCode.HOST_DISK_FULL: Wording(
        "a disk of the host where the job is driven from is full",
        fix="free some space in {where} on that host, or set TMPDIR to another place",
        failure_class=FailureClass.DISK_FULL,
        meaning="the driver runs where `stager` asked for the nodes, or on the first node of a "
        "batch job; no other node failed",
    ),
    ProblemCode.HOST_DISK_UNWRITABLE: Wording(
        "a disk of the host where the job is driven from cannot be used",
        fix="look at {where} on that host (full, read-only, failing?), or set TMPDIR to another "
        "place",
        meaning="the driver runs where `stager` asked for the nodes, or on the first node of a "
        "batch job; no other node failed",
    ),
    ProblemCode.EXCERPT_UNWRITABLE: Wording(
        "the part of the bundle that is to be sent cannot be written",
        fix="free some space there, or set TMPDIR to another place",
    ),
    ProblemCode.EXCERPT_DISK_FULL: Wording(
        "the part of the bundle that is to be sent cannot be written",
        fix="free some space there, or set TMPDIR to another place",
        failure_class=FailureClass.DISK_FULL,
    ),
    ProblemCode.INCOMING_UNWRITABLE: Wording(
        "the bundle cannot be received", fix="check the free space and the permissions there"
    ),
    ProblemCode.INCOMING_DISK_FULL: Wording(
        "the bundle cannot be received",
        fix="check the free space and the permissions there",
        failure_class=FailureClass.DISK_FULL,
    ),
    ProblemCode.BUNDLE_CUT_OFF: Wording(
        "the bundle could not be sent",
        "the rest of it did not arrive",
        "see the problem that is reported first",
    ),
    ProblemCode.BUNDLE_NOT_ARRIVED: Wording(
        "the bundle could not be sent",
        "{arrived} of {size} bytes had arrived",
        "see the problem that is reported first",
    ),
    ProblemCode.BUNDLE_NOT_ARRIVED_NO_ROOM: Wording(
        "the bundle could not be sent",
        "{arrived} of {size} bytes had arrived, {free} are free",
        "see the problem that is reported first",
        FailureClass.DISK_FULL,
    ),
    ProblemCode.RELAY_SOURCE_ENDED: Wording(
        "the process on {host} that sends the bundle has ended",
        "{why}",
        "start the job again; after SIGKILL, look there for a lack of memory (dmesg)",
        FailureClass.KILLED,
    ),
    ProblemCode.RELAY_SOURCE_HANGS: Wording(
        "the process on {host} that sends the bundle hangs",
        "{why}",
        "look at the file system of {where} on that host: it may not answer at present",
        meaning="the nodes waited for a minute; none of them failed",
    ),
    ProblemCode.BUNDLE_NOT_SENT: Wording(
        "the bundle could not be sent to the node",
        "{way} says: {why}",
        "check the free space and the permissions in {incoming} there" + _OR_EXCLUDE,
        meaning="sending to it failed, and failed again when tried with this node alone",
    ),
    ProblemCode.BUNDLE_NOT_SENT_NO_ROOM: Wording(
        "the bundle could not be sent to the node",
        "{way} says: {why}",
        "check the free space and the permissions in {incoming} there" + _OR_EXCLUDE,
        FailureClass.DISK_FULL,
        meaning="the disk there is full, of which Slurm says only `Unspecified error`. The line "
        "shows how much had arrived and how much is free",
    ),
    ProblemCode.BUNDLE_NOT_SENT_NETWORK: Wording(
        "the bundle could not be sent to the node",
        "sbcast says: {why}",
        "check the network to {where}: `sinfo -N -n {where}`, `ping {where}`" + _OR_EXCLUDE,
    ),
    ProblemCode.COPY_DAMAGED_TWICE: Wording(
        "the copy of the bundle was damaged on its way, twice",
        fix="the bundle itself is sound: check the network to {where}, and its memory and "
        "disk, or leave the node out with --exclude={where}",
        failure_class=FailureClass.DAMAGED_COPY,
        meaning="the node received different bytes from those sent, and received them once more. "
        "That node's network or memory is at fault, not the bundle",
    ),
    # The environment as it is made.
    ProblemCode.NO_ROOM: Wording(
        "the environment does not fit",
        fix="free some, or name another place with [cluster] node-root or $STAGER_NODE_ROOT",
        failure_class=FailureClass.DISK_FULL,
    ),
    ProblemCode.ENVIRONMENT_DISK_FULL: Wording(
        "the environment does not fit", fix=_SEE_SPACE, failure_class=FailureClass.DISK_FULL
    ),
    ProblemCode.ENVIRONMENT_UNWRITABLE: Wording(
        "the environment cannot be written", fix=_SEE_SPACE
    ),
    ProblemCode.LAYER_MISSING: Wording(
        "a part of the environment is missing",
        "{name} was to be taken from an older environment, which has changed",
        "start again",
    ),
    ProblemCode.ENVIRONMENT_GONE: Wording(
        "the environment is gone",
        "it was removed, as `stager clean` does with what is not in use",
        "start again",
    ),
    ProblemCode.UNPACKING_FAILED: Wording(
        "an unpacking process failed",
        "{why}; see its traceback above",
        "report this with the log",
    ),
    ProblemCode.UNPACKING_KILLED: Wording(
        "an unpacking process was killed",
        "signal {signal}",
        "usually the node ran out of memory; a tmpfs counts as memory too",
        FailureClass.KILLED,
    ),
    ProblemCode.UNPACKING_ENDED: Wording(
        "an unpacking process ended",
        "exit status {status}",
        "see the messages above; usually it received SIGTERM",
    ),
    # The environment as it is found.
    ProblemCode.ENVIRONMENT_DAMAGED: Wording(
        "the environment is damaged",
        fix="remove it with `stager clean --nodes`, then stage it again",
        failure_class=FailureClass.DAMAGED_COPY,
    ),
    ProblemCode.ENVIRONMENT_REPAIRED: Wording(
        "the environment is damaged",
        fix="stager repairs the environment before using it",
        failure_class=FailureClass.DAMAGED_COPY,
    ),
    ProblemCode.ENVIRONMENT_TAKEN_AWAY: Wording(
        "the environment is damaged",
        fix="it was removed there: the next `stager verify` or `stager run` makes it again",
        failure_class=FailureClass.DAMAGED_COPY,
    ),
    ProblemCode.DAMAGE_IN_USE: Wording(
        "the damaged environment cannot be removed",
        "a job on this node is using it",
        "wait until that job has ended, or end it, and stage again",
        FailureClass.DAMAGED_COPY,
    ),
    ProblemCode.DAMAGE_NOT_REMOVED: Wording(
        "the damaged environment cannot be removed",
        fix="remove {root} there by hand",
        failure_class=FailureClass.DAMAGED_COPY,
    ),
    ProblemCode.PYTHON_GARBLED: Wording(
        "the environment's Python is not usable", "it answered: {answer}", _REBUILD
    ),
    ProblemCode.PYTHON_FAILED: Wording(
        "the environment's Python does not run",
        fix=f"if it names a shared library, install that on the node; else {_REBUILD}",
    ),
    ProblemCode.PYTHON_ILLEGAL_INSTRUCTION: Wording(
        "the environment's Python does not run",
        fix="this processor lacks instructions that the wheels use; exclude the node",
    ),
    ProblemCode.PYTHON_KILLED: Wording(
        "the environment's Python does not run",
        fix="the node ran out of memory; ask for more with --mem, or exclude the node",
        failure_class=FailureClass.KILLED,
    ),
    ProblemCode.LIBRARY_UNUSABLE: Wording(
        "the node has no usable copy of this shared library",
        "{why}; needed by {modules} in the environment's Python, and by {importers}",
        "install the package that has it on the node; or build with a Python that brings its "
        'libraries (uv python install, then [environment] interpreter = "bundled"); or exclude the '
        "node",
        meaning="a Python that was compiled on the build machine, such as pyenv's, needs libraries "
        "of its distribution (`libffi` for `ctypes`, `libssl` for `ssl`, ...). It is a warning "
        "where the modules of `environment.imports` can be imported without it",
    ),
    ProblemCode.PACKAGE_MISSING: Wording("the package is missing", "not in {root}", _REBUILD),
    ProblemCode.PACKAGE_INCOMPLETE: Wording(
        "the package is incomplete", "there is no module {module}", _REBUILD
    ),
    ProblemCode.PACKAGE_FOREIGN: Wording(
        "the package does not come from the environment", "found in {found}", _SEE_PTH
    ),
    ProblemCode.MODULE_MISSING: Wording("the module is missing", "not found by {python}", _REBUILD),
    ProblemCode.MODULE_FOREIGN: Wording(
        "the module does not come from the environment",
        "found in {found}",
        _SEE_PTH,
        meaning="something puts another directory first on `sys.path`: a `.pth` file, or "
        "`sitecustomize`",
    ),
    ProblemCode.MODULE_NOT_IMPORTED: Wording(
        "the module cannot be imported",
        fix="run stager exec -- python -c 'import {where}' there to see the whole error",
    ),
}
"""By code."""
