"""A training program that hangs in twelve ways, and is silent in six, on real PyTorch.

Of each way, the place where the rank at fault is ends with a comment that has its name.
"""

from __future__ import annotations

from typing import NamedTuple

PROGRAM = """\
import concurrent.futures
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist

CASE, SECONDS = sys.argv[1], float(sys.argv[2])
LIBC = ctypes.CDLL(None)


class Shards(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, number):
        time.sleep(SECONDS)  # in a loader
        return number


def sleep_as_worker():
    time.sleep(SECONDS)


def use_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # in a lock


def call_c():
    ctypes.PyDLL(None).system(b"exec sleep 600")  # in C


def leave_early():
    while not os.path.exists("done"):
        time.sleep(0.5)  # out of the loop early


def use_dead_worker():
    results = multiprocessing.Queue()
    worker = multiprocessing.Process(target=sleep_as_worker)
    worker.start()
    os.kill(worker.pid, signal.SIGKILL)
    results.get()  # a dead loader worker


def fill_pipe():
    with subprocess.Popen(["sleep", str(SECONDS)], stdin=subprocess.PIPE) as reader:
        os.write(reader.stdin.fileno(), bytes(1 << 20))  # a full pipe


def use_pool():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        outer = pool.submit(lambda: pool.submit(int).result())
        outer.result()  # a deadlocked thread pool


def wait_in_kernel():
    # As with a file server that is gone: until a child has begun its program, state D (vfork).
    pipe = os.path.join(tempfile.mkdtemp(), "pipe")
    os.mkfifo(pipe)
    actions, child = ctypes.create_string_buffer(512), ctypes.c_int()
    LIBC.posix_spawn_file_actions_init(actions)
    LIBC.posix_spawn_file_actions_addopen(actions, 0, pipe.encode(), os.O_RDONLY, 0)
    argv = (ctypes.c_char_p * 2)(b"true", None)
    LIBC.posix_spawn(ctypes.byref(child), b"/bin/true", actions, None, argv, None)  # stalled


HANGS = {
    "a loader": lambda: next(iter(torch.utils.data.DataLoader(Shards(), num_workers=0))),
    "a worker": lambda: next(iter(torch.utils.data.DataLoader(Shards(), num_workers=1))),
    "a lock": use_lock,
    "C": call_c,
    "early": leave_early,
    "a dead worker": use_dead_worker,
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "a full pipe": fill_pipe,
    "a pool": use_pool,
    "a file server": wait_in_kernel,
}


def cut_network():
    time.sleep(0.5)
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)


def compute():
    until, values = time.monotonic() + SECONDS, torch.rand(300, 300)
    while time.monotonic() < until:
        values = torch.nn.functional.softmax(values @ values, dim=0)


def write_checkpoint():
    until, values = time.monotonic() + SECONDS, torch.zeros(1 << 22)
    while time.monotonic() < until:
        torch.save({"model": values}, "checkpoint.pt")
        with open("checkpoint.pt", "rb+") as file:
            os.fsync(file.fileno())


def count_words(number):
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        " ".join(map(str, range(1000))).split()


def preprocess():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(count_words, range(2))


SILENCES = {
    "evaluate": (compute, compute),
    "evaluate on one": (compute, None),
    "checkpoint": (write_checkpoint, None),
    "preprocess": (preprocess, None),
    "sleep": (lambda: time.sleep(SECONDS), lambda: time.sleep(SECONDS)),
}


def train():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([0, 1])
    values = torch.ones(4)
    for step in range(4):
        dist.all_reduce(values)
        if rank == 0:
            print("step", step, flush=True)
    if CASE == "a subgroup":
        if rank == 0:
            dist.all_reduce(values, group=pair)
        elif rank == 1:
            time.sleep(SECONDS)  # in a subgroup
    elif CASE == "another operation" and rank == 2:
        dist.broadcast(values, 0)  # mismatched
    elif CASE == "the network" and rank == 0:
        cut_network()
    elif CASE == "quiet steps":
        until = torch.tensor([time.time() + SECONDS])
        dist.broadcast(until, 0)
        count = torch.zeros(1)
        while not count:
            time.sleep(0.1)
            count[0] = time.time() > until[0]
            dist.all_reduce(count, dist.ReduceOp.MAX)
    elif CASE in SILENCES:
        first, others = SILENCES[CASE]
        work = others if rank else first
        if work is not None:
            work()
    elif CASE in HANGS and rank == 1:
        HANGS[CASE]()
    dist.all_reduce(values)  # where the others wait
    print("done", flush=True)


if __name__ == "__main__":
    train()
"""


class ProvokedHang(NamedTuple):
    kind: str
    rank: int | None
    mark: str  # the comment at the line where the rank is; empty where no process can show it


HANGS = {
    "a loader": ProvokedHang("behind", 1, "in a loader"),
    "a worker": ProvokedHang("behind", 1, "in a loader"),
    "a lock": ProvokedHang("behind", 1, "in a lock"),
    "C": ProvokedHang("elsewhere", 1, "in C"),
    "a subgroup": ProvokedHang("behind", 1, "in a subgroup"),
    "another operation": ProvokedHang("mismatch", 2, "mismatched"),
    "early": ProvokedHang("behind", 1, "out of the loop early"),
    "a dead worker": ProvokedHang("stopped", 1, "a dead loader worker"),
    "stopped": ProvokedHang("stopped", 1, ""),
    "the network": ProvokedHang("network", None, "where the others wait"),
    "a full pipe": ProvokedHang("behind", 1, "a full pipe"),
    "a pool": ProvokedHang("behind", 1, "a deadlocked thread pool"),
    "a file server": ProvokedHang("held", 1, "stalled"),
}
SILENCES = ("evaluate", "evaluate on one", "checkpoint", "quiet steps", "preprocess", "sleep")


def find_place(mark: str) -> str:
    """Return the beginning of the place of a rank that is at a mark: ``script.py:42 ``."""
    lines = enumerate(PROGRAM.splitlines(), 1)
    return next((f"script.py:{at} " for at, line in lines if mark and f"# {mark}" in line), "")
