// Package scheduler reads from the environment the facts that the scheduler of this node supplies: the number of nodes,
// this node's rank, and the address of node 0.
//
// The package is pure: variables and files come in as functions, and nothing is resolved or contacted.
package scheduler

import (
	"fmt"
	"slices"
	"strings"
)

// Auto makes Detect look for every scheduler that can be identified without being named.
const Auto = "auto"

// defaultPort is the port on node 0 where a scheduler names none.
const defaultPort = 29500

// maxNodes bounds the memory that a damaged list can make us allocate.
const maxNodes = 100_000

// System is the input. No function may be nil.
type System struct {
	// Env looks a variable up, as os.LookupEnv does.
	Env func(name string) (string, bool)
	// ReadFile returns the content of a file.
	ReadFile func(path string) ([]byte, error)
	// Host is the host name, as the kernel knows it.
	Host string
	// Nodes is the most nodes that the user asks for, 0 where unset. Some schedulers do not supply their number.
	Nodes int
}

// Facts are supplied by a scheduler.
type Facts struct {
	// Name is the scheduler's, "" where there is none.
	Name string
	// Nodes is the number of nodes, 0 if unknown.
	Nodes int
	// NodeRank is this node's, from 0; -1 if unknown.
	NodeRank int
	// MasterAddr is the host name or address of node 0 and MasterPort, from 1, a port there. DLRover's are its master's,
	// without a port.
	MasterAddr string
	MasterPort int
	// Slots is how many workers this node is to have, 0 if unknown.
	Slots int
	// Share is this node's part of the framework's processes, where some have nodes of their own, as preset.Vars has it;
	// "": workers and all side processes.
	Share string
	// Preset is that of the framework that the pods belong to, and Servers how many of them are parameter servers; "" and
	// 0 without Share.
	Preset  string
	Servers int
	// RunID names the job, "" where the scheduler has no name that all nodes know.
	RunID string
	// Restart counts the starts of the job before this one.
	Restart int
	// From are the variables, and the paths of the files, that were used, in the order of their names.
	From []string

	nodesFrom string   // for messages: "$WORLD_SIZE=2"
	hosts     []string // all nodes, where they are listed
}

// complete reports whether f suffices for a rendezvous, where the user asks for that many.
func (f *Facts) complete(nodes int) bool { return f.Nodes > 0 || nodes > 0 || f.Name == dlroverName }

// source is one scheduler.
type source struct {
	name string
	// read returns false where the scheduler's variables are not there.
	read func(*reader) (Facts, bool, error)
	// needs names the required variables.
	needs string
}

// sources are in the order in which they are looked for. The roles of ms-operator's pods count with a daemon, too.
func sources() []source {
	return []source{
		{msOperatorName, msOperator, "$MS_ROLE, $MS_SCHED_HOST and $MS_WORKER_NUM, which ms-operator sets"},
		{dlroverName, dlrover, "$DLROVER_MASTER_ADDR, which DLRover's operator sets"},
		{kubeflowName, kubeflow, "$MASTER_ADDR, $MASTER_PORT, $RANK and $WORLD_SIZE, the latter two of nodes"},
		{"jobset", jobSet, "$JOB_COMPLETION_INDEX, and a host name that ends with it"},
		{volcanoName, volcano, "$VC_TASK_INDEX, and $VC_<TASK>_HOSTS of Volcano's plug-in svc"},
		{mpiName, mpi, "the variables of Open MPI's mpirun, or the host file of the MPI operator, " + mpiHostFile +
			", or where " + strings.Join(mpiHostFileVariables(), ", ") + " say"},
		{"slurm", slurm, "$SLURM_JOB_ID and $SLURM_STEP_ID: start dlrover-run with srun"},
		{"skypilot", skyPilot, "$SKYPILOT_NODE_RANK and $SKYPILOT_NODE_IPS"},
		{"sagemaker", sageMaker, "$SM_HOSTS and $SM_CURRENT_HOST"},
		{statefulSetName, statefulSet, "a host name such as NAME-0, and a headless Service (spec.serviceName)"},
	}
}

// Names lists the schedulers in the order in which they are looked for.
func Names() []string {
	var names []string
	for _, s := range sources() {
		names = append(names, s.name)
	}
	return names
}

// Detect reads the facts of the named scheduler, or with Auto of the first that is found. Without any, Facts have no
// name. An error names the variables, the rule and the fix. With Auto, a scheduler with too few facts is no error.
func Detect(name string, s System) (Facts, error) {
	if name == Auto {
		return detect(s)
	}
	all := sources()
	i := slices.IndexFunc(all, func(c source) bool { return c.name == name })
	if i < 0 {
		return Facts{}, fmt.Errorf("--scheduler=%.100s is unknown; use auto, none, or one of %s", name,
			strings.Join(Names(), ", "))
	}
	f, found, err := read(all[i], s, true)
	switch {
	case err != nil:
		return Facts{}, fmt.Errorf("--scheduler=%s: %w", name, err)
	case !found:
		return Facts{}, fmt.Errorf("--scheduler=%s needs %s", name, all[i].needs)
	case !f.complete(s.Nodes):
		return Facts{}, fmt.Errorf("--scheduler=%s does not say how many nodes there are: give --nnodes", name)
	}
	return f, nil
}

// Alone is a variable, as $NAME=VALUE, that shows one of several nodes where Detect with Auto finds no scheduler; ""
// where there is none.
func Alone(s System) string {
	r := &reader{System: s}
	if r.worker() {
		return ""
	}
	names := []string{"JOB_COMPLETION_INDEX", "VC_TASK_INDEX", "VK_TASK_INDEX", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}
	if r.all("MASTER_ADDR") {
		names = append(names, "RANK")
	}
	for _, name := range names { // a node 0 may be the only one
		if n, v, err := r.number(0, maxNodes, name); err == nil && n > 0 {
			return v.String()
		}
	}
	for _, v := range []variable{{"K_MPI_JOB_ROLE", "worker"}, {"MS_ROLE", "MS_WORKER"}} {
		if role, set := r.peek(v.name); set && role == v {
			return v.String()
		}
	}
	return ""
}

func detect(s System) (best Facts, err error) {
	for _, c := range sources() {
		f, found, err := read(c, s, false)
		switch {
		case best.Name != "" && (err != nil || !found):
		case err != nil:
			return Facts{}, fmt.Errorf("%s: %w; --scheduler=none ignores what %s says", c.name, err, c.name)
		case !found || !f.complete(s.Nodes):
		case best.Name == "":
			best = f
		case best.contradicts(f):
			return Facts{}, fmt.Errorf("%s (%s) and %s (%s) contradict each other: say by --scheduler=%s or --scheduler=%s "+
				"whose job this is", best.nodesFrom, best.Name, f.nodesFrom, f.Name, best.Name, f.Name)
		}
	}
	return best, nil
}

// contradicts reports whether both know the number of nodes, and know another. Volcano's plug-ins for PyTorch, which
// set Kubeflow's variables, may choose among the hosts that Volcano lists.
func (f *Facts) contradicts(g Facts) bool {
	return f.Nodes > 0 && g.Nodes > 0 && f.Nodes != g.Nodes && !(f.Name == kubeflowName && g.Name == volcanoName)
}

func read(c source, s System, named bool) (Facts, bool, error) {
	r := &reader{System: s, named: named}
	f, found, err := c.read(r)
	if err != nil || !found {
		return Facts{}, false, err
	}
	slices.Sort(r.from)
	f.Name, f.From = c.name, slices.Compact(r.from)
	if f.MasterPort == 0 && c.name != dlroverName {
		f.MasterPort = defaultPort
	}
	return f, true, nil
}
