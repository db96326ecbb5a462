package main

const (
	launcher = "dlrover-run"
	every    = "every program"
	logging  = "every program but dlroverctl"
	client   = "workers"
)

// variable is an environment variable that a program reads.
type variable struct{ name, reader, meaning string }

var variables = []variable{
	{"PET_<OPTION>", launcher, "default of an option, as in torchrun: `PET_NNODES=2:4`"},
	{"PET_LOG_FORMAT", logging, "default of `--log-format`"},
	{"LOGLEVEL", logging,
		"least level of their own log lines, as in torchrun: `DEBUG`, `INFO` (default), `WARNING`, `ERROR`, `CRITICAL`"},
	{"DLROVER_TOKEN", every, "the job token, at least 16 bytes; not passed on to workers"},
	{"DLROVER_TOKEN_FILE", every, "file with the job token; before `DLROVER_TOKEN`, after `--token-file`"},
	{"DLROVER_MASTER_ADDR", launcher + ", dlroverctl",
		"`HOST:PORT` of the daemon; makes `dlrover-master` the backend unless one is given"},
	{"USER", "dlroverctl", "who gives an order, in the reason that the run is told"},
	{"PYTHON_EXEC", launcher, "the workers' Python"},
	{"POD_NAME", launcher, "name of this node; in DLRover's pods"},
	{"POD_IP", launcher, "address of this node for the others, unless `--local-addr` is given"},
	{"NODE_IP", launcher, "address by which `--topology-file` knows this node; else `POD_IP`"},
	{"NODE_ID", launcher,
		"which incarnation of the node this pod is, from 0: a higher one takes the place of a lower one"},
	{"NODE_RANK", launcher, "default of `--node-rank`"},
	{"WORKER_RANK", launcher, "the same, after `NODE_RANK`"},
	{"NODE_NUM", launcher, "number of nodes, with `--auto-config`"},
	{"ELASTIC_JOB_NAME", launcher, "run id, unless `--rdzv-id` is given"},
	{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", launcher, "default of `--shutdown-timeout`"},
	{"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", launcher, "default of `--log-line-prefix-template`"},
	{"TORCHELASTIC_ENABLE_FILE_TIMER", launcher, "1: serve PyTorch's file timer to the workers"},
	{"TORCHELASTIC_TIMER_FILE", launcher, "where: path of its pipe"},
	{"TORCHELASTIC_ERROR_FILE", launcher, "file to which the root cause is copied, for a launcher around this one"},
	{"DLROVER_TERMINATION_LOG", launcher,
		"file for the [termination message](recovery.md#verdict) (default: `/dev/termination-log`, if it exists)"},
	{"DLROVER_WARM", client, "set by the launcher with `--warm`: the file for what was imported, or 1"},
	{"PYTHONMALLOC", client, "passed on; with `debug` and Python 3.8 nothing is forked for `--warm`"},
	{"OMP_NUM_THREADS", launcher, "passed on; 1 for each of several workers if it is not set"},
	{"CUDA_VISIBLE_DEVICES", launcher, "devices that `--nproc-per-node=auto` counts, and of `--virtual-local-rank`"},
	{"HIP_VISIBLE_DEVICES", launcher, "the same on ROCm"},
	{"ROCR_VISIBLE_DEVICES", launcher, "the same on ROCm"},
	{"ASCEND_RT_VISIBLE_DEVICES", launcher, "the same on Ascend"},
	{"MACA_VISIBLE_DEVICES", launcher, "the same on MetaX"},
	{"DLROVER_GPUCHECK", launcher, "path of [gpucheck](gpucheck.md); else the one beside the launcher, or in `PATH`"},
	{"NCCL_ASYNC_ERROR_HANDLING", launcher, "passed on; see [torchrun.md](torchrun.md#the-workers-environment)"},
	{"TORCH_NCCL_ASYNC_ERROR_HANDLING", launcher, "the same"},
	{"TORCHELASTIC_HEALTH_CHECK_PORT", launcher, "no effect, which the launcher says"},
	{"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", launcher, "no effect, which the launcher says"},
	{"TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", launcher, "no effect, which the launcher says"},
	{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE", launcher, "no effect, which the launcher says"},
	{"PYTHONPATH", launcher,
		"passed on behind a directory of the launcher's; also where it looks for the version of PyTorch"},
	{"TMPDIR", launcher, "where the workers' logs go without `--log-dir` (default: `/tmp`)"},
	{"DLROVER_CKPT_CLIENT", client, "`upstream`: import the installed DLRover's checkpoint modules, not ours"},
	{"DLROVER_CKPT_SHM", client,
		"directory in memory for checkpoints of workers without a launcher (default: `/dev/shm`)"},
	{"NCCL_SOCKET_IFNAME", launcher, "passed on; also which interfaces [node checks](node-checks.md) test"},
	{"NCCL_IB_HCA", launcher, "passed on; also which RDMA devices node checks look at"},
	{"GLOO_SOCKET_IFNAME", launcher, "passed on, also to PyTorch's part of node checks"},
	{"DLROVER_HANG", launcher, "default of `--hang`: `auto`, `outside` or `off`; see [hang.md](hang.md)"},
	{"XPU_TIMER_HANG_TIMEOUT", launcher,
		"seconds without progress from which on a worker is suspected; see [hang.md](hang.md)"},
	{"XPU_TIMER_TIMELINE_PATH", launcher + ", dlroverctl", "directory for the evidence of hangs"},
	{"DLROVER_SYSFS_ROOT", launcher, "where the layout of MetaX devices is looked up (default: `/sys`)"},
	{"SWITCHBOX_CHECK_TOOL_PATH", launcher,
		"MetaX' tool for `--switchbox-check` (default: `/opt/mxmap/bin/mxom-client`)"},
	{"TORCH_PYTHON", "make", "the Python with PyTorch for tests, demo and bench (default: `/usr/bin/python3`)"},
}
