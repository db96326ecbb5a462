complete dlrover-run \
  'n@--nnodes@x:N|MIN:MAX@' \
  'n@--nproc-per-node@x:N|auto|gpu|cpu@' \
  'n@--node-unit@x:N@' \
  'n@--replica-groups@x:G@' \
  'n@--rdzv-backend@x:NAME@' \
  'n@--rdzv-endpoint@x:HOST[:PORT]@' \
  'n@--rdzv-id@x:ID@' \
  'n@--rdzv-conf@x:KEY=VALUE,...@' \
  'n@--node-rank@x:N@' \
  'n@--master-addr@x:HOST@' \
  'n@--master-port@x:PORT@' \
  'n@--scheduler@(auto none ms-operator dlrover kubeflow jobset volcano mpi slurm skypilot sagemaker statefulset)@' 'c@--scheduler=@(auto none ms-operator dlrover kubeflow jobset volcano mpi slurm skypilot sagemaker statefulset)@' \
  'n@--local-addr@x:HOST@' \
  'n@--token-file@f@' 'c@--token-file=@f@' \
  'n@--tls@(auto off)@' 'c@--tls=@(auto off)@' \
  'n@--tls-cert@f@' 'c@--tls-cert=@f@' \
  'n@--tls-key@f@' 'c@--tls-key=@f@' \
  'n@--tls-ca@f@' 'c@--tls-ca=@f@' \
  'n@--topology-file@f@' 'c@--topology-file=@f@' \
  'n@--workdir@f@' 'c@--workdir=@f@' \
  'n@--role@x:NAME@' \
  'n@--start-method@(spawn fork forkserver)@' 'c@--start-method=@(spawn fork forkserver)@' \
  'n@--numa-binding@(node socket exclusive core-complex)@' 'c@--numa-binding=@(node socket exclusive core-complex)@' \
  'n@--preset@x:NAME@' \
  'n@--ports@x:N@' \
  'n@--ms-port@x:PORT@' \
  'n@--ms-servers@x:N@' \
  'n@--membind-policy@x:POLICY@' \
  'n@--training-port@x:PORT@' \
  'n@--ucp-device-type@x:NAME@' \
  'n@--max-restarts@x:N@' \
  'n@--monitor-interval@x:SECONDS@' \
  'n@--shutdown-timeout@x:SECONDS@' \
  'n@--restart-grace@x:SECONDS@' \
  'n@--signals-to-handle@x:NAME,...@' \
  'n@--restart-policy@(OnFailure Never Always ExitCode)@' 'c@--restart-policy=@(OnFailure Never Always ExitCode)@' \
  'n@--retryable-exit-codes@x:CODE,...@' \
  'n@--policy@x:FILE|NAME@' \
  'n@--rule@x:RULE@' \
  'n@--exit-code-policy@(torchrun reason dlrover)@' 'c@--exit-code-policy=@(torchrun reason dlrover)@' \
  'n@--backoff-limit@x:N@' \
  'n@--restart-backoff@x:MIN:MAX@' \
  'n@--restart-window@x:SCOPE=N/DURATION@' \
  'n@--same-failures@x:N@' \
  'n@--no-progress@x:N@' \
  'n@--deadline@x:DURATION@' \
  'n@--start-deadline@x:DURATION@' \
  'n@--success-rule@(all rank0 node0 any)@' 'c@--success-rule=@(all rank0 node0 any)@' \
  'n@--clean-up@(none unfinished all)@' 'c@--clean-up=@(none unfinished all)@' \
  'n@--on-failure@x:exit|hold[=DURATION]@' \
  'n@--on-rank-exit@(restart-all tolerate)@' 'c@--on-rank-exit=@(restart-all tolerate)@' \
  'n@--warm-mode@(fork standby)@' 'c@--warm-mode=@(fork standby)@' \
  'n@--warm-deny@x:MODULE,...@' \
  'n@--before@x:COMMAND@' \
  'n@--after@x:COMMAND@' \
  'n@--hook-timeout@x:DURATION@' \
  'n@--resume-command@x:COMMAND@' \
  'n@--resume-args@x:WORDS@' \
  'n@--leave-on@x:FILE|URL@' \
  'n@--leave-grace@x:DURATION@' \
  'n@--ckpt-replicas@x:N@' \
  'n@--ckpt-shm-dir@f@' 'c@--ckpt-shm-dir=@f@' \
  'n@--ckpt-write-rate@x:SIZE@' \
  'n@--ckpt-sidecar@x:NAME@' \
  'n@--ckpt-daemon@(auto off)@' 'c@--ckpt-daemon=@(auto off)@' \
  'n@--log-dir@f@' 'c@--log-dir=@f@' \
  'n@--redirects@x:0-3|RANK:0-3,...@' \
  'n@--tee@x:0-3|RANK:0-3,...@' \
  'n@--log-line-prefix-template@x:TEXT@' \
  'n@--local-ranks-filter@x:RANK,...@' \
  'n@--duplicate-stdout-filters@x:TEXT,...@' \
  'n@--duplicate-stderr-filters@x:TEXT,...@' \
  'n@--log-rotate-size@x:SIZE@' \
  'n@--log-rotate-count@x:N@' \
  'n@--log-format@(auto text json)@' 'c@--log-format=@(auto text json)@' \
  'n@--logs-specs@x:default@' \
  'n@--event-log-handler@x:null|console@' \
  'n@--event-log@f@' 'c@--event-log=@f@' \
  'n@--log-rule@x:RULE@' \
  'n@--log-rules@f@' 'c@--log-rules=@f@' \
  'n@--metrics-addr@x:HOST:PORT@' \
  'n@--total-steps@x:N@' \
  'n@--tensorboard@x:LOGDIR[:[HOST:]PORT]@' \
  'n@--accelerator@(nvidia.com/gpu ascend-npu mthreads.com/gpu metax-tech.com/gpu cpu)@' 'c@--accelerator=@(nvidia.com/gpu ascend-npu mthreads.com/gpu metax-tech.com/gpu cpu)@' \
  'n@--precheck@(0 1 2)@' 'c@--precheck=@(0 1 2)@' \
  'n@--check-level@(host full)@' 'c@--check-level=@(host full)@' \
  'n@--check-action@(exclude report)@' 'c@--check-action=@(exclude report)@' \
  'n@--check-ttl@x:DURATION@' \
  'n@--check-timeout@x:DURATION@' \
  'n@--health-check@x:COMMAND|unix:PATH@' \
  'n@--box-pairs@x:A:B@' \
  'n@--min-bandwidth@x:MB/S@' \
  'n@--min-channels@x:N@' \
  'n@--hang@(auto outside off)@' 'c@--hang=@(auto outside off)@' \
  'n@--hang-action@(report restart stop)@' 'c@--hang-action=@(report restart stop)@' \
  'n@--slow-action@(report check drain)@' 'c@--slow-action=@(report check drain)@' \
  'n@--slow-check-link@(no yes)@' 'c@--slow-check-link=@(no yes)@' \
  'n@--print-completion@(bash zsh tcsh)@' 'c@--print-completion=@(bash zsh tcsh)@' \
  'c@--@(nnodes nproc-per-node auto-config node-unit replica-groups rdzv-backend rdzv-endpoint rdzv-id rdzv-conf standalone node-rank master-addr master-port scheduler local-addr token-file tls tls-cert tls-key tls-ca allow-exec insecure topology-file module no-python run-path workdir role start-method virtual-local-rank numa-binding preset no-local-rank live-hostfile ports ms-port ms-servers numa-affinity membind-policy training-port ucp-device-type auto-tunning max-restarts monitor-interval shutdown-timeout restart-grace signals-to-handle restart-policy retryable-exit-codes policy rule exit-code-policy backoff-limit restart-backoff restart-window same-failures no-progress deadline start-deadline success-rule clean-up on-failure on-rank-exit warm warm-mode warm-deny before after hook-timeout hold resume-command resume-args leave-on leave-grace save-at-breakpoint no-save-at-breakpoint ckpt-replicas ckpt-shm-dir ckpt-write-rate ckpt-sidecar ckpt-daemon log-dir redirects tee log-line-prefix-template local-ranks-filter duplicate-stdout-filters duplicate-stderr-filters log-rotate-size log-rotate-count log-format logs-specs event-log-handler event-log log-rule log-rules metrics-addr total-steps open-metrics ui tensorboard accelerator network-check precheck comm-perf-test check-level check-action exclude-straggler check-ttl check-timeout health-check check-only switchbox-check box-pairs min-bandwidth min-channels hang hang-action slow-action slow-check-link dry-run print-completion help version)@' \
  'p@*@f@'
