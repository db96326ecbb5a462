package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"dlrover-run/rendezvous/kube"
	"dlrover-run/rendezvous/kube/kubetest"
	"dlrover-run/rendezvous/nodes"
)

const (
	machineCount = 4
	slowMachine  = 2 // the one with a slow link
	spareMachine = 4

	firstMark = 8 * time.Second
	stepLimit = 45 * time.Second
)

func machine(n int) string { return fmt.Sprintf("gpu-%02d", n) }
func pod(n int) string     { return fmt.Sprintf("pod-%d", n) }

// feedback shows how a faulty node is found, marked and cleared: in network namespaces, where that is possible, for
// which it runs itself once more; name is then that of theirs.
func feedback(ctx context.Context, s *screen, bin, name string) error {
	if _, err := os.Stat(filepath.Join(bin, "dlrover-run")); err != nil {
		return fmt.Errorf("%w; run 'make build' first, or name the directory with --bin", err)
	}
	if name != "" {
		return playFeedback(ctx, s, bin, hall{name}, played)
	}
	why := possible()
	if why == nil {
		h := hall{fmt.Sprintf("dlf%d-", os.Getpid())}
		defer h.remove()
		if why = h.build(); why == nil {
			return h.enter(ctx, bin)
		}
		h.remove()
	}
	s.line("All nodes are on loopback, and a health check plays the slow link: %v.", why)
	return playFeedback(ctx, s, bin, hall{}, played)
}

// kubernetes is what the story needs of a cluster. What is not there is "".
type kubernetes interface {
	addNode(name string)
	masterPod() (env map[string]string) // makes the pod of dlrover-master
	taint(node string) string           // the value of ours
	avoid() string                      // the annotation kube.AvoidKey of the master's pod
}

// masterRights are those of the manifests for taints and for the nodes to avoid.
var masterRights = []string{"get nodes", "list nodes", "patch nodes", "create events", "patch pods"}

const (
	namespace = "training"
	masterPod = "dlrover-master-0"
)

// playedCluster is an API server in this program.
type playedCluster struct {
	t      kubetest.T
	server *kubetest.Server
}

func played(f *feedbackStory) kubernetes { return playedCluster{f, kubetest.Start(f)} }

func (k playedCluster) addNode(name string) { k.server.AddNode(k.t, name) }

func (k playedCluster) masterPod() map[string]string {
	return k.server.Pod(k.t, namespace, masterPod, masterRights...)
}

func (k playedCluster) taint(node string) string {
	value, _ := k.server.Taint(node)
	return value
}

func (k playedCluster) avoid() string {
	text, _ := k.server.PodAnnotations(namespace, masterPod)[kube.AvoidKey].(string)
	return text
}

// playFeedback plays the story in a cluster that start starts.
func playFeedback(ctx context.Context, s *screen, bin string, h hall, start func(*feedbackStory) kubernetes) error {
	if err := adoptOrphans(); err != nil {
		return err
	}
	return inDirectory(ctx, s, func(dir string) error {
		c, err := newCluster(dir, bin, "", nil)
		if err != nil {
			return err
		}
		defer c.close()
		c.wg.Go(c.drain)
		f := &feedbackStory{screen: s, ctx: ctx, c: c, h: h}
		defer f.cleanUp()
		if h.inSpaces() {
			c.on = f.command
		}
		f.k = start(f)
		s.began = time.Now()
		return f.run()
	})
}

// drain takes what is seen and told by nobody here.
func (c *cluster) drain() {
	for {
		select {
		case <-c.records:
		case <-c.quit:
			return
		}
	}
}

// feedbackStory is told by one goroutine.
type feedbackStory struct {
	*screen
	ctx     context.Context
	c       *cluster
	h       hall
	k       kubernetes
	env     []string // of a pod of the cluster
	cleanup []func()
	told    int // lines of the daemon's event log
}

// What kubetest needs: this is no test.
func (f *feedbackStory) Helper()             {}
func (f *feedbackStory) Fatal(args ...any)   { panic(fmt.Sprint(args...)) }
func (f *feedbackStory) Cleanup(done func()) { f.cleanup = append(f.cleanup, done) }
func (f *feedbackStory) TempDir() string {
	dir, err := os.MkdirTemp(f.c.dir, "cluster-")
	if err != nil {
		f.Fatal(err)
	}
	return dir
}

func (f *feedbackStory) cleanUp() {
	for _, done := range slices.Backward(f.cleanup) {
		done()
	}
}

// command runs a program in the namespace of its machine.
func (f *feedbackStory) command(name, program string, args []string) []string {
	line := append([]string{program}, args...)
	for n := 1; n <= machineCount; n++ {
		if strings.HasPrefix(name, pod(n)) {
			return append([]string{"ip", "netns", "exec", f.h.space(n)}, line...)
		}
	}
	return line // this program's own, which is the switch's
}

func (f *feedbackStory) run() error {
	for n := 1; n <= machineCount; n++ {
		f.k.addNode(machine(n))
	}
	for name, value := range f.k.masterPod() {
		f.env = append(f.env, name+"="+value)
	}
	f.line("A cluster of four nodes, with an API server as Kubernetes has it. Three pods are to train, one is a spare.\n"+
		"The link of %s is slow.\n", machine(slowMachine))
	for _, chapter := range []func() error{f.marked, f.expired, f.recheck} {
		if err := chapter(); err != nil {
			return err
		}
	}
	f.line("\n%s  the node is in use again, and %s has nothing left to undo", f.paint(green, "ok    "), "dlrover-master")
	return nil
}

// startDaemon starts a dlrover-master with what the one before knew.
func (f *feedbackStory) startDaemon(markTime time.Duration) error {
	args := []string{"--node-action=taint", "--node-mark-time=" + markTime.String(), "--data-dir=" + f.c.path("data")}
	if f.h.inSpaces() {
		args = append(args, "--listen="+hubAddr+":0")
	}
	err := f.c.startMaster(f.ctx, f.env, args...)
	if err == nil {
		f.now("dlrover-master --node-action=taint --node-mark-time=%v --data-dir=... serves at %s", markTime, f.c.addr)
	}
	return err
}

func (f *feedbackStory) now(format string, args ...any) { f.tell(time.Now(), format, args...) }

// worker trains until it is told to stop.
const worker = "#!/bin/sh\n: >\"$1/up.$NODE_NAME\"\nwhile [ ! -e \"$1/stop\" ]; do sleep 0.1; done\n"

// checkScript is the health check of a site on loopback.
const checkScript = "#!/bin/sh\n[ ! -e \"$SLOW.$NODE_NAME\" ] || { echo 'eth0 sends 38 Mbit/s of 96'; exit 1; }\n"

// launch starts the launcher of a pod.
func (f *feedbackStory) launch(n int, what, run string, more ...string) (*child, error) {
	args := []string{"--rdzv-id=" + run, "--nproc-per-node=1", "--exit-code-policy=reason",
		"--rdzv-conf=last_call_timeout=3,join_timeout=120"}
	env := []string{"POD_NAME=" + pod(n), "NODE_NAME=" + machine(n), "DLROVER_MASTER_ADDR=" + f.c.addr}
	if f.h.inSpaces() {
		args = append(args, "--network-check", "--check-level=host", "--exclude-straggler")
	} else {
		args = append(args, "--health-check="+f.c.path("check"))
		env = append(env, "SLOW="+f.c.path("slow"))
	}
	return f.c.start(pod(n)+what, "dlrover-run", append(args, more...), env, nil)
}

// slow makes the link of the machine slow, or repairs it.
func (f *feedbackStory) slow(is bool) error {
	if f.h.inSpaces() {
		rate := fullRate
		if is {
			rate = slowRate
		}
		return f.h.rate(slowMachine, rate)
	}
	path := f.c.path("slow." + machine(slowMachine))
	if is {
		return os.WriteFile(path, nil, 0o600)
	}
	return os.Remove(path)
}

// marked: the faulty node is found before training, and the spare takes its place.
func (f *feedbackStory) marked() error {
	f.line("%s", f.paint(bold, "1. Found before training, barred, recorded, marked"))
	err := errors.Join(os.WriteFile(f.c.path("worker"), []byte(worker), 0o755),
		os.WriteFile(f.c.path("check"), []byte(checkScript), 0o755), f.slow(true))
	if err != nil {
		return err
	}
	if err := f.startDaemon(firstMark); err != nil {
		return err
	}
	f.now("three launchers and a spare start: dlrover-run --nnodes=3 ...; their nodes are checked first")
	pods := map[int]*child{}
	for n := 1; n <= machineCount; n++ {
		if n == spareMachine { // the three are first
			if err := f.event("join", pod(slowMachine)); err != nil {
				return err
			}
		}
		if pods[n], err = f.launch(n, "", "job", "--nnodes=3", "--no-python", f.c.path("worker"), f.c.dir); err != nil {
			return err
		}
	}
	if err := f.event("barred", pod(slowMachine)); err != nil {
		return err
	}
	if err := f.ends(pods[slowMachine], 40); err != nil {
		return err
	}
	if err := f.event("node-marked", machine(slowMachine)); err != nil {
		return err
	}
	if err := f.tainted(true); err != nil {
		return err
	}
	for _, n := range []int{1, 3, spareMachine} {
		if err := f.until("the workers run", f.exists("up."+machine(n))); err != nil {
			return err
		}
	}
	f.now("%s %s, %s and, in the place of %s, %s", f.paint(green, "training:"), machine(1), machine(3),
		machine(slowMachine), machine(spareMachine))
	if err := f.show("nodes"); err != nil {
		return err
	}
	return os.WriteFile(f.c.path("stop"), nil, 0o600)
}

// expired: nobody does anything, and the mark ends.
func (f *feedbackStory) expired() error {
	f.line("\n%s", f.paint(bold, "2. The mark expires"))
	if err := f.event("node-unmarked", machine(slowMachine)); err != nil {
		return err
	}
	return f.tainted(false)
}

// recheck: the node is found again, repaired, and cleared by a check that passes.
func (f *feedbackStory) recheck() error {
	f.line("\n%s", f.paint(bold, "3. Found again, repaired, and cleared by a check that passes"))
	if err := f.replaceDaemon(); err != nil {
		return err
	}
	f.now("the link of %s is still slow; a check of three nodes: dlrover-run --nnodes=2:3 --check-only ...",
		machine(slowMachine))
	if err := f.check("first", 40, 1, slowMachine, 3); err != nil {
		return err
	}
	if err := f.event("node-marked", machine(slowMachine)); err != nil {
		return err
	}
	if err := f.tainted(true); err != nil {
		return err
	}
	if err := f.slow(false); err != nil {
		return err
	}
	f.now("the link is repaired; another check, beside the spare")
	if err := f.check("second", 0, slowMachine, spareMachine); err != nil {
		return err
	}
	if err := f.event("node-unmarked", machine(slowMachine)); err != nil {
		return err
	}
	if err := f.tainted(false); err != nil {
		return err
	}
	return f.show("nodes")
}

// replaceDaemon kills the daemon as a crash would, and starts another one, whose marks last longer.
func (f *feedbackStory) replaceDaemon() error {
	before, err := f.findings()
	if err != nil {
		return err
	}
	if err := f.c.daemon.cmd.Process.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-f.c.daemon.done
	f.now("dlrover-master is killed with kill -9")
	if err := f.startDaemon(time.Hour); err != nil {
		return err
	}
	after, err := f.findings()
	switch {
	case err != nil:
		return err
	case len(before) == 0 || !slices.Equal(before, after):
		return fmt.Errorf("what was found about %s was %v, and is %v after the restart", machine(slowMachine), before, after)
	}
	f.now("it knows what the one before knew of %s: %s", machine(slowMachine), after[0].Text)
	return nil
}

// findings are what the daemon knows of the slow machine, the newest first.
func (f *feedbackStory) findings() (found []nodes.Finding, err error) {
	out, err := f.ctl("nodes", "--json")
	if err != nil {
		return nil, err
	}
	var known struct{ Nodes []nodes.Node }
	if err := json.Unmarshal(out, &known); err != nil {
		return nil, fmt.Errorf("dlroverctl nodes --json: %w", err)
	}
	for _, n := range known.Nodes {
		for _, k := range n.Findings {
			if n.Name == machine(slowMachine) {
				found = append(found, k.Finding)
			}
		}
	}
	return found, nil
}

// check has machines check themselves and each other; the slow one's launcher ends with code.
func (f *feedbackStory) check(what string, code int, machines ...int) error {
	pods := map[int]*child{}
	for _, n := range machines {
		p, err := f.launch(n, "-"+what, what, fmt.Sprintf("--nnodes=2:%d", len(machines)), "--check-only")
		if err != nil {
			return err
		}
		pods[n] = p
	}
	for n, p := range pods {
		want := code
		if n != slowMachine {
			want = 0
		}
		if err := f.ends(p, want); err != nil {
			return err
		}
	}
	return nil
}

// ends waits for a launcher.
func (f *feedbackStory) ends(p *child, code int) error {
	late, cancel := context.WithTimeout(f.ctx, stepLimit)
	defer cancel()
	p.wait(late)
	switch {
	case f.ctx.Err() != nil:
		return context.Cause(f.ctx)
	case p.running():
		return fmt.Errorf("%s still runs after %v", p.name, stepLimit)
	case p.code != code:
		return fmt.Errorf("%s ended with code %d, not %d", p.name, p.code, code)
	}
	if code != 0 {
		f.now("%s: its launcher ends with code %d, and the pod with it", p.name, code)
	}
	return nil
}

// until waits for something to be so.
func (f *feedbackStory) until(what string, is func() bool) error {
	for end := time.Now().Add(stepLimit); !is(); {
		if time.Now().After(end) {
			return fmt.Errorf("after %v it is still not so that %s", stepLimit, what)
		}
		select {
		case <-time.After(poll):
		case <-f.c.daemon.done:
			return fmt.Errorf("dlrover-master ended with code %d: %s", f.c.daemon.code, lastLineOf(f.c.path("master.stderr")))
		case <-f.ctx.Done():
			return context.Cause(f.ctx)
		}
	}
	return nil
}

func (f *feedbackStory) exists(name string) func() bool {
	return func() bool {
		_, err := os.Stat(f.c.path(name))
		return err == nil
	}
}

// event waits for an event about a node in the daemon's log, and tells it. Others are passed over.
func (f *feedbackStory) event(event, node string) error {
	return f.until("the events tell of "+event+" of "+node, func() bool {
		data, _ := os.ReadFile(f.c.path("master.events")) // there is none at first
		lines := bytes.SplitAfter(data, []byte("\n"))
		for _, line := range lines[min(f.told, len(lines)):] {
			var e struct {
				Time              time.Time
				Event, Node, Text string
			}
			if json.Unmarshal(line, &e) != nil {
				return false // it is not whole yet
			}
			f.told++
			if e.Event == event && e.Node == node {
				if event != "join" {
					f.tell(e.Time, "%s %s: %s", e.Event, e.Node, e.Text)
				}
				return true
			}
		}
		return false
	})
}

// tainted waits until the slow machine's node has the taint, or has not, and the master's pod the annotation with it.
func (f *feedbackStory) tainted(want bool) error {
	node, avoid := machine(slowMachine), ""
	if want {
		avoid = fmt.Sprintf("[%q]", node)
	}
	var value string
	what := fmt.Sprintf("the taint of %s is there: %v; and %s is %q", node, want, kube.AvoidKey, avoid)
	err := f.until(what, func() bool {
		value = f.k.taint(node)
		return (value != "") == want && f.k.avoid() == avoid
	})
	switch {
	case err != nil:
		return err
	case want:
		f.now("Kubernetes: node %s has the taint %s=%s:NoSchedule; no new pod comes to it", node, kube.Key, value)
		f.now("Kubernetes: the master's pod has the annotation %s: %s", kube.AvoidKey, avoid)
	default:
		f.now("Kubernetes: node %s has no taint any more", node)
	}
	return nil
}

// show prints what dlroverctl says.
func (f *feedbackStory) show(args ...string) error {
	out, err := f.ctl(args...)
	f.line("\n  $ dlroverctl %s", strings.Join(args, " "))
	for line := range strings.Lines(string(out)) {
		f.line("  %s", strings.TrimRight(line, "\n"))
	}
	f.line("")
	return err
}

// ctl asks the daemon with dlroverctl. The answer is with an error, too.
func (f *feedbackStory) ctl(args ...string) (answer []byte, err error) {
	cmd := exec.CommandContext(f.ctx, filepath.Join(f.c.bin, "dlroverctl"), args...)
	cmd.Env = append(environment(), "DLROVER_MASTER_ADDR="+f.c.addr, "DLROVER_TOKEN_FILE="+f.c.path("token"))
	if answer, err = cmd.CombinedOutput(); err != nil {
		err = fmt.Errorf("dlroverctl %s: %w: %s", strings.Join(args, " "), err, lastLine(answer))
	}
	return answer, err
}
