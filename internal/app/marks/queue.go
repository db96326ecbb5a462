package marks

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"dlrover-run/hang"
	"dlrover-run/internal/app/nodehealth"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/job"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
)

// queue collects the notes of a service, which must not block, and hands them to the Manager in batches.
type queue struct {
	mu   sync.Mutex
	runs map[string]*heard // by run; only those with news
	wake chan struct{}     // holds one when there is
}

// heard is the news of a run.
type heard struct {
	machines map[string]string // of nodes that have joined, by their names
	said     []said            // in order
}

// said is something about a node.
type said struct {
	event   job.Event // of the Note; passed is none
	node    string    // its name
	text    string
	aspect  string   // of the node, that has failed
	covered []string // aspects of the node that have passed
}

const (
	passed   = "passed"
	maxSaid  = 1 << 16 // of one run in one piece; the rest is not heard
	maxCover = 16      // aspects of one node, of nodehealth.MaxKind bytes
)

func newQueue() *queue { return &queue{runs: map[string]*heard{}, wake: make(chan struct{}, 1)} }

// Hear takes a note of a run. It is quick, and may be called with the run locked.
func (mgr *Manager) Hear(run string, n rendezvous.Note) {
	switch n.Event {
	case job.EventJoin:
		mgr.Place(run, n.Node, n.Machine)
	case job.EventBarred, job.EventLateCheck, job.EventOrder, job.EventNodeError, job.EventDeviceFault,
		job.EventLogRule, job.EventSlowFound, job.EventSlowChecked:
		mgr.queue.add(run, func(h *heard) {
			if n.Machine != "" {
				h.machines[n.Node] = n.Machine
			}
			h.say(said{event: n.Event, node: n.Node, text: n.Text, aspect: n.Aspect})
		})
	case job.EventNodeLoss, job.EventNodeLeave, job.EventBreak, job.EventSeal, job.EventRun, job.EventSucceeded,
		job.EventFailed, job.EventResumed:
		mgr.queue.add(run, func(*heard) {})
	}
}

// Place hears which machine a node of a run is on, "" if that is unknown.
func (mgr *Manager) Place(run, node, machine string) {
	mgr.queue.add(run, func(h *heard) { h.machines[node] = machine })
}

// Cleared hears which aspects of a node a check has found to be sound, by the ID of its launcher, which may leave right
// after that.
func (mgr *Manager) Cleared(run, id string, covered []string) {
	s := mgr.service.Load()
	if s == nil {
		return
	}
	if name := s.Hub.Names(run, []string{id})[id]; name != "" {
		mgr.queue.add(run, func(h *heard) { h.say(said{event: passed, node: name, covered: bounded(covered)}) })
	}
}

// bounded drops unknown aspects.
func bounded(covered []string) []string {
	covered = slices.Clone(covered[:min(len(covered), maxCover)])
	return slices.DeleteFunc(covered, func(a string) bool { return len(a) > nodehealth.MaxKind })
}

func (h *heard) say(s said) {
	if len(h.said) < maxSaid {
		h.said = append(h.said, s)
	}
}

func (q *queue) add(run string, f func(*heard)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	h := q.runs[run]
	if h == nil {
		h = &heard{machines: map[string]string{}}
		q.runs[run] = h
	}
	f(h)
	signal(q.wake)
}

// take is all that is new.
func (q *queue) take() map[string]*heard {
	q.mu.Lock()
	defer q.mu.Unlock()
	runs := q.runs
	q.runs = map[string]*heard{}
	return runs
}

// lookEvery is how often all runs are looked at, whether anything was heard of them or not.
const lookEvery = time.Hour

// Follow connects the Manager to a service that passes its notes to Hear and passed checks to Cleared. Call it once.
func (mgr *Manager) Follow(s *service.Service) {
	mgr.service.Store(s)
	l := &listener{mgr: mgr, s: s, known: map[string]*known{}}
	for _, r := range s.Hub.Runs(false) { // an earlier leader has judged them
		if epochs, err := s.Hub.Evidences(r.Run); err == nil && len(epochs) > 0 {
			l.known[r.Run] = &known{machines: map[string]string{}, judged: epochs[len(epochs)-1].EpochID}
		}
	}
	mgr.wg.Go(func() { l.listen(mgr.ctx) })
}

// listener turns notes into findings.
type listener struct {
	mgr   *Manager
	s     *service.Service
	known map[string]*known // by run
}

// known is the listener's state of a run.
type known struct {
	machines map[string]string // by the names of nodes; "" is unknown
	here     []string          // machines of the nodes that were here when it last looked
	judged   job.EpochID
}

// listen processes notes in batches. Notes from before the end of ctx are processed before it returns, so that Close
// writes them.
func (l *listener) listen(ctx context.Context) {
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for last := false; !last; {
		select {
		case <-ctx.Done():
		case <-look.C:
			l.lookAtAll()
		case <-l.mgr.queue.wake:
		}
		select {
		case <-ctx.Done():
		case <-time.After(l.mgr.cfg.Settle):
		}
		last = ctx.Err() != nil
		for run, h := range l.mgr.queue.take() {
			l.hear(run, h)
		}
	}
}

// lookAtAll has every run looked at that is here, or that was.
func (l *listener) lookAtAll() {
	l.mgr.mu.Lock()
	runs := l.mgr.registry.Runs()
	l.mgr.mu.Unlock()
	for _, r := range l.s.Hub.Runs(false) {
		runs = append(runs, r.Run)
	}
	for _, run := range runs {
		l.mgr.queue.add(run, func(*heard) {})
	}
}

// hear judges the news of a run. Its size includes nodes that have left meanwhile, because the news may be about them.
func (l *listener) hear(run string, h *heard) {
	r := l.known[run]
	if r == nil {
		r = &known{machines: map[string]string{}}
		l.known[run] = r
	}
	maps.Copy(r.machines, h.machines)
	st, err := l.s.Hub.Run(run)
	for _, n := range st.Nodes {
		r.machines[n.Name] = n.Machine
	}
	here := r.places(st.Nodes)
	before := append(slices.Clone(r.here), here...)
	for name := range h.machines {
		before = append(before, r.machine(name))
	}
	l.mgr.Size(run, before)
	l.find(run, r, h.said, st.Bars)
	l.judge(run, r)
	l.mgr.Size(run, here)
	r.here = here
	if err != nil { // the run is not kept any more
		delete(l.known, run)
	}
	r.forget(st.Nodes)
}

// forget drops the machines of nodes that have gone when there are many.
func (r *known) forget(here []rendezvous.NodeStatus) {
	if len(r.machines) < 2*len(here)+nodehealth.MaxPerNode*64 {
		return
	}
	clear(r.machines)
	for _, n := range here {
		r.machines[n.Name] = n.Machine
	}
}

// machine returns the name of a node's machine.
func (r *known) machine(node string) string {
	if m := r.machines[node]; m != "" {
		return m
	}
	return node
}

func (r *known) places(ns []rendezvous.NodeStatus) []string {
	out := make([]string, 0, len(ns))
	for _, n := range ns {
		out = append(out, r.machine(n.Name))
	}
	return out
}

// find hands over findings, all at once, and then which machines have passed a check since.
func (l *listener) find(run string, r *known, all []said, bars map[string]job.Cause) {
	var found []nodehealth.Finding
	ok := map[string][]string{} // aspects, by machine
	for _, s := range all {
		if s.event == passed {
			m := r.machine(s.node)
			ok[m] = append(ok[m], s.covered...)
			continue
		}
		kind, text := kindOf(s, bars)
		if kind == "" {
			continue
		}
		m := r.machine(s.node)
		if kind != nodehealth.LogRule {
			delete(ok, m)
		}
		found = append(found, nodehealth.Finding{Node: m, Run: run, Kind: kind, Text: text, Aspect: s.aspect})
	}
	if len(found) > 0 {
		l.mgr.Find(found...)
	}
	for _, m := range slices.Sorted(maps.Keys(ok)) {
		l.mgr.passedIfNoted(m, ok[m])
	}
}

// kindOf returns the meaning of a note about a node, and its text; "" is no meaning. Launchers whose workers survive
// SIGKILL have their own names barred because of a hang.
func kindOf(s said, bars map[string]job.Cause) (nodehealth.Kind, string) {
	what, rest, _ := strings.Cut(s.text, ": ")
	switch {
	case s.event == job.EventDeviceFault:
		return nodehealth.Kind(what), rest
	case s.event == job.EventLogRule:
		return nodehealth.LogRule, s.text
	case s.event == job.EventSlowFound || s.event == job.EventSlowChecked: // the newest is kept of each run
		return nodehealth.Slow, s.text
	case s.event == job.EventBarred || s.event == job.EventLateCheck || s.event == job.EventNodeError:
		return nodehealth.CheckFailed, s.text
	case what == string(rendezvous.OrderBar) && bars[s.node].Kind == job.CauseHang:
		return nodehealth.Unkillable, s.text
	}
	return "", ""
}

// passedIfNoted is Passed, but free of cost for the many machines without a record.
func (mgr *Manager) passedIfNoted(machine string, covered []string) {
	mgr.mu.Lock()
	noted := mgr.registry.Noted(machine)
	mgr.mu.Unlock()
	if noted {
		mgr.Passed(machine, covered...)
	}
}

// judge hands over the culprits of the epochs that have ended since its last call.
func (l *listener) judge(run string, r *known) {
	epochs, err := l.s.Hub.Evidences(run)
	if err != nil {
		return
	}
	i := slices.IndexFunc(epochs, func(e rendezvous.EpochEvidence) bool { return e.EpochID == r.judged })
	for _, e := range epochs[i+1:] {
		if v, tells := l.s.Judge(run, e); tells {
			l.blame(run, r, e, v)
		}
		r.judged = e.EpochID
	}
}

// blame records the end of an epoch: its culprit, and the findings about machines.
func (l *listener) blame(run string, r *known, e rendezvous.EpochEvidence, v service.Verdict) {
	culprit, kind := "", nodehealth.Kind("")
	switch {
	case v.Rule == verdict.WasHung:
		culprit = l.hung(run, r, v)
	case v.Rule == verdict.NodeLost:
		if !silent(e, v.RootNode) {
			return // it has left on purpose
		}
		culprit, kind = v.RootNode, nodehealth.Silent
	case v.RootRank != nil && !programs(v.Class):
		culprit, kind = v.RootNode, deviceKind(v)
	}
	if culprit != "" {
		culprit = r.machine(culprit)
	}
	if kind != "" && culprit != "" {
		l.mgr.Find(nodehealth.Finding{Node: culprit, Run: run, Kind: kind, Text: v.Line})
	}
	if culprit != "" && l.mgr.cfg.Devices != nil {
		l.mgr.askDevices(run, v.RootNode, culprit)
	}
	l.mgr.Failed(run, culprit, v.Line)
}

// deviceTime bounds the lookup of a node's devices.
const deviceTime = 5 * time.Second

// askDevices records the broken devices of a node that was to blame. One lookup is under way at a time: when many nodes
// fail at once, their devices are not the cause.
func (mgr *Manager) askDevices(run, node, machine string) {
	if !mgr.asking.CompareAndSwap(false, true) {
		return
	}
	mgr.wg.Go(func() {
		defer mgr.asking.Store(false)
		ctx, cancel := context.WithTimeout(mgr.ctx, deviceTime)
		defer cancel()
		for _, text := range mgr.cfg.Devices(ctx, node) {
			mgr.Find(nodehealth.Finding{Node: machine, Run: run, Kind: nodehealth.Device, Text: text})
		}
	})
}

// hung records the nodes that a hung world has waited for, and names the first of them. A verdict of little confidence
// blames no node.
func (l *listener) hung(run string, r *known, v service.Verdict) string {
	if v.Hang == nil || v.Hang.Confidence == hang.Low {
		return ""
	}
	var found []nodehealth.Finding
	for _, s := range v.Hang.Suspects {
		found = append(found, nodehealth.Finding{Node: r.machine(s.Node), Run: run, Kind: nodehealth.Hang, Text: v.Hang.Line})
	}
	l.mgr.Find(found...)
	return v.RootNode
}

func silent(e rendezvous.EpochEvidence, node string) bool {
	return slices.ContainsFunc(e.Losses, func(o job.Loss) bool { return o.Node == node && o.Silent })
}

// programs reports whether a class of failures comes from the program and its command line, on any machine.
func programs(c verdict.Class) bool {
	switch c {
	case verdict.ImportError, verdict.UsageError, verdict.Interrupted, verdict.FileNotFound, verdict.Permission:
		return true
	}
	return false
}

// deviceKind is the kind of a failure that the worker's device is to blame for, "" for others.
func deviceKind(v service.Verdict) nodehealth.Kind {
	switch {
	case v.Class == verdict.DeviceError:
		return nodehealth.Device
	case v.Class != verdict.Hardware:
		return ""
	case strings.Contains(strings.ToLower(v.Line), "ecc"):
		return nodehealth.ECC
	}
	return nodehealth.Xid
}
