package service

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// GroupRequest asks for the replica group of a node: the body of POST /v1/runs/{run}/groups.
type GroupRequest struct {
	ID   string `json:"id"`   // the launcher's
	Name string `json:"name"` // the node's
	Wish int    `json:"wish"` // the group that it should be in; -1: any
	Size int    `json:"size"` // nodes of each group
	// Group has the Count and the Min of the groups; the rest is ignored.
	Group rendezvous.Group `json:"group"`
}

// GroupAnswer is the index of the group, or -1 for a node that has to ask again, because none lacks a node.
type GroupAnswer struct {
	Index int `json:"index"`
}

// promise is how long a place is kept for a node that has not joined its group yet.
const promise = time.Minute

// maxDivisions bounds the runs whose groups are remembered.
const maxDivisions = 1024

// groups assigns the nodes of runs to replica groups. Most of its knowledge is that of the groups' runs, so that it
// survives with them.
type groups struct {
	hub *api.Hub

	mu sync.Mutex           // is held while the Hub is asked
	of map[string]*division // by ID of the larger run

	promises promises
	quorums  quorums
}

// promises are places of nodes that have not joined their groups yet, by launcher's ID. It may be used with a run
// locked.
type promises struct {
	mu sync.Mutex
	of map[string]promised
}

type promised struct {
	of    string // the larger run
	index int
	at    time.Time
}

// count adds the nodes that are promised to groups of a run, other than one launcher, and returns the promise to that.
func (p *promises) count(of, id string, views []rendezvous.Occupied) (own int, promised bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	for other, held := range p.of {
		switch {
		case now.Sub(held.at) > promise || held.index >= len(views) && held.of == of:
			delete(p.of, other)
		case held.of != of:
		case other == id:
			own, promised = held.index, true
		default:
			views[held.index].Nodes++
		}
	}
	return own, promised
}

func (p *promises) keep(id string, held promised) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.of == nil {
		p.of = map[string]promised{}
	}
	p.of[id] = held
}

// drop is for a launcher that has joined, or has left.
func (p *promises) drop(ids ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range ids {
		delete(p.of, id)
	}
}

// division is the part that the groups' own runs do not know.
type division struct {
	outcomes []string // of groups that have ended, also when their runs are forgotten
	used     time.Time
}

// check reports an invalid request.
func (q *GroupRequest) check(run string) error {
	q.Group.Of, q.Group.Index = run, 0
	p := rendezvous.Params{Min: q.Size, Max: q.Size, Group: q.Group}
	err := p.Validate()
	switch {
	case err != nil:
	case q.Group.Count == 0 || q.Size > rendezvous.MaxNodes/q.Group.Count:
		err = fmt.Errorf("%d replica groups of %d nodes: need at most %d nodes", q.Group.Count, q.Size, rendezvous.MaxNodes)
	case q.ID == "" || max(len(q.ID), len(q.Name)) > rendezvous.MaxName || !text.Printable(q.ID+q.Name):
		err = fmt.Errorf("launcher %.40q of node %.40q: %s, at most %d bytes", q.ID, q.Name, text.PrintableRule,
			rendezvous.MaxName)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", api.ErrBadRequest, err)
	}
	return nil
}

// Place answers a request for a group. The error is rendezvous.ErrRefused if the run has other groups.
func (s *Service) Place(run string, q GroupRequest) (GroupAnswer, error) {
	if err := q.check(run); err != nil {
		return GroupAnswer{}, err
	}
	g := &s.groups
	g.mu.Lock()
	defer g.mu.Unlock()
	d, err := g.divisionLocked(run, q.Group.Count, time.Now())
	if err != nil {
		return GroupAnswer{}, err
	}
	views, at, err := g.viewsLocked(d, q)
	if err != nil || at >= 0 {
		return GroupAnswer{at}, err
	}
	index, found := g.promises.count(run, q.ID, views)
	if !found {
		index, found = rendezvous.PlaceIn(views, q.Size, q.Name, q.Wish)
	}
	if !found {
		return GroupAnswer{-1}, nil
	}
	g.promises.keep(q.ID, promised{run, index, time.Now()})
	return GroupAnswer{index}, nil
}

// divisionLocked returns the division of a run, a new one if no node is in it. It forgets other runs that have been
// silent for long.
func (g *groups) divisionLocked(run string, count int, now time.Time) (*division, error) {
	if g.of == nil {
		g.of = map[string]*division{}
	}
	d := g.of[run]
	if d != nil && len(d.outcomes) != count && g.alive(run, len(d.outcomes)) {
		return nil, fmt.Errorf("%w: --replica-groups=%d, but run %q was opened with %d; use the same --replica-groups on "+
			"every node", rendezvous.ErrRefused, count, run, len(d.outcomes))
	}
	if d == nil || len(d.outcomes) != count {
		for id, old := range g.of {
			if now.Sub(old.used) > promise && !g.alive(id, len(old.outcomes)) {
				delete(g.of, id)
				g.quorums.drop(id)
			}
		}
		if d == nil && len(g.of) >= maxDivisions {
			return nil, fmt.Errorf("%w: there are %d runs with replica groups", rendezvous.ErrRefused, maxDivisions)
		}
		d = &division{outcomes: make([]string, count)}
		g.of[run] = d
	}
	d.used = now
	return d, nil
}

func (g *groups) alive(run string, count int) bool {
	for i := range count {
		if len(g.hub.IDs(rendezvous.GroupRun(run, i))) > 0 {
			return true
		}
	}
	return false
}

// viewsLocked are the groups as they are now. At is the group in which the launcher is already; -1: it is in none.
func (g *groups) viewsLocked(d *division, q GroupRequest) (views []rendezvous.Occupied, at int, err error) {
	views, over := make([]rendezvous.Occupied, q.Group.Count), 0
	for i := range views {
		v, id := &views[i], rendezvous.GroupRun(q.Group.Of, i)
		s, err := g.hub.Run(id)
		if err != nil && !errors.Is(err, api.ErrUnknownRun) {
			return nil, -1, err
		}
		known, here := err == nil, g.hub.IDs(id)
		if known && len(here) > 0 {
			if err := q.differs(s.Params); err != nil {
				return nil, -1, err
			}
		}
		if slices.Contains(here, q.ID) {
			return nil, i, nil
		}
		if v.Nodes = len(here); known {
			d.outcomes[i] = s.Outcome
		}
		g.promises.drop(here...)
		for _, n := range s.Nodes {
			if n.Suspect {
				v.Suspect = append(v.Suspect, n.Name)
			}
		}
		for _, l := range s.Missing {
			v.Gone = append(v.Gone, l.Node)
		}
		if v.Over = d.outcomes[i] != ""; v.Over {
			over++
		}
	}
	if over == len(views) { // a late node hears of the result, and a new one begins the run anew
		for i := range views {
			views[i].Over = false
		}
	}
	return views, -1, nil
}

// differs returns an error if the request is of other groups than the run of one group.
func (q *GroupRequest) differs(p rendezvous.Params) error {
	if own := q.Group; p.Group.Count != own.Count || p.Group.Min != own.Min || p.Max != q.Size {
		return fmt.Errorf("%w: --replica-groups=%d with %d nodes each, of which %d groups are needed, but the run was "+
			"opened with %d, %d and %d; use the same --replica-groups and --nnodes on every node", rendezvous.ErrRefused,
			own.Count, q.Size, own.Min, p.Group.Count, p.Max, p.Group.Min)
	}
	return nil
}

// ended ends all groups if too few can go on without the one whose run has failed.
func (g *groups) ended(run string) {
	s, err := g.hub.Run(run)
	of := s.Params.Group
	if err != nil || of.Of == "" {
		return
	}
	g.mu.Lock()
	d, err := g.divisionLocked(of.Of, of.Count, time.Now())
	if err != nil {
		g.mu.Unlock()
		return
	}
	d.outcomes[of.Index] = s.Outcome
	left := of.Count
	for i := range of.Count {
		if s, err := g.hub.Run(rendezvous.GroupRun(of.Of, i)); err == nil {
			d.outcomes[i] = s.Outcome
		}
		if d.outcomes[i] == string(job.Failed) {
			left--
		}
	}
	g.mu.Unlock()
	if left >= of.Min {
		return
	}
	why := fmt.Sprintf("replica group %d of run %s has failed, and %d of %d groups are left, but %d are needed", of.Index,
		of.Of, left, of.Count, of.Min)
	for i := range of.Count {
		_ = g.hub.Order(rendezvous.GroupRun(of.Of, i), rendezvous.Order{Kind: rendezvous.OrderStop, Text: orderText(why)})
	} // those that have ended, or are not here, refuse
}

// observed is called with the run locked.
func (g *groups) observed(run string, n rendezvous.Note) {
	if n.ID != "" {
		g.promises.drop(n.ID)
	}
	i := strings.LastIndex(run, ".g")
	if i < 0 || !endsEpoch(n.Event) {
		return
	}
	if index, err := strconv.Atoi(run[i+2:]); err == nil {
		g.quorums.ended(run[:i], index)
	}
	if n.Event == job.EventFailed {
		go g.ended(run) // a Hub that is closed meanwhile has no runs
	}
}
