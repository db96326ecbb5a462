package checkpointd

import (
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/shm"
)

// saves are the saves of this daemon, in the order in which they were found.
type saves struct {
	life *lifetime

	mu          sync.Mutex
	list        []*save                        // newest last; bounded by maxRemembered
	breakpoints int                            // breakpoint saves that have not been decided, and may begin more
	undecided   map[string]coordinator.Holding // the newest save, by directory, where the nodes could not agree on one
	durable     map[int]SegmentStatus          // newest committed save of each rank
}

func newSaves(life *lifetime) *saves {
	return &saves{life: life, undecided: map[string]coordinator.Holding{}, durable: map[int]SegmentStatus{}}
}

// add adds j, unless the same shard was added before: then it returns that. An aborted save stays aborted for all its
// shards, except for the second attempt that a breakpoint may make.
func (s *saves) add(j *save) (earlier *save) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.findLocked(ofShard(j.meta.Save, j.meta.Shard))
	if o != nil && (!o.phase.aborted() || !j.secondAttempt || o.secondAttempt) {
		return o
	}
	s.list = append(s.list, j)
	s.trimLocked()
	s.life.notify()
	return nil
}

// trimLocked forgets the oldest saves that are over.
func (s *saves) trimLocked() {
	for i := 0; len(s.list) > maxRemembered && i < len(s.list); {
		if s.list[i].phase.terminal() {
			s.list = append(s.list[:i], s.list[i+1:]...)
			continue
		}
		i++
	}
}

// inFlightLocked lists the saves of dir, "" for all, that are on their way to the disk.
func (s *saves) inFlightLocked(dir string) (out []*save) {
	for _, j := range s.list {
		if !j.phase.terminal() && (dir == "" || j.meta.Dir == dir) {
			out = append(out, j)
		}
	}
	return out
}

func (s *saves) inFlight(dir string) []*save {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.inFlightLocked(dir)
}

// shardsUnderWay lists the shards of a save that are on their way to the disk.
func (s *saves) shardsUnderWay(id string) []*save {
	return slices.DeleteFunc(s.inFlight(""), func(j *save) bool { return j.meta.Save != id })
}

// quiet reports that no save is on its way to the disk, nor about to be.
func (s *saves) quiet() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.breakpoints == 0 && len(s.inFlightLocked("")) == 0
}

// written reports that a load from dir need not wait: nothing of it is on its way, except saves that wait for others.
func (s *saves) written(dir string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.breakpoints == 0 && !slices.ContainsFunc(s.list,
		func(j *save) bool { return j.meta.Dir == dir && !j.phase.terminal() && !j.stuck })
}

// left counts the saves that are on their way. lost and undecided may be on the disk or not.
func (s *saves) left() (n int, lost []*save, undecided []coordinator.Holding) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.breakpoints + len(s.inFlightLocked("")), s.lostLocked(), slices.Collect(maps.Values(s.undecided))
}

// lostLocked lists the newest save of each shard that was aborted: this daemon has brought nothing newer to the disk.
func (s *saves) lostLocked() (lost []*save) {
	type key struct {
		dir   string
		shard int
	}
	newest := map[key]*save{}
	for _, j := range s.list {
		at := key{j.meta.Dir, j.meta.Shard}
		if o := newest[at]; o == nil || !j.saved.Before(o.saved) {
			newest[at] = j
		}
	}
	for _, j := range newest {
		half := errors.Is(j.err, errPartial) || errors.Is(j.err, errIncomplete) || errors.Is(j.err, errOutdated)
		if j.phase == failed && !half { // halves are of no use
			lost = append(lost, j)
		}
	}
	return lost
}

// state is how far a save has come. A save that failed has an error.
func (s *saves) state(j *save) (phase, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return j.phase, j.err
}

func (s *saves) find(match func(j *save) bool) *save {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.findLocked(match)
}

// findLocked returns the newest save that matches, nil if there is none.
func (s *saves) findLocked(match func(j *save) bool) *save {
	for _, j := range slices.Backward(s.list) {
		if match(j) {
			return j
		}
	}
	return nil
}

// requested finds the save of a request among those of this daemon.
func (s *saves) requested(r request) *save {
	return s.find(func(j *save) bool {
		return j.meta.Dir == r.Dir && j.meta.Step == r.Step && (r.Save == "" || j.meta.Save == r.Save)
	})
}

// later returns the step of a committed save of the same shard and directory that was made after j; false if
// files of j are durable. Later is by the clock of one node: steps may go back.
func (s *saves) later(j *save) (step int64, ok bool) {
	if j.entry != nil {
		return 0, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.list, func(o *save) bool {
		return o.phase == committed && o.meta.Dir == j.meta.Dir && o.meta.Shard == j.meta.Shard &&
			o.saved.After(j.saved)
	})
	if i < 0 {
		return 0, false
	}
	return s.list[i].meta.Step, true
}

// working reports whether a save is on its way through this daemon.
func (s *saves) working(id string) bool {
	return s.find(func(j *save) bool { return j.meta.Save == id && !j.phase.terminal() }) != nil
}

// abortedTwice reports whether this node has given a save up for good.
func (s *saves) abortedTwice(id string) bool {
	return s.find(func(j *save) bool { return j.meta.Save == id && j.secondAttempt && j.phase.aborted() }) != nil
}

func (s *saves) tried(id string, shard int) bool {
	return s.find(ofShard(id, shard)) != nil
}

// ofShard matches the attempts at a shard of a save.
func ofShard(id string, shard int) func(j *save) bool {
	return func(j *save) bool { return j.meta.Save == id && j.meta.Shard == shard }
}

func (s *saves) setPhase(j *save, to phase) {
	s.mu.Lock()
	defer s.mu.Unlock()
	j.phase = to
	s.life.notify()
}

// setStuck records that j has waited for long.
func (s *saves) setStuck(j *save) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !j.stuck && time.Since(j.begun) > agreePatience {
		j.stuck = true
		s.life.notify()
	}
}

// end records the end of a save.
func (s *saves) end(j *save, to phase, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	j.phase, j.err = to, err
	if to == committed {
		if !j.saved.Before(s.undecided[j.meta.Dir].Saved) {
			delete(s.undecided, j.meta.Dir)
		}
		if !j.saved.Before(s.durable[j.meta.Rank].Saved) {
			s.durable[j.meta.Rank] = SegmentStatus{Rank: j.meta.Rank, Step: j.meta.Step, Saved: j.saved, Durable: true}
		}
	}
	s.life.notify()
}

// firstLog reports whether no shard of j's save has logged the reason of its abort yet, and records that j has.
func (s *saves) firstLog(j *save) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	said := slices.ContainsFunc(s.list, func(o *save) bool { return o.meta.Save == j.meta.Save && o.logged })
	j.logged = true
	return !said
}

// countBreakpoint adds 1 when a breakpoint save begins, -1 when it is decided.
func (s *saves) countBreakpoint(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.breakpoints += n
	s.life.notify()
}

// decide records the result of an agreement about dir: newest is the save that stays undecided, nil if there is none.
func (s *saves) decide(dir string, newest *coordinator.Holding) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.undecided, dir)
	if newest != nil {
		s.undecided[dir] = *newest
	}
}

// dirs are the directories of the saves.
func (s *saves) dirs() map[string]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	dirs := map[string]bool{}
	for _, j := range s.list {
		dirs[j.meta.Dir] = true
	}
	return dirs
}

// dropPartial drops the saves whose other shards cannot come any more: a worker of this node has saved over its shard,
// or the save is of this node alone and the workers of its epoch have ended. here are the shards in memory, latest the
// newest saves.
func (s *saves) dropPartial(latest orders, here map[shardOf]bool, ended func(m shm.Meta) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.breakpoints > 0 { // it may be about to start the others
		return
	}
	tried := map[string]int{}
	for _, j := range s.list {
		if p := (shardOf{j.meta.Save, j.meta.Shard}); !j.secondAttempt {
			here[p] = true
			tried[p.save]++
		}
	}
	for _, j := range s.inFlightLocked("") {
		if ended(j.meta) && tried[j.meta.Save] < j.meta.Shards || latest.passed(j, here) {
			j.drop(errPartial)
		}
	}
}

// status describes the saves on their way to the disk, and the ages of segs and of the durable saves.
func (s *saves) status(segs []SegmentStatus) (under []saveStatus, ages []coordinator.Age) {
	s.mu.Lock()
	defer s.mu.Unlock()
	under = []saveStatus{}
	for _, j := range s.inFlightLocked("") {
		under = append(under, saveStatus{Step: j.meta.Step, Shard: j.meta.Shard, Phase: string(j.phase),
			Bytes: j.bytes, Done: j.done.Load(), Since: j.begun})
	}
	return under, agesOf(s.durable, segs)
}
