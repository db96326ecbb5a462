package run

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/app/token"
	"dlrover-run/internal/openfile"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/scheduler"
)

// startPatience is how long a node waits for node 0 of a scheduler: pods of a job may start minutes apart.
const startPatience = 10 * time.Minute

// schedule reads the scheduler's variables. An option that sets the meeting point wins: then nothing is read.
func (r *resolver) schedule() (err error) {
	name := r.c.String("scheduler")
	given := r.c.IsSet("scheduler")
	if name == "none" || !given && (r.s.called.Name == "torchrun" || r.s.called.command.Alone) {
		return nil
	}
	most := 0
	if r.c.IsSet("nnodes") {
		if _, most, err = argv.ParseNNodes(r.c.String("nnodes")); err != nil {
			return err
		}
	}
	if name == scheduler.Auto && (most == 1 || r.namesRendezvous()) {
		return nil
	}
	s := r.system(most)
	r.s.scheduler, err = scheduler.Detect(name, s)
	if v := scheduler.Alone(s); err == nil && r.s.scheduler.Name == "" && most == 0 && v != "" {
		r.warn("%s, but nothing says how many nodes there are, and where they meet: this one trains alone; give --nnodes "+
			"(1, if that is meant)", v)
	}
	return err
}

// system is the source of a scheduler's variables; most is the number of nodes that the user requests.
func (r *resolver) system(most int) scheduler.System {
	return scheduler.System{Env: r.env, ReadFile: r.host.readFile, Host: r.host.name, Nodes: most}
}

// namesRendezvous reports whether an option sets the meeting point.
func (r *resolver) namesRendezvous() bool {
	return r.c.Bool("standalone") || r.c.String("rdzv-endpoint") != "" || r.c.IsSet("master-addr") ||
		r.c.IsSet("master-port") || r.c.String("rdzv-backend") == string(master)
}

// readNamed reads a file that an option or a variable names, at most 16 MiB.
func readNamed(name string) ([]byte, error) { return openfile.ReadNamed(name, 16<<20) }

// scheduled reports whether a scheduler sets anything that the rendezvous has no variables of its own for.
func (r *resolver) scheduled() bool {
	return r.s.scheduler.Name != "" && r.s.scheduler.Name != "dlrover"
}

// meetsByScheduler reports whether the scheduler sets the meeting point. It needs the number of nodes.
func (r *resolver) meetsByScheduler() bool {
	return r.scheduled() && r.s.params.Max > 1 && !r.namesRendezvous() && r.lookup("DLROVER_MASTER_ADDR") == ""
}

func (r *resolver) rankedByScheduler() bool { return r.scheduled() && r.s.params.Max > 1 }

// sizeByScheduler compares the numbers of nodes.
func (r *resolver) sizeByScheduler(lo, hi int) (int, int, error) {
	f := &r.s.scheduler
	switch {
	case !r.scheduled() || f.Nodes == 0:
		return lo, hi, nil
	case !r.c.IsSet("nnodes"):
		return f.Nodes, f.Nodes, nil
	case lo > f.Nodes:
		return 0, 0, fmt.Errorf("--nnodes=%s needs %d nodes, but %s has started %d (from %s): leave the option out, or give "+
			"--scheduler=none", r.c.String("nnodes"), lo, f.Name, f.Nodes, strings.Join(f.From, ", "))
	case hi < f.Nodes && hi > 1:
		r.warn("--nnodes=%s, but %s has started %d nodes: the others are spares", r.c.String("nnodes"), f.Name, f.Nodes)
	}
	return lo, hi, nil
}

// meetByScheduler has node 0 serve the rendezvous. Ranks are the scheduler's as long as all its nodes are there, and
// nodes may be replaced.
func (r *resolver) meetByScheduler() error {
	f := &r.s.scheduler
	host := strings.Trim(f.MasterAddr, "[]")
	if f.NodeRank == 0 && host == "localhost" { // node 0's name for itself
		host = r.host.name
	}
	isHost := f.NodeRank == 0
	r.s.backend, r.s.host, r.s.port, r.s.isHost = c10d, host, f.MasterPort, &isHost
	switch name := r.c.String("rdzv-backend"); {
	case name == string(static) && r.c.IsSet("rdzv-backend"):
		r.s.backend = static
	case name != string(static) && name != string(c10d):
		return fmt.Errorf("--rdzv-backend=%s: where a scheduler says how nodes meet (%s) it is c10d or static", name, f.Name)
	}
	return nil
}

// scheduledAddress is where the other nodes reach this one.
func (r *resolver) scheduledAddress() string {
	if r.s.scheduler.NodeRank == 0 && r.s.host != r.host.name {
		return r.s.host
	}
	if a := r.host.route(r.s.host, r.s.port); r.s.scheduler.NodeRank != 0 && a != r.host.name {
		return a
	}
	if own := r.host.addrs(); len(own) > 0 { // node 0's name is not known yet, or is this host's
		return own[0]
	}
	return r.host.name
}

// sameRank refuses a variable that contradicts the scheduler's.
func (r *resolver) sameRank(name string) error {
	if f := &r.s.scheduler; r.rankedByScheduler() && f.NodeRank >= 0 && r.s.node.Rank != f.NodeRank {
		return fmt.Errorf("$%s=%d and %s's node rank %d (from $%s) contradict each other: unset one, or give --node-rank",
			name, r.s.node.Rank, f.Name, f.NodeRank, strings.Join(f.From, ", $"))
	}
	return nil
}

// tokenOfKey derives the job token from a secret that all nodes have. The MPI operator and Volcano give all pods of
// a job one ssh key, and a cluster with Slurm has one home directory.
func (r *resolver) tokenOfKey() bool {
	switch r.s.scheduler.Name {
	case "slurm", "mpi", "volcano":
		r.s.token, r.s.tokenFrom = token.OfKey(r.host.root, r.lookup("HOME"), r.s.runID)
	}
	return r.s.token != ""
}

// podsToken gives the job token to the pods of a template, as YAML.
const podsToken = "env: [{name: DLROVER_TOKEN, valueFrom: {secretKeyRef: {name: job-token, key: token}}}]"

// withoutToken refuses to start nodes that could not meet.
func (r *resolver) withoutToken() error {
	f := &r.s.scheduler
	hint := "give every node the same DLROVER_TOKEN (openssl rand -hex 16)"
	switch f.Name {
	case "slurm":
		hint = "before srun, do: export DLROVER_TOKEN=$(openssl rand -hex 16); or have the same key of ssh in ~/.ssh, " +
			"which only its owner may read"
	case "kubeflow", "ms-operator", "jobset", "statefulset":
		hint = "give the container in the template of every role of pods this line: " + podsToken + "; its Secret is made " +
			"by: kubectl create secret generic job-token --from-literal=token=$(openssl rand -hex 16)"
	}
	return fmt.Errorf("%s says that the nodes meet at %s, on a network, which needs a job token: %s; --insecure, or "+
		"PET_INSECURE=1, does without", f.Name, r.s.endpoint(), hint)
}

// endpoint is where the nodes meet.
func (s *settings) endpoint() string { return net.JoinHostPort(s.host, strconv.Itoa(s.port)) }

// scheduledText describes the scheduler's values in use; "" if there are none.
func (s *settings) scheduledText() string {
	f := &s.scheduler
	switch {
	case f.Name == "" || f.Name == "dlrover":
		return ""
	case s.backend == local && s.slotsWhy != f.Name:
		return ""
	case s.backend == local:
		return fmt.Sprintf("%s: one node, workers: %d (from %s)", f.Name, s.slots, strings.Join(f.From, ", "))
	}
	who := fmt.Sprintf("node %d", f.NodeRank)
	if f.NodeRank < 0 {
		who = "a node"
	}
	if f.Share != "" {
		who += " (" + f.Share + ")"
	}
	text := fmt.Sprintf("%s: %s of %s, which meet at %s (from %s)", f.Name, who, nodesText(s), s.endpoint(),
		strings.Join(f.From, ", "))
	if s.tokenFrom != "" {
		text += "; no DLROVER_TOKEN: the job token is derived from " + s.tokenFrom + ", which all nodes must share"
	}
	return text
}

func nodesText(s *settings) string {
	if s.params.Min == s.params.Max {
		return strconv.Itoa(s.params.Max)
	}
	return fmt.Sprintf("%d to %d", s.params.Min, s.params.Max)
}

// planScheduler holds the scheduler's values, even if an option overrides them.
type planScheduler struct {
	Name     string   `json:"name"`
	Nodes    int      `json:"nodes,omitempty"`
	NodeRank int      `json:"node_rank"`
	Workers  int      `json:"workers,omitempty"`
	Share    string   `json:"share,omitempty"`
	Restart  int      `json:"restart,omitempty"`
	From     []string `json:"from"`
}

func (s *settings) planScheduler() *planScheduler {
	f := &s.scheduler
	if f.Name == "" {
		return nil
	}
	return &planScheduler{Name: f.Name, Nodes: f.Nodes, NodeRank: f.NodeRank, Workers: f.Slots, Share: f.Share,
		Restart: f.Restart, From: f.From}
}
