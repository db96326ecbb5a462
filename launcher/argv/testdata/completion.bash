# bash completion for dlrover-run
_dlrover_run() {
  local cur=${COMP_WORDS[COMP_CWORD]} opt= i w
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    w=${COMP_WORDS[i]}
    case $w in
    [=:]*) opt=${opt:-:}; continue ;;
    --) compopt -o default; return ;;
    --nnodes|--nproc-per-node|--nproc_per_node|--node-unit|--node_unit|--replica-groups|--replica_groups|--rdzv-backend|--rdzv_backend|--rdzv-endpoint|--rdzv_endpoint|--rdzv-id|--rdzv_id|--rdzv-conf|--rdzv_conf|--node-rank|--node_rank|--master-addr|--master_addr|--master-port|--master_port|--scheduler|--local-addr|--local_addr|--token-file|--token_file|--tls|--tls-cert|--tls_cert|--tls-key|--tls_key|--tls-ca|--tls_ca|--topology-file|--topology_file|--workdir|--role|--start-method|--start_method|--numa-binding|--numa_binding|--preset|--ports|--ms-port|--ms_port|--ms-servers|--ms_servers|--membind-policy|--membind_policy|--training-port|--training_port|--ucp-device-type|--ucp_device_type|--max-restarts|--max_restarts|--monitor-interval|--monitor_interval|--shutdown-timeout|--shutdown_timeout|--restart-grace|--restart_grace|--signals-to-handle|--signals_to_handle|--restart-policy|--restart_policy|--retryable-exit-codes|--retryable_exit_codes|--policy|--rule|--exit-code-policy|--exit_code_policy|--backoff-limit|--backoff_limit|--restart-backoff|--restart_backoff|--restart-window|--restart_window|--same-failures|--same_failures|--no-progress|--no_progress|--deadline|--start-deadline|--start_deadline|--success-rule|--success_rule|--clean-up|--clean_up|--on-failure|--on_failure|--on-rank-exit|--on_rank_exit|--warm-mode|--warm_mode|--warm-deny|--warm_deny|--before|--after|--hook-timeout|--hook_timeout|--resume-command|--resume_command|--resume-args|--resume_args|--leave-on|--leave_on|--leave-grace|--leave_grace|--ckpt-replicas|--ckpt_replicas|--ckpt-shm-dir|--ckpt_shm_dir|--ckpt-write-rate|--ckpt_write_rate|--ckpt-sidecar|--ckpt_sidecar|--ckpt-daemon|--ckpt_daemon|--log-dir|--log_dir|--redirects|-r|--tee|-t|--log-line-prefix-template|--log_line_prefix_template|--local-ranks-filter|--local_ranks_filter|--duplicate-stdout-filters|--duplicate_stdout_filters|--duplicate-stderr-filters|--duplicate_stderr_filters|--log-rotate-size|--log_rotate_size|--log-rotate-count|--log_rotate_count|--log-format|--log_format|--logs-specs|--logs_specs|--event-log-handler|--event_log_handler|--event-log|--event_log|--log-rule|--log_rule|--log-rules|--log_rules|--metrics-addr|--metrics_addr|--total-steps|--total_steps|--tensorboard|--accelerator|--precheck|--check-level|--check_level|--check-action|--check_action|--check-ttl|--check_ttl|--check-timeout|--check_timeout|--health-check|--health_check|--box-pairs|--box_pairs|--min-bandwidth|--min_bandwidth|--min-channels|--min_channels|--hang|--hang-action|--hang_action|--slow-action|--slow_action|--slow-check-link|--slow_check_link|--print-completion|--print_completion) opt=$w; continue ;;
    -*) opt= ;;
    *) [[ -n $opt ]] || { compopt -o default; return; }; opt= ;;
    esac
  done
  [[ $cur != '=' ]] || cur=
  case $opt in
    --scheduler) COMPREPLY=($(compgen -W 'auto none ms-operator dlrover kubeflow jobset volcano mpi slurm skypilot sagemaker statefulset' -- "$cur")); return ;;
    --token-file|--token_file) compopt -o default; return ;;
    --tls) COMPREPLY=($(compgen -W 'auto off' -- "$cur")); return ;;
    --tls-cert|--tls_cert) compopt -o default; return ;;
    --tls-key|--tls_key) compopt -o default; return ;;
    --tls-ca|--tls_ca) compopt -o default; return ;;
    --topology-file|--topology_file) compopt -o default; return ;;
    --workdir) compopt -o default; return ;;
    --start-method|--start_method) COMPREPLY=($(compgen -W 'spawn fork forkserver' -- "$cur")); return ;;
    --numa-binding|--numa_binding) COMPREPLY=($(compgen -W 'node socket exclusive core-complex' -- "$cur")); return ;;
    --restart-policy|--restart_policy) COMPREPLY=($(compgen -W 'OnFailure Never Always ExitCode' -- "$cur")); return ;;
    --exit-code-policy|--exit_code_policy) COMPREPLY=($(compgen -W 'torchrun reason dlrover' -- "$cur")); return ;;
    --success-rule|--success_rule) COMPREPLY=($(compgen -W 'all rank0 node0 any' -- "$cur")); return ;;
    --clean-up|--clean_up) COMPREPLY=($(compgen -W 'none unfinished all' -- "$cur")); return ;;
    --on-rank-exit|--on_rank_exit) COMPREPLY=($(compgen -W 'restart-all tolerate' -- "$cur")); return ;;
    --warm-mode|--warm_mode) COMPREPLY=($(compgen -W 'fork standby' -- "$cur")); return ;;
    --ckpt-shm-dir|--ckpt_shm_dir) compopt -o default; return ;;
    --ckpt-daemon|--ckpt_daemon) COMPREPLY=($(compgen -W 'auto off' -- "$cur")); return ;;
    --log-dir|--log_dir) compopt -o default; return ;;
    --log-format|--log_format) COMPREPLY=($(compgen -W 'auto text json' -- "$cur")); return ;;
    --event-log|--event_log) compopt -o default; return ;;
    --log-rules|--log_rules) compopt -o default; return ;;
    --accelerator) COMPREPLY=($(compgen -W 'nvidia.com/gpu ascend-npu mthreads.com/gpu metax-tech.com/gpu cpu' -- "$cur")); return ;;
    --precheck) COMPREPLY=($(compgen -W '0 1 2' -- "$cur")); return ;;
    --check-level|--check_level) COMPREPLY=($(compgen -W 'host full' -- "$cur")); return ;;
    --check-action|--check_action) COMPREPLY=($(compgen -W 'exclude report' -- "$cur")); return ;;
    --hang) COMPREPLY=($(compgen -W 'auto outside off' -- "$cur")); return ;;
    --hang-action|--hang_action) COMPREPLY=($(compgen -W 'report restart stop' -- "$cur")); return ;;
    --slow-action|--slow_action) COMPREPLY=($(compgen -W 'report check drain' -- "$cur")); return ;;
    --slow-check-link|--slow_check_link) COMPREPLY=($(compgen -W 'no yes' -- "$cur")); return ;;
    --print-completion|--print_completion) COMPREPLY=($(compgen -W 'bash zsh tcsh' -- "$cur")); return ;;
    ?*) return ;;
  esac
  if [[ $cur == -* ]]; then
    COMPREPLY=($(compgen -W '--nnodes --nproc-per-node --auto-config --node-unit --replica-groups --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --standalone --node-rank --master-addr --master-port --scheduler --local-addr --token-file --tls --tls-cert --tls-key --tls-ca --allow-exec --insecure --topology-file --module -m --no-python --run-path --workdir --role --start-method --virtual-local-rank --numa-binding --preset --no-local-rank --live-hostfile --ports --ms-port --ms-servers --numa-affinity --membind-policy --training-port --ucp-device-type --auto-tunning --max-restarts --monitor-interval --shutdown-timeout --restart-grace --signals-to-handle --restart-policy --retryable-exit-codes --policy --rule --exit-code-policy --backoff-limit --restart-backoff --restart-window --same-failures --no-progress --deadline --start-deadline --success-rule --clean-up --on-failure --on-rank-exit --warm --warm-mode --warm-deny --before --after --hook-timeout --hold --resume-command --resume-args --leave-on --leave-grace --save-at-breakpoint --no-save-at-breakpoint --ckpt-replicas --ckpt-shm-dir --ckpt-write-rate --ckpt-sidecar --ckpt-daemon --log-dir --redirects -r --tee -t --log-line-prefix-template --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --log-rotate-size --log-rotate-count --log-format --logs-specs --event-log-handler --event-log --log-rule --log-rules --metrics-addr --total-steps --open-metrics --ui --tensorboard --accelerator --network-check --precheck --comm-perf-test --check-level --check-action --exclude-straggler --check-ttl --check-timeout --health-check --check-only --switchbox-check --box-pairs --min-bandwidth --min-channels --hang --hang-action --slow-action --slow-check-link --dry-run --print-completion --help -h --version' -- "$cur"))
  else
    compopt -o default
  fi
}
complete -F _dlrover_run dlrover-run
