package checkpointd

import "context"

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
// that directory and fetches copies from peers; more reports whether that may make a difference.
func (d *Daemon) restorables(ctx context.Context, r request) (reply, error) {
	d.scan()
	if r.timeout() > 0 {
		d.restart.over()
		ctx, cancel := context.WithTimeout(ctx, r.timeout())
		defer cancel()
		_ = d.life.until(ctx, func() bool { return d.saves.written(r.Dir) }) // then only committed saves count
		d.copies.fetch(ctx, r)
	}
	d.recovery.recover(ctx, r.Dir, d.saves.working)
	more := !d.saves.written(r.Dir) || d.copies.kept()
	return reply{"offers": d.segs.restorable(r), "more": more}, nil
}
