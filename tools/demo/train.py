"""Trains a small classifier of two spirals with DistributedDataParallel, elastically.

Every worker takes an equal share of the same global batch, so the training does the
same whatever the world size is. Rank 0 writes a checkpoint every few steps; after a
restart all workers go on from it. That is all an elastic script has to do.
"""
import argparse
import json
import math
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def say(kind, **facts):
    line = json.dumps({"event": kind, "pid": os.getpid(), "world_size": dist.get_world_size(), **facts})
    sys.stdout.write(line + "\n")  # one write a line: the workers of a node share a pipe
    sys.stdout.flush()


def spirals(n):
    gen = torch.Generator().manual_seed(7)
    label = (torch.arange(n) % 2).float()
    radius = torch.rand(n, generator=gen)
    angle = 2.5 * math.pi * radius + math.pi * label
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return 2 * points + 0.02 * torch.randn(n, 2, generator=gen), label


def save(path, **state):
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)  # a reader sees the old file or the new one, whole


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, required=True)
    p.add_argument("--step-seconds", type=float, default=0, help="shortest time a step takes")
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--checkpoint-every", type=int, default=10)
    args = p.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    say("up", rank=rank)

    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    step = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    ddp = DistributedDataParallel(model)
    loss_of = torch.nn.BCEWithLogitsLoss()
    points, labels = spirals(2000)

    while step < args.steps:
        began = time.monotonic()
        step += 1
        batch = torch.randperm(len(points), generator=torch.Generator().manual_seed(step))[:400][rank::world]
        loss = loss_of(ddp(points[batch]).squeeze(1), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            say("step", step=step, loss=mean.item())
            if step % args.checkpoint_every == 0:
                save(args.checkpoint, step=step, model=model.state_dict(), optimizer=optimizer.state_dict())
        time.sleep(max(0, args.step_seconds - (time.monotonic() - began)))

    if rank == 0:
        with torch.no_grad():
            right = (model(points).squeeze(1) > 0) == (labels > 0.5)
        say("trained", step=step, accuracy=right.float().mean().item())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
