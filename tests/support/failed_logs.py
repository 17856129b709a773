"""Lines that ranks and launchers leave in logs as they fail."""

from __future__ import annotations

PEER = "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:4711"
WAITED = "RuntimeError: [/x/gloo/unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation"
IN_TORCH = "/x/torch/distributed/c10d_logger.py"
EXITED = "srun: error: n1: task 1: Exited with exit code 1\n"


def mark(mark: str, text: str) -> str:
    return "".join(f"{mark}{line}\n" for line in text.splitlines())


def trace(closing: str, frame: str = "/home/you/train.py", before: str = "") -> str:
    frames = f'  File "{frame}", line 1, in main\n    go()\n'
    return mark(before, f"Traceback (most recent call last):\n{frames}{closing}\n")


def report(code: int = 1, local: int = 1) -> str:
    where = "E1122 05:30:00.1 99 torch/distributed/elastic/x.py:1]"
    return f"{where} failed (exitcode: {code}) local_rank: {local} (pid: 7)\n"


def table(*rows: tuple[int, int], host: str = "n1", each: int = 4) -> str:
    """Return torchrun's table of ranks and exit statuses, its root cause last."""
    texts = [
        f"[{rank}]:\n  time      : 2026-11-22_05:30:00\n  host      : {host}\n"
        f"  rank      : {rank} (local_rank: {rank % each})\n  exitcode  : {code} (pid: 7)\n"
        for rank, code in rows
    ]
    texts.insert(-1, "Root Cause (first observed failure):\n")
    closing = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n"
    return closing + "".join(texts)
