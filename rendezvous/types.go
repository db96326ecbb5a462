package rendezvous

import (
	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"fmt"
	"time"
)

// Defaults of Params. LastCall and JoinTimeout are torchrun's.
const (
	defaultLastCall    = 30 * time.Second
	DefaultJoinTimeout = 600 * time.Second
	defaultGrowthDelay = time.Second
	defaultGateTimeout = 5 * time.Minute
)

// MaxNodes bounds the world of one run.
const MaxNodes = 100_000

// Unlimited is the Params.MaxRestarts of a node that counts its restarts by itself, as DLRover's agents do.
const Unlimited = 1 << 30

// Params are the rules of one run. Every node of a run must bring the same Min, Max, Unit, Static, Group and, if its
// version has checks, Check; of all others the run has one value, that of the node that opened it.
type Params struct {
	// Min and Max bound the number of nodes of a world (--nnodes MIN:MAX).
	Min int `json:"min"`
	Max int `json:"max"`
	// Unit floors the world to a multiple of itself (--node_unit); 0 means 1.
	Unit int `json:"unit,omitempty"`
	// LastCall is how long a first world waits for more nodes once Min have joined, at most.
	LastCall time.Duration `json:"last_call,omitempty"`
	// Quiet ends the last call once no node has come for so long and the Promised ones are there; 0: it does not.
	Quiet time.Duration `json:"quiet,omitempty"`
	// Promised is the number of started nodes, from a scheduler's variables; 0: unknown.
	Promised int `json:"promised,omitempty"`
	// JoinTimeout bounds the forming of a world; then the run fails.
	JoinTimeout time.Duration `json:"join_timeout,omitempty"`
	// GrowthDelay collects newcomers before a running world is restarted for them.
	// A world that reaches Max restarts at once.
	GrowthDelay time.Duration `json:"growth_delay,omitempty"`
	// NodeTimeout is how long a node may give no sign of life, at least SuspectAfter. 0: UnreachableAfter if its host
	// answers no new connection either, else 15 s.
	NodeTimeout time.Duration `json:"node_timeout,omitempty"`
	// MaxRestarts is how many worker failures the whole run may spend. Unlimited gives way to the first node's that has
	// another value.
	MaxRestarts int `json:"max_restarts"`
	// Always restarts a world that has succeeded while restarts are left
	// (--restart-policy=Always).
	Always bool `json:"always,omitempty"`
	// Static fixes every node's group rank to its Node.Rank, as torchrun's static backend does.
	Static bool `json:"static,omitempty"`
	// Gate holds back every node until a check has cleared it.
	Gate bool `json:"gate,omitempty"`
	// GateTimeout is how long a world that could be sealed waits for the checks of its nodes; then it is sealed without
	// their answers. It has a default with a Gate only.
	GateTimeout time.Duration `json:"gate_timeout,omitempty"`
	// Check is how nodes are checked, in the format of the checking package; "" without. At most maxCheck bytes.
	Check string `json:"check,omitempty"`
	// CheckOnly: the run is over with its checks. Nodes that fail are not waited for, nor checked again.
	CheckOnly bool `json:"check_only,omitempty"`
	// Hang is the treatment of workers that hang, in the format of the watching package; "" without. At most maxHang
	// bytes.
	Hang string `json:"hang,omitempty"`
	// Hold has the run begin held: its nodes meet, and get no workers before an order resumes it.
	Hold bool `json:"hold,omitempty"`
	// Budget bounds restarts and times, and defines the success of the run.
	Budget Budget `json:"budget,omitzero"`
	// Group is the run's place among replica groups.
	Group Group `json:"group,omitzero"`
}

// Bounds of other packages' values in Params, in bytes.
const (
	maxCheck = 1024 // of Check
	maxHang  = 1024 // of Hang
)

// WithDefaults returns p with zero values replaced by the defaults.
func (p Params) WithDefaults() Params {
	p.Unit = max(p.Unit, 1)
	if p.LastCall == 0 {
		p.LastCall = defaultLastCall
	}
	if p.JoinTimeout == 0 {
		p.JoinTimeout = DefaultJoinTimeout
	}
	if p.GrowthDelay == 0 {
		p.GrowthDelay = defaultGrowthDelay
	}
	if p.Gate && p.GateTimeout == 0 {
		p.GateTimeout = defaultGateTimeout
	}
	p.Budget = p.Budget.withDefaults()
	return p
}

// Validate reports the first rule that p breaks.
func (p Params) Validate() error {
	p = p.WithDefaults()
	switch {
	case p.Min < 1 || p.Max < p.Min || p.Max > MaxNodes:
		return fmt.Errorf("nnodes %d:%d: need 0 < MIN <= MAX <= %d", p.Min, p.Max, MaxNodes)
	case p.floor(p.Max) < p.Min:
		return fmt.Errorf("node unit %d: no multiple of it lies within nnodes %d:%d; change --node_unit or --nnodes",
			p.Unit, p.Min, p.Max)
	case p.MaxRestarts < 0:
		return fmt.Errorf("max restarts %d: must not be negative", p.MaxRestarts)
	case min(p.LastCall, p.JoinTimeout, p.GrowthDelay, p.GateTimeout, p.Quiet) < 0 || p.Promised < 0:
		return fmt.Errorf("rendezvous timeouts must be positive "+
			"(last call %s, join timeout %s, growth delay %s, gate timeout %s, quiet %s for %d nodes)",
			p.LastCall, p.JoinTimeout, p.GrowthDelay, p.GateTimeout, p.Quiet, p.Promised)
	case p.NodeTimeout != 0 && p.NodeTimeout < SuspectAfter:
		return fmt.Errorf("node timeout %s: need at least %s, after which a host that is silent is noticed",
			p.NodeTimeout, SuspectAfter)
	case len(p.Check) > maxCheck || !text.Printable(p.Check):
		return fmt.Errorf("node checks %.100q: %s, at most %d bytes", p.Check, text.PrintableRule, maxCheck)
	case len(p.Hang) > maxHang || !text.Printable(p.Hang):
		return fmt.Errorf("hang detection %.100q: %s, at most %d bytes", p.Hang, text.PrintableRule, maxHang)
	case p.Static && p.Min != p.Max:
		return fmt.Errorf("nnodes %d:%d: the static rendezvous has a fixed size; use --nnodes=%d or --rdzv-backend=c10d",
			p.Min, p.Max, p.Max)
	case p.Group.validate() != nil:
		return p.Group.validate()
	}
	return p.Budget.validate()
}

// floor is the largest world that n nodes can form under the unit.
func (p Params) floor(n int) int { return n / p.Unit * p.Unit }

// fit is the size of the largest world of n nodes.
func (p Params) fit(n int) int { return p.floor(min(n, p.Max)) }

// Node is one launcher as it introduces itself.
type Node struct {
	// ID is unique for every launcher process: a replacement on the same host has another one.
	ID string `json:"id"`
	// Name is the node's name for people: pod name or host name.
	Name string `json:"name"`
	// Rank is the wished group rank (NODE_RANK, --node-rank), or -1 for none.
	Rank int `json:"rank"`
	// Generation grows with every replacement of the node of one wished rank
	// (NODE_ID of a DLRover pod): the newer one is right, the older one is dead.
	// 0 is no generation.
	Generation int `json:"generation,omitempty"`
	// Addr is where other nodes reach this one, IP the key of the topology file.
	Addr string `json:"addr,omitempty"`
	IP   string `json:"ip,omitempty"`
	// Addrs are all addresses of the node, at most MaxAddrs: its workers may come
	// from any of them.
	Addrs []string `json:"addrs,omitempty"`
	// Peer is the address from which the node's connection comes, and Via the daemon's own at its other end. The daemon
	// overwrites them; both are "" for a node in its process.
	Peer string `json:"peer,omitempty"`
	Via  string `json:"via,omitempty"`
	// Slots is the number of workers on this node (nproc-per-node); 0: it serves workers of other nodes, and the run
	// succeeds without it.
	Slots int    `json:"slots"`
	Role  string `json:"role,omitempty"`
	// Machine is the name of the node's machine, that of a pod by its cluster; "": as Name, or unknown. Devices is how
	// many accelerators its workers may use. Both are for people.
	Machine string `json:"machine,omitempty"`
	Devices int    `json:"devices,omitempty"`
	// Uptime is the age of the launcher process when it joins. It distinguishes a late node of a finished run from the
	// first node of the next one.
	Uptime time.Duration `json:"uptime,omitempty"`
	// Ports are free TCP ports of the node, at most MaxPorts, that its workers may listen on: the whole world gets them.
	Ports []int `json:"ports,omitempty"`
	// Bases are the first ports of free ranges, as long as the collectives of the node's devices need, in the node's order
	// of preference. There are at most maxBases. The whole world gets them, and takes one that all nodes have.
	Bases []int `json:"bases,omitempty"`
	// Life is a port at which only the launcher listens, for as long as it lives; the zero value is none.
	Life Life `json:"life,omitzero"`
	// Serve is the port at which the launcher can serve the rendezvous when the one that does so is lost; 0: it cannot.
	Serve int `json:"serve,omitempty"`
	// Agent names the program that the node runs instead of our launcher, AgentDLRover; "" is ours. Such a node has its
	// workers serve their store.
	Agent string `json:"agent,omitempty"`
	// Can lists the launcher's abilities beyond the first version of the protocol, at most maxAbilities.
	Can []Ability `json:"can,omitempty"`
}

// AgentDLRover is the Node.Agent of an agent that is DLRover's own, in Python.
const AgentDLRover = "dlrover"

// Life is a TCP port that only its owner's end closes. A client that connects gets the key, at most MaxName bytes. The
// key distinguishes the port's owner from a stranger behind the same address; it is no secret.
type Life struct {
	Port int    `json:"port"`
	Key  string `json:"key"`
}

// Ability is a feature that only some versions of the launcher have. A daemon never requests it from other launchers.
type Ability string

// The abilities of a launcher.
const (
	// CanGate: it knows the directives Check and Bar.
	CanGate Ability = "gate"
	// CanNotice: it reads notices.
	CanNotice Ability = "notices"
	// CanHold: it knows Directive.Hold, and CanCommand: it executes Directive.Command.
	CanHold    Ability = "hold"
	CanCommand Ability = "command"
	// CanLeave: it knows Directive.Leave.
	CanLeave Ability = "leave"
	// CanStream: it opens the streams that notices ask for.
	CanStream Ability = "streams"
	// CanProfile: it knows streams.Request.Profile.
	CanProfile Ability = "profile"
)

// Bounds of a Node, so that the world table stays small.
const (
	MaxName      = 512 // bytes of an id, a name, a role or an address
	MaxAddrs     = 16
	MaxPorts     = 256
	maxBases     = 16
	maxAbilities = 16
)

// Directive is the present duty of one node. Only the newest one counts.
type Directive struct {
	// Seq grows with every directive and differs between histories.
	Seq  uint64   `json:"seq"`
	Kind job.Kind `json:"kind"`
	job.EpochID
	// Place is set for Lead and Run.
	Place *job.Place `json:"place,omitempty"`
	// Restarts is the number of restarts so far.
	Restarts int `json:"restarts,omitempty"`
	// Cause is the reason for a Stop, for this epoch or for a Fail.
	Cause *job.Cause `json:"cause,omitempty"`
	// Params are the run's, when this node brought others.
	Params *Params `json:"params,omitempty"`
	// Paused is set while the run is paused, with the author and the reason: no limit on waiting counts meanwhile.
	Paused *job.Cause `json:"paused,omitempty"`
	// Barred is set while an order bars the node's name, in any state of the node. It precedes Bar, for a daemon that is
	// restarted before the node has ended its workers.
	Barred *job.Cause `json:"barred,omitempty"`
	// Hold, with Run: start no workers, but be ready to.
	Hold bool `json:"hold,omitempty"`
	// Command is the workers' command; nil: the one with which their node was started.
	Command *job.Command `json:"command,omitempty"`
	// Spent is the used part of the run's budget besides Restarts; nil is nothing.
	Spent *Spent `json:"spent,omitempty"`
	// Failover, with Run, tells which launchers may serve the rendezvous next; nil: none. With Wait or Bar it is that of
	// others, which elect without this node.
	Failover *Failover `json:"failover,omitempty"`
	// Bars are the names that orders have barred, for a node that may serve the run next; nil is no news.
	Bars *Bars `json:"bars,omitempty"`
	// Leave is why this node shall end its workers, if it has any, and leave the run for good.
	Leave *job.Cause `json:"leave,omitempty"`
}

// Confirms reports that d is a Run which starts nothing: the run is paused, or the node barred. A daemon that rebuilds
// a world gives it to all nodes of it, and cannot know that the workers of some have not been started yet.
func (d Directive) Confirms() bool { return d.Kind == job.Run && (d.Paused != nil || d.Barred != nil) }

// Bounds of one epoch's kept evidence, and of the part that a leaving node gets: in a failed run of 10,000 nodes every
// one gets it.
const (
	maxKept = 256
	maxTold = 16
)

// NodeStatus is one row of the status page.
type NodeStatus struct {
	Name  string `json:"name"`
	State string `json:"state"`
	// GroupRank is -1 for a node that is in no world.
	GroupRank int    `json:"group_rank"`
	Addr      string `json:"addr,omitempty"`
	Slots     int    `json:"slots"`
	// Connected: a request of the node is being held. Suspect: its connection broke.
	Connected bool `json:"connected"`
	Suspect   bool `json:"suspect,omitempty"`
	// Barred is why the node gets no workers.
	Barred *job.Cause `json:"barred,omitempty"`
	// Since is the start of its launcher, and Restarts how often its workers were started again.
	Since    time.Time `json:"since,omitzero"`
	Restarts int       `json:"restarts,omitempty"`
	Role     string    `json:"role,omitempty"`
	Machine  string    `json:"machine,omitempty"`
	Devices  int       `json:"devices,omitempty"`
	// Switch is its access switch by the topology, or without one the domain that its check has found; "" is unknown.
	Switch string `json:"switch,omitempty"`
}

// Status is a picture of a run for people and metrics.
type Status struct {
	Phase     string     `json:"phase"`
	Round     int        `json:"round"`
	Epoch     int        `json:"epoch"`
	Params    Params     `json:"params"`
	Restarts  int        `json:"restarts"`
	Members   int        `json:"members"`
	Waiting   int        `json:"waiting"`
	WorldSize int        `json:"world_size"`
	Outcome   string     `json:"outcome,omitempty"`
	Cause     *job.Cause `json:"cause,omitempty"`
	// Paused names the author and reason of a pause, and Bars the names of nodes that get no workers.
	Paused *job.Cause           `json:"paused,omitempty"`
	Bars   map[string]job.Cause `json:"bars,omitempty"`
	// Hold is why the run is held, and Command the workers' command if it differs from the nodes' own.
	Hold    *job.Cause   `json:"hold,omitempty"`
	Command *job.Command `json:"command,omitempty"`
	// Budget is the remaining one of a run that has a world or had one.
	Budget *BudgetStatus `json:"budget,omitempty"`
	// EndedAt is when the run got its Outcome.
	EndedAt time.Time `json:"ended_at,omitzero"`
	// Missing are nodes of the newest world that have gone, as long as no other world has followed; 256 at most.
	Missing []job.Loss `json:"missing,omitempty"`
	// Due are the events that time alone brings to the run, the next first.
	Due []Due `json:"due,omitempty"`
}
