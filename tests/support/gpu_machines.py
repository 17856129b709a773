"""Machines with NVIDIA GPUs, invented: what their ``nvidia-smi`` and their kernel would say."""

from __future__ import annotations

from pathlib import Path

OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (x)\n"
CLOSED_MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Nov 30 06:39:21 UTC 2022\n"


def nvidia_smi(
    folder: Path, rows: str, listing: str = "", *, code: int = 0, body: str = ""
) -> Path:
    path = folder / "nvidia-smi"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f"#!/bin/sh\n{body}\nif [ \"$1\" = -L ]; then cat <<'END'\n{listing}\nEND\n"
        f"else cat <<'END'\n{rows}\nEND\nfi\nexit {code}\n"
    )
    path.chmod(0o755)
    return path


def proc(folder: Path, driver: str, *models: str, module: str = OPEN_MODULE) -> Path:
    """Write the kernel's account of a driver and its GPUs; return the directory of /proc."""
    nvidia = folder / "driver" / "nvidia"
    nvidia.mkdir(parents=True)
    (nvidia / "version").write_text(module.format(driver) + "GCC version:  gcc version 12.2.0\n")
    for number, model in enumerate(models):
        card = nvidia / "gpus" / f"0000:{number}7:00.0"
        card.mkdir(parents=True)
        (card / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 88\n")
    return folder
