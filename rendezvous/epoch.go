package rendezvous

import (
	"slices"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/stable"
)

type phase string

const (
	forming   phase = "forming"   // collecting joins
	gating    phase = "gating"    // a world could be sealed; the checks of its nodes are awaited
	releasing phase = "releasing" // sealed; rank 0 is clearing its store
	running   phase = "running"
	finished  phase = "finished"
)

// epoch is the newest sealed world, the phase in which the run is with it, and the evidence about its end.
type epoch struct {
	phase     phase
	id        job.EpochID // Round is 0 before the first world
	term      uint64      // the first term of this daemon, larger than those of all before
	adopted   bool        // the next one begins a term: an earlier daemon had sealed this one, or knew a later term
	formingAt time.Time   // join timeout runs from here
	sealedAt  time.Time   // passes of the members stand still since then; zero: they do not

	world []*node // members by group rank; lost ones stay until the next seal
	size  int     // of the world when it was sealed; some may not have come back to a later daemon
	other bool    // an earlier daemon had sealed it
	votes bool    // its members may elect another server
	away  []away  // members that have gone; if tied, those of the world before
	tied  bool    // no other server may be elected while one of them is silent
	// started is when the newest launcher of each name that has joined since was started; nil where nobody has a vote.
	started map[string]time.Time
	// plan tells its members which launchers may serve next; nil: they know none.
	plan *Failover

	working int // members that have workers
	workers int
	held    bool // the members got Run without workers

	done       int // members that succeeded
	results    results
	elastic    bool // a member went away since the last seal
	cause      *job.Cause
	kept       kept
	outcome    job.Outcome // of the run
	finishedAt time.Time
}

// results count the ends of single workers, which do not end the epoch.
type results struct {
	// exhausted is the number of nodes whose workers have all failed, while others go on; decision is that of the newest.
	exhausted int
	decision  Decision
	// Rank 0, all of the first node with workers, and any worker have succeeded.
	rank0, node0, any bool
}

// fresh reports whether this history has seen no world yet.
func (e *epoch) fresh() bool { return e.id.Round == 0 }

// collecting: no world is sealed.
func (e *epoch) collecting() bool { return e.phase == forming || e.phase == gating }

// seated reports whether n has a place in the world. Others may be missing from one that an earlier daemon had sealed.
func (e *epoch) seated(n *node) bool {
	at, found := slices.BinarySearchFunc(e.world, n.rank, func(m *node, rank int) int { return m.rank - rank })
	return found && e.world[at] == n
}

// follows has the next epoch follow one of an earlier daemon whose clock was ahead.
func (e *epoch) follows(seen job.EpochID) {
	if seen.Term <= e.id.Term {
		return
	}
	e.adopted = true
	if seen.Term >= e.term { // else another node has seen a later one
		e.term = termAfter(seen.Term, e.term)
	}
}

// termAfter is a term after the newest known one, for a daemon whose clock is behind and gives it the term own. Another
// such daemon, of which nothing is kept, has had another one.
func termAfter(newest, own uint64) uint64 { return newest + 1 + own%(1<<20) }

// next begins the epoch of the ranked nodes: a new round if other nodes form it than before.
func (e *epoch) next(now time.Time, ranked []*node) {
	if e.adopted { // an earlier daemon may have announced an epoch that would have the same name
		e.id.Term, e.adopted = max(e.term, e.id.Term+1), false
	}
	if !e.elastic && slices.Equal(e.world, ranked) {
		e.id.Epoch++
	} else {
		e.id.Round++
		e.id.Epoch = 0
	}
	e.phase, e.sealedAt, e.held = releasing, now, false
	e.size, e.other, e.votes, e.plan = len(ranked), false, false, nil
	if !e.tied {
		e.away, e.started = nil, nil
	}
	for i := range e.away {
		e.away[i].early = false // all others of that world are known now
	}
	e.setWorld(ranked)
}

// ordered is the epoch of an order that is given now. It is newer than any of an earlier daemon.
func (e *epoch) ordered() job.EpochID {
	if e.id.Term < e.term {
		return job.EpochID{Term: e.term}
	}
	return e.id
}

func (e *epoch) setWorld(members []*node) {
	e.world, e.working = members, 0
	for _, n := range members {
		if n.Slots > 0 {
			e.working++
		}
	}
}

// forget drops the evidence about the epoch before.
func (e *epoch) forget() {
	e.elastic, e.kept, e.results = false, kept{}, results{}
}

// breaks lets the run form a world again.
func (e *epoch) breaks(now time.Time) {
	e.phase, e.formingAt, e.cause, e.done = forming, now, nil, 0
}

// run books that the workers are started or, if the run is held, wait.
func (e *epoch) run(held bool) { e.phase, e.held = running, held }

// finish ends the run.
func (e *epoch) finish(now time.Time, o job.Outcome, c *job.Cause) {
	e.phase, e.outcome, e.cause, e.finishedAt = finished, o, c, now
	if e.fresh() {
		e.id.Term = e.term // no world of before is newer
	}
}

// archive drops all but the evidence that is handed out: a run that has ended may be kept for long.
func (e *epoch) archive(told job.Evidence) {
	e.world, e.kept = nil, kept{slices.Clone(told.Failures), slices.Clone(told.Losses)}
}

// places are those of the world's nodes after so many restarts.
func (e *epoch) places(restarts int) []job.Place {
	roles := map[string]int{}
	ps := make([]job.Place, len(e.world))
	base := 0
	workerStore := slices.ContainsFunc(e.world, func(n *node) bool { return n.Agent != "" })
	for i, n := range e.world {
		ps[i] = job.Place{
			GroupRank: i, GroupWorldSize: len(e.world), RankBase: base, RoleRankBase: roles[n.Role], RestartCount: restarts,
			WorkerStore: workerStore,
		}
		base += n.Slots
		roles[n.Role] += n.Slots
	}
	for i, n := range e.world {
		ps[i].WorldSize, ps[i].RoleWorldSize = base, roles[n.Role]
	}
	e.workers = base
	return ps
}

// table is the world by group rank.
func (e *epoch) table() []job.Member {
	ms, o := make([]job.Member, len(e.world)), overviewOf(e.world)
	for i, n := range e.world {
		ms[i] = job.Member{
			GroupRank: i, Node: n.Name, Addr: o.reach(n, n.Addr), Addrs: n.Addrs, RankBase: n.rankBase,
			Slots: n.Slots, Role: n.Role, Ports: n.Ports, Bases: n.Bases, Agent: n.Agent,
		}
	}
	return ms
}

// lose records that a member has gone.
func (e *epoch) lose(n *node, l job.Loss) {
	e.elastic = true
	if len(e.kept.losses) < maxKept {
		e.kept.losses = append(e.kept.losses, n.lost(l))
	}
}

// evidence is the evidence about the end of the epoch, the earliest first.
func (e *epoch) evidence(restarts, maxRestarts int) job.Evidence {
	earlier := func(a, b job.Failure) int { return a.At.Compare(b.At) }
	failures := stable.Sorted(slices.Values(e.kept.failures), earlier)
	losses := stable.Sorted(slices.Values(e.kept.losses), func(a, b job.Loss) int { return a.At.Compare(b.At) })
	return job.Evidence{
		Outcome: e.outcome, Cause: e.cause,
		Failures: failures[:min(len(failures), maxTold)], Losses: losses[:min(len(losses), maxTold)],
		Restarts: restarts, MaxRestarts: maxRestarts, WorldSize: e.workers,
	}
}

// failed reports whether the epoch has ended because of a failure.
func (e *epoch) failed() bool { return e.cause != nil && e.cause.Kind == job.CauseFailure }

// tolerate books failures of n's workers that do not stop the others of the world.
func (e *epoch) tolerate(n *node, f Failing, m *members) {
	n.failed = n.failed || f.Beside && n.rankBase > 0 // node 0 decides the run's result
	if f.Left > 0 {
		return
	}
	m.become(n, succeeded)
	n.failed = true
	e.results.exhausted++
	e.results.decision = f.Decision
}

// complete books that all workers of n have succeeded.
func (e *epoch) complete(n *node, m *members, out *outbox) {
	m.become(n, succeeded)
	e.done++
	out.note(job.EventNodeSucceeded, n.Name, "")
}

// over: no worker is left, and some have succeeded.
func (e *epoch) over() bool { return e.done > 0 && e.done+e.results.exhausted >= e.working }

// starting reports whether a first step may be awaited.
func (e *epoch) starting() bool { return e.phase == running && e.done == 0 && !e.held }

// verdict is the last directive of a run that has ended.
func (e *epoch) verdict() Directive {
	if e.outcome == job.Succeeded {
		return Directive{Kind: job.Done}
	}
	return Directive{Kind: job.Fail, Cause: e.cause}
}

// succeeded books the successes that n reports.
func (r *results) succeeded(n *node, s Success, tolerate bool) {
	whole := len(s.Ranks) == 0
	r.any = true
	first := n.rankBase == 0 && n.Slots > 0
	r.node0 = r.node0 || whole && first
	r.rank0 = r.rank0 || slices.Contains(s.Ranks, 0) || whole && first && !tolerate
}

// enough reports whether the run's success rule is met; over says that no worker is left.
func (r *results) enough(rule SuccessRule, over bool) bool {
	switch rule {
	case SuccessRank0:
		return r.rank0 || over
	case SuccessNode0:
		return r.node0 || over
	case SuccessAny:
		return r.any || over
	}
	return over
}

// kept is the evidence about the end of an epoch.
type kept struct {
	failures []job.Failure
	losses   []job.Loss
}

// record keeps the first failures of the newest epoch, at most one for a worker and at most maxKept, so that a world of
// any size costs the same.
func (k *kept) record(fs []job.Failure) {
	for _, f := range fs {
		if len(k.failures) < maxKept && !k.knows(f) {
			k.failures = append(k.failures, f)
		}
	}
}

func (k *kept) knows(f job.Failure) bool {
	for _, o := range k.failures {
		if o.Rank == f.Rank && o.GroupRank == f.GroupRank {
			return true
		}
	}
	return false
}
