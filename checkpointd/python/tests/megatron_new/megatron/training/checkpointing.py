import os
import random

import torch

_ARGS = None
LOG = []


def get_args():
    return _ARGS


def ensure_directory_exists(filename, check_parent=True):
    dirname = os.path.dirname(filename) if check_parent else filename
    os.makedirs(dirname, exist_ok=True)


def get_checkpoint_name(checkpoints_path, iteration, release=False, pipeline_parallel=None, tensor_rank=None,
                        pipeline_rank=None, expert_parallel=None, expert_rank=None, return_base_dir=False):
    directory = "release" if release else "iter_{:07d}".format(iteration)
    if return_base_dir:
        return os.path.join(checkpoints_path, directory)
    rank = _ARGS.tensor_rank if tensor_rank is None else tensor_rank
    return os.path.join(checkpoints_path, directory, "mp_rank_%02d" % rank, "model_optim_rng.pt")


def get_distributed_optimizer_checkpoint_name(model_checkpoint_name):
    return os.path.join(os.path.dirname(model_checkpoint_name), "distrib_optim.pt")


def get_checkpoint_tracker_filename(checkpoints_path):
    return os.path.join(checkpoints_path, "latest_checkpointed_iteration.txt")


def read_metadata(tracker_filename):
    with open(tracker_filename, "r") as f:
        text = f.read().strip()
    return (0, True) if text == "release" else (int(text), False)


def get_rng_state():
    return [{"random_rng_state": random.getstate(), "torch_rng_state": torch.get_rng_state()}]


def save_checkpoint(iteration, model, optimizer, opt_param_scheduler, num_floating_point_operations_so_far,
                    checkpointing_context=None, train_data_iterator=None, non_persistent_ckpt=False, release=False):
    args = get_args()
    LOG.append("saving checkpoint at iteration %7d to %s" % (iteration, args.save))
    checkpoint_name = get_checkpoint_name(args.save, iteration)
    if args.use_distributed_optimizer and not args.no_save_optim and optimizer is not None:
        optim_checkpoint_name = get_distributed_optimizer_checkpoint_name(checkpoint_name)
        ensure_directory_exists(optim_checkpoint_name)
        optimizer.save_parameter_state(optim_checkpoint_name)
    if args.data_parallel_rank == 0:
        state_dict = {
            "args": args, "checkpoint_version": 3.0, "iteration": iteration,
            "num_floating_point_operations_so_far": num_floating_point_operations_so_far,
            "model": model[0].state_dict(), "rng_state": get_rng_state()}
        if optimizer is not None:
            state_dict["optimizer"] = optimizer.state_dict()
        if opt_param_scheduler is not None:
            state_dict["opt_param_scheduler"] = opt_param_scheduler.state_dict()
        ensure_directory_exists(checkpoint_name)
        torch.save(state_dict, checkpoint_name)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        with open(get_checkpoint_tracker_filename(args.save), "w") as f:
            f.write(str(iteration))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def _get_checkpoint_format(checkpoint_name):
    if any(name.startswith("mp_rank_0") for name in os.listdir(checkpoint_name)):
        return "torch"
    raise NotImplementedError("unknown checkpoint format in %s" % checkpoint_name)


def _load_base_checkpoint(load_dir):
    tracker_filename = get_checkpoint_tracker_filename(load_dir)
    if not os.path.isfile(tracker_filename):
        return None
    iteration, release = read_metadata(tracker_filename)
    assert _get_checkpoint_format(get_checkpoint_name(load_dir, iteration, release, return_base_dir=True)) == "torch"
    return torch.load(get_checkpoint_name(load_dir, iteration, release), map_location="cpu", weights_only=False)


def load_checkpoint(ddp_model, optimizer, opt_param_scheduler, load_arg="load", strict=True,
                    checkpointing_context=None):
    args = get_args()
    load_dir = getattr(args, load_arg)
    state_dict = _load_base_checkpoint(load_dir)
    if state_dict is None:
        return 0, 0
    ddp_model[0].load_state_dict(state_dict["model"], strict=strict)
    if optimizer is not None:
        optimizer.load_state_dict(state_dict["optimizer"])
        if args.use_distributed_optimizer:
            iteration, release = read_metadata(get_checkpoint_tracker_filename(load_dir))
            optimizer.load_parameter_state(get_distributed_optimizer_checkpoint_name(
                get_checkpoint_name(load_dir, iteration, release)))
    if opt_param_scheduler is not None:
        opt_param_scheduler.load_state_dict(state_dict["opt_param_scheduler"])
    torch.set_rng_state(state_dict["rng_state"][0]["torch_rng_state"])
    return state_dict["iteration"], state_dict["num_floating_point_operations_so_far"]
