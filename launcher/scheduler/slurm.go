package scheduler

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// firstSpecialStep is the least of the step ids that are no steps of srun's: a batch script, an interactive shell.
const firstSpecialStep = 0xfffffff0

// A job's port on node 0 is from firstJobPort on, so that two jobs on one node use different ones. The range ends
// before the ports that Linux gives to clients.
const (
	firstJobPort = 20000
	jobPorts     = 10000
)

// slurm is a step of srun with one task per node. A shell in an allocation, and a batch script, are no step.
func slurm(r *reader) (f Facts, found bool, err error) {
	if _, mpirun := r.peek(openMPIRank); mpirun && !r.named { // its daemons are steps of srun, but not on the first node
		return f, false, nil
	}
	_, shell := r.peek("SLURM_PTY_PORT")
	job, inJob := r.peek("SLURM_JOB_ID", "SLURM_JOBID")
	step, inStep := r.peek("SLURM_STEP_ID", "SLURM_STEPID")
	if number, err := strconv.ParseUint(step.value, 10, 64); err == nil && number >= firstSpecialStep {
		inStep = false
	}
	if !inJob || !inStep || shell && !r.named || r.worker() {
		return f, false, nil
	}
	if err := r.slurmSize(&f); err != nil {
		return f, false, err
	}
	r.from = append(r.from, job.name, step.name)
	f.RunID = job.value + "." + step.value
	return f, true, r.slurmMaster(&f, job)
}

// slurmSize reads the numbers of nodes and tasks, which must be the same.
func (r *reader) slurmSize(f *Facts) (err error) {
	var nodes, tasks, rank variable
	if f.Nodes, nodes, err = r.number(1, maxNodes, "SLURM_STEP_NUM_NODES", "SLURM_NNODES"); err != nil {
		return err
	}
	count, tasks, err := r.number(1, 1<<24, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
	switch {
	case err != nil:
		return err
	case f.Nodes == 0 || count == 0:
		return fmt.Errorf("a step without $SLURM_NNODES and $SLURM_NTASKS: start dlrover-run with srun")
	case count != f.Nodes:
		return fmt.Errorf("%v with %v: one launcher on each node starts the workers; give srun --ntasks-per-node=1", tasks,
			nodes)
	}
	if f.NodeRank, rank, err = r.number(0, maxNodes, "SLURM_NODEID", "SLURM_PROCID"); err != nil {
		return err
	}
	if f.NodeRank >= f.Nodes {
		return fmt.Errorf("%v does not fit %v: need a number from 0 to %d", rank, nodes, f.Nodes-1)
	}
	f.nodesFrom = nodes.String()
	if f.Slots, _, err = r.number(0, 4096, "SLURM_GPUS_ON_NODE"); err != nil {
		return err
	}
	f.Restart, _, err = r.number(0, 1<<30, "SLURM_RESTART_COUNT")
	return err
}

// slurmMaster finds node 0 in the list of nodes.
func (r *reader) slurmMaster(f *Facts, job variable) error {
	list, set := r.lookup("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
	if !set {
		return fmt.Errorf("a step without $SLURM_JOB_NODELIST: start dlrover-run with srun")
	}
	hosts, err := nodes(list.value)
	if err != nil {
		return fmt.Errorf("%v: %w", list, err)
	}
	if len(hosts) != f.Nodes {
		return fmt.Errorf("%v lists %d nodes, but %s", list, len(hosts), f.nodesFrom)
	}
	f.MasterAddr = hosts[0]
	if f.MasterPort, err = r.port(); err != nil || f.MasterPort > 0 {
		return err
	}
	id, err := strconv.ParseUint(job.value, 10, 64)
	if err != nil {
		return fmt.Errorf("%v: need the job's number", job)
	}
	f.MasterPort = firstJobPort + int(id%jobPorts)
	return nil
}

// skyPilot starts the same command on every node.
func skyPilot(r *reader) (f Facts, found bool, err error) {
	rank, v, err := r.number(0, maxNodes, "SKYPILOT_NODE_RANK")
	ips, set := r.lookup("SKYPILOT_NODE_IPS")
	if err != nil || v.name == "" || !set || r.worker() {
		return f, false, err
	}
	hosts := strings.Fields(ips.value)
	if rank >= len(hosts) {
		return f, false, fmt.Errorf("%v does not fit $SKYPILOT_NODE_IPS, which has %d lines", v, len(hosts))
	}
	f = Facts{Nodes: len(hosts), NodeRank: rank, MasterAddr: hosts[0], hosts: hosts}
	f.nodesFrom = fmt.Sprintf("$SKYPILOT_NODE_IPS with %d lines", len(hosts))
	if f.Slots, _, err = r.number(0, 4096, "SKYPILOT_NUM_GPUS_PER_NODE"); err != nil {
		return f, false, err
	}
	id, _ := r.lookup("SKYPILOT_TASK_ID")
	f.RunID = id.value
	f.MasterPort, err = r.port()
	return f, true, err
}

// sageMaker lists the hosts as JSON.
func sageMaker(r *reader) (f Facts, found bool, err error) {
	list, set := r.lookup("SM_HOSTS")
	own, named := r.lookup("SM_CURRENT_HOST")
	if !set || !named || r.worker() {
		return f, false, nil
	}
	var hosts []string
	if err := json.Unmarshal([]byte(list.value), &hosts); err != nil {
		return f, false, fmt.Errorf("%v: need a list such as [\"algo-1\",\"algo-2\"]", list)
	}
	if f.NodeRank = slices.Index(hosts, own.value); f.NodeRank < 0 {
		return f, false, fmt.Errorf("%v is not in %v", own, list)
	}
	f.Nodes, f.MasterAddr, f.hosts = len(hosts), hosts[0], hosts
	f.nodesFrom = list.String()
	if f.Slots, _, err = r.number(0, 4096, "SM_NUM_GPUS"); err != nil {
		return f, false, err
	}
	f.MasterPort, err = r.port()
	return f, true, err
}
