package agents

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

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
	worked rendezvous.EpochID // the newest epoch whose world it was told
	works  bool               // it has workers of that epoch
	ended  rendezvous.EpochID // the newest epoch that it has ended, by joining again
	done   bool               // its workers have succeeded
	exited bool               // it has said that it ends
	moved  bool               // it has told of a step
}

// join takes an agent into a rendezvous.
func (h *Host) join(ctx context.Context, who caller, m *pyproto.Message) (*pyproto.Message, error) {
	rank := m.Int("node_rank")
	if m.Get("node_rank") == nil || rank < 0 {
		rank = m.Int("node_id") // to 0.3
	}
	slots := m.Int("local_world_size")
	if m.Str("rdzv_name") == checking {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.check.join(time.Now(), rank, who.id, slots)
		return rendezvousState(m.Dialect(), &pyproto.Dict{}, 0, h.check.round, 0), nil
	}
	round, err := h.joinTraining(ctx, who, rank, slots, m.Str("node_ip"))
	if err != nil {
		h.cfg.Log.Error("an agent cannot join", "node_id", who.id, "node_rank", rank, "err", err)
		return nil, err
	}
	return rendezvousState(m.Dialect(), &pyproto.Dict{}, 0, round, 0), nil
}

func (h *Host) joinTraining(ctx context.Context, who caller, rank, slots int, ip string) (int, error) {
	h.mu.Lock()
	a, p := h.agents[who], h.rulesOf(who)
	round := h.worlds.last
	alive := a != nil && time.Since(a.seen) < Silence && !a.exited
	h.check.over()
	h.mu.Unlock()
	switch {
	case p == nil:
		return 0, fmt.Errorf("agents: the rules of the run are not known: node %d was here before this master; "+
			"start its pod again", who.id)
	case a != nil && a.node.Rank == rank:
		return round, h.rejoin(ctx, a, slots, ip)
	case alive:
		return 0, fmt.Errorf("agents: two agents with NODE_ID=%d, of node ranks %d and %d: every one needs a NODE_ID of its "+
			"own", who.id, a.node.Rank, rank)
	case a != nil:
		h.leave(ctx, a, rendezvous.Leave{Reason: "another agent has its NODE_ID", Killed: true})
	}
	h.replace(ctx, who, rank)
	return round, h.arrive(ctx, who, *p, rank, slots, ip)
}

// rulesOf are those that the agent has told; an agent that has been here before does not tell them again.
func (h *Host) rulesOf(who caller) *rendezvous.Params {
	if p, ok := h.params[who]; ok {
		return &p
	}
	return h.last
}

// replace drops the dead agent of a rank: a later NODE_ID is the rank's new pod.
func (h *Host) replace(ctx context.Context, who caller, rank int) {
	h.mu.Lock()
	var dead *agent
	for other, a := range h.agents {
		if a.node.Rank == rank && other.id < who.id {
			dead = a
		}
	}
	h.mu.Unlock()
	if dead != nil {
		h.leave(ctx, dead, rendezvous.Leave{Reason: fmt.Sprintf("replaced by node %d", who.id), Killed: true})
	}
}

// arrive makes a node of an agent.
func (h *Host) arrive(ctx context.Context, who caller, p rendezvous.Params, rank, slots int, ip string) error {
	name := fmt.Sprintf("%s-%d", cmp.Or(who.kind, "worker"), who.id)
	a := &agent{who: who, params: p, seen: time.Now(), node: rendezvous.Node{
		ID: name + "@" + strconv.FormatInt(time.Now().UnixNano(), 36), Name: name, Rank: rank, Generation: who.id, Addr: ip,
		IP: ip, Slots: slots, Agent: rendezvous.AgentDLRover,
	}}
	if err := h.cfg.Service.Join(ctx, h.cfg.Run, rendezvous.Join{Node: a.node, Params: p}); err != nil {
		return err
	}
	watching, cancel := context.WithCancel(h.ctx)
	a.cancel = cancel
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ctx.Err() != nil {
		return h.ctx.Err()
	}
	h.agents[who], h.names[name] = a, a
	h.wg.Go(func() { h.follow(watching, a) })
	if !h.begun {
		h.begun = true
		h.wg.Go(h.listen)
	}
	return nil
}

// rejoin is that of an agent whose workers have ended, or a request that is sent again.
func (h *Host) rejoin(ctx context.Context, a *agent, slots int, ip string) error {
	h.mu.Lock()
	worked, told, epoch := a.works, a.dir.Kind == rendezvous.Stop, a.worked
	a.works, a.done, a.moved = false, false, false
	a.node.Slots, a.node.Addr, a.node.IP = slots, ip, ip
	if worked {
		a.ended = a.worked
	}
	h.mu.Unlock()
	if !worked {
		return nil
	}
	if !told { // it restarts by itself
		_ = h.report(ctx, rendezvous.Failing{ID: a.node.ID, EpochID: epoch, Decision: rendezvous.RestartFree})
	}
	return h.rejoinHub(ctx, a)
}

func (h *Host) rejoinHub(ctx context.Context, a *agent) error {
	h.mu.Lock()
	ev := rendezvous.Join{Node: a.node, Params: a.params, Stopped: a.ended}
	h.mu.Unlock()
	return h.cfg.Service.Join(ctx, h.cfg.Run, ev)
}

// follow receives what the node of an agent is told.
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
			h.forget(a)
			return
		default:
			h.cfg.Log.Debug("an agent's node is not followed", "node", a.node.Name, "err", err)
			h.pause(ctx)
		}
	}
}

func (h *Host) pause(ctx context.Context) {
	select {
	case <-time.After(time.Second):
	case <-ctx.Done():
	}
}

// take keeps a directive for the agent's next question, and does what needs no agent.
func (h *Host) take(ctx context.Context, a *agent, d rendezvous.Directive) {
	h.mu.Lock()
	a.dir = d
	var then func()
	switch d.Kind {
	case rendezvous.Stop:
		then = h.stop(ctx, a, d)
	case rendezvous.Done:
		h.release(a)
		if a.exited {
			then = func() { h.leave(ctx, a, rendezvous.Leave{Reason: "done"}) }
		}
	case rendezvous.Fail:
		if a.exited {
			then = func() { h.leave(ctx, a, rendezvous.Leave{Reason: "the job failed"}) }
		}
	}
	h.mu.Unlock()
	if then != nil {
		then()
	}
}

// stop: an agent without workers is back at once. One whose workers have succeeded waits for others in a barrier of its
// own, and cannot be called back: it ends, and the world goes on without it.
func (h *Host) stop(ctx context.Context, a *agent, d rendezvous.Directive) func() {
	switch {
	case a.done && a.worked == d.EpochID:
		h.release(a)
		return func() {
			h.leave(ctx, a, rendezvous.Leave{Reason: "its workers had succeeded, and agents of DLRover do not go back"})
		}
	case a.works && a.worked == d.EpochID:
		return nil // it is told that nodes wait
	}
	a.ended = d.EpochID
	return func() { _ = h.rejoinHub(ctx, a) } // a Round that is gone tells the agent's next question
}

// waiting is what makes agents stop: above 0 there are nodes that wait for a new world; -1 ends them while they wait.
func (h *Host) waiting(who caller, name string) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	a := h.agents[who]
	over := a != nil && (a.dir.Kind == rendezvous.Fail || a.dir.Leave != nil)
	switch {
	case over && !a.works:
		return -1
	case over:
		return 1 // it ends its workers, and asks again
	case name == checking:
		return max(h.check.waitingNum(), stopped(a))
	case a == nil:
		return h.strayed()
	}
	return stopped(a)
}

func stopped(a *agent) int {
	if a != nil && a.works && a.dir.Kind == rendezvous.Stop {
		return 1
	}
	return 0
}

// strayed calls back an agent that has been here before this master, when others wait for it.
func (h *Host) strayed() int {
	for _, a := range h.agents {
		if a.dir.Kind == rendezvous.Wait {
			return 1
		}
	}
	return 0
}

func (h *Host) report(ctx context.Context, ev rendezvous.Event) error {
	err := h.cfg.Service.Report(ctx, h.cfg.Run, ev)
	if errors.Is(err, rendezvous.ErrUnknownNode) {
		return nil // it is told so by what it asks next
	}
	return err
}

// failed tells the run of what has befallen an agent.
func (h *Host) failed(ctx context.Context, who caller, m *pyproto.Message) error {
	text := m.Str("error_data")
	h.mu.Lock()
	a := h.agents[who]
	ev := rendezvous.Failing{Decision: rendezvous.RestartFree}
	if a != nil {
		ev.ID, ev.EpochID, ev.Failures = a.node.ID, a.worked, failures(a, text)
	}
	h.mu.Unlock()
	if a == nil {
		h.cfg.Log.Warn("an agent that has not joined tells of a failure", "node_id", who.id, "level", m.Str("level"),
			"text", fmt.Sprintf("%.300q", text))
		if m.Str("level") == nodeError {
			h.cfg.Note("node-error", nodeName(who), line(text))
		}
		return nil
	}
	switch m.Str("level") {
	case processError:
		return h.report(ctx, ev)
	case nodeError:
		h.cfg.Note("node-error", a.node.Name, line(text))
		err := h.report(ctx, rendezvous.Barred{ID: a.node.ID, Reason: line(text)})
		h.leave(ctx, a, rendezvous.Leave{Reason: "the node is at fault: " + line(text)})
		return err
	}
	h.cfg.Log.Info("an agent tells", "node", a.node.Name, "level", m.Str("level"), "text", fmt.Sprintf("%.300q", text))
	return nil
}

// DLRover's levels that are acted upon.
const (
	processError = "process_error"
	nodeError    = "node_error"
)

func nodeName(who caller) string { return fmt.Sprintf("%s-%d", cmp.Or(who.kind, "worker"), who.id) }

// maxFailures bounds those that one agent tells at once.
const maxFailures = 128

// failures reads what an agent tells of its workers: an object by global rank. One that was cut is a failure still.
func failures(a *agent, text string) []rendezvous.Failure {
	var told map[string]struct {
		LocalRank int    `json:"local_rank"`
		ExitCode  int    `json:"exitcode"`
		Message   string `json:"message"`
	}
	base, at := 0, time.Now()
	if a.dir.Place != nil {
		base = a.dir.Place.RankBase
	}
	if json.Unmarshal([]byte(text), &told) != nil || len(told) == 0 {
		return []rendezvous.Failure{{Rank: base, GroupRank: a.group(), Text: line(text), At: at}}
	}
	var fs []rendezvous.Failure
	for rank, f := range told {
		n, err := strconv.Atoi(rank)
		if err != nil || len(fs) == maxFailures {
			continue
		}
		detail, _ := json.Marshal(map[string]any{ // as a launcher tells it; of these types JSON knows all
			"node": a.group(), "node_name": a.node.Name, "rank": n, "local_rank": f.LocalRank,
			"exit_code": cmp.Or(f.ExitCode, 1), "message": line(f.Message), "at": at,
		})
		fs = append(fs, rendezvous.Failure{Rank: n, GroupRank: a.group(), At: at, Detail: detail,
			Text: fmt.Sprintf("rank %d (node %s, local rank %d) failed: exit code %d, %s", n, a.node.Name, f.LocalRank,
				f.ExitCode, line(f.Message))})
	}
	return fs
}

func (a *agent) group() int {
	if a.dir.Place == nil {
		return 0
	}
	return a.dir.Place.GroupRank
}

// line is a text of an agent, printable and of at most 1 KiB.
func line(text string) string {
	text = text[:min(len(text), 1024)]
	clean := []rune{}
	for _, r := range text {
		if rendezvous.Printable(string(r)) && r != '\uFFFD' {
			clean = append(clean, r)
		} else if len(clean) > 0 && clean[len(clean)-1] != ' ' {
			clean = append(clean, ' ')
		}
	}
	return string(clean)
}

// event is what an agent says of itself.
func (h *Host) event(ctx context.Context, who caller, m *pyproto.Message) error {
	switch kind := m.Str("event_type"); kind {
	case "NODE_CHECK_SUCCEEDED", "NODE_CHECK_FAILED":
		h.checked(m.Object("node").Int("rank"), kind == "NODE_CHECK_SUCCEEDED", m.Float("event_elapsed_time"))
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
	a := h.agents[who]
	if a == nil {
		h.mu.Unlock()
		return nil
	}
	a.exited = true
	early, kind := succeeded && !a.done, a.dir.Kind
	h.mu.Unlock()
	switch {
	case !succeeded:
		h.leave(ctx, a, rendezvous.Leave{Reason: "its workers have failed, and it starts them no more"})
		return nil
	case kind == rendezvous.Done || kind == rendezvous.Fail:
		h.leave(ctx, a, rendezvous.Leave{Reason: "done"})
		return nil
	case early:
		return h.succeeded(ctx, a)
	}
	return nil
}

// succeeded tells the run of it, once.
func (h *Host) succeeded(ctx context.Context, a *agent) error {
	h.mu.Lock()
	told, epoch := a.done, a.worked
	a.done = true
	h.mu.Unlock()
	if told {
		return nil
	}
	return h.report(ctx, rendezvous.Success{ID: a.node.ID, EpochID: epoch})
}

// stepped: the first step of an epoch.
func (h *Host) stepped(ctx context.Context, who caller) error {
	h.mu.Lock()
	a := h.agents[who]
	news := a != nil && a.works && !a.moved
	var ev rendezvous.Stepped
	if news {
		a.moved, ev = true, rendezvous.Stepped{ID: a.node.ID, EpochID: a.worked}
	}
	h.mu.Unlock()
	if !news {
		return nil
	}
	return h.report(ctx, ev)
}

// leave takes an agent's node out of the run.
func (h *Host) leave(ctx context.Context, a *agent, ev rendezvous.Leave) {
	ev.ID = a.node.ID
	h.forget(a)
	if _, err := h.cfg.Service.Leave(ctx, h.cfg.Run, ev); err != nil && !errors.Is(err, rendezvous.ErrUnknownNode) {
		h.cfg.Log.Warn("an agent's node does not leave the run", "node", a.node.Name, "err", err)
	}
}

func (h *Host) forget(a *agent) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.agents[a.who] == a {
		delete(h.agents, a.who)
		delete(h.names, a.node.Name)
		delete(h.steps, a.who)
		delete(h.ports, a.who)
	}
	h.check.gone(a.node.Rank, a.who.id)
	a.cancel()
}

// listen looks for agents that are silent.
func (h *Host) listen() {
	t := time.NewTicker(Silence / 9)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-h.ctx.Done():
			return
		}
		for _, a := range h.silent(time.Now()) {
			h.leave(h.ctx, a, rendezvous.Leave{
				Reason: fmt.Sprintf("its agent has given no sign of life for %s", Silence), Killed: true,
			})
		}
	}
}

func (h *Host) silent(now time.Time) (as []*agent) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, a := range h.agents {
		if !a.exited && now.Sub(a.seen) > Silence {
			as = append(as, a)
		}
	}
	return as
}
