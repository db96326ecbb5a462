package rendezvous

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous/ledger"
)

// Kept is the state of a run that a later daemon needs and the launchers do not bring: all that was decided, spent and
// learned. It takes a few kilobytes, however large the run is.
//
// The launchers know best which workers run, because they may be newer than the store; all else is as in Kept.
type Kept struct {
	Term   uint64      `json:"term"`             // the newest of the run's daemons
	Params Params      `json:"params,omitzero"`  // zero: no node has opened the run
	Epoch  job.EpochID `json:"epoch,omitzero"`   // the newest that is known; all below is of its time, or later
	World  *KeptWorld  `json:"world,omitempty"`  // its nodes; nil without, and after the end
	Unrun  bool        `json:"unrun,omitempty"`  // its workers have not been started yet
	Broken *KeptBreak  `json:"broken,omitempty"` // nil: its workers run, or it is not known to have ended
	Works  []string    `json:"works,omitempty"`  // of the run's nodes, as Join.Work
	Over   job.EpochID `json:"over,omitzero"`    // the newest of the run by this name that has ended before

	Restarts int       `json:"restarts,omitempty"`
	Spent    Spent     `json:"spent,omitzero"`
	PausedAt time.Time `json:"paused_at,omitzero"`

	Paused   *job.Cause           `json:"paused,omitempty"`
	Unpaused job.EpochID          `json:"unpaused_in,omitzero"` // as orders.unpausedIn
	Hold     *job.Cause           `json:"hold,omitempty"`
	Unheld   job.EpochID          `json:"unheld_in,omitzero"`
	Bars     map[string]job.Cause `json:"bars,omitempty"`
	Unbarred []string             `json:"unbarred,omitempty"` // names that were barred once
	Command  *job.Command         `json:"command,omitempty"`
	OnResume *job.Command         `json:"on_resume,omitempty"`
	Restart  *Order               `json:"restart,omitempty"` // ends Epoch, perhaps before its nodes hear of it

	Ledger *ledger.Ledger `json:"ledger,omitempty"` // nil: no node has opened the run

	Passes map[string]KeptPass `json:"passes,omitempty"` // of checks, by the ID of the launcher

	End *KeptEnd `json:"end,omitempty"` // nil: the run has not ended
}

// KeptWorld are the nodes of the newest world that are still here.
type KeptWorld struct {
	Size  int      `json:"size"`
	Hash  uint64   `json:"hash"`            // of their names, in any order
	Names []string `json:"names,omitempty"` // if they are few
}

// KeptBreak is why a world has ended that no other one has followed yet, and which of its nodes have gone, for no
// launcher tells that.
type KeptBreak struct {
	Cause  job.Cause  `json:"cause"`
	Losses []job.Loss `json:"losses,omitempty"` // the first ones
}

// KeptPass is the result of a check for a node that has passed it.
type KeptPass struct {
	Until  time.Time     `json:"until,omitzero"` // zero: for good
	Left   time.Duration `json:"left,omitempty"` // instead of Until, while the node has workers: the clock stands still
	Domain string        `json:"domain,omitempty"`
	Alone  bool          `json:"alone,omitempty"`
}

// KeptEnd is how a run has ended.
type KeptEnd struct {
	At       time.Time    `json:"at"`
	Evidence job.Evidence `json:"evidence"`
	Nodes    []NodeStatus `json:"nodes,omitempty"` // as they were then, if they are few
}

// Bounds of Kept.
const (
	maxKeptNames  = 64 // of a world
	maxKeptPasses = 512
	maxKeptEnded  = 256 // nodes of a run that has ended
	maxKeptLosses = 16
)

// Kept is the state with which a later Round of the run has to begin. The caller must not write to anything that it
// refers to.
func (r *Round) Kept() Kept {
	o, e := r.orders, r.epoch
	k := Kept{
		Term: max(e.id.Term, e.term), Params: *r.params, Epoch: e.id, World: r.memory.world(),
		Unrun: e.phase == releasing, Broken: r.memory.broken(), Works: r.admission.works, Over: r.admission.over,
		Restarts: r.account.restarts, Spent: r.account.spent, PausedAt: r.account.spent.PausedAt,
		Paused: o.paused, Unpaused: o.unpausedIn, Hold: o.hold, Unheld: o.unheldIn, Command: o.command, OnResume: o.onResume,
		Restart: o.restart, Bars: o.barred(), Passes: r.checks.passes(),
	}
	if e.fresh() && e.phase != finished {
		k.Epoch = r.account.spentIn
		k.Unrun = r.memory.past != nil && r.memory.past.Unrun
	}
	k.Spent.PausedAt = time.Time{}
	k.Spent.Recent = k.Spent.Recent[max(0, len(k.Spent.Recent)-maxRecentTold):]
	for name, c := range o.bars {
		if c == nil {
			k.Unbarred = append(k.Unbarred, name)
		}
	}
	slices.Sort(k.Unbarred)
	if !r.memory.book.Since.IsZero() {
		k.Ledger = r.memory.book.Clone()
	}
	if e.phase == finished {
		k.End = &KeptEnd{At: e.finishedAt, Evidence: r.out.evidence()}
		if len(r.ended) <= maxKeptEnded {
			k.End.Nodes = r.ended
		}
	}
	return k
}

// Steady is k with times by the clock of now, for New.
func (k Kept) Steady(now time.Time) *Kept {
	k.Spent.PausedAt = k.PausedAt
	k.Spent.steady(now)
	k.PausedAt, k.Spent.PausedAt = k.Spent.PausedAt, time.Time{}
	if k.Ledger != nil {
		k.Ledger = k.Ledger.Clone()
		k.Ledger.Moved(now)
	}
	return &k
}

// recall begins with the state that earlier daemons have kept of the run.
func (m *memory) recall(k *Kept) {
	*m.params = k.Params
	m.account.restarts, m.account.spent, m.account.spentIn = k.Restarts, k.Spent, k.Epoch
	m.past = k
	m.account.spent.PausedAt = k.PausedAt
	m.orders.recall(k)
	if k.Ledger != nil {
		*m.book = *k.Ledger.Clone()
	}
	if k.End == nil {
		m.kept = k
		return
	}
	e, end := m.epoch, k.End.Evidence
	e.phase, e.id, e.workers, e.outcome, e.cause = finished, k.Epoch, end.WorldSize, end.Outcome, end.Cause
	e.finishedAt, e.kept = k.End.At, kept{end.Failures, end.Losses}
}

// recall takes over the orders that an earlier daemon was given. Those of the nodes' newest epoch count unless a node
// knows of a newer one.
func (o *orders) recall(k *Kept) {
	o.hold, o.unheldIn, o.onResume, o.restart = k.Hold, k.Unheld, k.OnResume, k.Restart
	for name, c := range k.Bars {
		o.set(name, &c)
	}
	for _, name := range k.Unbarred {
		o.set(name, nil)
	}
	in := k.Epoch
	if o.unpausedIn = k.Unpaused; k.Paused != nil {
		o.paused, o.pausedIn = k.Paused, &in
	}
	if k.Command != nil {
		o.command, o.commandIn = k.Command, &in
	}
}

// passes are those of nodes that are here, if they are few.
func (c *checks) passes() map[string]KeptPass {
	if !c.params.Gate || len(c.members.nodes) > maxKeptPasses || c.epoch.phase == finished {
		return nil
	}
	all := map[string]KeptPass{}
	for id, n := range c.members.nodes {
		if !n.cleared {
			continue
		}
		p := KeptPass{Until: n.until, Domain: n.domain, Alone: n.unpaired}
		if stands := c.epoch.seated(n) && !c.epoch.sealedAt.IsZero(); stands && !n.until.IsZero() {
			p.Until, p.Left = time.Time{}, max(n.until.Sub(c.epoch.sealedAt), 1)
		}
		all[id] = p
	}
	return all
}

// recallPass gives n the pass that it had.
func (m *memory) recallPass(now time.Time, n *node) {
	p, passed := m.kept.Passes[n.ID]
	if !passed {
		return
	}
	n.cleared, n.until, n.domain, n.unpaired = true, p.Until, p.Domain, p.Alone
	switch {
	case p.Left > 0:
		n.until = now.Add(p.Left)
	case !p.Until.IsZero():
		n.until = now.Add(p.Until.Sub(now)) // by a clock that is not set
	}
}

// world are the nodes that a later daemon has to wait for: those that this one still waits for, or else those of the
// newest world that are here.
func (m *memory) world() *KeptWorld {
	switch {
	case m.rebuild != nil && !m.recalls():
		w := keptWorld(m.rebuild.world, func(n *node) bool { return n != nil })
		w.Size = len(m.rebuild.world) - len(m.rebuild.broken.Losses)
		return w
	case m.kept != nil:
		return m.kept.World
	case m.epoch.fresh() || m.epoch.phase == finished:
		return nil
	}
	return keptWorld(m.epoch.world, func(n *node) bool { return m.members.here(n) && n.state != leaving })
}

func keptWorld(nodes []*node, here func(*node) bool) *KeptWorld {
	w := &KeptWorld{}
	for _, n := range nodes {
		if !here(n) {
			continue
		}
		w.Size++
		w.Hash += hashed(n.Name)
		if w.Size <= maxKeptNames {
			w.Names = append(w.Names, n.Name)
		}
	}
	if w.Size > maxKeptNames {
		w.Names = nil
	}
	return w
}

// less is w without a node of the name.
func (w *KeptWorld) less(name string) *KeptWorld {
	less := KeptWorld{Size: w.Size - 1, Hash: w.Hash - hashed(name), Names: slices.Clone(w.Names)}
	if i := slices.Index(less.Names, name); i >= 0 {
		less.Names = slices.Delete(less.Names, i, i+1)
	}
	return &less
}

// broken is why the newest world has ended, or cannot go on.
func (m *memory) broken() *KeptBreak {
	e := m.epoch
	switch {
	case m.rebuild != nil && len(m.rebuild.broken.Losses) > 0:
		b := m.rebuild.broken
		if m.recalls() && m.kept.Broken != nil {
			b = KeptBreak{m.kept.Broken.Cause, slices.Concat(m.kept.Broken.Losses, b.Losses)}
		}
		return &KeptBreak{b.Cause, b.Losses[:min(len(b.Losses), maxKeptLosses)]}
	case m.kept != nil:
		return m.kept.Broken
	case e.cause == nil || !e.collecting():
		return nil
	}
	return &KeptBreak{*e.cause, slices.Clone(e.kept.losses[:min(len(e.kept.losses), maxKeptLosses)])}
}

func hashed(name string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(name))
	return h.Sum64()
}

// missing are the names of the nodes that are not here, as far as they are known.
func (w *KeptWorld) missing(m *members) (names []string) {
	here := map[string]int{}
	for _, n := range m.nodes {
		here[n.Name]++
	}
	for _, name := range w.Names {
		if here[name]--; here[name] < 0 {
			names = append(names, name)
		}
	}
	return names
}

// without reports that no node of the name is in it. Of many nodes that is not known.
func (w *KeptWorld) without(name string) bool {
	return w != nil && w.Size > 0 && len(w.Names) == w.Size && !slices.Contains(w.Names, name)
}

// complete reports whether all nodes are here. Of many nodes that is known only while no others are here.
func (w *KeptWorld) complete(m *members) bool {
	switch {
	case len(m.nodes) < w.Size:
		return false
	case len(w.Names) == w.Size:
		return len(w.missing(m)) == 0
	}
	var sum uint64
	for _, n := range m.nodes {
		sum += hashed(n.Name)
	}
	return len(m.nodes) == w.Size && sum == w.Hash
}

// stranger: a node whose options are not those of a run that earlier daemons have known waits while nodes of that run
// may come back, which would refuse it. If none does, it is of another job by that name, and opens the run anew.
func (m *memory) stranger(now time.Time, a *admission, e Join) (opens bool, err error) {
	var differs error
	if m.kept != nil && len(m.members.nodes) == 0 && m.kept.Params != (Params{}) {
		differs = a.conflict(e)
	}
	if differs == nil || cmp.Or(e.Params.WithDefaults().Validate(), e.Node.validate()) != nil {
		return false, nil
	}
	if m.otherAt.IsZero() {
		m.otherAt = now
	}
	if now.Sub(m.otherAt) < resumeWindow {
		return false, fmt.Errorf("%w: %w", ErrReturning, differs)
	}
	return true, nil
}
