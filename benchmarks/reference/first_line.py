"""A program whose ranks meet and say so: how long a launch takes until a program can begin."""

import torch.distributed as dist

dist.init_process_group("gloo")
print(f"[RANK {dist.get_rank()}] WORLD_SIZE={dist.get_world_size()}", flush=True)
dist.destroy_process_group()
