// Package feature describes a task of the launcher apart from starting workers. Each one is a package next to this, and
// a row in the table of features in internal/app/run.
package feature

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"dlrover-run/internal/app/run/events"
	"dlrover-run/internal/app/run/pypath"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/console"
	"dlrover-run/internal/exposition"
	"dlrover-run/internal/job"
	"dlrover-run/internal/secure"
	"dlrover-run/launcher"
	"dlrover-run/launcher/argv/native"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/preset"
	"dlrover-run/launcher/proc"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto/upstream"
	"dlrover-run/rendezvous/tcpstore"
)

// Feature is a task of the launcher. Its functions share the variables of the closure that made it. A nil function has
// nothing to do.
type Feature struct {
	Name string
	// Settings reads and checks the feature's options.
	Settings func(Options) error
	// Plan adds to the --dry-run output.
	Plan func(*Plan)
	// Open prepares everything that can fail, before any other node is contacted. It returns nil for a feature that was
	// not requested.
	Open func(Node) (*Opened, error)
}

// Opened is a feature that was requested. A nil function has nothing to do. They are called in this order, apart from
// the part's hooks, Observe and the taps, which are called while the agent runs:
//
//	Open -> Joined -> Configure -> Part, Observe, taps -> Part.End -> Release -> Close
type Opened struct {
	launcher.Part // the launcher names it
	// Joined acts when this node has joined its run.
	Joined func()
	// Configure changes how workers are run.
	Configure func(*launcher.Config)
	// Observe is notified of the events on this node.
	Observe func(launcher.Event)
	// Tap gets the workers' output, from a worker's start on. A feature that reads it only now and then follows the logs.
	Tap func(id logs.WorkerID, stream logs.Std) logs.Tap
	// SideTap gets the output of the side processes.
	SideTap func(name string) logs.Tap
	// Release frees the resources of workers and side processes when all of them have ended.
	Release func()
	// Close frees the rest, when the other nodes have been notified as well.
	Close func() error

	// Steps and Saves are how far the workers have come, for a feature that counts their steps or their checkpoints.
	Steps func() job.Progress
	Saves func() job.Progress
	// Unsaved is why saves may not be on disk; it is called after Part.End.
	Unsaved func() error
	// Page serves browsers that come to a rendezvous in this process, below /ui/.
	Page http.Handler
	// Profile has a worker of this node write a trace, see Node.
	Profile Profile
	// Upstream is the check of this node under DLRover's master.
	Upstream func(context.Context) (upstream.Check, error)
}

// Profile has the worker of a rank write a trace of some time to a file. The note says what is in it.
type Profile func(ctx context.Context, rank int, last time.Duration, to string) (note string, err error)

// Plan is the part of the --dry-run output that features write.
type Plan struct {
	// Checkpoints is left out when no daemon is wanted.
	Checkpoints any `json:"checkpoints,omitempty"`
	// Features are the parts of the other features, by name. A feature that was not requested adds nothing.
	Features map[string]any `json:"features,omitempty"`
	// Env are variables of the workers that features set at the start, with a placeholder where the value is not known.
	Env []string `json:"-"`
}

// Options are the command line, the environment and this host.
type Options interface {
	IsSet(option string) bool
	Bool(option string) bool
	Args() []string // the script and its arguments
	Int(option string) int
	String(option string) string
	Strings(option string) []string
	// Within is the value of an option of type Duration within bounds, both of them inclusive.
	Within(option string, least, most time.Duration) (time.Duration, error)
	// Lookup is the value of a variable of the environment; "" if it is not set.
	Lookup(variable string) string
	LookupEnv(variable string) (string, bool)
	Environ() []string
	// LookPath finds a program.
	LookPath(program string) (string, error)
	// Python is the workers' interpreter.
	Python() (string, error)
	// GPUs counts the accelerators of this node.
	GPUs() (n int, kind string)
	// SharedMemory is the room in /dev/shm; false if it is not known.
	SharedMemory() (free int64, known bool)
	// Warn adds a warning, which is logged when the job starts.
	Warn(format string, args ...any)
	// Job is the job as the options before have it.
	Job() *Job
}

// Job has the settings of the job that features read. A feature may change the values behind its pointers.
type Job struct {
	Called  string          // the name of the launcher, which may be another's
	Command *native.Command // the meaning of another launcher's command line
	RunID   string
	Params  *rendezvous.Params
	Node    *rendezvous.Node // this one
	Slots   int              // workers of this node
	First   bool             // this node is sure to get group rank 0
	Port    int              // where the nodes meet
	Preset  *preset.Preset
	Workdir string // of the workers; "": the launcher's
	ShmDir  string

	Local     bool   // the rendezvous stays inside this process
	Master    bool   // dlrover-master serves it, or DLRover's own
	Meeting   string // where and how the nodes meet
	Token     string
	TokenFile string // absolute; "": the token is from elsewhere
	TLS       secure.Choice
	Insecure  bool
	LogDir    string
	LogFormat console.Format
	Bare      bool // this node has a side process, and no workers
	// World returns the assumed world before the nodes have met, and the number of its workers.
	World func() (nodes []preset.Node, workers int)
}

// Node is the running launcher of this node.
type Node interface {
	Job() *Job
	Log() *slog.Logger
	// Events is the event log.
	Events() events.Writer
	// Finding tells the run of a finding in a worker's output.
	Finding(rule string, rank int, text string)
	// Scrape has tell called for every scrape of the metrics; false if there are none.
	Scrape(tell func(*exposition.Scrape)) bool
	// Python is the workers' PYTHONPATH.
	Python() *pypath.Path
	// Environ is the environment that workers inherit.
	Environ() []string
	// Profile is that of the feature that has one; nil: there is none. It is known when all features are open.
	Profile() Profile
	// PID is the process that the user has started, or the launcher of several hosts.
	PID() int
	// Logs is the workers' output, and Processes are their processes. Both are nil before all features are open.
	Logs() *logs.Logs
	Processes() *proc.Supervisor
	// Rendezvous is where this node meets the others; nil before it tries to join.
	Rendezvous() Rendezvous
	// SetPorts and SetBases change the offers of this node to the next world.
	SetPorts(ports []int)
	SetBases(bases []int)
}

// Rendezvous is this node's side of the rendezvous, in this process or elsewhere.
type Rendezvous interface {
	// Served is the service in this process, and Client that of a rendezvous elsewhere; one of them is nil.
	Served() *service.Service
	Client() *api.Client
	// Upstream is DLRover's own master; nil if the rendezvous is ours.
	Upstream() *upstream.Service
	// Daemons is the address that the checkpoint daemons of several nodes share; "" for one node.
	Daemons() string
	// FollowDaemons has move called with every later address of Daemons.
	FollowDaemons(move func(addr string))
	// WhenServing has serving called once this process serves the rendezvous, which it does from its start or once it was
	// elected, with its own address on this host.
	WhenServing(serving func(addr string))
	// Store serves the workers. LendStore admits other nodes as well, until end is called.
	Store() *tcpstore.Server
	LendStore(others []string) (addr string, end func())
}

// NeedsWorld is the Configure of features that read the nodes of the world.
func NeedsWorld(cfg *launcher.Config) { cfg.NeedsWorld = true }

// OnNotice is a feature that only reads notices.
func OnNotice(f func(topic, body string)) *Opened {
	return &Opened{Configure: func(cfg *launcher.Config) { cfg.OnNotice = append(cfg.OnNotice, f) }}
}

// Unusable gives an option that has no effect here the exit status of a wrong one.
func Unusable(err error) error {
	if err == nil {
		return nil
	}
	return &launcher.ReasonError{Reason: policy.Usage, Err: err}
}

// MaxDeadline is ten years.
const MaxDeadline = 10 * 365 * 24 * time.Hour

// NoAccelerator is the --accelerator of a job on CPUs, with any devices.
const NoAccelerator = "cpu"

// Kinds are the kinds of devices that an --accelerator names, by DLRover's names; nil for any.
func Kinds(accelerator string) []string {
	switch accelerator {
	case "nvidia.com/gpu":
		return []string{"cuda", "rocm", "metax"} // all that answer to torch.cuda
	case "metax-tech.com/gpu":
		return []string{"metax"}
	case "ascend-npu":
		return []string{"ascend"}
	case "mthreads.com/gpu":
		return []string{"musa"}
	}
	return nil
}
