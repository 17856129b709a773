"""The loop as one writes it by hand: DistributedDataParallel, DistributedSampler, and nothing else.

    torchrun ... minimal.py DATA BATCH EPOCHS

Rank 0 prints the rows a second of each epoch, over all ranks, and the loss at its end.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from trainer.data import images
from trainer.workloads import mnist


def main(data: str, batch: int, epochs: int) -> None:
    """Train."""
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    rows = images.normalize_images(images.read_mnist(Path(data))[0], mnist.MEAN, mnist.SPREAD)
    dataset = TensorDataset(rows.inputs, rows.labels)
    sampler = DistributedSampler(dataset, ranks, rank, seed=42)
    loader = DataLoader(dataset, batch, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(mnist.make_model(42))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        started = time.perf_counter()
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        seconds = time.perf_counter() - started
        if rank == 0:
            print(f"RATE {len(rows) / seconds:.1f} loss {loss.item():.4f}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
