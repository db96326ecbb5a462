import os

import torch

_ARGS = None


def get_args():
    return _ARGS


def ensure_directory_exists(filename):
    os.makedirs(os.path.dirname(filename), exist_ok=True)


def get_checkpoint_name(checkpoints_path, iteration, release=False, pipeline_parallel=None, tensor_rank=None,
                        pipeline_rank=None):
    directory = "release" if release else "iter_{:07d}".format(iteration)
    return os.path.join(checkpoints_path, directory, "mp_rank_00", "model_optim_rng.pt")


def get_checkpoint_tracker_filename(checkpoints_path):
    return os.path.join(checkpoints_path, "latest_checkpointed_iteration.txt")


def save_checkpoint(iteration, model, optimizer, opt_param_scheduler):
    args = get_args()
    name = get_checkpoint_name(args.save, iteration)
    state_dict = {"args": args, "iteration": iteration, "model": model[0].state_dict()}
    if optimizer is not None:
        state_dict["optimizer"] = optimizer.state_dict()
    ensure_directory_exists(name)
    torch.save(state_dict, name)
    with open(get_checkpoint_tracker_filename(args.save), "w") as f:
        f.write(str(iteration))


def load_checkpoint(model, optimizer, opt_param_scheduler, load_arg="load", strict=True):
    load_dir = getattr(get_args(), load_arg)
    tracker = get_checkpoint_tracker_filename(load_dir)
    if not os.path.isfile(tracker):
        return 0
    with open(tracker) as f:
        iteration = int(f.read())
    state_dict = torch.load(get_checkpoint_name(load_dir, iteration), map_location="cpu", weights_only=False)
    model[0].load_state_dict(state_dict["model"], strict=strict)
    if optimizer is not None:
        optimizer.load_state_dict(state_dict["optimizer"])
    return state_dict["iteration"]
