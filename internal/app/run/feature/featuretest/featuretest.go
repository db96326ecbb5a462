// Package featuretest has the surroundings of a feature for its tests.
package featuretest

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/freeports"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/argv/native"
	"dlrover-run/launcher/preset"
	"dlrover-run/rendezvous"
)

// Options are those of a command line and an environment.
type Options struct {
	*argv.Line
	Env      map[string]string
	Kind     string // of the devices of this host
	Devices  int
	Warnings []string
	Of       feature.Job
}

// Read reads the options of a command line.
func Read(t *testing.T, line string, env map[string]string) *Options {
	t.Helper()
	o := &Options{Env: env, Of: Job()}
	var err error
	o.Line, err = argv.Parse(argv.Options(), strings.Fields(line), o.LookupEnv)
	require.NoError(t, err)
	return o
}

// Job is a job with nothing set.
func Job() feature.Job {
	return feature.Job{Command: &native.Command{}, Params: &rendezvous.Params{}, Node: &rendezvous.Node{},
		Preset: &preset.Preset{}}
}

// Within implements feature.Options, without bounds.
func (o *Options) Within(option string, _, _ time.Duration) (time.Duration, error) {
	return o.Duration(option), nil
}

// Lookup implements feature.Options.
func (o *Options) Lookup(variable string) string { return o.Env[variable] }

// LookupEnv implements feature.Options.
func (o *Options) LookupEnv(variable string) (string, bool) { v, set := o.Env[variable]; return v, set }

// Environ implements feature.Options.
func (o *Options) Environ() (kvs []string) {
	for name, value := range o.Env {
		kvs = append(kvs, name+"="+value)
	}
	return kvs
}

// LookPath implements feature.Options.
func (o *Options) LookPath(program string) (string, error) { return exec.LookPath(program) }

// Python implements feature.Options.
func (o *Options) Python() (string, error) { return exec.LookPath("python3") }

// GPUs implements feature.Options.
func (o *Options) GPUs() (n int, kind string) { return o.Devices, o.Kind }

// SharedMemory implements feature.Options.
func (o *Options) SharedMemory() (free int64, known bool) { return 0, false }

// Warn implements feature.Options.
func (o *Options) Warn(format string, args ...any) {
	o.Warnings = append(o.Warnings, fmt.Sprintf(format, args...))
}

// Job implements feature.Options.
func (o *Options) Job() *feature.Job { return &o.Of }

// Node is a node without services; a test that needs one sets Node.
type Node struct {
	feature.Node
	Of    feature.Job
	Offer func([]int) // SetPorts and SetBases
	At    feature.Rendezvous
}

// Rendezvous implements feature.Node.
func (n *Node) Rendezvous() feature.Rendezvous { return n.At }

// Rendezvous is one with a service, or without.
type Rendezvous struct {
	feature.Rendezvous
	Service *service.Service
}

// Served implements feature.Rendezvous.
func (r Rendezvous) Served() *service.Service { return r.Service }

// SetPorts implements feature.Node.
func (n *Node) SetPorts(ports []int) { n.Offer(ports) }

// SetBases implements feature.Node.
func (n *Node) SetBases(bases []int) { n.Offer(bases) }

// Job implements feature.Node.
func (n *Node) Job() *feature.Job { return &n.Of }

// Log implements feature.Node.
func (n *Node) Log() *slog.Logger { return slog.New(slog.DiscardHandler) }

// FreeStretch is where many ranges in a row are free, and no other test looks for any: who has the last port of a
// stretch has all of it. DLRover's agents take theirs from 20000 on, and the kernel's are higher.
func FreeStretch(t *testing.T, size int) int {
	t.Helper()
	const first, last = 2000, 10000 // freeports.ForServer takes none of these
	for _, i := range rand.Perm((last - first) / size) {
		start := first + i*size
		claim, err := net.Listen("tcp", fmt.Sprintf(":%d", start+size-1))
		if err != nil {
			continue
		}
		t.Cleanup(func() { _ = claim.Close() })
		if freeports.AreFree(start, size-1) {
			return start
		}
	}
	t.Skipf("SKIPPED: TRAINING PORTS ARE NOT TESTED: no %d free ports in a row between %d and %d", size, first, last)
	return 0
}
