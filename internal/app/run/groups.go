package run

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"dlrover-run/internal/app/service"
	"dlrover-run/internal/retry"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// The variables of torchft's own launchers.
const (
	groupVariable  = "REPLICA_GROUP_ID"
	groupsVariable = "NUM_REPLICA_GROUPS"
)

// replicas are the groups of --replica-groups. The zero value is a job without groups.
type replicas struct {
	count, least int // groups, and how many of them are needed
	size         int // nodes of each
	wish         int // the group that this node should be in; -1: any
}

// readGroups reads --replica-groups, after the rendezvous. The bounds of the nodes are those of the whole job until the
// node has its group.
func (s *settings) readGroups(o *options) error {
	n := o.Int("replica-groups")
	if n == 0 || o.Bool("check-only") {
		return nil
	}
	p := s.params
	switch {
	case n < 2 || n > rendezvous.MaxGroups:
		return fmt.Errorf("--replica-groups=%d: need 2 to %d groups, or 0 for none", n, rendezvous.MaxGroups)
	case s.rdzv.backend == local || p.Max < n:
		return fmt.Errorf("--replica-groups=%d: each group has a launcher of its own at least, and the job has %d; use "+
			"--nnodes=%d, or a multiple of it", n, p.Max, n)
	case p.Max%n != 0:
		return fmt.Errorf("--replica-groups=%d: --nnodes=%d:%d cannot be divided into so many groups; use a multiple of %d",
			n, p.Min, p.Max, n)
	case p.Min%(p.Max/n) != 0:
		return fmt.Errorf("--replica-groups=%d: groups have %d nodes each, so the least number of nodes in --nnodes=%d:%d "+
			"has to be a multiple of %d", n, p.Max/n, p.Min, p.Max, p.Max/n)
	case p.Unit > 1:
		return fmt.Errorf("--replica-groups=%d and --node-unit=%d: nodes come and go by groups; leave out one of the two", n,
			p.Unit)
	}
	s.replicas = replicas{count: n, size: p.Max / n, least: p.Min / (p.Max / n), wish: -1}
	r := &s.replicas
	if s.node.Rank >= 0 {
		r.wish = s.node.Rank / r.size
	}
	if text := o.Lookup(groupVariable); text != "" && !p.Static {
		wish, err := strconv.Atoi(text)
		if err != nil || wish < 0 || wish >= n {
			return fmt.Errorf("$%s=%q: with --replica-groups=%d it must be from 0 to %d, or not be set", groupVariable, text,
				n, n-1)
		}
		r.wish = wish
	}
	return nil
}

// nodes is the number of nodes of the job in all groups, at most.
func (s *settings) nodes() int { return max(s.params.Max, s.replicas.count*s.replicas.size) }

// enter makes this node one of a group. From here on the run is the group's own.
func (s *settings) enter(index int) {
	r, p := s.replicas, &s.params
	p.Group = rendezvous.Group{Of: s.runID, Index: index, Count: r.count, Min: r.least}
	p.Min, p.Max, p.Quiet, p.Promised = r.size, r.size, 0, 0
	s.runID = rendezvous.GroupRun(s.runID, index)
	if rank := s.node.Rank; rank >= 0 && rank/r.size == index {
		s.node.Rank = rank % r.size
	} else {
		s.node.Rank = -1
	}
}

// env are the variables of the workers of the group with the index.
func (r replicas) env(index string) []string {
	if r.count == 0 {
		return nil
	}
	return []string{groupVariable + "=" + index, fmt.Sprintf("%s=%d", groupsVariable, r.count)}
}

// askEvery is the pause between the questions of a node that waits for a place in a group.
const askEvery = time.Second

// enterGroup finds the group of this node. With the static rendezvous the ranks decide.
func (j *nodeJob) enterGroup(ctx context.Context) error {
	s := j.s
	if s.replicas.count == 0 || s.params.Group.Count > 0 {
		return nil
	}
	index := s.replicas.wish
	if !s.params.Static {
		var err error
		if index, err = j.askForGroup(ctx); err != nil {
			return err
		}
		if c := j.endpoint.client; c != nil {
			c.Close() // the death notice needs a connection that is made after it
		}
	}
	s.enter(index)
	j.log = j.runsLog.With("run_id", s.runID)
	j.log.Info("this node is in a replica group", "group", index, "groups", s.replicas.count)
	return nil
}

// askForGroup waits until a group lacks a node.
func (j *nodeJob) askForGroup(ctx context.Context) (int, error) {
	s, waits := j.s, false
	connect := s.rdzv.connect
	if j.endpoint.second {
		connect = min(connect, retryServing)
	}
	pause := retry.Backoff{First: 10 * time.Millisecond, Most: askEvery, Spread: true}
	var away time.Time // since when nobody answers
	for {
		answer, err := j.askOnce(ctx)
		switch {
		case err == nil && answer.Index >= 0:
			return answer.Index, nil
		case err == nil:
			if !waits {
				waits = true
				j.log.Info("all replica groups have their nodes; this node is a spare")
			}
			away = time.Time{}
		case errors.Is(err, api.ErrNotFound):
			return 0, fmt.Errorf("--replica-groups=%d: the rendezvous daemon at %s is of a version without replica groups; "+
				"upgrade it, or start one job for each group (%w)", s.replicas.count, j.endpoint.where, err)
		case api.Final(err):
			return 0, err
		case away.IsZero():
			away = time.Now()
		case time.Since(away) > connect:
			return 0, fmt.Errorf("no rendezvous daemon at %s within %s; is it running, and is the address right? (%w)",
				j.endpoint.where, connect, err)
		}
		if !pause.Wait(ctx) {
			return 0, context.Cause(ctx)
		}
	}
}

func (j *nodeJob) askOnce(ctx context.Context) (a service.GroupAnswer, err error) {
	s, r := j.s, j.s.replicas
	q := service.GroupRequest{ID: s.node.ID, Name: s.node.Name, Wish: r.wish, Size: r.size,
		Group: rendezvous.Group{Count: r.count, Min: r.least}}
	if served := j.endpoint.Served(); served != nil {
		return served.Place(s.runID, q)
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	err = j.endpoint.client.Call(ctx, s.runID, "groups", q, &a)
	return a, err
}

// askTimeout bounds one question.
const askTimeout = 10 * time.Second

// lingers is how long this launcher serves the other nodes after its own end. Other groups may train on for long.
func (s *settings) lingers() time.Duration {
	if s.replicas.count > 0 {
		return math.MaxInt64
	}
	return lingerBudget
}
