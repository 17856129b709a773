"""The options of torchrun, ``accelerate launch``, ``uv run`` and Python, and what becomes of them.

torchrun: ``torch/distributed/run.py`` of torch 2.13; accelerate: ``commands/launch.py`` of 1.15;
uv: ``uv run --help`` of 0.13. Options of accelerate that configure the training itself (DeepSpeed,
FSDP, Megatron-LM, dynamo, FP8...) are left unknown: they must not be dropped silently.
"""

from __future__ import annotations

from .option_scan import Option

_RENDEZVOUS = "the job's own nodes, port and id are used"
_LOGS = "every rank has a log of its own in the log directory"
_NO_PYTHON = "ranks are Python programs, started by the environment's own interpreter"
_SET_BY_STAGER = "stager sets it itself where it starts torchrun on each node"


def _values(names: str, why: str) -> dict[str, Option]:
    return {name: Option(takes=True, dropped=why) for name in names.split()}


def _flags(names: str, why: str) -> dict[str, Option]:
    return {name: Option(dropped=why) for name in names.split()}


TORCHRUN: dict[str, Option] = {
    "nnodes": Option(takes=True),
    "nproc-per-node": Option(takes=True),
    "max-restarts": Option(takes=True),
    "module": Option(short="m"),
    "no-python": Option(refused=_NO_PYTHON),
    **_flags("standalone", "the job has several nodes, which meet at its first one"),
    **_values("rdzv-backend rdzv-endpoint rdzv-id rdzv-conf", _RENDEZVOUS),
    **_values("node-rank master-addr master-port local-addr", _RENDEZVOUS),
    **_values("log-dir local-ranks-filter logs-specs", _LOGS),
    **_values("duplicate-stdout-filters duplicate-stderr-filters", _LOGS),
    "redirects": Option(takes=True, dropped=_LOGS, short="r"),
    "tee": Option(takes=True, dropped=_LOGS, short="t"),
    **_flags("run-path", "the wrapper runs the script in its own interpreter anyway"),
    **_values("monitor-interval start-method event-log-handler role", _SET_BY_STAGER),
    **_values("signals-to-handle shutdown-timeout", _SET_BY_STAGER),
    **_values("numa-binding", "bind through Slurm, with [cluster] salloc-args"),
    **_flags("virtual-local-rank", "each rank finds its GPU by LOCAL_RANK"),
}

LAUNCH: dict[str, Option] = {**TORCHRUN, "use-env": Option()}
"""Of ``torch.distributed.launch``, the older name."""

ACCELERATE: dict[str, Option] = {
    "num-processes": Option(takes=True),
    "num-machines": Option(takes=True),
    "max-restarts": Option(takes=True),
    "mixed-precision": Option(takes=True),
    "dynamo-backend": Option(takes=True),
    "multi-gpu": Option(),
    "cpu": Option(),
    "use-cpu": Option(),
    "module": Option(short="m"),
    "no-python": Option(refused=_NO_PYTHON),
    **_values("machine-rank main-process-ip main-process-port", _RENDEZVOUS),
    **_values("rdzv-backend rdzv-conf", _RENDEZVOUS),
    **_flags("same-network", _RENDEZVOUS),
    **_values("log-dir", _LOGS),
    "tee": Option(takes=True, dropped=_LOGS, short="t"),
    **_values("role monitor-interval", _SET_BY_STAGER),
    **_values("gpu-ids", "Slurm decides which GPUs a job gets"),
    **_values("num-cpu-threads-per-process", "set it with [launch] omp-num-threads"),
    **_flags("enable-cpu-affinity", "bind through Slurm, with [cluster] salloc-args"),
    "quiet": Option(dropped="stager run -q is quiet", short="q"),
    **_flags("debug", "set ACCELERATE_DEBUG_MODE=true before stager runs"),
    "config-file": Option(
        takes=True, refused="its settings cannot be carried over; give them as options"
    ),
}

_BUNDLE = "the environment comes from the bundle"

UV_RUN: dict[str, Option] = {
    "module": Option(short="m"),
    "script": Option(short="s"),
    "gui-script": Option(),
    "with": Option(
        takes=True, dropped="name the package in [environment] requirements and build", short="w"
    ),
    "python": Option(takes=True, dropped=_BUNDLE + "; see [environment] python", short="p"),
    **_values("extra no-extra group no-group only-group env-file with-editable", _BUNDLE),
    **_values("with-requirements package python-platform index default-index", _BUNDLE),
    "index-url": Option(takes=True, dropped=_BUNDLE, short="i"),
    "find-links": Option(takes=True, dropped=_BUNDLE, short="f"),
    "upgrade-package": Option(takes=True, dropped=_BUNDLE, short="P"),
    "config-setting": Option(takes=True, dropped=_BUNDLE, short="C"),
    **_values("extra-index-url index-strategy keyring-provider upgrade-group resolution", _BUNDLE),
    **_values("prerelease prerelease-package fork-strategy exclude-newer", _BUNDLE),
    **_values("exclude-newer-package no-sources-package reinstall-package link-mode", _BUNDLE),
    **_values("config-settings-package no-build-isolation-package no-build-package", _BUNDLE),
    **_values("no-binary-package no-editable-package cache-dir refresh-package color", _BUNDLE),
    **_values("allow-insecure-host project config-file", _BUNDLE),
    "directory": Option(
        takes=True, refused="ranks run where stager is called from; change to that directory first"
    ),
    **_flags("all-extras no-dev dev only-dev no-default-groups all-groups no-editable", _BUNDLE),
    **_flags("exact no-env-file isolated active no-sync locked frozen all-packages", _BUNDLE),
    **_flags("no-project no-index no-sources reinstall compile-bytecode refresh", _BUNDLE),
    **_flags("no-build-isolation no-build no-binary require-build-hashes", _BUNDLE),
    **_flags("no-require-build-hashes managed-python no-managed-python offline", _BUNDLE),
    **_flags("no-python-downloads system-certs native-tls no-progress no-config", _BUNDLE),
    "upgrade": Option(dropped=_BUNDLE, short="U"),
    "no-cache": Option(dropped=_BUNDLE, short="n"),
    "quiet": Option(dropped=_BUNDLE, short="q"),
    "verbose": Option(dropped=_BUNDLE, short="v"),
}

PYTHON_FLAGS = "bBdEiIOPqRsSuvx"
"""One-letter options of Python without a value; ranks are isolated and unbuffered in any case."""
PYTHON_VALUES = "WX"
"""Those with one."""
