"""The words by which programs say that they go on after an error, begin again, or end.

Whether an error ended its process is mostly told by what follows it (:mod:`.aftermath`); these are
the words that say so themselves.
"""

from __future__ import annotations

import re

_LEVEL = re.compile(
    r"""^\W*(?:WARNING|WARN|INFO|DEBUG)\b       # WARNING step 41: text
    |^\[?W\d{3,4}\ \d\d:|^\[W\                  # torch in C++ and in Python
    |\bNCCL\ INFO\b
    |^.{0,40}\d\d:\d\d.{0,40}\b(?:WARNING|WARN|INFO|DEBUG)\b""",
    re.VERBOSE,
)
_LOGGED = re.compile(
    r"(?<!NCCL )\bWARN(?:ING)?\b.*"
    r"(?:fail|cannot|can't|could ?n.t|could not|unable|error|exception)",
    re.IGNORECASE,
)
_IN_THREAD = re.compile(r"^Exception in thread ")
"""The line above a traceback that ends a thread, and no process."""
_IGNORED = re.compile(
    r"^Exception ignored (?:in|on|while)\b|\bsafe(?:ly)? to ignore\b"
    r"|^--- Logging error ---|^Error in atexit\._run_exitfuncs:"
)
_RECOVERED = re.compile(
    r"""(?<!max\ )(?<!maximum\ )(?<!fork:\ )\bre-?try(?:ing)?\b
    |\bwill\ (?:be\ )?(?:re)?tr(?:y|ied)\b|\btrying\ again\b
    |\bskip(?:ping|ped)\b|\bfall(?:ing|s)?\ ?back\b|\bcontinuing\b|\brecovered\b
    |\bignor(?:ing|ed)\b|\breconnect(?:ing|ed)\b|\bdecreasing\ batch\ size\b
    |\busing\ the\ default\b""",
    re.IGNORECASE | re.VERBOSE,
)
_GAVE_UP = re.compile(
    r"\b(?:stopping|aborting|exiting|giving up|gave up|terminating)\b", re.IGNORECASE
)
_RESTARTED = re.compile(
    r"""(?<!not\ )\b(?:re-?start(?:s|ed|ing)?|resum(?:e[ds]?|ing)|re-?launch(?:ed|ing)?
    |requeue[ds]?|(?:attempt|try|retry)\W{0,3}\d+|restart_count)\b""",
    re.IGNORECASE | re.VERBOSE,
)
_OF_RUNTIME = ("[", "srun: ", "slurm")
"""The beginning of lines of torch's C++ and of Slurm, which count their own attempts."""
_ENDED_WELL = re.compile(
    r"""\b(?:finished|completed?|done|success(?:ful(?:ly)?)?|succeeded|ended\ well)\b
    |\bexit(?:ed)?\b.{0,12}\b(?:code|status)\W{0,3}0\b""",
    re.IGNORECASE | re.VERBOSE,
)
_TRAINED = re.compile(
    r"""\b(?:train(?:ing)?|fit(?:ting)?|epochs?)\b.{0,30}\b(?:finished|completed?|done|ended)\b
    |\b(?:finished|completed|done)\b.{0,20}\b(?:training|epochs?)\b
    |\bmax_(?:epochs|steps)\S*\ reached|\btrain_runtime\b""",
    re.IGNORECASE | re.VERBOSE,
)
_ENDED_BADLY = re.compile(
    r"error|fail|abort|unsuccess|\bnot\b|\b(?:code|status|rc)\W{0,3}-?[1-9]", re.IGNORECASE
)
_OF_AN_END = re.compile(
    r"""
    # launchers, schedulers, shells, and what a batch script says at its end
    \s|\W*$|[-=*\#+~_]{4,}|\S+:\ line\ \d+:|\+\ |(?:real|user|sys)\s+\d|usage:\ |wandb:
    |(?:srun|sbatch|slurmstepd|slurmd|salloc|mpirun|mpiexec|prterun|orterun|torchrun|accelerate
        |bash|sh)\b
    |(?:job|exit|end(?:ed)?|finish\w*)\ ?\w*\W
    # crashes: frames and stacks of C++, of Python's faulthandler, and of MPI
    |frame\ \#|\#\d+\ |\*\*\*\ |\[[\w.-]+:\d+\]\ |terminate\ called|Fatal\ Python\ error
    |Current\ thread|Thread\ 0x|Extension\ modules|Aborted|Killed|Segmentation\ fault|Bus\ error
    # exceptions and what hangs on them, torch's own stamps and its table
    |Traceback|(?:>\ )?File\ "|Exception\ ignored|During\ handling|The\ above
    |[\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b|\[?[IWEF]\d{3,4}\ \d\d:\d\d:\d\d
    |Failures:|Root\ Cause|.*\bFAILED$|.*\bNCCL\ (?:INFO|WARN|ERROR)\b
    |.*\b(?:kill|terminat|abort|shut(?:ting)?\ ?down|clos(?:e|ing)|clean(?:ing)?\ ?up
        |exit(?:s|ed|ing)?\b|errors?\b|fail)""",
    re.IGNORECASE | re.VERBOSE,
)


def says_recovered(text: str) -> bool:
    """Return whether a line says that its program goes on after an error."""
    return bool(_RECOVERED.search(text))


def says_survived(text: str) -> bool:
    """Return whether a line says, by its level too, that its program survived what it tells."""
    return bool(_LEVEL.search(text)) or says_recovered(text)


def says_gave_up(text: str) -> bool:
    """Return whether a line says that its program ends because of what it tells."""
    return bool(_GAVE_UP.search(text)) and not says_survived(text)


def introduces_survived(text: str) -> bool:
    """Return whether a line says that its program survived the traceback below it."""
    return bool(_LOGGED.search(text) or _IN_THREAD.match(text)) or says_recovered(text)


def introduces_ignored(text: str) -> bool:
    """Return whether the traceback below is printed and no more, as that of a destructor is."""
    return bool(_IGNORED.search(text))


def says_restarted(text: str) -> bool:
    """Return whether a line says that another attempt begins."""
    return bool(_RESTARTED.search(text)) and not text.startswith(_OF_RUNTIME)


def says_ended_well(text: str) -> bool:
    """Return whether a line says that all ended well."""
    return bool(_ENDED_WELL.search(text)) and not _ENDED_BADLY.search(text)


def says_trained(text: str) -> bool:
    """Return whether a line says that the training itself ended well, and not only its script."""
    return bool(_TRAINED.search(text)) and not _ENDED_BADLY.search(text)


def is_of_an_end(text: str) -> bool:
    """Return whether a line is one that a process may print as it comes to its end."""
    return bool(_OF_AN_END.match(text))
