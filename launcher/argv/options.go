package argv

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Sections of the help text.
const (
	sizeSection    = "Size of the job"
	rdzvSection    = "Rendezvous"
	workerSection  = "Workers"
	restartSection = "Failures and restarts"
	ckptSection    = "Checkpoints"
	logSection     = "Logs and events"
	checkSection   = "Devices and health checks"
	otherSection   = "Launcher"
)

const notYet = "is not available yet in this version; remove it"

// Options returns the table of all options in the order of the help text, as a fresh slice: torchrun's from 1.13 to
// 2.15, DLRover's and its MetaX fork's, and our own.
func Options() []Option {
	opts := slices.Concat(sizeOptions(), rendezvousOptions(), workerOptions(), restartOptions(), checkpointOptions(), logOptions(),
		checkOptions(), otherOptions())
	for i := range opts {
		o := &opts[i]
		switch o.Name {
		case "logs-specs", "numa-binding", "print-completion", "box-pairs", "token-file", "no-save-at-breakpoint", "help", "version":
		default:
			o.Env = "PET_" + strings.ToUpper(strings.ReplaceAll(o.Name, "-", "_"))
		}
		if o.Default != "" {
			o.Usage += " (default " + o.Default + ")"
		}
	}
	return opts
}

func sizeOptions() []Option {
	return []Option{
		{Name: "nnodes", Default: "1:1", Meta: "N|MIN:MAX", Category: sizeSection,
			Usage: "nodes in the job, as a fixed number or as a range within which nodes may come and go"},
		{Name: "nproc-per-node", Default: "1", Meta: "N|auto|gpu|cpu|xpu", Category: sizeSection,
			Usage: "workers on this node: a number, one per GPU, XPU or CPU, or auto for one per accelerator and without one per CPU"},
		{Name: "auto-config", Kind: Flag, Category: sizeSection, Extra: true,
			Usage: "take the number of nodes from NODE_NUM and the number of workers from the GPUs of this node"},
		{Name: "node-unit", Type: Int, Default: "1", Meta: "N", Category: sizeSection, Extra: true,
			Usage: "train on a multiple of N nodes only, N >= 1; surplus nodes wait as spares"},
	}
}

func rendezvousOptions() []Option {
	return []Option{
		{Name: "rdzv-backend", Default: "static", Meta: "NAME", Category: rdzvSection,
			Usage: "how nodes find each other: static with fixed node ranks, c10d with ranks given out when the nodes meet, dlrover-master with a daemon of its own"},
		{Name: "rdzv-endpoint", Meta: "HOST[:PORT]", Category: rdzvSection,
			Usage: "where the rendezvous is served, an IPv6 address as [ADDRESS]:PORT; empty means the master address if static"},
		{Name: "rdzv-id", Default: "none", Meta: "ID", Category: rdzvSection,
			Usage: "name of the job, the same on all its nodes"},
		{Name: "rdzv-conf", Meta: "KEY=VALUE,...", Category: rdzvSection,
			Usage: "settings of the rendezvous in seconds: join_timeout (600), last_call_timeout (30), growth_delay (1), read_timeout (60), and is_host=true|false"},
		{Name: "standalone", Kind: Flag, Category: rdzvSection,
			Usage: "one-node job with a rendezvous of its own on a free port; backend, endpoint and id are ignored"},
		{Name: "node-rank", Type: Int, Default: "0", Meta: "N", Category: rdzvSection,
			Usage: "rank of this node, from 0; the static rendezvous demands it, the others take it for a wish"},
		{Name: "master-addr", Default: "127.0.0.1", Meta: "HOST", Category: rdzvSection,
			Usage: "host or address of node rank 0; static rendezvous only"},
		{Name: "master-port", Type: Int, Meta: "PORT", Category: rdzvSection,
			Usage: "port on node rank 0, 0-65535, 29500 unless given; static rendezvous only"},
		{Name: "local-addr", Meta: "HOST", Category: rdzvSection,
			Usage: "address under which the other nodes reach this one; unless given the one that leads to the rendezvous"},
		{Name: "token-file", Meta: "PATH", Category: rdzvSection, Extra: true,
			Usage: "file with the secret that the nodes of the job share"},
		{Name: "insecure", Kind: Flag, Category: rdzvSection, Extra: true,
			Usage: "serve and join a rendezvous on a network address without a secret"},
		{Name: "topology-file", Meta: "PATH", Category: rdzvSection, Extra: true,
			Usage: "lines of three words, asw psw ip, by which nodes under one switch get neighbouring ranks; read by the node that serves the rendezvous"},
	}
}

func workerOptions() []Option {
	return []Option{
		{Name: "module", Short: 'm', Kind: Flag, Category: workerSection,
			Usage: "the script is the name of a Python module, run as python -m does"},
		{Name: "no-python", Kind: Flag, Category: workerSection,
			Usage: "execute the script itself and not Python with it; not together with --module"},
		{Name: "run-path", Kind: Flag, Category: workerSection,
			Usage: "run the script as runpy.run_path does; wins over --no-python"},
		{Name: "role", Default: "default", Meta: "NAME", Category: workerSection,
			Usage: "role of these workers, also in front of their lines on the console"},
		{Name: "start-method", Choices: []string{"spawn", "fork", "forkserver"}, Default: "spawn", Meta: "METHOD",
			Category: workerSection,
			Usage:    "how Python functions would be started: spawn, fork or forkserver; of no effect on scripts, as in torchrun"},
		{Name: "virtual-local-rank", Kind: Flag, Category: workerSection,
			Usage: "every worker gets LOCAL_RANK=0 and sees its own GPU only"},
		{Name: "numa-binding", Choices: []string{"node", "socket", "exclusive", "core-complex"}, Meta: "MODE",
			Category: workerSection,
			Usage:    "bind each worker to CPUs near its GPU: node, socket, exclusive or core-complex"},
		{Name: "preset", Default: "torch", Meta: "NAME", Category: workerSection, Extra: true,
			Usage: "set of environment variables given to the workers"},
	}
}

func restartOptions() []Option {
	return []Option{
		{Name: "max-restarts", Type: Int, Default: "0", Meta: "N", Category: restartSection,
			Usage: "how many worker failures the whole job may recover from, >= 0; lost and new nodes are not counted"},
		{Name: "monitor-interval", Type: Float, Default: "0.1", Meta: "SECONDS", Category: restartSection,
			Usage: "accepted for torchrun's sake, > 0; the kernel tells when a worker ends, at once"},
		{Name: "shutdown-timeout", Type: Int, Meta: "SECONDS", Category: restartSection,
			Usage: "time workers get between the signal and SIGKILL, >= 0; $TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30 unless given"},
		{Name: "signals-to-handle", Default: "SIGTERM,SIGINT,SIGHUP,SIGQUIT", Meta: "NAME,...", Category: restartSection,
			Usage: "signals that stop the job and are passed on to the workers"},
		choice(Option{Name: "restart-policy", Choices: []string{"OnFailure", "Never", "Always", "ExitCode"},
			Default: "OnFailure", Meta: "POLICY", Category: restartSection, Extra: true,
			Usage: "when workers are started again: OnFailure, Never, Always, or ExitCode for the codes of --retryable-exit-codes"}),
		{Name: "retryable-exit-codes", Default: "130,137,143", Meta: "CODE,...", Category: restartSection, Extra: true,
			Usage: "exit codes 1-255 and ranges such as 1-5 that --restart-policy=ExitCode answers with a restart"},
		choice(Option{Name: "exit-code-policy", Choices: []string{"torchrun", "reason"}, Default: "torchrun", Meta: "POLICY",
			Category: restartSection, Extra: true,
			Usage: "exit code when the job fails: torchrun, which is always 1, or reason, which tells what went wrong"}),
	}
}

func checkpointOptions() []Option {
	return []Option{
		{Name: "save-at-breakpoint", Kind: Flag, Category: ckptSection, Extra: true,
			Usage: "write the newest checkpoint in memory to storage when workers fail or end or the membership changes; this is so unless --no-save-at-breakpoint"},
		{Name: "no-save-at-breakpoint", Kind: Flag, Category: ckptSection, Extra: true,
			Usage: "leave it in memory, except when a signal ends the job"},
		{Name: "ckpt-replicas", Type: Int, Default: "0", Meta: "N", Category: ckptSection, Extra: true,
			Usage: "nodes that hold each checkpoint shard in memory, this one included; 0 leaves it to the training script's replica_count"},
		{Name: "ckpt-shm-dir", Default: "/dev/shm", Meta: "DIR", Category: ckptSection, Extra: true,
			Usage: "directory in memory for checkpoints"},
		{Name: "ckpt-write-rate", Meta: "SIZE", Category: ckptSection, Extra: true,
			Usage: "bytes a second, K, M or G, that checkpoints are written to storage with at most; no limit unless given"},
		{Name: "ckpt-sidecar", Meta: "NAME", Category: ckptSection, Extra: true,
			Usage: "checkpoints are kept by a checkpointd --job=NAME in another container of this pod"},
		choice(Option{Name: "ckpt-daemon", Choices: []string{"auto", "off"}, Default: "auto", Meta: "auto|off", Category: ckptSection, Extra: true,
			Usage: "auto starts the checkpoint daemon when a worker first needs it, off leaves checkpoints to the workers"}),
	}
}

func logOptions() []Option {
	return []Option{
		{Name: "log-dir", Meta: "DIR", Category: logSection,
			Usage: "directory for the workers' logs, each run in a directory of its own; a new temporary one unless given, /dev/null for no files"},
		{Name: "redirects", Short: 'r', Default: "0", Meta: "0-3|RANK:0-3,...", Category: logSection,
			Usage: "workers' output that goes to files: 0 none, 1 stdout, 2 stderr, 3 both, for all or by local rank"},
		{Name: "tee", Short: 't', Default: "0", Meta: "0-3|RANK:0-3,...", Category: logSection,
			Usage: "workers' output that goes to files and to the console, in the form of --redirects"},
		{Name: "log-line-prefix-template", Meta: "TEXT", Category: logSection,
			Usage: "text in front of each line of --tee with ${role_name}, ${local_rank}, ${rank}, ${hostname}; [${role_name}${local_rank}]: unless given"},
		{Name: "local-ranks-filter", Meta: "RANK,...", Category: logSection,
			Usage: "local ranks whose output reaches the console, all unless given; files are not affected"},
		{Name: "duplicate-stdout-filters", Meta: "TEXT,...", Category: logSection,
			Usage: "copy lines of --tee stdout that contain one of the texts to filtered_stdout.log; ,, is a comma within a text"},
		{Name: "duplicate-stderr-filters", Meta: "TEXT,...", Category: logSection,
			Usage: "copy lines of --tee stderr that contain one of the texts to filtered_stderr.log; ,, is a comma within a text"},
		{Name: "log-rotate-size", Meta: "SIZE", Category: logSection, Extra: true,
			Usage: "start a new log file beyond this size in bytes, K, M or G; never unless given"},
		{Name: "log-rotate-count", Type: Int, Default: "5", Meta: "N", Category: logSection, Extra: true,
			Usage: "full log files kept for each stream with --log-rotate-size, >= 1"},
		{Name: "logs-specs", Meta: "default", Category: logSection, Check: checkLogsSpecs,
			Usage: "how logs are kept: default is --log-dir, --redirects and --tee"},
		{Name: "event-log-handler", Default: "null", Meta: "null|console", Category: logSection, Check: checkEventLogHandler,
			Usage: "where torchrun's events go: null for nowhere, console for stderr"},
		{Name: "event-log", Meta: "PATH", Category: logSection, Extra: true,
			Usage: "file to which events are added, one JSON object per line"},
		{Name: "metrics-addr", Meta: "HOST:PORT", Category: logSection, Extra: true,
			Usage: "address on which Prometheus metrics are served; none unless given"},
	}
}

func checkOptions() []Option {
	return []Option{
		choice(Option{Name: "accelerator", Default: "nvidia.com/gpu", Meta: "NAME", Category: checkSection, Extra: true,
			Choices: []string{"nvidia.com/gpu", "ascend-npu", "mthreads.com/gpu", "metax-tech.com/gpu"},
			Usage:   "kind of device: nvidia.com/gpu, ascend-npu, mthreads.com/gpu or metax-tech.com/gpu"}),
		{Name: "precheck", Type: Int, Choices: []string{"0", "1", "2"}, Default: "0", Meta: "0|1|2", Category: checkSection,
			Extra: true, Check: checkPrecheck,
			Usage: "test before training: 0 none, 1 network, 2 network and its speed"},
		{Name: "network-check", Kind: Flag, Category: checkSection, Extra: true, Unavailable: notYet,
			Usage: "test devices and network of all nodes before the workers start"},
		{Name: "comm-perf-test", Kind: Flag, Category: checkSection, Extra: true, Unavailable: notYet,
			Usage: "measure the network's speed after --network-check"},
		{Name: "exclude-straggler", Kind: Flag, Category: checkSection, Extra: true, Unavailable: notYet,
			Usage: "leave the job when --network-check finds this node slow"},
		{Name: "switchbox-check", Kind: Flag, Category: checkSection, Extra: true, Unavailable: notYet,
			Usage: "test the links between the MetaX devices of this node"},
		{Name: "box-pairs", Kind: Pairs, Meta: "A:B", Category: checkSection, Extra: true, Unavailable: notYet,
			Default: "0:1,2:4,3:5,6:7", Usage: "pairs of devices that --switchbox-check tests, separated by spaces or commas"},
		{Name: "min-bandwidth", Type: Int, Default: "10000", Meta: "MB/S", Category: checkSection, Extra: true,
			Unavailable: notYet, Usage: "speed in MB/s above which a pair passes --switchbox-check"},
		{Name: "min-channels", Type: Int, Default: "2", Meta: "N", Category: checkSection, Extra: true, Unavailable: notYet,
			Usage: "pairs that must pass --switchbox-check"},
		{Name: "numa-affinity", Kind: Flag, Category: checkSection, Extra: true, Unavailable: notYet,
			Usage: "run each worker on the NUMA node of its GPU"},
		{Name: "membind-policy", Default: "preferred", Meta: "POLICY", Category: checkSection, Extra: true,
			Unavailable: notYet, Usage: "memory policy of --numa-affinity: bind, preferred or none"},
		{Name: "ucp-device-type", Default: "cpu", Meta: "NAME", Category: checkSection, Extra: true, Unavailable: notYet,
			Usage: "device that converts universal checkpoints"},
		{Name: "training-port", Type: Int, Default: "60000", Meta: "PORT", Category: checkSection, Extra: true,
			Unavailable: notYet, Usage: "first port of Ascend's collectives"},
		{Name: "auto-tunning", Kind: Flag, Category: checkSection, Extra: true, Unavailable: notYet,
			Usage: "let the master change the data loader's settings while training"},
	}
}

func otherOptions() []Option {
	return []Option{
		{Name: "dry-run", Kind: Flag, Category: otherSection, Extra: true,
			Usage: "print what would be run, and exit"},
		{Name: "print-completion", Choices: []string{"bash", "zsh", "tcsh"}, Meta: "SHELL", Category: otherSection,
			Usage: "print a completion script for bash, zsh or tcsh, and exit"},
		{Name: "help", Short: 'h', Kind: Flag, Category: otherSection, Usage: "print this text, and exit"},
		{Name: "version", Kind: Flag, Category: otherSection, Extra: true, Usage: "print the version, and exit"},
	}
}

// choice makes o's choices hold for its variable too. torchrun does not check those, but an option that is not
// torchrun's has no such past to keep.
func choice(o Option) Option {
	o.Check = func(value string) error { return checkChoice(&o, value) }
	return o
}

func checkPrecheck(value string) error {
	if value != "0" {
		return fmt.Errorf("%s asks for a network check, which is not available yet in this version; use 0 or remove it", value)
	}
	return nil
}

func checkLogsSpecs(value string) error {
	if value != "default" {
		return errors.New(pyRepr(value) +
			" would be a Python entry point, which this launcher cannot load; remove it and use --log-dir, --redirects and --tee")
	}
	return nil
}

func checkEventLogHandler(value string) error {
	if value != "null" && value != "console" {
		return errors.New(pyRepr(value) +
			" would be a Python handler, which this launcher cannot load; use null or console, or --event-log for a file")
	}
	return nil
}
