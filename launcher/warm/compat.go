package warm

import (
	"slices"
	"strings"
)

// readAtImport begin the names of variables that interpreters, loaders and libraries read once, when they are started,
// loaded or imported: workers that need other values cannot be forked.
var readAtImport = []string{
	"PYTHON", "LD_", "MALLOC_", "GLIBC_TUNABLES=", "LANG=", "LC_",
	"OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "NUMEXPR_",
	"TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_", "TRITON_",
	"JAX_", "XLA_", "TF_", "HF_", "TRANSFORMERS_", "NUMBA_", "PADDLE_", "FLAGS_", "MS_",
}

// readLater begin the names of those among them that are read when a job communicates. Launchers set some of these for
// a worker or an epoch.
var readLater = []string{
	"TORCH_NCCL_", "TORCH_FR_", "TORCH_GLOO_", "PADDLE_TRAINER", "PADDLE_CURRENT", "PADDLE_MASTER",
	"PADDLE_GLOBAL_", "PADDLE_LOCAL_", "PADDLE_RANK_", "PADDLE_NNODES=", "JAX_NUM_PROCESSES=", "JAX_PROCESS_ID=",
	"MS_WORKER_NUM=", "MS_SCHED_", "MS_ROLE=", "MS_NODE_ID=", "TF_CONFIG=", "JAX_COORDINATOR_",
}

// compatible names a variable, in one line without its value, that keeps a process started with the environment parent
// from becoming a worker with the other one; "" if none does. Of equal names the last one counts.
func compatible(parent, worker []string) (why string) {
	have, want := atImport(parent), atImport(worker)
	var names []string
	for name, value := range want {
		if old, ok := have[name]; !ok || old != value {
			names = append(names, name)
		}
	}
	for name := range have {
		if _, ok := want[name]; !ok {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	return "$" + slices.Min(names) + " is not what it was at the imports"
}

func atImport(env []string) map[string]string {
	vars := map[string]string{}
	for _, kv := range env {
		if begins(kv, readAtImport) && !begins(kv, readLater) {
			name, value, _ := strings.Cut(kv, "=")
			vars[name] = value
		}
	}
	return vars
}

func begins(kv string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(kv, p) })
}

// commonEnv is the common part of all environments, without the variables that distinguish workers and epochs: the
// imports are made with it.
func commonEnv(envs ...[]string) (common []string) {
	for _, kv := range last(envs[0]) {
		name, _, _ := strings.Cut(kv, "=")
		if !slices.Contains(ofOneWorker, name) && !slices.ContainsFunc(envs[1:], func(o []string) bool {
			return !slices.Contains(o, kv)
		}) {
			common = append(common, kv)
		}
	}
	return common
}

// ofOneWorker are variables of one rank or epoch. DLROVER_HANG_DIR is of an epoch, too, but the modules that it asks
// for have to be there at the imports.
var ofOneWorker = []string{
	"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
	"ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE",
	"TORCHELASTIC_USE_AGENT_STORE", variable,
}

// last leaves the last one of equal names.
func last(env []string) (kvs []string) {
	seen := map[string]bool{}
	for _, kv := range slices.Backward(env) {
		if name, _, _ := strings.Cut(kv, "="); !seen[name] {
			seen[name] = true
			kvs = append(kvs, kv)
		}
	}
	slices.Reverse(kvs)
	return kvs
}
