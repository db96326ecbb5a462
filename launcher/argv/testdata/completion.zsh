#compdef dlrover-run
_arguments -s -S -A '-*' \
  '*--nnodes=[number of nodes\: a fixed number, or a range within which nodes may leave and join while the job runs (default\: 1\:1)]:N|MIN\:MAX: ' \
  '*--nproc-per-node=[workers on this node\: a number, gpu or cpu for one per device of that kind, or auto for one per accelerator (without one, per CPU) (default\: 1)]:N|auto|gpu|cpu: ' \
  '*--auto-config[take the number of nodes from $NODE_NUM and the number of workers from the GPUs of this node]' \
  '*--node-unit=[train on a multiple of N nodes only, N >= 1; surplus nodes wait as spares (default\: 1)]:N: ' \
  '*--replica-groups=[divide the nodes into G groups (2 to 256), each with a world and a budget of its own\: a failure restarts one group, the others go on (0\: no groups) (default\: 0)]:G: ' \
  '*--rdzv-backend=[how nodes find each other\: static (fixed node ranks), c10d (one node serves the rendezvous; ranks are assigned when the nodes meet), etcd or etcd-v2 (the nodes elect in etcd the one that serves) or dlrover-master (a daemon serves it) (default\: static)]:NAME: ' \
  '*--rdzv-endpoint=[address of the rendezvous, or of etcd, IPv6 as \[ADDRESS\]\:PORT; of several masters or members of etcd with commas between (default with static\: --master-addr and --master-port)]:HOST\[\:PORT\]: ' \
  '*--rdzv-id=[id of the job, the same on all its nodes (default\: none)]:ID: ' \
  '*--rdzv-conf=[rendezvous settings; times are seconds or have a unit\: join_timeout (default\: 600), last_call_timeout (2 after the newest node, 30 in all; 30 while nodes are missing that a scheduler has promised), growth_delay (1), node_timeout (4.6, or 15 where a host cannot be examined), read_timeout (60), is_host=true|false, alone=true|false (a node on a silent host is taken for dead, so that a minority serves itself); with etcd protocol=http|https, ca_cert, ssl_cert, ssl_cert_key, user, password_file, etcd_prefix]:KEY=VALUE,...: ' \
  '*--standalone[run a one-node job with its own rendezvous on a free port; --rdzv-backend, --rdzv-endpoint and --rdzv-id are ignored]' \
  '*--node-rank=[rank of this node, >= 0; required by static, a preference for other backends (default\: 0)]:N: ' \
  '*--master-addr=[host name or address of the node with rank 0; static only (default\: 127.0.0.1)]:HOST: ' \
  '*--master-port=[port on the node with rank 0, 0-65535; static only (default\: 29500)]:PORT: ' \
  '*--scheduler=[scheduler that supplies node count, rank and address; explicit options win. auto\: first one detected; none\: ignore (default\: auto)]:auto|none|NAME:(auto none ms-operator dlrover kubeflow jobset volcano mpi slurm skypilot sagemaker statefulset)' \
  '*--local-addr=[address at which other nodes reach this one (default\: the local address of the route to the rendezvous)]:HOST: ' \
  '*--token-file=[file with the job token, a secret that all nodes of the job share (default\: $DLROVER_TOKEN_FILE, else the token in $DLROVER_TOKEN)]:PATH:_files' \
  '*--tls=[auto\: connections of the rendezvous and of checkpoint copies are encrypted, with a key that is derived from the job token; off\: they are not (default\: $DLROVER_TLS, else by --tls-ca where it is given)]:auto|off:(auto off)' \
  '*--tls-cert=[certificate of this node, in PEM, to serve with and to show to servers (default\: $DLROVER_TLS_CERT)]:PATH:_files' \
  '*--tls-key=[private key of --tls-cert (default\: $DLROVER_TLS_KEY)]:PATH:_files' \
  '*--tls-ca=[certificates of the authorities, in PEM, that sign those of servers, and of nodes that join this one (default\: $DLROVER_TLS_CA)]:PATH:_files' \
  '*--allow-exec[let owners of the job token run commands next to this node'\''s workers, by dlroverctl exec; needs a token, and excludes --insecure]' \
  '*--insecure[serve and join a rendezvous without a job token, even on a network address and for every user]' \
  '*--topology-file=[file with lines of three words, asw psw ip\: nodes under the same switch get adjacent ranks. The node that serves the rendezvous reads it, and reads it again after a change]:PATH:_files' \
  '*--module[run the script as a Python module, as python -m does]' \
  '*-m[run the script as a Python module, as python -m does]' \
  '*--no-python[execute the script itself instead of passing it to Python; cannot be combined with --module]' \
  '*--run-path[run the script with runpy.run_path; takes precedence over --no-python]' \
  '*--workdir=[working directory of the workers; a relative path of the script starts there, too (default\: the launcher'\''s)]:DIR:_files' \
  '*--role=[role of the workers, also part of the prefix of their console lines (default\: default)]:NAME: ' \
  '*--start-method=[accepted for compatibility, ignored; as in torchrun it concerns Python functions only\: spawn, fork or forkserver (default\: spawn)]:METHOD:(spawn fork forkserver)' \
  '*--virtual-local-rank[give every worker LOCAL_RANK=0 and make only its own GPU visible to it]' \
  '*--numa-binding=[bind each worker to CPUs near its GPU\: node, socket, exclusive or core-complex (default\: no binding)]:MODE:(node socket exclusive core-complex)' \
  '*--preset=[framework of the workers\: torch, deepspeed, mindspore, jax, tensorflow, paddle, mpi, torchft, or auto, which chooses by the script'\''s imports (default\: torch)]:NAME: ' \
  '*--no-local-rank[with --preset=deepspeed\: do not give the script the argument --local_rank=N]' \
  '*--live-hostfile=-[keep a hostfile of the running nodes (HOST slots=N, in rank order) and rewrite it whenever they change; DLROVER_HOSTFILE gives workers its path; auto is a private file (default\: none)]' \
  '*--ports=[hold N free TCP ports, 0 to 256, on this node for its workers; workers learn the ports of all nodes (default\: 0)]:N: ' \
  '*--ms-port=[with --preset=mindspore\: port of the scheduler on the first node, the same on all nodes; without it $MS_SCHED_PORT counts; 0\: a free one (default\: 0)]:PORT: ' \
  '*--ms-servers=[with --preset=mindspore\: number of parameter servers on the first node, 0 to 256; without it $MS_SERVER_NUM counts (default\: 0)]:N: ' \
  '*--numa-affinity[bind each worker to the CPUs and the memory of its GPU'\''s NUMA node; if that is unknown, a warning says so and nothing is bound]' \
  '*--membind-policy=[memory with --numa-affinity\: bind allows only the node'\''s own, preferred also other memory once that is full, none does not bind it (default\: preferred)]:POLICY: ' \
  '*--training-port=[on Ascend\: set HCCL_IF_BASE_PORT, the first of 16 ports, to this port or the next one free on all nodes; $HCCL_IF_BASE_PORT wins; 0 leaves the variable alone (default\: 60000)]:PORT: ' \
  '*--ucp-device-type=[accepted for compatibility, ignored as in DLRover itself (default\: cpu)]:NAME: ' \
  '*--auto-tunning[accepted for compatibility; the tuner of the data loader belongs to DLRover'\''s Python master]' \
  '*--max-restarts=[worker failures that the whole job may recover from, >= 0; lost and new nodes are not counted (default\: 0)]:N: ' \
  '*--monitor-interval=[accepted for compatibility, ignored (must be > 0)\: the kernel reports the end of a worker at once (default\: 0.1)]:SECONDS: ' \
  '*--shutdown-timeout=[time between the stop signal and SIGKILL, >= 0 (default\: $TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30)]:SECONDS: ' \
  '*--restart-grace=[like --shutdown-timeout, but before a restart, and never longer; used only if set, or once the workers'\'' checkpoints are safe (default\: 2)]:SECONDS: ' \
  '*--signals-to-handle=[signals that stop the job; they are forwarded to the workers (default\: SIGTERM,SIGINT,SIGHUP,SIGQUIT)]:NAME,...: ' \
  '*--restart-policy=[when workers are restarted\: OnFailure, Never, Always, or ExitCode for --retryable-exit-codes only (default\: OnFailure)]:POLICY:(OnFailure Never Always ExitCode)' \
  '*--retryable-exit-codes=[exit codes from 1 to 255, and ranges such as 1-5, that are retried with --restart-policy=ExitCode (default\: 130,137,143)]:CODE,...: ' \
  '*--policy=[rules that decide what follows a failure\: a file, or one of t9k, ms-operator, kubeflow, nvrx, paddle, dlrover (default\: --restart-policy decides)]:FILE|NAME: ' \
  '*--rule=[rule that comes before those of --policy\: CONDITION \[and CONDITION\]... -> ACTION \[max N per DURATION\] \[because TEXT\]; may be repeated. Conditions\: exit 3, signal SIGKILL, exception NAME, pattern /REGEX/, event oom|hang, any. Actions\: retry, retry-free, retry-elsewhere, shrink, hold, stop-job]:RULE: ' \
  '*--exit-code-policy=[exit status when the job fails\: torchrun (always 1), reason (one status for each cause) or dlrover (statuses that DLRover'\''s master takes for a hardware error, an OOM kill or a stop) (default\: torchrun)]:POLICY:(torchrun reason dlrover)' \
  '*--backoff-limit=[restarts in a row without progress that the whole job may spend, including those that --max-restarts does not count; -1\: no limit; with --policy=t9k all restarts count (default\: 100)]:N: ' \
  '*--restart-backoff=[wait before a restart that follows one without progress\: MIN at first, twice as long each time, MAX at most; 0\: none (default\: 10ms\:30s)]:MIN\:MAX: ' \
  '*--restart-window=[allow N restarts per DURATION for failures of one rank, of one node or of the job, such as job=3/1h; up to 4 windows, separated by commas or repeated]:SCOPE=N/DURATION: ' \
  '*--same-failures=[end the job when workers fail alike N times in a row before their first step; -1\: never (default\: 5)]:N: ' \
  '*--no-progress=[end the job after N restarts in a row without a newer checkpoint or more steps; 0\: never (default\: 0)]:N: ' \
  '*--deadline=[end the job this long after its first start, restarts included, such as 36h (default\: never)]:DURATION: ' \
  '*--start-deadline=[end the job if no worker makes a step within this time after a start; implies --hang=auto (default\: never)]:DURATION: ' \
  '*--success-rule=[workers that must succeed for the job to succeed\: all, rank 0, all of node 0, or any one. rank0 and node0 decide alone\: failures of other workers end nothing when no restart is left for them; also AllWorkers (all) (default\: all)]:RULE:(all rank0 node0 any)' \
  '*--clean-up=[treatment of workers that still run when the job has succeeded\: none lets them run to their end, and ignores it; unfinished and all stop them; also None (none), Unfinished (unfinished), Running (unfinished), All (all) (default\: unfinished)]:WHAT:(none unfinished all)' \
  '*--on-failure=[when the job would fail because of its workers\: exit, or hold it, paused without workers, for DURATION or until an order (default\: exit)]:exit|hold\[=DURATION\]: ' \
  '*--on-rank-exit=[when a worker fails\: restart-all restarts all workers; tolerate lets the others go on while any is left (default\: restart-all)]:ACTION:(restart-all tolerate)' \
  '*--warm=-[import once on each node, and fork workers from that, at the first start and at restarts\: auto, or no value, imports what the script imports at its top level, and what the workers have imported at their first step; MODULEs imports these (default\: off)]' \
  '*--warm-mode=[with --warm\: fork imports once and forks; standby keeps an interpreter for each worker, for modules that must not be forked, such as those that touch a device (default\: fork)]:fork|standby:(fork standby)' \
  '*--warm-deny=[with --warm\: modules that only the workers import]:MODULE,...: ' \
  '*--before=[shell command that this node runs before every start of its workers; its environment says why they start, and its failure counts as that of a worker]:COMMAND: ' \
  '*--after=[shell command that this node runs each time its workers have ended; its environment says how]:COMMAND: ' \
  '*--hook-timeout=[time limit of each run of --before and --after; then the command is killed, and has failed (default\: 300)]:DURATION: ' \
  '*--hold=-[meet, but start no workers before dlroverctl start; every node runs COMMAND meanwhile, such as '\''sleep inf'\'']' \
  '*--resume-command=[command that workers execute after a hold or a pause\: a program or a .py file, with arguments if wanted]:COMMAND: ' \
  '*--resume-args=[arguments after a hold or a pause\: of --resume-command, or else of the script]:WORDS: ' \
  '*--leave-on=[leave the job when the file appears, or when the URL answers with status 200 (404\: not yet)]:FILE|URL: ' \
  '*--leave-grace=[time from the notice that this node has to leave, such as SIGTERM, to its end\: the grace period of its pod. A tenth, 2s at most, stays in reserve (default\: 30s, or none with --shutdown-timeout)]:DURATION: ' \
  '*--save-at-breakpoint[write the newest checkpoint in memory to storage when workers fail or end or the membership changes (default\: on)]' \
  '*--no-save-at-breakpoint[leave the newest checkpoint in memory, except when a signal ends the job]' \
  '*--ckpt-replicas=[nodes that hold each checkpoint shard in memory, including this one; 0 leaves it to replica_count in the training script (default\: 0)]:N: ' \
  '*--ckpt-shm-dir=[directory in memory for checkpoints (default\: /dev/shm)]:DIR:_files' \
  '*--ckpt-write-rate=[limit for writing checkpoints to storage in bytes per second; K, M or G may follow (default\: no limit)]:SIZE: ' \
  '*--ckpt-sidecar=[use the checkpoint daemon of another container of this pod\: checkpointd --job=NAME]:NAME: ' \
  '*--ckpt-daemon=[auto starts the checkpoint daemon when a worker first needs it; off leaves checkpoints to the workers (default\: auto)]:auto|off:(auto off)' \
  '*--log-dir=[directory for the workers'\'' logs, one subdirectory per run; /dev/null for no files (default\: a new temporary directory)]:DIR:_files' \
  '*--redirects=[worker output that goes to files\: 0 none, 1 stdout, 2 stderr, 3 both, for all workers or by local rank (default\: 0)]:0-3|RANK\:0-3,...: ' \
  '*-r+[worker output that goes to files\: 0 none, 1 stdout, 2 stderr, 3 both, for all workers or by local rank (default\: 0)]:0-3|RANK\:0-3,...: ' \
  '*--tee=[worker output that goes to files and to the console, in the format of --redirects (default\: 0)]:0-3|RANK\:0-3,...: ' \
  '*-t+[worker output that goes to files and to the console, in the format of --redirects (default\: 0)]:0-3|RANK\:0-3,...: ' \
  '*--log-line-prefix-template=[prefix of each line printed by --tee, with ${role_name}, ${local_rank}, ${rank}, ${hostname} (default\: \[${role_name}${local_rank}\]\:)]:TEXT: ' \
  '*--local-ranks-filter=[local ranks whose output is shown on the console; files are not affected (default\: all)]:RANK,...: ' \
  '*--duplicate-stdout-filters=[copy lines of --tee stdout that contain one of the texts to filtered_stdout.log; write ,, for a comma within a text]:TEXT,...: ' \
  '*--duplicate-stderr-filters=[copy lines of --tee stderr that contain one of the texts to filtered_stderr.log; write ,, for a comma within a text]:TEXT,...: ' \
  '*--log-rotate-size=[start a new log file beyond this size in bytes; K, M or G may follow (default\: never)]:SIZE: ' \
  '*--log-rotate-count=[full log files kept for each stream with --log-rotate-size, >= 1 (default\: 5)]:N: ' \
  '*--log-format=[format of the launcher'\''s own log lines\: text, json, or auto for text on a terminal and json otherwise (default\: auto)]:auto|text|json:(auto text json)' \
  '*--logs-specs=[accepted for compatibility; only default, which stands for --log-dir, --redirects and --tee]:default: ' \
  '*--event-log-handler=[where torchrun'\''s events go\: null (nowhere) or console (stderr) (default\: null)]:null|console: ' \
  '*--event-log=[file to which events are appended, one JSON object per line (default\: none)]:PATH:_files' \
  '*--log-rule=[NAME\:REGEX\[\:OPTION\]...\: watch the workers'\'' lines that match; may be repeated. every=300s and first=900s find missing lines; below=N, above=N and nan find bad numbers; further options\: times=N, ranks=0-3,8, action=report|restart|stop]:RULE: ' \
  '*--log-rules=[file with a --log-rule on each line; # begins a comment]:PATH:_files' \
  '*--metrics-addr=[address that serves Prometheus metrics, with the job token unless it is on loopback, and /healthz (default\: none)]:HOST\:PORT: ' \
  '*--total-steps=[training steps of the whole job\: in a pod of a TrainJob whose status wants progress, report percentage, remaining time, pace and restarts (default\: nothing is reported)]:N: ' \
  '*--open-metrics[serve the metrics of --metrics-addr to everyone, without the job token]' \
  '*--ui=-[the launcher that serves the rendezvous has a dlrover-master beside it serve the page of the job, and logs the link; at a free port of localhost unless another address is given]' \
  '*--tensorboard=[run TensorBoard on the first node while the job runs, at localhost\:6006 unless another address is given]:LOGDIR\[\:\[HOST\:\]PORT\]: ' \
  '*--accelerator=[kind of accelerator\: nvidia.com/gpu, ascend-npu, mthreads.com/gpu, metax-tech.com/gpu or cpu (default\: nvidia.com/gpu)]:NAME:(nvidia.com/gpu ascend-npu mthreads.com/gpu metax-tech.com/gpu cpu)' \
  '*--network-check[before training, all nodes check their devices and test the network in pairs; a faulty node is left out]' \
  '*--precheck=[0 none; 1 as --network-check; 2 as --network-check --comm-perf-test (default\: 0)]:0|1|2:(0 1 2)' \
  '*--comm-perf-test[with --network-check\: run one collective over all nodes at its end, and report the speed]' \
  '*--check-level=[extent of --network-check\: host tests devices and network, full also computes and communicates with PyTorch (default\: full)]:LEVEL:(host full)' \
  '*--check-action=[consequence for a node that fails a check\: exclude leaves it out of the job, report only reports it (default\: exclude)]:ACTION:(exclude report)' \
  '*--exclude-straggler[with --network-check\: leave out slow nodes like faulty ones]' \
  '*--check-ttl=[how long a passed check is valid, not counting the time in which workers run\: such as 30s or 10m, or run for as long as the node stays in the run (default\: 10m)]:DURATION: ' \
  '*--check-timeout=[time limit of a check; the import of PyTorch may take 120s more (default\: 60)]:DURATION: ' \
  '*--health-check=[your own check of a node\: a command, judged by its exit status or JSON, or a socket that answers a GET with JSON (default\: none)]:COMMAND|unix\:PATH: ' \
  '*--check-only[check, print the findings, and exit without starting workers; needs no script]' \
  '*--switchbox-check[before training, every node tests the links between pairs of its devices]' \
  '*--box-pairs=[pairs of devices that --switchbox-check tests, separated by spaces or commas, or ring\: each device with the next one. Default pairs drop out if this node lacks one of their devices; NVIDIA devices left over are paired in order (default\: 0\:1,2\:4,3\:5,6\:7)]:A\:B: ' \
  '*--min-bandwidth=[bandwidth in 10^6 bytes a second that a pair needs to pass --switchbox-check (default\: 10000)]:MB/S: ' \
  '*--min-channels=[number of pairs that must pass --switchbox-check (default\: 2)]:N: ' \
  '*--hang=[detection of hangs\: outside only looks at the workers; auto also puts a small shim into their interpreters; off finds none. --hang-action and XPU_TIMER_ variables imply auto (default\: outside)]:auto|outside|off:(auto outside off)' \
  '*--hang-action=[reaction to a hang\: report only reports it, restart restarts the workers, stop ends the job (default\: report)]:report|restart|stop:(report restart stop)' \
  '*--slow-action=[reaction to ranks that slow the job\: report names them, check compares their node with another one, drain has it leave where a spare, or fewer nodes, can go on. It implies --hang=auto (default\: report)]:report|check|drain:(report check drain)' \
  '*--slow-check-link=[with --slow-action=check\: yes loads the job'\''s links between the two nodes for a second or two (default\: no)]:no|yes:(no yes)' \
  '*--dry-run[print the plan of the run as JSON, and exit]' \
  '*--print-completion=[print a completion script for bash, zsh or tcsh, and exit]:SHELL:(bash zsh tcsh)' \
  '*--help[show this text, and exit]' \
  '*-h[show this text, and exit]' \
  '*--version[print the version, and exit]' \
  '1:script:_files' '*::arguments:_files'
