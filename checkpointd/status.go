package checkpointd

import (
	"context"
	"maps"
	"time"

	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/internal/stable"
)

// Status is the present state of the daemon.
type Status struct {
	World    World             `json:"world"`
	Trouble  string            `json:"note,omitempty"`
	Segments []SegmentStatus   `json:"segments"`
	Ranks    []coordinator.Age `json:"ranks"` // of this node, ascending
	Saves    []saveStatus      `json:"saves"` // under way
	Counters Counters          `json:"counters"`
	Usage    Usage             `json:"usage,omitzero"`
}

// SegmentStatus is one file of shared memory.
type SegmentStatus struct {
	Name    string    `json:"name"`
	Rank    int       `json:"rank"`
	Step    int64     `json:"step"`
	Saved   time.Time `json:"saved"`
	Bytes   int64     `json:"bytes"`
	Durable bool      `json:"durable"`
	Copy    bool      `json:"copy"`
	Dir     string    `json:"dir"`
}

// saveStatus is one shard on its way to the disk.
type saveStatus struct {
	Step  int64     `json:"step"`
	Shard int       `json:"shard"`
	Phase string    `json:"phase"`
	Bytes int64     `json:"bytes"`
	Done  int64     `json:"done"`
	Since time.Time `json:"since"`
}

// Status reads it all; it is meant for people and metrics, not for every save.
func (d *Daemon) Status() Status {
	st := Status{World: d.epochs.current(), Trouble: d.retries.trouble(), Segments: d.segs.status(),
		Counters: d.count.snapshot(), Usage: d.epochs.used()}
	st.Saves, st.Ranks = d.saves.status(st.Segments)
	return st
}

// agesOf returns the newest saves of each rank, of segs in memory and of durable on disk.
func agesOf(durable map[int]SegmentStatus, segs []SegmentStatus) []coordinator.Age {
	ranks := map[int]coordinator.Age{}
	for rank, s := range durable {
		ranks[rank] = coordinator.Age{Rank: rank, MemoryStep: -1, DurableStep: s.Step, DurableAt: s.Saved}
	}
	for _, s := range segs {
		if s.Copy {
			continue
		}
		a, ok := ranks[s.Rank]
		if !ok {
			a = coordinator.Age{Rank: s.Rank, MemoryStep: -1, DurableStep: -1}
		}
		if s.Saved.After(a.MemoryAt) {
			a.MemoryStep, a.MemoryAt = s.Step, s.Saved
		}
		if s.Durable && s.Saved.After(a.DurableAt) {
			a.DurableStep, a.DurableAt = s.Step, s.Saved
		}
		ranks[s.Rank] = a
	}
	return stable.Sorted(maps.Values(ranks), func(a, b coordinator.Age) int { return a.Rank - b.Rank })
}

// reportAges reports the ages to the master now and then. In a world of several nodes the first report says that this
// daemon is there.
func (d *Daemon) reportAges() {
	if d.cfg.Remote == nil {
		return
	}
	t := time.NewTicker(agesEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-d.worlds:
			t.Reset(agesEvery)
		case <-d.life.ctx.Done():
			return
		}
		if st := d.Status(); len(st.Ranks) > 0 || st.World.round() != "" {
			if len(st.Ranks) > 0 {
				st.Ranks[0].Trouble = st.Trouble
			}
			ctx, cancel := context.WithTimeout(d.life.ctx, agesEvery)
			_ = d.cfg.Remote.Ages(ctx, st.World.round(), st.World.GroupRank, st.Ranks) // repeated soon
			cancel()
		}
	}
}
