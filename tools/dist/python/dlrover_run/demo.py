"""Trains a small network with PyTorch on this machine, kills a worker, and shows how the training goes on.

    python -m dlrover_run.demo

It prints the command that it runs, which is dlrover-run with this file as the training script: two workers under
DistributedDataParallel. Only the marked lines are special to it: it saves its state in memory, and loads it again
after a restart.
"""
import argparse
import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

try:
    os.environ["RANK"]  # only workers need PyTorch; --warm reads here what to import for them
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType  # special: of dlrover-run
except KeyError:
    pass


def main():
    p = argparse.ArgumentParser(prog="dlrover_run.demo", description=__doc__.split("\n")[0])
    p.add_argument("--workers", type=int, default=2, help="2 or more (default: 2)")
    p.add_argument("--steps", type=int, default=160, help="40 or more (default: 160)")
    p.add_argument("--dir", help=argparse.SUPPRESS)  # of the workers' files
    args = p.parse_args()
    if args.workers < 2 or args.steps < 40:
        p.error("--workers=%d --steps=%d: the demo needs 2 workers or more, and 40 steps or more" % (
            args.workers, args.steps))
    if "RANK" in os.environ:
        return train(args.steps, args.dir or own_dir())
    if importlib.util.find_spec("torch") is None:
        sys.exit("dlrover_run.demo: it trains with PyTorch, which %s does not have: install torch for it" %
                 sys.executable)
    try:
        return launch(args)
    except FileNotFoundError as e:
        sys.exit("dlrover_run.demo: %s" % e)


def own_dir():
    """Is an empty directory for workers that dlrover-run starts directly: dlrover-run ... -m dlrover_run.demo."""
    path = os.path.join(tempfile.gettempdir(), "dlrover-run-demo-" + os.environ.get("TORCHELASTIC_RUN_ID", "none"))
    if os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        shutil.rmtree(path, ignore_errors=True)  # of another run; the other ranks wait for this one in train()
    return path


def launcher():
    """Is the path of dlrover-run. This file can also be alone, in a Debian package or an image."""
    if importlib.util.find_spec("dlrover_run") is not None:
        from dlrover_run import find_program
        return find_program()
    path = shutil.which("dlrover-run")
    if path is None:
        raise FileNotFoundError("dlrover-run is not in PATH")
    return path


def launch(args):
    """Runs dlrover-run with this file, and returns its exit status."""
    program = launcher()
    path = tempfile.mkdtemp(prefix="dlrover-run-demo-")
    command = ["dlrover-run", "--standalone", "--nproc-per-node=%d" % args.workers, "--max-restarts=1", "--warm",
               "--log-format=text", "--log-dir=" + os.path.join(path, "logs"), os.path.abspath(__file__),
               "--steps=%d" % args.steps, "--dir=" + path]
    print("$ " + " ".join(map(shlex.quote, command)) + "\n", flush=True)
    os.environ["PYTHON_EXEC"] = sys.executable
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        with subprocess.Popen(command, executable=program) as job:
            for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(sig, lambda sig, frame: job.send_signal(sig))
            status = job.wait()
        return status if status >= 0 else 128 - status
    finally:
        shutil.rmtree(path, ignore_errors=True)


def train(steps, path):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # special: this machine alone
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(),
                                torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    checkpointer = DdpCheckpointer(os.path.join(path, "checkpoints"))  # special
    state, step = checkpointer.load_checkpoint(), 0  # {} at the first start
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    os.makedirs(path, exist_ok=True)
    killed = os.path.join(path, "killed")
    if rank == 0:
        tell_start(step, world, killed)

    ddp, loss_of = DistributedDataParallel(model), torch.nn.BCEWithLogitsLoss()
    points, labels = spirals()
    while step < steps:
        step += 1
        batch = torch.randperm(len(points), generator=torch.Generator().manual_seed(step))[:400][rank::world]
        loss = loss_of(ddp(points[batch]).squeeze(1), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)  # to be seen
        checkpointer.save_checkpoint(step, {"step": step, "model": model.state_dict(),  # special
                                            "optimizer": optimizer.state_dict()}, storage_type=StorageType.MEMORY)
        if rank == 0 and step % 10 == 0:
            say("step %4d   loss %.3f   %s" % (step, loss.item(), "#" * round(40 * min(1, loss.item()))))
        if rank == world - 1 and step == steps // 2 and not os.path.exists(killed):
            die(rank, step, killed)
    if rank == 0:
        right = ((model(points).squeeze(1) > 0) == (labels > 0.5)).float().mean().item()
        say("trained %d steps: %.0f %% of the points are on the right side; one worker was killed meanwhile" % (
            step, 100 * right))
    dist.barrier()
    dist.destroy_process_group()


def tell_start(step, world, killed):
    if not os.path.exists(killed):
        say("%d workers train from step %d" % (world, step))
        return
    with open(killed) as f:
        at, when = f.read().split()
    say("%d workers train from step %d, %.1f s after the kill at step %s, with the state that was in memory" % (
        world, step, time.time() - float(when), at))


def die(rank, step, killed):
    """Ends this process as an out-of-memory killer or a broken machine would."""
    time.sleep(0.2)  # the others have saved this step, too
    say("rank %d: kill -9 of myself at step %d" % (rank, step))
    with open(killed, "w") as f:
        f.write("%d %f" % (step, time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def spirals():
    """Two classes of points on two spirals."""
    gen = torch.Generator().manual_seed(7)
    label = (torch.arange(2000) % 2).float()
    radius = torch.rand(2000, generator=gen)
    angle = 7.85 * radius + 3.1416 * label
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return 2 * points + 0.02 * torch.randn(2000, 2, generator=gen), label


def say(line):
    sys.stdout.write(line + "\n")  # one write a line: the workers share the terminal
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
