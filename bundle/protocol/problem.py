"""A problem: a code and the values that belong to it, which travel as JSON.

The words of each code are in :mod:`bundle.protocol.problem_table`. Agents of a Slurm step are not
sent that table: what they report, the driver puts into words.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType

from .enumerations import TextEnum


class ProblemCode(TextEnum):
    """The kind of a problem; :data:`bundle.protocol.problem_table.TABLE` explains each."""

    # No static method: Python 3.9 calls it as it stands here.
    def _generate_next_value_(name: str, *_: object) -> str:  # type: ignore[override]
        """Return the value of a code: ``no-room`` for ``NO_ROOM``."""
        return name.lower().replace("_", "-")

    # A node: its directories.
    PATH_NOT_EXAMINED = enum.auto()
    NO_PLACE = enum.auto()
    NO_PLACE_WITH_ROOM = enum.auto()
    UNSET_VARIABLE = enum.auto()
    NODE_ROOT_REFUSED = enum.auto()
    NODE_ROOT_BASE_REFUSED = enum.auto()
    NOT_A_NODE_ROOT = enum.auto()
    NOT_REMOVED = enum.auto()
    NOT_REMOVED_MOUNT = enum.auto()
    # Its Python, processor and C library.
    NO_PYTHON = enum.auto()
    NO_CPYTHON = enum.auto()
    NO_CONTAINER_PROGRAM = enum.auto()
    IMAGE_UNREADABLE = enum.auto()
    OTHER_MACHINE = enum.auto()
    OTHER_LIBC = enum.auto()
    OLD_LIBC = enum.auto()
    OLD_GPU_DRIVER = enum.auto()
    # Its network, names and clock.
    NAME_UNRESOLVED = enum.auto()
    NO_ROUTE = enum.auto()
    NO_INTERFACE = enum.auto()
    INTERFACE_OF_NO_NODE = enum.auto()
    NO_INTERFACE_WITH_ADDRESS = enum.auto()
    NO_ADDRESS_FOR_OTHERS = enum.auto()
    NO_FREE_PORT = enum.auto()
    NAMES_UNRESOLVED = enum.auto()
    NAMES_LEAD_BACK = enum.auto()
    NAMES_DIFFER = enum.auto()
    CLOCK_WRONG = enum.auto()
    HEAD_PORT_TAKEN = enum.auto()
    HEAD_IS_ANOTHER = enum.auto()
    HEAD_MUTE = enum.auto()
    HEAD_REFUSES = enum.auto()
    HEAD_SILENT = enum.auto()
    HEAD_UNREACHED = enum.auto()
    HEAD_REACHED_BY_NONE = enum.auto()
    HEAD_WITHOUT_ADDRESS = enum.auto()
    # Its answers to the driver.
    NO_ANSWER = enum.auto()
    NO_ANSWER_KILLED = enum.auto()
    NO_ANSWER_EXITED = enum.auto()
    NO_ANSWER_FOLLOWED = enum.auto()
    NO_ANSWER_NO_STEP = enum.auto()
    NO_ANSWER_NO_START = enum.auto()
    NO_ANSWER_NODE_FAILURE = enum.auto()
    NO_ANSWER_UNREACHABLE = enum.auto()
    NO_ANSWER_DESERTED = enum.auto()
    NO_ANSWER_SILENT = enum.auto()
    NO_ANSWER_HANGS = enum.auto()
    # A host that is reached over ssh.
    SSH_UNREACHED = enum.auto()
    SSH_NAME_UNKNOWN = enum.auto()
    SSH_NO_LOGIN = enum.auto()
    SSH_KEY_UNKNOWN = enum.auto()
    SSH_KEY_CHANGED = enum.auto()
    SSH_TURNED_AWAY = enum.auto()
    SSH_LOGIN_FAILED = enum.auto()
    SSH_CONNECTION_LOST = enum.auto()
    SSH_NOT_STARTED = enum.auto()
    SSH_SAME_HOST = enum.auto()
    # The bundle as a file.
    BUNDLE_UNREADABLE = enum.auto()
    BUNDLE_DISK_FAULT = enum.auto()
    BUNDLE_DAMAGED = enum.auto()
    STORED_LAYER_UNUSABLE = enum.auto()
    ANOTHER_BUNDLE = enum.auto()
    SIGNATURE_REFUSED = enum.auto()
    BUNDLE_OF_OTHER_VERSION = enum.auto()
    NO_ZSTD = enum.auto()
    DECOMPRESSOR_UNUSABLE = enum.auto()
    PROGRAM_INCOMPLETE = enum.auto()
    # The bundle on its way to the nodes.
    BUNDLE_INVISIBLE = enum.auto()
    NOTHING_TO_SEND = enum.auto()
    HOST_DISK_FULL = enum.auto()
    HOST_DISK_UNWRITABLE = enum.auto()
    EXCERPT_UNWRITABLE = enum.auto()
    EXCERPT_DISK_FULL = enum.auto()
    INCOMING_UNWRITABLE = enum.auto()
    INCOMING_DISK_FULL = enum.auto()
    BUNDLE_CUT_OFF = enum.auto()
    BUNDLE_NOT_ARRIVED = enum.auto()
    BUNDLE_NOT_ARRIVED_NO_ROOM = enum.auto()
    RELAY_SOURCE_ENDED = enum.auto()
    RELAY_SOURCE_HANGS = enum.auto()
    BUNDLE_NOT_SENT = enum.auto()
    BUNDLE_NOT_SENT_NO_ROOM = enum.auto()
    BUNDLE_NOT_SENT_NETWORK = enum.auto()
    COPY_DAMAGED_TWICE = enum.auto()
    # The environment as it is made.
    NO_ROOM = enum.auto()
    ENVIRONMENT_DISK_FULL = enum.auto()
    ENVIRONMENT_UNWRITABLE = enum.auto()
    LAYER_MISSING = enum.auto()
    ENVIRONMENT_GONE = enum.auto()
    UNPACKING_FAILED = enum.auto()
    UNPACKING_KILLED = enum.auto()
    UNPACKING_ENDED = enum.auto()
    # The environment as it is found.
    ENVIRONMENT_DAMAGED = enum.auto()
    ENVIRONMENT_REPAIRED = enum.auto()
    ENVIRONMENT_TAKEN_AWAY = enum.auto()
    DAMAGE_IN_USE = enum.auto()
    DAMAGE_NOT_REMOVED = enum.auto()
    PYTHON_GARBLED = enum.auto()
    PYTHON_FAILED = enum.auto()
    PYTHON_ILLEGAL_INSTRUCTION = enum.auto()
    PYTHON_KILLED = enum.auto()
    LIBRARY_UNUSABLE = enum.auto()
    PACKAGE_MISSING = enum.auto()
    PACKAGE_INCOMPLETE = enum.auto()
    PACKAGE_FOREIGN = enum.auto()
    MODULE_MISSING = enum.auto()
    MODULE_FOREIGN = enum.auto()
    MODULE_NOT_IMPORTED = enum.auto()
    # A job: its description and its allocation.
    JOB_OF_OTHER_VERSION = enum.auto()
    JOB_UNREADABLE = enum.auto()
    REQUEST_UNREADABLE = enum.auto()
    LOG_DIR_UNWRITABLE = enum.auto()
    NO_ALLOCATION = enum.auto()
    ALLOCATION_UNUSABLE = enum.auto()
    TOO_FEW_NODES = enum.auto()
    TOO_FEW_CPUS = enum.auto()
    NODE_LIST_UNREADABLE = enum.auto()
    SRUN_NOT_STARTED = enum.auto()
    RELAY_NOT_STARTED = enum.auto()
    SLURM_COMMAND_FAILED = enum.auto()
    SENT_LOCALLY = enum.auto()
    FETCHED_LOCALLY = enum.auto()
    # A job: its ranks.
    BACKEND_UNUSABLE = enum.auto()
    LAUNCHER_NOT_STARTED = enum.auto()
    PIPES_NOT_MADE = enum.auto()
    PIPES_DISK_FULL = enum.auto()
    PIPES_OVER_LIMIT = enum.auto()
    RANKS_DID_NOT_END = enum.auto()
    RANKS_CANNOT_TALK = enum.auto()
    NOTHING_MEASURED = enum.auto()
    # A job: its output and its results.
    OUTPUT_LOST = enum.auto()
    OUTPUT_NOT_LOGGED = enum.auto()
    OUTPUT_DISK_FULL = enum.auto()
    RUN_DIR_MISSING = enum.auto()
    TOO_MANY_OUTPUTS = enum.auto()
    OUTPUTS_NOT_SENT = enum.auto()
    NO_RESULTS = enum.auto()
    NO_PLACE_FOR_RESULTS = enum.auto()
    RESULTS_TOO_LARGE = enum.auto()
    RESULTS_UNWRITABLE = enum.auto()
    RESULTS_INCOMPLETE = enum.auto()
    RESULTS_CUT_BY_DISK = enum.auto()
    OUTPUT_NOT_PLACED = enum.auto()
    # A job: its end, where Slurm made it.
    JOB_TIME_LIMIT = enum.auto()
    JOB_CANCELLED = enum.auto()
    JOB_REQUEUED = enum.auto()
    JOB_NODE_FAILURE = enum.auto()
    JOB_PREEMPTED = enum.auto()
    JOB_ENDED = enum.auto()
    # Of another version: its words are its values.
    OTHER = enum.auto()


@dataclass(frozen=True)
class Problem:
    """One thing that keeps a node from running the job."""

    code: ProblemCode
    """Its kind."""
    where: str
    """The directory, host, interface or module it concerns."""
    values: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The findings that its words name, with numbers: ``needs 1.4 GB, 0.2 GB are free``."""

    @property
    def what(self) -> str:
        """The fault: ``the environment does not fit``; in an agent of a step, its code."""
        table = _table()
        return self.code.value if table is None else str(table.what(self))

    @property
    def why(self) -> str:
        """The finding: ``needs 1.4 GB, 0.2 GB are free``; in an agent of a step, its values."""
        table = _table()
        return ", ".join(self.values.values()) if table is None else str(table.why(self))

    @property
    def fix(self) -> str:
        """The remedy, a thing that the user can do; empty in an agent of a step."""
        table = _table()
        return "" if table is None else str(table.fix(self))

    @property
    def without_place(self) -> str:
        """The problem as a sentence that does not begin with its place."""
        return "; ".join(filter(None, (self.what, self.why, self.fix)))

    def __str__(self) -> str:
        return f"{self.where}: {self.without_place}" if self.where else self.without_place

    def to_json(self) -> dict[str, object]:
        """Return the fields as a JSON object, and the words where they are known."""
        fields: dict[str, object] = {
            "code": self.code.value,
            "where": self.where,
            "values": dict(self.values),
        }
        if _table() is None:
            return fields
        return {**fields, "what": self.what, "why": self.why, "fix": self.fix}

    @classmethod
    def from_json(cls, raw: Mapping[str, object]) -> Problem:
        """Read :meth:`to_json`'s output; one of another version is shown in its own words.

        Raises:
            KeyError: it has neither a code and values that are known, nor words.
            TypeError: it is no object, or a field of it is no text.
        """
        if not isinstance(raw, Mapping):
            raise TypeError("it is no object")
        table = _table()
        if table is not None:
            return table.read(raw)  # type: ignore[no-any-return]
        values = raw["values"]
        if not isinstance(values, Mapping):
            raise TypeError("its values are no object")
        return cls(ProblemCode(raw["code"]), str(raw["where"]), values)


@functools.lru_cache(maxsize=None)
def _table() -> ModuleType | None:
    """Return the module that puts problems into words; None in an agent, which has not got it."""
    try:
        from . import problem_table
    except ImportError:
        return None
    return problem_table


class NodeError(Exception):
    """The one expected failure of the far side.

    Attributes:
        problem: what went wrong, where, why, and what to do about it.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return str(self.problem)
