package argv

import (
	"errors"
	"slices"
	"strings"
)

// Sections of the help text.
const (
	sizeSection    = "Size of the job"
	rdzvSection    = "Rendezvous"
	workerSection  = "Workers"
	restartSection = "Failures and restarts"
	holdSection    = "Hold and leave"
	ckptSection    = "Checkpoints"
	logSection     = "Logs and events"
	checkSection   = "Devices and health checks"
	hangSection    = "Hangs"
	otherSection   = "Launcher"
)

// Options returns the table of all options in the order of the help text, as a fresh slice: torchrun's from 1.13 to
// 2.15, those of DLRover and its MetaX fork, and our own.
func Options() []Option {
	opts := slices.Concat(sizeOptions(), rendezvousOptions(), workerOptions(), dlroverOptions(), restartOptions(),
		budgetOptions(), holdOptions(), checkpointOptions(), logOptions(), checkOptions(), hangOptions(), otherOptions())
	for i := range opts {
		o := &opts[i]
		switch o.Name {
		case "logs-specs", "numa-binding", "print-completion", "box-pairs", "token-file", "tls", "tls-cert", "tls-key",
			"tls-ca", "no-save-at-breakpoint", "help", "version":
		default:
			o.Env = "PET_" + strings.ToUpper(strings.ReplaceAll(o.Name, "-", "_"))
		}
		for i, s := range o.Others {
			o.Usage += []string{"; also ", ", "}[min(i, 1)] + s.Word + " (" + s.Means + ")"
		}
		if o.Default != "" {
			o.Usage += " (default: " + o.Default + ")"
		}
	}
	return opts
}

func sizeOptions() []Option {
	return []Option{
		{Name: "nnodes", Default: "1:1", Meta: "N|MIN:MAX", Category: sizeSection,
			Usage: "number of nodes: a fixed number, or a range within which nodes may leave and join while the job runs"},
		{Name: "nproc-per-node", Default: "1", Meta: "N|auto|gpu|cpu", Category: sizeSection,
			Usage: "workers on this node: a number, gpu or cpu for one per device of that kind, " +
				"or auto for one per accelerator (without one, per CPU)"},
		{Name: "auto-config", Kind: Flag, Category: sizeSection, Extra: true,
			Usage: "take the number of nodes from $NODE_NUM and the number of workers from the GPUs of this node"},
		{Name: "node-unit", Type: Int, Default: "1", Meta: "N", Category: sizeSection, Extra: true,
			Usage: "train on a multiple of N nodes only, N >= 1; surplus nodes wait as spares"},
		{Name: "replica-groups", Type: Int, Default: "0", Meta: "G", Category: sizeSection, Extra: true,
			Usage: "divide the nodes into G groups (2 to 256), each with a world and a budget of its own: a failure restarts " +
				"one group, the others go on (0: no groups)"},
	}
}

func rendezvousOptions() []Option {
	return []Option{
		{Name: "rdzv-backend", Default: "static", Meta: "NAME", Category: rdzvSection,
			Usage: "how nodes find each other: static (fixed node ranks), c10d (one node serves the rendezvous; " +
				"ranks are assigned when the nodes meet), etcd or etcd-v2 (the nodes elect in etcd the one that serves) or " +
				"dlrover-master (a daemon serves it)"},
		{Name: "rdzv-endpoint", Meta: "HOST[:PORT]", Category: rdzvSection,
			Usage: "address of the rendezvous, or of etcd, IPv6 as [ADDRESS]:PORT; of several masters or members of etcd with " +
				"commas between (default with static: --master-addr and --master-port)"},
		{Name: "rdzv-id", Default: "none", Meta: "ID", Category: rdzvSection,
			Usage: "id of the job, the same on all its nodes"},
		{Name: "rdzv-conf", Meta: "KEY=VALUE,...", Category: rdzvSection,
			Usage: "rendezvous settings; times are seconds or have a unit: join_timeout (default: 600), last_call_timeout (2 " +
				"after the newest node, 30 in all; 30 while nodes are missing that a scheduler has promised), growth_delay (1), " +
				"node_timeout (4.6, or 15 where a host cannot be examined), read_timeout (60), is_host=true|false, " +
				"alone=true|false (a node on a silent host is taken for dead, so that a minority serves itself); with etcd " +
				"protocol=http|https, ca_cert, ssl_cert, ssl_cert_key, user, password_file, etcd_prefix"},
		{Name: "standalone", Kind: Flag, Category: rdzvSection,
			Usage: "run a one-node job with its own rendezvous on a free port; --rdzv-backend, " +
				"--rdzv-endpoint and --rdzv-id are ignored"},
		{Name: "node-rank", Type: Int, Default: "0", Meta: "N", Category: rdzvSection,
			Usage: "rank of this node, >= 0; required by static, a preference for other backends"},
		{Name: "master-addr", Default: "127.0.0.1", Meta: "HOST", Category: rdzvSection,
			Usage: "host name or address of the node with rank 0; static only"},
		{Name: "master-port", Type: Int, Meta: "PORT", Category: rdzvSection,
			Usage: "port on the node with rank 0, 0-65535; static only (default: 29500)"},
		{Name: "scheduler", Default: "auto", Meta: "auto|none|NAME", Category: rdzvSection, Extra: true,
			Choices: []string{"auto", "none", "ms-operator", "dlrover", "kubeflow", "jobset", "volcano", "mpi", "slurm",
				"skypilot", "sagemaker", "statefulset"},
			Usage: "scheduler that supplies node count, rank and address; explicit options win. auto: first one detected; " +
				"none: ignore"},
		{Name: "local-addr", Meta: "HOST", Category: rdzvSection,
			Usage: "address at which other nodes reach this one (default: the local address of the route to the rendezvous)"},
		{Name: "token-file", Meta: "PATH", Category: rdzvSection, Extra: true,
			Usage: "file with the job token, a secret that all nodes of the job share (default: $DLROVER_TOKEN_FILE, " +
				"else the token in $DLROVER_TOKEN)"},
		{Name: "tls", Meta: "auto|off", Category: rdzvSection, Extra: true, Choices: []string{"auto", "off"},
			Usage: "auto: connections of the rendezvous and of checkpoint copies are encrypted, with a key that is derived " +
				"from the job token; off: they are not (default: $DLROVER_TLS, else by --tls-ca where it is given)"},
		{Name: "tls-cert", Meta: "PATH", Category: rdzvSection, Extra: true,
			Usage: "certificate of this node, in PEM, to serve with and to show to servers (default: $DLROVER_TLS_CERT)"},
		{Name: "tls-key", Meta: "PATH", Category: rdzvSection, Extra: true,
			Usage: "private key of --tls-cert (default: $DLROVER_TLS_KEY)"},
		{Name: "tls-ca", Meta: "PATH", Category: rdzvSection, Extra: true,
			Usage: "certificates of the authorities, in PEM, that sign those of servers, and of nodes that join this one " +
				"(default: $DLROVER_TLS_CA)"},
		{Name: "allow-exec", Kind: Flag, Category: rdzvSection, Extra: true,
			Usage: "let owners of the job token run commands next to this node's workers, by dlroverctl exec; needs a token, " +
				"and excludes --insecure"},
		{Name: "insecure", Kind: Flag, Category: rdzvSection, Extra: true,
			Usage: "serve and join a rendezvous without a job token, even on a network address and for every user"},
		{Name: "topology-file", Meta: "PATH", Category: rdzvSection, Extra: true,
			Usage: "file with lines of three words, asw psw ip: nodes under the same switch get adjacent ranks. The node " +
				"that serves the rendezvous reads it, and reads it again after a change"},
	}
}

func workerOptions() []Option {
	return []Option{
		{Name: "module", Short: 'm', Kind: Flag, Category: workerSection,
			Usage: "run the script as a Python module, as python -m does"},
		{Name: "no-python", Kind: Flag, Category: workerSection,
			Usage: "execute the script itself instead of passing it to Python; cannot be combined with --module"},
		{Name: "run-path", Kind: Flag, Category: workerSection,
			Usage: "run the script with runpy.run_path; takes precedence over --no-python"},
		{Name: "workdir", Meta: "DIR", Category: workerSection, Extra: true,
			Usage: "working directory of the workers; a relative path of the script starts there, too (default: the " +
				"launcher's)"},
		{Name: "role", Default: "default", Meta: "NAME", Category: workerSection,
			Usage: "role of the workers, also part of the prefix of their console lines"},
		{Name: "start-method", Choices: []string{"spawn", "fork", "forkserver"}, Default: "spawn", Meta: "METHOD",
			Category: workerSection,
			Usage: "accepted for compatibility, ignored; as in torchrun it concerns Python functions only: " +
				"spawn, fork or forkserver"},
		{Name: "virtual-local-rank", Kind: Flag, Category: workerSection,
			Usage: "give every worker LOCAL_RANK=0 and make only its own GPU visible to it"},
		{Name: "numa-binding", Choices: []string{"node", "socket", "exclusive", "core-complex"}, Meta: "MODE",
			Category: workerSection,
			Usage:    "bind each worker to CPUs near its GPU: node, socket, exclusive or core-complex (default: no binding)"},
		{Name: "preset", Default: "torch", Meta: "NAME", Category: workerSection, Extra: true,
			Usage: "framework of the workers: torch, deepspeed, mindspore, jax, tensorflow, paddle, mpi, torchft, or auto, " +
				"which chooses by the script's imports"},
		{Name: "no-local-rank", Kind: Flag, Category: workerSection, Extra: true,
			Usage: "with --preset=deepspeed: do not give the script the argument --local_rank=N"},
		{Name: "live-hostfile", Kind: Optional, Bare: "auto", Meta: "PATH", Category: workerSection, Extra: true,
			Usage: "keep a hostfile of the running nodes (HOST slots=N, in rank order) and rewrite it whenever they change; " +
				"DLROVER_HOSTFILE gives workers its path; auto is a private file (default: none)"},
		{Name: "ports", Type: Int, Default: "0", Meta: "N", Category: workerSection, Extra: true,
			Usage: "hold N free TCP ports, 0 to 256, on this node for its workers; workers learn the ports of all nodes"},
		{Name: "ms-port", Type: Int, Default: "0", Meta: "PORT", Category: workerSection, Extra: true,
			Usage: "with --preset=mindspore: port of the scheduler on the first node, the same on all nodes; without it " +
				"$MS_SCHED_PORT counts; 0: a free one"},
		{Name: "ms-servers", Type: Int, Default: "0", Meta: "N", Category: workerSection, Extra: true,
			Usage: "with --preset=mindspore: number of parameter servers on the first node, 0 to 256; without it " +
				"$MS_SERVER_NUM counts"},
	}
}

func restartOptions() []Option {
	return []Option{
		{Name: "max-restarts", Type: Int, Default: "0", Meta: "N", Category: restartSection,
			Usage: "worker failures that the whole job may recover from, >= 0; lost and new nodes are not counted"},
		{Name: "monitor-interval", Type: Duration, Default: "0.1", Meta: "SECONDS", Category: restartSection,
			Usage: "accepted for compatibility, ignored (must be > 0): the kernel reports the end of a worker at once"},
		{Name: "shutdown-timeout", Type: Duration, Meta: "SECONDS", Category: restartSection,
			Usage: "time between the stop signal and SIGKILL, >= 0 (default: $TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30)"},
		{Name: "restart-grace", Type: Duration, Default: "2", Meta: "SECONDS", Category: restartSection, Extra: true,
			Usage: "like --shutdown-timeout, but before a restart, and never longer; used only if set, or once the workers' " +
				"checkpoints are safe"},
		{Name: "signals-to-handle", Default: "SIGTERM,SIGINT,SIGHUP,SIGQUIT", Meta: "NAME,...", Category: restartSection,
			Usage: "signals that stop the job; they are forwarded to the workers"},
		choice(Option{Name: "restart-policy", Choices: []string{"OnFailure", "Never", "Always", "ExitCode"},
			Default: "OnFailure", Meta: "POLICY", Category: restartSection, Extra: true,
			Usage: "when workers are restarted: OnFailure, Never, Always, or ExitCode for --retryable-exit-codes only"}),
		{Name: "retryable-exit-codes", Default: "130,137,143", Meta: "CODE,...", Category: restartSection, Extra: true,
			Usage: "exit codes from 1 to 255, and ranges such as 1-5, that are retried with --restart-policy=ExitCode"},
		{Name: "policy", Meta: "FILE|NAME", Category: restartSection, Extra: true,
			Usage: "rules that decide what follows a failure: a file, or one of t9k, ms-operator, kubeflow, nvrx, paddle, " +
				"dlrover (default: --restart-policy decides)"},
		{Name: "rule", Meta: "RULE", Repeat: true, Category: restartSection, Extra: true,
			Usage: "rule that comes before those of --policy: CONDITION [and CONDITION]... -> ACTION [max N per DURATION] " +
				"[because TEXT]; may be repeated. Conditions: exit 3, signal SIGKILL, exception NAME, pattern /REGEX/, event " +
				"oom|hang, any. Actions: retry, retry-free, retry-elsewhere, shrink, hold, stop-job"},
		choice(Option{Name: "exit-code-policy", Choices: []string{"torchrun", "reason", "dlrover"}, Default: "torchrun",
			Meta: "POLICY", Category: restartSection, Extra: true,
			Usage: "exit status when the job fails: torchrun (always 1), reason (one status for each cause) or dlrover " +
				"(statuses that DLRover's master takes for a hardware error, an OOM kill or a stop)"}),
	}
}

// budgetOptions bound the restarts, and say when a job has succeeded.
func budgetOptions() []Option {
	return []Option{
		{Name: "backoff-limit", Type: Int, Default: "100", Meta: "N", Category: restartSection, Extra: true,
			Usage: "restarts in a row without progress that the whole job may spend, including those that --max-restarts " +
				"does not count; -1: no limit; with --policy=t9k all restarts count"},
		{Name: "restart-backoff", Default: "10ms:30s", Meta: "MIN:MAX", Category: restartSection, Extra: true,
			Usage: "wait before a restart that follows one without progress: MIN at first, twice as long each time, MAX at " +
				"most; 0: none"},
		{Name: "restart-window", Meta: "SCOPE=N/DURATION", Repeat: true, Category: restartSection, Extra: true,
			Usage: "allow N restarts per DURATION for failures of one rank, of one node or of the job, such as job=3/1h; up " +
				"to 4 windows, separated by commas or repeated"},
		{Name: "same-failures", Type: Int, Default: "5", Meta: "N", Category: restartSection, Extra: true,
			Usage: "end the job when workers fail alike N times in a row before their first step; -1: never"},
		{Name: "no-progress", Type: Int, Default: "0", Meta: "N", Category: restartSection, Extra: true,
			Usage: "end the job after N restarts in a row without a newer checkpoint or more steps; 0: never"},
		{Name: "deadline", Type: Duration, Meta: "DURATION", Category: restartSection, Extra: true,
			Usage: "end the job this long after its first start, restarts included, such as 36h (default: never)"},
		{Name: "start-deadline", Type: Duration, Meta: "DURATION", Category: restartSection, Extra: true,
			Usage: "end the job if no worker makes a step within this time after a start; implies --hang=auto (default: " +
				"never)"},
		choice(Option{Name: "success-rule", Choices: []string{"all", "rank0", "node0", "any"}, Default: "all",
			Meta: "RULE", Category: restartSection, Extra: true, Others: []synonym{{"AllWorkers", "all"}},
			Usage: "workers that must succeed for the job to succeed: all, rank 0, all of node 0, or any one. rank0 and " +
				"node0 decide alone: failures of other workers end nothing when no restart is left for them"}),
		choice(Option{Name: "clean-up", Choices: []string{"none", "unfinished", "all"}, Default: "unfinished",
			Meta: "WHAT", Category: restartSection, Extra: true,
			Others: []synonym{{"None", "none"}, {"Unfinished", "unfinished"}, {"Running", "unfinished"}, {"All", "all"}},
			Usage: "treatment of workers that still run when the job has succeeded: none lets them run to their end, and " +
				"ignores it; unfinished and all stop them"}),
		{Name: "on-failure", Default: "exit", Meta: "exit|hold[=DURATION]", Category: restartSection, Extra: true,
			Usage: "when the job would fail because of its workers: exit, or hold it, paused without workers, for DURATION " +
				"or until an order"},
		choice(Option{Name: "on-rank-exit", Choices: []string{"restart-all", "tolerate"}, Default: "restart-all",
			Meta: "ACTION", Category: restartSection, Extra: true,
			Usage: "when a worker fails: restart-all restarts all workers; tolerate lets the others go on while any is left"}),
		{Name: "warm", Kind: Optional, Default: "off", Bare: "auto", Meta: "auto|off|MODULE,...", Category: restartSection,
			Extra: true,
			Usage: "import once on each node, and fork workers from that, at the first start and at restarts: auto, or no " +
				"value, imports what the script imports at its top level, and what the workers have imported at their first " +
				"step; MODULEs imports these"},
		choice(Option{Name: "warm-mode", Choices: []string{"fork", "standby"}, Default: "fork", Meta: "fork|standby",
			Category: restartSection, Extra: true,
			Usage: "with --warm: fork imports once and forks; standby keeps an interpreter for each worker, for modules that " +
				"must not be forked, such as those that touch a device"}),
		{Name: "warm-deny", Meta: "MODULE,...", Category: restartSection, Extra: true,
			Usage: "with --warm: modules that only the workers import"},
		{Name: "before", Meta: "COMMAND", Category: restartSection, Extra: true,
			Usage: "shell command that this node runs before every start of its workers; its environment says why they start, " +
				"and its failure counts as that of a worker"},
		{Name: "after", Meta: "COMMAND", Category: restartSection, Extra: true,
			Usage: "shell command that this node runs each time its workers have ended; its environment says how"},
		{Name: "hook-timeout", Type: Duration, Default: "300", Meta: "DURATION", Category: restartSection, Extra: true,
			Usage: "time limit of each run of --before and --after; then the command is killed, and has failed"},
	}
}

func holdOptions() []Option {
	return []Option{
		{Name: "hold", Kind: Optional, Meta: "COMMAND", Category: holdSection, Extra: true,
			Usage: "meet, but start no workers before dlroverctl start; every node runs COMMAND meanwhile, such as 'sleep inf'"},
		{Name: "resume-command", Meta: "COMMAND", Category: holdSection, Extra: true,
			Usage: "command that workers execute after a hold or a pause: a program or a .py file, with arguments if wanted"},
		{Name: "resume-args", Meta: "WORDS", Category: holdSection, Extra: true,
			Usage: "arguments after a hold or a pause: of --resume-command, or else of the script"},
		{Name: "leave-on", Meta: "FILE|URL", Category: holdSection, Extra: true,
			Usage: "leave the job when the file appears, or when the URL answers with status 200 (404: not yet)"},
		{Name: "leave-grace", Type: Duration, Meta: "DURATION", Category: holdSection, Extra: true,
			Usage: "time from the notice that this node has to leave, such as SIGTERM, to its end: the grace period of its " +
				"pod. A tenth, 2s at most, stays in reserve (default: 30s, or none with --shutdown-timeout)"},
	}
}

func checkpointOptions() []Option {
	return []Option{
		{Name: "save-at-breakpoint", Kind: Flag, Category: ckptSection, Extra: true,
			Usage: "write the newest checkpoint in memory to storage when workers fail or end or the membership " +
				"changes (default: on)"},
		{Name: "no-save-at-breakpoint", Kind: Flag, Category: ckptSection, Extra: true,
			Usage: "leave the newest checkpoint in memory, except when a signal ends the job"},
		{Name: "ckpt-replicas", Type: Int, Default: "0", Meta: "N", Category: ckptSection, Extra: true,
			Usage: "nodes that hold each checkpoint shard in memory, including this one; 0 leaves it to replica_count " +
				"in the training script"},
		{Name: "ckpt-shm-dir", Default: "/dev/shm", Meta: "DIR", Category: ckptSection, Extra: true,
			Usage: "directory in memory for checkpoints"},
		{Name: "ckpt-write-rate", Meta: "SIZE", Category: ckptSection, Extra: true,
			Usage: "limit for writing checkpoints to storage in bytes per second; K, M or G may follow (default: no limit)"},
		{Name: "ckpt-sidecar", Meta: "NAME", Category: ckptSection, Extra: true,
			Usage: "use the checkpoint daemon of another container of this pod: checkpointd --job=NAME"},
		choice(Option{Name: "ckpt-daemon", Choices: []string{"auto", "off"}, Default: "auto", Meta: "auto|off",
			Category: ckptSection, Extra: true,
			Usage: "auto starts the checkpoint daemon when a worker first needs it; off leaves checkpoints to the workers"}),
	}
}

func logOptions() []Option {
	return []Option{
		{Name: "log-dir", Meta: "DIR", Category: logSection,
			Usage: "directory for the workers' logs, one subdirectory per run; /dev/null for no files (default: " +
				"a new temporary directory)"},
		{Name: "redirects", Short: 'r', Default: "0", Meta: "0-3|RANK:0-3,...", Category: logSection,
			Usage: "worker output that goes to files: 0 none, 1 stdout, 2 stderr, 3 both, for all workers or by local rank"},
		{Name: "tee", Short: 't', Default: "0", Meta: "0-3|RANK:0-3,...", Category: logSection,
			Usage: "worker output that goes to files and to the console, in the format of --redirects"},
		{Name: "log-line-prefix-template", Meta: "TEXT", Category: logSection,
			Usage: "prefix of each line printed by --tee, with ${role_name}, ${local_rank}, ${rank}, ${hostname} (default: " +
				"[${role_name}${local_rank}]:)"},
		{Name: "local-ranks-filter", Meta: "RANK,...", Category: logSection,
			Usage: "local ranks whose output is shown on the console; files are not affected (default: all)"},
		{Name: "duplicate-stdout-filters", Meta: "TEXT,...", Category: logSection,
			Usage: "copy lines of --tee stdout that contain one of the texts to filtered_stdout.log; write ,, " +
				"for a comma within a text"},
		{Name: "duplicate-stderr-filters", Meta: "TEXT,...", Category: logSection,
			Usage: "copy lines of --tee stderr that contain one of the texts to filtered_stderr.log; write ,, " +
				"for a comma within a text"},
		{Name: "log-rotate-size", Meta: "SIZE", Category: logSection, Extra: true,
			Usage: "start a new log file beyond this size in bytes; K, M or G may follow (default: never)"},
		{Name: "log-rotate-count", Type: Int, Default: "5", Meta: "N", Category: logSection, Extra: true,
			Usage: "full log files kept for each stream with --log-rotate-size, >= 1"},
		choice(Option{Name: "log-format", Choices: []string{"auto", "text", "json"}, Default: "auto", Meta: "auto|text|json",
			Category: logSection, Extra: true,
			Usage: "format of the launcher's own log lines: text, json, or auto for text on a terminal and json otherwise"}),
		{Name: "logs-specs", Meta: "default", Category: logSection, Check: checkLogsSpecs,
			Usage: "accepted for compatibility; only default, which stands for --log-dir, --redirects and --tee"},
		{Name: "event-log-handler", Default: "null", Meta: "null|console", Category: logSection, Check: checkEventLogHandler,
			Usage: "where torchrun's events go: null (nowhere) or console (stderr)"},
		{Name: "event-log", Meta: "PATH", Category: logSection, Extra: true,
			Usage: "file to which events are appended, one JSON object per line (default: none)"},
		{Name: "log-rule", Meta: "RULE", Repeat: true, Category: logSection, Extra: true,
			Usage: "NAME:REGEX[:OPTION]...: watch the workers' lines that match; may be repeated. every=300s and first=900s " +
				"find missing lines; below=N, above=N and nan find bad numbers; further options: times=N, ranks=0-3,8, " +
				"action=report|restart|stop"},
		{Name: "log-rules", Meta: "PATH", Category: logSection, Extra: true,
			Usage: "file with a --log-rule on each line; # begins a comment"},
		{Name: "metrics-addr", Meta: "HOST:PORT", Category: logSection, Extra: true,
			Usage: "address that serves Prometheus metrics, with the job token unless it is on loopback, and /healthz " +
				"(default: none)"},
		{Name: "total-steps", Type: Int, Meta: "N", Category: logSection, Extra: true,
			Usage: "training steps of the whole job: in a pod of a TrainJob whose status wants progress, report percentage, " +
				"remaining time, pace and restarts (default: nothing is reported)"},
		{Name: "open-metrics", Kind: Flag, Category: logSection, Extra: true,
			Usage: "serve the metrics of --metrics-addr to everyone, without the job token"},
		{Name: "ui", Kind: Optional, Bare: "127.0.0.1:0", Meta: "[HOST]:PORT", Category: logSection, Extra: true,
			Usage: "the launcher that serves the rendezvous has a dlrover-master beside it serve the page of the job, and " +
				"logs the link; at a free port of localhost unless another address is given"},
		{Name: "tensorboard", Meta: "LOGDIR[:[HOST:]PORT]", Category: logSection, Extra: true,
			Usage: "run TensorBoard on the first node while the job runs, at localhost:6006 unless another address is given"},
	}
}

func checkOptions() []Option {
	return []Option{
		choice(Option{Name: "accelerator", Default: "nvidia.com/gpu", Meta: "NAME", Category: checkSection, Extra: true,
			Choices: []string{"nvidia.com/gpu", "ascend-npu", "mthreads.com/gpu", "metax-tech.com/gpu", "cpu"},
			Usage:   "kind of accelerator: nvidia.com/gpu, ascend-npu, mthreads.com/gpu, metax-tech.com/gpu or cpu"}),
		{Name: "network-check", Kind: Flag, Category: checkSection, Extra: true,
			Usage: "before training, all nodes check their devices and test the network in pairs; a faulty node is left out"},
		choice(Option{Name: "precheck", Type: Int, Choices: []string{"0", "1", "2"}, Default: "0", Meta: "0|1|2",
			Category: checkSection, Extra: true,
			Usage: "0 none; 1 as --network-check; 2 as --network-check --comm-perf-test"}),
		{Name: "comm-perf-test", Kind: Flag, Category: checkSection, Extra: true,
			Usage: "with --network-check: run one collective over all nodes at its end, and report the speed"},
		choice(Option{Name: "check-level", Default: "full", Meta: "LEVEL", Category: checkSection, Extra: true,
			Choices: []string{"host", "full"},
			Usage: "extent of --network-check: host tests devices and network, full also computes and communicates with " +
				"PyTorch"}),
		choice(Option{Name: "check-action", Default: "exclude", Meta: "ACTION", Category: checkSection, Extra: true,
			Choices: []string{"exclude", "report"},
			Usage:   "consequence for a node that fails a check: exclude leaves it out of the job, report only reports it"}),
		{Name: "exclude-straggler", Kind: Flag, Category: checkSection, Extra: true,
			Usage: "with --network-check: leave out slow nodes like faulty ones"},
		{Name: "check-ttl", Default: "10m", Meta: "DURATION", Category: checkSection, Extra: true,
			Usage: "how long a passed check is valid, not counting the time in which workers run: such as 30s or 10m, or run " +
				"for as long as the node stays in the run"},
		{Name: "check-timeout", Type: Duration, Default: "60", Meta: "DURATION", Category: checkSection, Extra: true,
			Usage: "time limit of a check; the import of PyTorch may take 120s more"},
		{Name: "health-check", Meta: "COMMAND|unix:PATH", Category: checkSection, Extra: true,
			Usage: "your own check of a node: a command, judged by its exit status or JSON, or a socket that answers a GET " +
				"with JSON (default: none)"},
		{Name: "check-only", Kind: Flag, Category: checkSection, Extra: true, Alone: true,
			Usage: "check, print the findings, and exit without starting workers; needs no script"},
		{Name: "switchbox-check", Kind: Flag, Category: checkSection, Extra: true,
			Usage: "before training, every node tests the links between pairs of its devices"},
		{Name: "box-pairs", Kind: Pairs, Meta: "A:B", Category: checkSection, Extra: true,
			Default: "0:1,2:4,3:5,6:7", Usage: "pairs of devices that --switchbox-check tests, separated by spaces or " +
				"commas, or ring: each device with the next one. Default pairs drop out if this node lacks one of their " +
				"devices; NVIDIA devices left over are paired in order"},
		{Name: "min-bandwidth", Type: Int, Default: "10000", Meta: "MB/S", Category: checkSection, Extra: true,
			Usage: "bandwidth in 10^6 bytes a second that a pair needs to pass --switchbox-check"},
		{Name: "min-channels", Type: Int, Default: "2", Meta: "N", Category: checkSection, Extra: true,
			Usage: "number of pairs that must pass --switchbox-check"},
	}
}

// dlroverOptions returns DLRover's options on top of torchrun's that belong nowhere else.
func dlroverOptions() []Option {
	return []Option{
		{Name: "numa-affinity", Kind: Flag, Category: workerSection, Extra: true,
			Usage: "bind each worker to the CPUs and the memory of its GPU's NUMA node; if that is unknown, a warning says " +
				"so and nothing is bound"},
		{Name: "membind-policy", Default: "preferred", Meta: "POLICY", Category: workerSection, Extra: true,
			Usage: "memory with --numa-affinity: bind allows only the node's own, preferred also other memory once that is " +
				"full, none does not bind it"},
		{Name: "training-port", Type: Int, Default: "60000", Meta: "PORT", Category: workerSection, Extra: true,
			Usage: "on Ascend: set HCCL_IF_BASE_PORT, the first of 16 ports, to this port or the next one free on all nodes; " +
				"$HCCL_IF_BASE_PORT wins; 0 leaves the variable alone"},
		{Name: "ucp-device-type", Default: "cpu", Meta: "NAME", Category: workerSection, Extra: true,
			Usage: "accepted for compatibility, ignored as in DLRover itself"},
		{Name: "auto-tunning", Kind: Flag, Category: workerSection, Extra: true,
			Usage: "accepted for compatibility; the tuner of the data loader belongs to DLRover's Python master"},
	}
}

func hangOptions() []Option {
	return []Option{
		choice(Option{Name: "hang", Choices: []string{"auto", "outside", "off"}, Default: "outside", Meta: "auto|outside|off",
			Category: hangSection, Extra: true,
			Usage: "detection of hangs: outside only looks at the workers; auto also puts a small shim into their " +
				"interpreters; off finds none. --hang-action and XPU_TIMER_ variables imply auto"}),
		choice(Option{Name: "hang-action", Choices: []string{"report", "restart", "stop"}, Default: "report",
			Meta: "report|restart|stop", Category: hangSection, Extra: true,
			Usage: "reaction to a hang: report only reports it, restart restarts the workers, stop ends the job"}),
		choice(Option{Name: "slow-action", Choices: []string{"report", "check", "drain"}, Default: "report",
			Meta: "report|check|drain", Category: hangSection, Extra: true,
			Usage: "reaction to ranks that slow the job: report names them, check compares their node with another one, " +
				"drain has it leave where a spare, or fewer nodes, can go on. It implies --hang=auto"}),
		choice(Option{Name: "slow-check-link", Choices: []string{"no", "yes"}, Default: "no", Meta: "no|yes",
			Category: hangSection, Extra: true,
			Usage: "with --slow-action=check: yes loads the job's links between the two nodes for a second or two"}),
	}
}

func otherOptions() []Option {
	return []Option{
		{Name: "dry-run", Kind: Flag, Category: otherSection, Extra: true,
			Usage: "print the plan of the run as JSON, and exit"},
		{Name: "print-completion", Choices: []string{"bash", "zsh", "tcsh"}, Meta: "SHELL", Category: otherSection,
			Usage: "print a completion script for bash, zsh or tcsh, and exit"},
		{Name: "help", Short: 'h', Kind: Flag, Category: otherSection, Usage: "show this text, and exit"},
		{Name: "version", Kind: Flag, Category: otherSection, Extra: true, Usage: "print the version, and exit"},
	}
}

// choice makes o's choices hold for its variable too. torchrun does not check those, but an option that is not
// torchrun's has no such past to keep.
func choice(o Option) Option {
	o.Check = func(value string) error { return checkChoice(&o, value) }
	return o
}

func checkLogsSpecs(value string) error {
	if value != "default" {
		return errors.New(pyRepr(value) +
			" would be a Python entry point, which this launcher cannot load; " +
			"remove it and use --log-dir, --redirects and --tee")
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
