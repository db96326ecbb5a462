package scheduler

import (
	"fmt"
	"strconv"
	"strings"

	"dlrover-run/launcher/hostfile"
)

// Names that other functions ask for.
const (
	dlroverName     = "dlrover"
	kubeflowName    = "kubeflow"
	volcanoName     = "volcano"
	mpiName         = "mpi"
	statefulSetName = "statefulset"
)

// dlrover is DLRover's operator. Its daemon supplies all that matters; the rank and the run have variables of their
// own.
func dlrover(r *reader) (f Facts, found bool, err error) {
	addr, found := r.lookup("DLROVER_MASTER_ADDR")
	if !found {
		return f, false, nil
	}
	f.MasterAddr = addr.value
	var v variable
	if f.Nodes, v, err = r.number(1, maxNodes, "NODE_NUM"); err != nil {
		return f, false, err
	}
	f.nodesFrom = v.String()
	return f, true, nil
}

// kubeflow is the training operator of Kubeflow, version 1, and its imitations. It counts nodes.
func kubeflow(r *reader) (f Facts, found bool, err error) {
	if !r.all("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE") || r.worker() {
		return f, false, nil
	}
	addr, _ := r.lookup("MASTER_ADDR")
	f.MasterAddr = addr.value
	if f.MasterPort, err = r.port(); err != nil {
		return f, false, err
	}
	var nodes, rank variable
	if f.Nodes, nodes, err = r.number(1, maxNodes, "WORLD_SIZE"); err != nil {
		return f, false, err
	}
	if f.NodeRank, rank, err = r.number(0, maxNodes, "RANK"); err != nil {
		return f, false, err
	}
	if f.NodeRank >= f.Nodes {
		return f, false, fmt.Errorf("%v does not fit %v: they count nodes, and ranks are from 0", rank, nodes)
	}
	f.nodesFrom = nodes.String()
	return f, true, nil
}

// jobSet is an Indexed Job, alone or of a JobSet: pods are called JOB-INDEX, and are found by the full name if they
// have a subdomain. The number of pods is unknown.
func jobSet(r *reader) (f Facts, found bool, err error) {
	if r.worker() || !r.all("JOB_COMPLETION_INDEX") || r.Nodes <= 1 && !r.named {
		return f, false, nil
	}
	index, v, err := r.number(0, maxNodes, "JOB_COMPLETION_INDEX")
	if err != nil {
		return f, false, err
	}
	base, ends := strings.CutSuffix(r.Host, "-"+strconv.Itoa(index))
	if f.Restart, _, err = r.number(0, 1<<30, "JOBSET_RESTART_ATTEMPT"); err != nil {
		return f, false, err
	}
	f.NodeRank = index
	if ends {
		f.RunID = base
	}
	if err = r.headless(&f, base, ends); err != nil {
		return f, false, err
	}
	return f, true, r.within(v, index)
}

// headless finds node 0 of pods that are called BASE-0, BASE-1 and so on, unless the user names it.
func (r *reader) headless(f *Facts, base string, numbered bool) (err error) {
	if f.MasterPort, err = r.port(); err != nil {
		return err
	}
	if addr, set := r.lookup("MASTER_ADDR"); set {
		f.MasterAddr = addr.value
		return nil
	}
	if !numbered {
		return fmt.Errorf("host name %q does not end with the pod's number, so that node 0 cannot be named: "+
			"set $MASTER_ADDR or --rdzv-endpoint", r.Host)
	}
	domain := r.domain()
	if domain == "" {
		return fmt.Errorf("pod %s has no name by which other pods reach it: give the pods a headless "+
			"Service (spec.subdomain of the pods is its name), or set $MASTER_ADDR or --rdzv-endpoint", r.Host)
	}
	f.MasterAddr = base + "-0" + domain
	return nil
}

// within refuses a node's number that the user's number of nodes does not hold.
func (r *reader) within(v variable, rank int) error {
	if r.Nodes > 0 && rank >= r.Nodes {
		return fmt.Errorf("%v does not fit --nnodes, which holds %d: need a number from 0 to %d", v, r.Nodes, r.Nodes-1)
	}
	return nil
}

// statefulSet has pods that are called NAME-0, NAME-1 and so on, and have a headless Service. Their number is unknown.
// Other pods may be called so: unless it is named, the user must have asked for several nodes.
func statefulSet(r *reader) (f Facts, found bool, err error) {
	i := strings.LastIndexByte(r.Host, '-')
	rank, err := digits(r.Host[i+1:])
	if i < 1 || err != nil || r.worker() || !r.named && (r.Nodes <= 1 || r.domain() == "") {
		return f, false, nil
	}
	f.NodeRank, f.RunID = rank, r.Host[:i]
	if err = r.headless(&f, f.RunID, true); err != nil {
		return f, false, err
	}
	if r.Nodes > 0 && rank >= r.Nodes {
		return f, false, fmt.Errorf("host name %q does not fit --nnodes, which holds %d: need a number from 0 to %d", r.Host,
			r.Nodes, r.Nodes-1)
	}
	return f, true, nil
}

// volcano is a job of Volcano with its plug-in svc, which lists the hosts of every task. A job of the tasks master and
// worker is of both, the master first; any other task is a job of its own.
func volcano(r *reader) (f Facts, found bool, err error) {
	index, v, err := r.number(0, maxNodes, "VC_TASK_INDEX", "VK_TASK_INDEX")
	if err != nil || v.name == "" || r.worker() {
		return f, false, err
	}
	task, hosts := r.volcanoTask(index)
	if len(hosts) == 0 {
		return f, false, nil
	}
	if index >= len(hosts) {
		return f, false, fmt.Errorf("%v does not fit $VC_%s_HOSTS, which has %d", v, task, len(hosts))
	}
	f.NodeRank = index
	switch task {
	case "WORKER":
		if masters := r.volcanoHosts("MASTER"); len(masters) > 0 {
			f.NodeRank += len(masters)
			hosts = append(masters, hosts...)
		}
	case "MASTER":
		hosts = append(hosts, r.volcanoHosts("WORKER")...)
	}
	f.Nodes, f.MasterAddr, f.hosts = len(hosts), hosts[0], hosts
	f.nodesFrom = fmt.Sprintf("$VC_%s_HOSTS with %d hosts", task, f.Nodes)
	f.MasterPort, err = r.port()
	return f, true, err
}

// volcanoTask finds the task of this pod, JOB-TASK-INDEX; both names may hold dashes. A pod that is called otherwise is
// a worker.
func (r *reader) volcanoTask(index int) (task string, hosts []string) {
	name, numbered := strings.CutSuffix(r.Host, "-"+strconv.Itoa(index))
	for i := len(name) - 1; i > 0 && numbered; i-- {
		if name[i] != '-' {
			continue
		}
		task = strings.ToUpper(strings.ReplaceAll(name[i+1:], "-", "_"))
		if _, set := r.peek("VC_" + task + "_HOSTS"); set {
			return task, r.volcanoHosts(task)
		}
	}
	return "WORKER", r.volcanoHosts("WORKER")
}

func (r *reader) volcanoHosts(task string) []string {
	v, _ := r.lookup("VC_" + task + "_HOSTS")
	return strings.FieldsFunc(v.value, func(c rune) bool { return c == ',' || c == ' ' || c == '\n' })
}

// Where the MPI operator mounts its list of hosts.
const mpiHostFile = "/etc/mpi/hostfile"

// mpiHostFileVariables name the file for Open MPI 4 and 5, Intel's and MPICH.
func mpiHostFileVariables() []string {
	return []string{"OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile", "I_MPI_HYDRA_HOST_FILE",
		"HYDRA_HOST_FILE"}
}

// mpi is a process of Open MPI's mpirun, or Kubeflow's MPI operator. The operator's variables of hosts are those of any
// MPI: only its own variables identify it.
func mpi(r *reader) (f Facts, found bool, err error) {
	role, of := r.lookup("K_MPI_JOB_ROLE")
	if _, started := r.peek(openMPIRank); started && !of && !r.worker() {
		return r.openMPI()
	}
	if !of && !r.named || r.worker() {
		return f, false, nil
	}
	path := mpiHostFile
	if v, set := r.lookup(mpiHostFileVariables()...); set {
		path = v.value
	}
	text, err := r.ReadFile(path)
	if err != nil {
		if r.named {
			return f, false, fmt.Errorf("%w: mount the operator's ConfigMap, JOB-config, there in the workers, too", err)
		}
		return f, false, nil
	}
	r.from = append(r.from, path)
	hosts, err := hostfile.Parse(string(text))
	if err != nil {
		return f, false, fmt.Errorf("%s: %w", path, err)
	}
	return r.mpiNode(path, role, hosts)
}

func (r *reader) mpiNode(path string, role variable, hosts []hostfile.Host) (f Facts, found bool, err error) {
	ip, _ := r.peek("POD_IP")
	i := hostfile.Find(hosts, r.Host, ip.value)
	switch {
	case i < 0 && role.value == "launcher":
		return f, false, fmt.Errorf("%v, and %s does not list host %s, so it trains nothing: start dlrover-run "+
			"in the workers (no SSH is needed), or set runLauncherAsWorker", role, path, r.Host)
	case i < 0:
		return f, false, fmt.Errorf("%s does not list host %s: give it the line %q", path, r.Host, r.Host+" slots=1")
	}
	f = Facts{Nodes: len(hosts), NodeRank: i, MasterAddr: hosts[0].Name, Slots: hosts[i].Slots}
	f.nodesFrom = fmt.Sprintf("%s with %d hosts", path, f.Nodes)
	for _, h := range hosts {
		f.hosts = append(f.hosts, h.Name)
	}
	f.MasterPort, err = r.port()
	return f, true, err
}
