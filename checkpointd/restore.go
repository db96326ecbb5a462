package checkpointd

import (
	"context"
	"slices"

	"dlrover-run/checkpointd/shm"
)

// restorable is a save in memory that a rank may load.
type restorable struct {
	Seg       string `json:"seg"`
	Seq       uint64 `json:"seq"`
	Step      int64  `json:"step"`
	Save      string `json:"save"`
	Rank      int    `json:"rank"`
	Shard     int    `json:"shard"`
	Shards    int    `json:"shards"`
	WorldSize int    `json:"world_size"`
	Layout    string `json:"layout"`
	Resize    string `json:"resize"`
	SavedNS   int64  `json:"saved_ns"`
	Framework string `json:"framework"`
}

// restorables lists the saves in memory that the rank of r may load. With a timeout it first waits for the writes to
// that directory and fetches copies from peers.
func (d *Daemon) restorables(ctx context.Context, r request) (reply, error) {
	d.scan()
	if r.timeout() > 0 {
		ctx, cancel := context.WithTimeout(ctx, r.timeout())
		defer cancel()
		d.awaitWrites(ctx, r.Dir)
		d.fetch(ctx, r)
	}
	d.recoverDir(ctx, r.Dir)
	return reply{"offers": d.restorable(r)}, nil
}

// awaitWrites waits until nothing of dir is on its way to the disk.
func (d *Daemon) awaitWrites(ctx context.Context, dir string) {
	_ = d.until(ctx, func() bool { // after the timeout only committed saves count
		return d.breakpoints == 0 && !slices.ContainsFunc(d.saves,
			func(j *save) bool { return j.meta.Dir == dir && !j.phase.terminal() && !j.stuck })
	})
}

func (d *Daemon) restorable(r request) []restorable {
	out := []restorable{}
	d.eachHeld(func(name string, _ *segment, h shm.Header, m shm.Meta) {
		if m.Dir != r.Dir || m.Rank != r.Rank && m.Resize != "any" {
			return
		}
		out = append(out, restorable{Seg: name, Seq: h.Seq, Step: m.Step, Save: m.Save, Rank: m.Rank, Shard: m.Shard,
			Shards:    m.Shards,
			WorldSize: m.WorldSize, Layout: m.Layout, Resize: m.Resize, SavedNS: h.Saved.UnixNano(),
			Framework: m.Framework})
	})
	return out
}
