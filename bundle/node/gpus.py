"""The NVIDIA driver of this machine, and its GPUs.

``nvidia-smi`` tells most. A driver with a broken GPU may keep it waiting for ever, even where it is
killed, so nobody waits for its end. What the kernel knows is in ``/proc/driver/nvidia``.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..protocol.messages import Gpu, GpuFacts
from ..system import processes

_COLUMNS = "name,memory.total,driver_version,mig.mode.current"
_SECONDS = 20.0
"""The longest time for all questions; without ``nvidia-persistenced`` the first takes seconds."""
_MIB = 1 << 20
_LIMIT = 1 << 20
"""Bytes that are read of an answer; a node with many GPUs gives some thousands."""
_DRIVER = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6}){1,3}")
_SHOWN = 200
"""Characters of a line that are shown."""
_VERSION = re.compile(r"\bKernel Module\b.*?\s(\d+\.\d+(?:\.\d+)*)(?:\s|$)")
"""In ``/proc/driver/nvidia/version``, for either kind of kernel module."""
_LIBRARY = re.compile(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)*)")


class Question:
    """A question to the driver that is asked at once, and answered later."""

    def __init__(self, env: Mapping[str, str], proc: Path = Path("/proc")) -> None:
        self._folder = proc / "driver" / "nvidia"
        self._library = _library(env)
        self._until = time.monotonic() + _SECONDS
        self._program = shutil.which("nvidia-smi", path=env.get("PATH"))
        self._asked = self._start(f"--query-gpu={_COLUMNS}", "--format=csv,noheader,nounits")

    def answer(self) -> GpuFacts | None:
        """Return the driver and its GPUs; None where there is no driver."""
        lines, fault = self._read(self._asked)
        listed = [one for one in map(_listed, lines) if one]
        if lines and not listed:
            fault = _short(lines[-1])
        told = (one.driver for one in listed if _DRIVER.fullmatch(one.driver))
        driver = kernel_driver(self._folder) or next(told, "")
        if not driver:
            return None  # the program is installed, and there is nothing for it
        library = "" if self._library == driver else self._library
        return GpuFacts(driver, library, self._gpus(listed) or _named(self._folder), fault)

    def _gpus(self, listed: Sequence[_Listed]) -> tuple[Gpu, ...]:
        gpus = tuple(one.gpu for one in listed)
        if any(one.has_instances for one in listed):
            return _with_instances(gpus, self._read(self._start("-L"))[0])
        return gpus

    def _start(self, *options: str) -> processes.Process | None:
        if self._program is None:
            return None
        try:
            return processes.start(
                [self._program, *options], stdout=processes.PIPE, stderr=processes.STDOUT
            )
        except processes.ProcessError:
            return None

    def _read(self, asked: processes.Process | None) -> tuple[Sequence[str], str]:
        if asked is None:
            return (), ""
        out = processes.output_of(asked, max(0.1, self._until - time.monotonic()), _LIMIT)
        if out is None:
            return (), f"nvidia-smi gave no answer in {_SECONDS:g} s"
        if len(out) >= _LIMIT:
            return (), f"nvidia-smi wrote more than {_LIMIT >> 20} MiB"
        lines = [line for line in out.decode(errors="replace").splitlines() if line.strip()]
        if asked.returncode == 0:
            return lines, ""
        why = _short(" ".join(lines[-1:]))
        return (), "" if "not a valid field" in why else why  # older than MIG


def _mebibytes(text: str) -> int:
    """Convert MiB to bytes; 0 for a text that is no number."""
    return int(text) * _MIB if re.fullmatch("[0-9]{1,9}", text) else 0


def _short(line: str) -> str:
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


def kernel_driver(folder: Path = Path("/proc/driver/nvidia")) -> str:
    """Return the version of the driver that the kernel has loaded; empty for none."""
    return version_in(_text(folder / "version"))


def version_in(text: str) -> str:
    """Return the version of the driver that the kernel's account of it names; empty for none."""
    match = _VERSION.search(text)
    return match[1] if match else ""


@dataclass(frozen=True)
class _Listed:
    gpu: Gpu
    """Its name and memory."""
    driver: str
    """The version of its driver."""
    has_instances: bool
    """True if it is divided into MIG instances."""


def _listed(line: str) -> _Listed | None:
    values = line.split(", ")
    if len(values) != 4:
        return None
    name, memory, driver, mig = values
    return _Listed(Gpu(name, _mebibytes(memory)), driver, has_instances=mig == "Enabled")


def _with_instances(gpus: Sequence[Gpu], lines: Sequence[str]) -> tuple[Gpu, ...]:
    profiles: list[list[str]] = []
    for line in lines:
        instance = re.match(r"\s+MIG (\S+)", line)
        if line.startswith("GPU "):
            profiles.append([])
        elif instance and profiles:
            profiles[-1].append(instance[1])
    if len(profiles) != len(gpus):
        return tuple(gpus)
    return tuple(Gpu(gpu.name, gpu.memory, tuple(found)) for gpu, found in zip(gpus, profiles))


def _named(folder: Path) -> tuple[Gpu, ...]:
    """Return the GPUs by /proc, which has their names only."""
    found = [_text(path) for path in sorted(folder.glob("gpus/*/information"))]
    names = [re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE) for text in found]
    return tuple(Gpu(name[1]) for name in names if name)


def _library(env: Mapping[str, str]) -> str:
    """Return the version of the driver's library that LD_LIBRARY_PATH names; empty for none.

    NVIDIA's package for forward compatibility puts a newer one there than the kernel's driver.
    """
    for folder in env.get("LD_LIBRARY_PATH", "").split(":"):
        match = _LIBRARY.fullmatch(
            os.path.basename(os.path.realpath(os.path.join(folder, "libcuda.so.1")))
        )
        if folder and match:
            return match[1]
    return ""


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
