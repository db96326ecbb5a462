#compdef dlrover-run
_arguments -s -S -A '-*' \
  '*--nnodes=[nodes in the job, as a fixed number or as a range within which nodes may come and go (default 1\:1)]:N|MIN\:MAX: ' \
  '*--nproc-per-node=[workers on this node\: a number, one per GPU, XPU or CPU, or auto for one per accelerator and without one per CPU (default 1)]:N|auto|gpu|cpu|xpu: ' \
  '*--auto-config[take the number of nodes from NODE_NUM and the number of workers from the GPUs of this node]' \
  '*--node-unit=[train on a multiple of N nodes only, N >= 1; surplus nodes wait as spares (default 1)]:N: ' \
  '*--rdzv-backend=[how nodes find each other\: static with fixed node ranks, c10d with ranks given out when the nodes meet, dlrover-master with a daemon of its own (default static)]:NAME: ' \
  '*--rdzv-endpoint=[where the rendezvous is served, an IPv6 address as \[ADDRESS\]\:PORT; empty means the master address if static]:HOST\[\:PORT\]: ' \
  '*--rdzv-id=[name of the job, the same on all its nodes (default none)]:ID: ' \
  '*--rdzv-conf=[settings of the rendezvous in seconds\: join_timeout (600), last_call_timeout (30), growth_delay (1), read_timeout (60), and is_host=true|false]:KEY=VALUE,...: ' \
  '*--standalone[one-node job with a rendezvous of its own on a free port; backend, endpoint and id are ignored]' \
  '*--node-rank=[rank of this node, from 0; the static rendezvous demands it, the others take it for a wish (default 0)]:N: ' \
  '*--master-addr=[host or address of node rank 0; static rendezvous only (default 127.0.0.1)]:HOST: ' \
  '*--master-port=[port on node rank 0, 0-65535, 29500 unless given; static rendezvous only]:PORT: ' \
  '*--local-addr=[address under which the other nodes reach this one; unless given the one that leads to the rendezvous]:HOST: ' \
  '*--token-file=[file with the secret that the nodes of the job share]:PATH:_files' \
  '*--insecure[serve and join a rendezvous on a network address without a secret]' \
  '*--topology-file=[lines of three words, asw psw ip, by which nodes under one switch get neighbouring ranks; read by the node that serves the rendezvous]:PATH:_files' \
  '*--module[the script is the name of a Python module, run as python -m does]' \
  '*-m[the script is the name of a Python module, run as python -m does]' \
  '*--no-python[execute the script itself and not Python with it; not together with --module]' \
  '*--run-path[run the script as runpy.run_path does; wins over --no-python]' \
  '*--role=[role of these workers, also in front of their lines on the console (default default)]:NAME: ' \
  '*--start-method=[how Python functions would be started\: spawn, fork or forkserver; of no effect on scripts, as in torchrun (default spawn)]:METHOD:(spawn fork forkserver)' \
  '*--virtual-local-rank[every worker gets LOCAL_RANK=0 and sees its own GPU only]' \
  '*--numa-binding=[bind each worker to CPUs near its GPU\: node, socket, exclusive or core-complex]:MODE:(node socket exclusive core-complex)' \
  '*--preset=[set of environment variables given to the workers (default torch)]:NAME: ' \
  '*--max-restarts=[how many worker failures the whole job may recover from, >= 0; lost and new nodes are not counted (default 0)]:N: ' \
  '*--monitor-interval=[accepted for torchrun'\''s sake, > 0; the kernel tells when a worker ends, at once (default 0.1)]:SECONDS: ' \
  '*--shutdown-timeout=[time workers get between the signal and SIGKILL, >= 0; $TORCH_ELASTIC_SHUTDOWN_TIMEOUT or 30 unless given]:SECONDS: ' \
  '*--signals-to-handle=[signals that stop the job and are passed on to the workers (default SIGTERM,SIGINT,SIGHUP,SIGQUIT)]:NAME,...: ' \
  '*--restart-policy=[when workers are started again\: OnFailure, Never, Always, or ExitCode for the codes of --retryable-exit-codes (default OnFailure)]:POLICY:(OnFailure Never Always ExitCode)' \
  '*--retryable-exit-codes=[exit codes 1-255 and ranges such as 1-5 that --restart-policy=ExitCode answers with a restart (default 130,137,143)]:CODE,...: ' \
  '*--exit-code-policy=[exit code when the job fails\: torchrun, which is always 1, or reason, which tells what went wrong (default torchrun)]:POLICY:(torchrun reason)' \
  '*--save-at-breakpoint[write the newest checkpoint in memory to storage when workers fail or end or the membership changes; this is so unless --no-save-at-breakpoint]' \
  '*--no-save-at-breakpoint[leave it in memory, except when a signal ends the job]' \
  '*--ckpt-replicas=[nodes that hold each checkpoint shard in memory, this one included; 0 leaves it to the training script'\''s replica_count (default 0)]:N: ' \
  '*--ckpt-shm-dir=[directory in memory for checkpoints (default /dev/shm)]:DIR:_files' \
  '*--ckpt-write-rate=[bytes a second, K, M or G, that checkpoints are written to storage with at most; no limit unless given]:SIZE: ' \
  '*--ckpt-sidecar=[checkpoints are kept by a checkpointd --job=NAME in another container of this pod]:NAME: ' \
  '*--ckpt-daemon=[auto starts the checkpoint daemon when a worker first needs it, off leaves checkpoints to the workers (default auto)]:auto|off:(auto off)' \
  '*--log-dir=[directory for the workers'\'' logs, each run in a directory of its own; a new temporary one unless given, /dev/null for no files]:DIR:_files' \
  '*--redirects=[workers'\'' output that goes to files\: 0 none, 1 stdout, 2 stderr, 3 both, for all or by local rank (default 0)]:0-3|RANK\:0-3,...: ' \
  '*-r+[workers'\'' output that goes to files\: 0 none, 1 stdout, 2 stderr, 3 both, for all or by local rank (default 0)]:0-3|RANK\:0-3,...: ' \
  '*--tee=[workers'\'' output that goes to files and to the console, in the form of --redirects (default 0)]:0-3|RANK\:0-3,...: ' \
  '*-t+[workers'\'' output that goes to files and to the console, in the form of --redirects (default 0)]:0-3|RANK\:0-3,...: ' \
  '*--log-line-prefix-template=[text in front of each line of --tee with ${role_name}, ${local_rank}, ${rank}, ${hostname}; \[${role_name}${local_rank}\]\: unless given]:TEXT: ' \
  '*--local-ranks-filter=[local ranks whose output reaches the console, all unless given; files are not affected]:RANK,...: ' \
  '*--duplicate-stdout-filters=[copy lines of --tee stdout that contain one of the texts to filtered_stdout.log; ,, is a comma within a text]:TEXT,...: ' \
  '*--duplicate-stderr-filters=[copy lines of --tee stderr that contain one of the texts to filtered_stderr.log; ,, is a comma within a text]:TEXT,...: ' \
  '*--log-rotate-size=[start a new log file beyond this size in bytes, K, M or G; never unless given]:SIZE: ' \
  '*--log-rotate-count=[full log files kept for each stream with --log-rotate-size, >= 1 (default 5)]:N: ' \
  '*--logs-specs=[how logs are kept\: default is --log-dir, --redirects and --tee]:default: ' \
  '*--event-log-handler=[where torchrun'\''s events go\: null for nowhere, console for stderr (default null)]:null|console: ' \
  '*--event-log=[file to which events are added, one JSON object per line]:PATH:_files' \
  '*--metrics-addr=[address on which Prometheus metrics are served; none unless given]:HOST\:PORT: ' \
  '*--accelerator=[kind of device\: nvidia.com/gpu, ascend-npu, mthreads.com/gpu or metax-tech.com/gpu (default nvidia.com/gpu)]:NAME:(nvidia.com/gpu ascend-npu mthreads.com/gpu metax-tech.com/gpu)' \
  '*--precheck=[test before training\: 0 none, 1 network, 2 network and its speed (default 0)]:0|1|2:(0 1 2)' \
  '*--dry-run[print what would be run, and exit]' \
  '*--print-completion=[print a completion script for bash, zsh or tcsh, and exit]:SHELL:(bash zsh tcsh)' \
  '*--help[print this text, and exit]' \
  '*-h[print this text, and exit]' \
  '*--version[print the version, and exit]' \
  '1:script:_files' '*::arguments:_files'
