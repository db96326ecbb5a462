package agents

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/retry"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/pyproto"
)

// agent is one of DLRover's, as a node of the run. Host.mu guards it.
type agent struct {
	who    caller
	node   rendezvous.Node
	params rendezvous.Params
	cancel context.CancelFunc
	seen   time.Time // its last request

	dir    rendezvous.Directive
	worked job.EpochID // of the newest world that it has received
	place  *job.Place  // its own in it
	works  bool        // it has workers of that epoch
	ended  job.EpochID // the newest epoch that it has ended, by joining again
	done   bool        // its workers have succeeded
	exited bool        // it has announced its end
	moved  bool        // it has reported a step
}

// Bounds of the values in an agent's join: no host has as many devices, nor an address of as many bytes.
const (
	maxSlots = 1 << 16
	maxAddr  = 255
)

// join takes an agent into a rendezvous.
func (h *Host) join(ctx context.Context, who caller, m *pyproto.Message) (*pyproto.Message, error) {
	rank, ip := m.Int("node_rank"), m.Str("node_ip")
	if m.Get("node_rank") == nil || rank < 0 {
		rank = m.Int("node_id") // to 0.3
	}
	slots, name := m.Int("local_world_size"), m.Str("rdzv_name")
	var round int
	var err error
	switch {
	case rank < 0 || rank >= rendezvous.MaxNodes || slots < 1 || slots > maxSlots:
		err = fmt.Errorf("agents: node rank %d with %d workers: need a rank from 0 to %d, and 1 to %d workers", rank, slots,
			rendezvous.MaxNodes-1, maxSlots)
	case len(ip) > maxAddr || !text.Printable(ip):
		err = fmt.Errorf("agents: NODE_IP %.100q of %d bytes: %s, at most %d", ip, len(ip), text.PrintableRule, maxAddr)
	case name == checking:
		h.locate(ctx, who, ip)
		round = h.joinCheck(who, rank, slots)
	case name == training:
		h.locate(ctx, who, ip)
		round, err = h.joinTraining(ctx, who, rank, slots, ip)
	default:
		err = fmt.Errorf("agents: no rendezvous is called %.100q, only %s and %s", name, training, checking)
	}
	if err != nil {
		h.cfg.Log.Error("an agent cannot join", "node_id", who.id, "node_rank", rank, "err", err)
		return nil, err
	}
	return rendezvousState(pyproto.DialectOf(m), &pyproto.Dict{}, 0, round, 0), nil
}

// locate finds out where an agent is.
func (h *Host) locate(ctx context.Context, who caller, ip string) {
	machine := h.cfg.Machine(ctx, who.kind, who.id, ip)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.reg.locate(who, machine)
}

func (h *Host) joinCheck(who caller, rank, slots int) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.check.join(time.Now(), rank, who.id, slots)
	return h.check.round
}

func (h *Host) joinTraining(ctx context.Context, who caller, rank, slots int, ip string) (int, error) {
	select {
	case h.joins <- struct{}{}:
		defer func() { <-h.joins }()
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	h.mu.Lock()
	c, err := h.reg.claim(time.Now(), who, rank, slots, ip)
	round := h.worlds.last
	h.check.over(who.id)
	h.mu.Unlock()
	switch {
	case err != nil:
		return 0, err
	case c.again != nil:
		return round, h.rejoin(ctx, c.again, slots, ip)
	case c.former != nil:
		h.leave(ctx, c.former, rendezvous.Leave{Reason: c.why, Killed: true})
	}
	return round, h.arrive(ctx, who, c.params, rank, slots, ip)
}

// arrive makes a node of an agent. It is registered before it joins: its join may seal a world, of which others hear at
// once.
func (h *Host) arrive(ctx context.Context, who caller, p rendezvous.Params, rank, slots int, ip string) error {
	h.mu.Lock()
	if err := h.ctx.Err(); err != nil {
		h.mu.Unlock()
		return err
	}
	a := h.reg.add(time.Now(), who, p, rank, slots, ip)
	var watching context.Context
	watching, a.cancel = context.WithCancel(h.ctx)
	ev := rendezvous.Join{Node: a.node, Params: p}
	h.mu.Unlock()
	if err := h.cfg.Service.Join(ctx, h.cfg.Run, ev); err != nil {
		h.forget(a)
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.ctx.Err(); err != nil {
		return err
	}
	h.wg.Go(func() { h.follow(watching, a) })
	if !h.begun {
		h.begun = true
		h.wg.Go(h.listen)
	}
	return nil
}

// rejoin joins the node of an agent whose workers have ended, or repeats a request. If the run is over, the agent's
// next poll reports it.
func (h *Host) rejoin(ctx context.Context, a *agent, slots int, ip string) error {
	h.mu.Lock()
	worked, told, epoch := a.works && !a.over(), a.dir.Kind == job.Stop, a.worked
	a.works, a.done, a.moved, a.exited = false, false, false, false
	if worked {
		a.node.Slots, a.node.Addr, a.node.IP, a.node.Machine = slots, ip, ip, h.reg.places[a.who]
		a.ended = a.worked
	}
	h.mu.Unlock()
	if !worked {
		return nil
	}
	if !told { // it restarts by itself
		_ = h.cfg.report(ctx, rendezvous.Failing{ID: a.node.ID, EpochID: epoch, Decision: rendezvous.RestartFree})
	}
	return h.rejoinHub(ctx, a)
}

// over: the run has ended for the agent.
func (a *agent) over() bool {
	return a.dir.Kind == job.Fail || a.dir.Kind == job.Done || a.dir.Leave != nil
}

func (h *Host) rejoinHub(ctx context.Context, a *agent) error {
	h.mu.Lock()
	ev := rendezvous.Join{Node: a.node, Params: a.params, Stopped: a.ended}
	h.mu.Unlock()
	return h.cfg.Service.Join(ctx, h.cfg.Run, ev)
}

// follow receives the directives of an agent's node.
func (h *Host) follow(ctx context.Context, a *agent) {
	var after api.Cursor
	for ctx.Err() == nil {
		n, err := h.cfg.Service.Watch(ctx, h.cfg.Run, a.node.ID, after)
		switch {
		case err == nil:
			after.Directive = n.Directive.Seq
			h.take(ctx, a, n.Directive)
		case errors.Is(err, api.ErrNothingNew):
		case ctx.Err() != nil:
			return
		case errors.Is(err, rendezvous.ErrUnknownNode): // lost, as the Round believes
			h.lose(a)
			return
		default:
			h.cfg.Log.Debug("an agent's node is not followed", "node", a.node.Name, "err", err)
			retry.Sleep(ctx, time.Second)
		}
	}
}

// take keeps a directive for the agent's next poll, and carries out the part that needs no agent.
func (h *Host) take(ctx context.Context, a *agent, d rendezvous.Directive) {
	h.mu.Lock()
	if h.reg.agents[a.who] != a {
		h.mu.Unlock()
		return
	}
	h.reg.direct(a, d)
	e := a.react(d)
	if e.release {
		h.store.release(h.worlds.numbers[a.worked])
	}
	h.mu.Unlock()
	if e.leave != "" {
		h.leave(ctx, a, rendezvous.Leave{Reason: e.leave})
	}
	if e.rejoin {
		_ = h.rejoinHub(ctx, a) // if the Round is gone, the agent's next poll reports it
	}
}

// effect is the part of a directive that needs no agent.
type effect struct {
	release bool   // end the barrier in which it waits for others
	leave   string // why its node leaves the run; "": it stays
	rejoin  bool
}

// react returns the effect of a directive. On a Stop an agent without workers joins again at once. One whose workers
// have succeeded waits for others in a barrier of its own, and cannot be called back: it ends, and the world goes on
// without it.
func (a *agent) react(d rendezvous.Directive) effect {
	switch here := a.worked == d.EpochID; {
	case d.Kind == job.Stop && a.done && here:
		return effect{release: true, leave: noWayBack}
	case d.Kind == job.Stop && a.works && here: // its polls report waiting nodes
	case d.Kind == job.Stop:
		a.ended = d.EpochID
		return effect{rejoin: true}
	case d.Kind == job.Done && !a.exited:
		return effect{release: true}
	case d.Kind == job.Done:
		return effect{leave: "done"}
	case d.Kind == job.Fail && a.exited:
		return effect{leave: "the job failed"}
	}
	return effect{}
}

const noWayBack = "its workers had succeeded, and agents of DLRover do not go back"

// waiting is the number that stops agents: above 0 there are nodes that wait for a new world; -1 ends them while they
// wait.
func (h *Host) waiting(who caller, name string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	a := h.reg.agents[who]
	switch {
	case a == nil && name == checking:
		return max(h.check.waitingNum(), h.reg.strayed(who))
	case a == nil:
		return h.reg.strayed(who)
	case a.over() && !a.works:
		return -1
	case a.over() && a.dir.Kind != job.Done:
		return 1 // it ends its workers, and asks again
	case name == checking:
		return max(h.check.waitingNum(), stopped(a))
	}
	return stopped(a)
}

func stopped(a *agent) int {
	if a.works && a.dir.Kind == job.Stop {
		return 1
	}
	return 0
}

// failed reports an agent's failure to the run.
func (h *Host) failed(ctx context.Context, who caller, m *pyproto.Message) error {
	text, level := m.Str("error_data"), m.Str("level")
	h.mu.Lock()
	a := h.reg.agents[who]
	takesPart, machine := a != nil || h.check.has(who.id), h.reg.places[who]
	ev, at := rendezvous.Failing{Decision: rendezvous.RestartFree}, job.Place{}
	if a != nil {
		ev.ID, ev.EpochID = a.node.ID, a.worked
		if a.place != nil {
			at = *a.place
		}
	}
	h.mu.Unlock()
	name := nodeName(who)
	switch {
	case level == nodeError && !takesPart:
		if h.said.first("node error of a stranger") {
			h.cfg.Log.Warn("an agent that has joined neither the run nor a check tells that its node is at fault, which is "+
				"not heeded; this is said once", "node", name, "text", line(text))
		}
	case level == nodeError:
		h.cfg.Note(job.EventNodeError, name, machine, line(text))
		if a != nil {
			h.leave(ctx, a, rendezvous.Leave{Reason: "the node is at fault: " + line(text)})
		}
	case level == processError && a != nil && !strings.Contains(text, ofSaver):
		ev.Failures = failures(name, at, text)
		return h.cfg.report(ctx, ev)
	default:
		h.cfg.Log.Info("an agent tells", "node", name, "level", level, "text", fmt.Sprintf("%.300q", text))
	}
	return nil
}

// DLRover's levels that are acted upon.
const (
	processError = "process_error"
	nodeError    = "node_error"
)

// ofSaver marks failures of the process that saves checkpoints: no worker has failed.
const ofSaver = "Async checkpoint saver got failure"

func nodeName(who caller) string {
	return fmt.Sprintf("%.100s-%d", cmp.Or(strings.Map(inName, who.kind), "worker"), who.id)
}

// inName keeps the printable characters of a node's name.
func inName(r rune) rune {
	if r > ' ' && r < 0x7F {
		return r
	}
	return -1
}

// Bounds of one report of an agent: failures, and the bytes of them that are read.
const (
	maxFailures = 128
	maxErrors   = 256 << 10
)

// longNumber matches numbers of processes and ports, in which failures of one kind differ.
var longNumber = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`[0-9]{4,}`) })

// failures parses an agent's report of its workers: an object by global rank. A truncated one is a failure still.
func failures(name string, place job.Place, text string) []job.Failure {
	var told map[int]struct {
		LocalRank int    `json:"local_rank"`
		ExitCode  int    `json:"exitcode"`
		Message   string `json:"message"`
	}
	at, group := time.Now(), place.GroupRank
	if len(text) <= maxErrors { // a few bytes of JSON may become a hundred
		_ = json.Unmarshal([]byte(text), &told)
	}
	var fs []job.Failure
	for _, rank := range sortedRanks(told) {
		f := told[rank]
		if rank < 0 || rank >= max(place.WorldSize, 1) || len(fs) == maxFailures {
			continue
		}
		detail, _ := json.Marshal(map[string]any{ // as a launcher sends it; JSON knows all of these types
			"node": group, "node_name": name, "rank": rank, "local_rank": f.LocalRank,
			"exit_code": cmp.Or(f.ExitCode, 1), "message": line(f.Message), "at": at,
		})
		why := fmt.Sprintf("exit code %d", f.ExitCode)
		if f.Message != "" {
			why += ", " + line(f.Message)
		}
		fs = append(fs, job.Failure{Rank: rank, GroupRank: group, At: at, Detail: detail,
			Fingerprint: longNumber().ReplaceAllString(why, "#"),
			Text:        fmt.Sprintf("rank %d (node %s, local rank %d) failed: %s", rank, name, f.LocalRank, why)})
	}
	if len(fs) == 0 {
		return []job.Failure{{Rank: place.RankBase, GroupRank: group, Text: line(text), At: at}}
	}
	return fs
}

// line is s of an agent, printable and of at most 1 KiB.
func line(s string) string { return strings.Join(strings.Fields(text.Line(s, 1<<10)), " ") }

// event handles an agent's report of its own state.
func (h *Host) event(ctx context.Context, who caller, m *pyproto.Message) error {
	switch kind := m.Str("event_type"); kind {
	case "NODE_CHECK_SUCCEEDED", "NODE_CHECK_FAILED":
		h.checked(who, m.Object("node").Int("rank"), kind == "NODE_CHECK_SUCCEEDED", m.Float("event_elapsed_time"))
	case "SUCCEEDED_EXITED":
		return h.exit(ctx, who, true)
	case "FAILED_EXITED":
		return h.exit(ctx, who, false)
	}
	return nil
}

// exit: the agent ends. One that has succeeded stays in the run until the run knows how it ends.
func (h *Host) exit(ctx context.Context, who caller, succeeded bool) error {
	h.mu.Lock()
	a := h.reg.agents[who]
	if a == nil {
		h.check.goneID(who.id)
		h.mu.Unlock()
		return nil
	}
	a.exited = true
	kind, works := a.dir.Kind, a.works
	h.mu.Unlock()
	switch {
	case !succeeded:
		h.leave(ctx, a, rendezvous.Leave{Reason: "its workers have failed, and it starts them no more"})
		return nil
	case kind == job.Done || kind == job.Fail:
		h.leave(ctx, a, rendezvous.Leave{Reason: "done"})
		return nil
	case !works:
		h.leave(ctx, a, rendezvous.Leave{Reason: "its agent ends without workers"})
		return nil
	}
	return h.succeeded(ctx, a)
}

// succeeded reports the success to the run, once. An agent that is to stop is too late: see stop.
func (h *Host) succeeded(ctx context.Context, a *agent) error {
	h.mu.Lock()
	told, epoch := a.done, a.worked
	late := a.dir.Kind == job.Stop && a.dir.EpochID == epoch
	a.done = true
	if late {
		h.store.release(h.worlds.numbers[a.worked])
	}
	h.mu.Unlock()
	switch {
	case told:
		return nil
	case late:
		h.leave(ctx, a, rendezvous.Leave{Reason: noWayBack})
		return nil
	}
	return h.cfg.report(ctx, rendezvous.Success{ID: a.node.ID, EpochID: epoch})
}

// stepped: the first step of an epoch.
func (h *Host) stepped(ctx context.Context, who caller) error {
	h.mu.Lock()
	a := h.reg.agents[who]
	news := a != nil && a.works && !a.moved
	var ev rendezvous.Stepped
	if news {
		a.moved, ev = true, rendezvous.Stepped{ID: a.node.ID, EpochID: a.worked}
	}
	h.mu.Unlock()
	if !news {
		return nil
	}
	return h.cfg.report(ctx, ev)
}

// leave takes an agent's node out of the run.
func (h *Host) leave(ctx context.Context, a *agent, ev rendezvous.Leave) {
	ev.ID = a.node.ID
	h.forget(a)
	if _, err := h.cfg.Service.Leave(ctx, h.cfg.Run, ev); err != nil && !errors.Is(err, rendezvous.ErrUnknownNode) {
		h.cfg.Log.Warn("an agent's node does not leave the run", "node", a.node.Name, "err", err)
	}
}

// lose is for an agent that may still be there, and is called back when it asks.
func (h *Host) lose(a *agent) {
	h.forget(a)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.reg.agents[a.who] == nil {
		h.reg.stray(a.who)
	}
}

func (h *Host) forget(a *agent) {
	h.mu.Lock()
	defer h.mu.Unlock()
	a.cancel()
	if !h.reg.remove(a) {
		return
	}
	h.ports.forget(a.who, len(h.reg.agents) == 0)
	h.check.gone(a.node.Rank, a.who.id)
}

// listen looks for agents that are silent.
func (h *Host) listen() {
	t := time.NewTicker(silence / 9)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-h.ctx.Done():
			return
		}
		h.mu.Lock()
		h.check.dropSilent(time.Now())
		silent := h.reg.silent(time.Now())
		h.mu.Unlock()
		for _, a := range silent {
			h.lose(a)
			h.leave(h.ctx, a, rendezvous.Leave{
				Reason: fmt.Sprintf("its agent has given no sign of life for %s", silence), Killed: true,
			})
		}
	}
}

func (a *agent) silent(now time.Time) bool { return now.Sub(a.seen) > silence }
