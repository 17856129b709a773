"""Training programs that fail in the five ways that a replay is for, on real PyTorch."""

from __future__ import annotations

TRAIN = """\
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def read_shard(step, rank):
    if CASE == "shard" and step == 2 and rank == 1:
        row = Path("shards", "rank1.csv").read_text().split(",")
        return torch.tensor([[float(cell) for cell in row]])
    width = 5 if CASE == "shape" and step == 2 and rank == 1 else 4
    return torch.randn(8, width)


def find_rate(settings, rank):
    return settings["rates" if rank == 0 else "rate"]


def train():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    settings = {"rates": 0.1}
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        batch = read_shard(step, rank)
        loss = model(batch).square().mean()
        if CASE == "nan" and step == 2 and rank == 1:
            loss = loss * float("inf") - float("inf")
        if CASE == "nan" and loss.isnan():
            raise FloatingPointError(f"loss is NaN at step {step}")
        if CASE == "key" and step == 2:
            find_rate(settings, rank)
        assert CASE != "assertion" or step < 2 or rank != 1, "rank 1 has gone too far"
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        every = [None] * world
        dist.all_gather_object(every, {"rank": rank})
        dist.barrier()
        if rank == 0:
            Path("metrics.json").write_text(json.dumps({"step": step}))
    dist.destroy_process_group()


CASE = sys.argv[1]
train()
"""
FAILURES = {
    "shard": ("ValueError", "return torch.tensor([[float(cell) for cell in row]])"),
    "shape": ("RuntimeError", "loss = model(batch).square().mean()"),
    "key": ("KeyError", 'return settings["rates" if rank == 0 else "rate"]'),
    "assertion": ("AssertionError", 'assert CASE != "assertion"'),
    "nan": ("FloatingPointError", 'raise FloatingPointError(f"loss is NaN at step {step}")'),
}


def find_line(case: str) -> int:
    text = FAILURES[case][1]
    return next(at for at, line in enumerate(TRAIN.splitlines(), 1) if text in line)
