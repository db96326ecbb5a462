package hang

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// byStore uses the keys that ranks wait for: process groups begin with an exchange of them.
func (a *analysis) byStore() *Verdict {
	for _, w := range a.store {
		waiters := a.waitersOf(w)
		if len(waiters) == 0 {
			continue
		}
		if culprits := a.missing(waiters); len(culprits) > 0 {
			return a.absent(w, culprits, waiters)
		}
	}
	return nil
}

// waitersOf are the ranks that wait for a key, or for the next one: by their connections, and by their stacks.
func (a *analysis) waitersOf(w StoreWait) members {
	return a.members.all(func(m *member) bool {
		return m.wait.store ||
			slices.ContainsFunc(m.sockets, func(s string) bool { return slices.Contains(w.Waiters, s) })
	})
}

// missing are ranks that wait for nothing: none leaves before all have arrived.
func (a *analysis) missing(waiters members) members {
	return a.members.all(func(m *member) bool {
		return m.halted() || m.class != classWaiting && !slices.Contains(waiters, m)
	})
}

// absent is the verdict on ranks that have not joined a process group.
func (a *analysis) absent(w StoreWait, culprits, waiters members) *Verdict {
	culprits = a.blame.limits.urgent(culprits)
	v := a.blame.on(culprits, waiters, nil)
	t := absentTerms(culprits)
	v.Kind, v.Age, v.Tell, v.Deadline = KindMissing, w.Age, t.tell, t.deadline
	v.In = cmp.Or(v.In, "init_process_group")
	named, ok := rankInKey(w.Key)
	isNamed := func(m *member) bool { return m.rank == named }
	switch {
	case len(a.noData) > 0:
		v.doubt("nothing is known of ranks " + a.noData.Brief(8))
	case culprits.any(func(m *member) bool { return m.class == classBusy }):
		v.doubt("it may be at work")
	case ok && !culprits.any(isNamed):
		v.doubt("the key that is waited for is that of rank " + strconv.Itoa(named))
	case !ok && len(culprits) > len(waiters):
		v.doubt("the key that is waited for names nobody")
	}
	return v
}

// storeGrace is for how long a key may be waited for before that is suspicious.
const storeGrace = 10 * time.Second

// rankInKey is the rank of a key of the default process group. Gloo has a key for every rank, NCCL's first one is
// rank 0's. Keys of other groups count within them, and name no rank of the world.
//
//	.../default_pg/0//cpu//0/2   gloo, PyTorch 2.x
//	.../default_pg/0//cuda//0    NCCL, PyTorch 2.x
//	.../default_pg/0/0/rank_2    gloo, PyTorch 1.x; and .../0/0/2
//	.../default_pg/0/0           NCCL, PyTorch 1.x
func rankInKey(key string) (rank int, ok bool) {
	_, rest, found := strings.Cut(key, "default_pg/0/")
	if !found {
		return 0, false
	}
	if device, after, typed := strings.Cut(strings.TrimPrefix(rest, "/"), "//"); typed && strings.HasPrefix(rest, "/") {
		if device == "cuda" {
			return 0, !strings.Contains(after, ":")
		}
		rest = after
	}
	context, last, deep := strings.Cut(rest, "/")
	if !deep {
		return 0, context == "0"
	}
	rank, err := strconv.Atoi(strings.TrimPrefix(last, "rank_"))
	return rank, err == nil && rank >= 0
}
