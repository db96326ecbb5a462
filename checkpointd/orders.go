package checkpointd

import "time"

// shardOf is a shard of a save.
type shardOf struct {
	save  string
	shard int
}

// stream identifies the saves of one shard. They are made one after the other.
type stream struct {
	epoch, dir    string
	shard, shards int
}

// orders are the latest saves of the streams of this node.
type orders map[stream]struct {
	saved time.Time
	order int64
}

// passed reports whether a worker of this node has made a later save and its shard of j is gone. Workers may restart
// their count within an epoch, so the time counts as well.
func (o orders) passed(j *save, here map[shardOf]bool) bool {
	m := j.meta
	for at, last := range o {
		same := at == stream{m.Epoch, m.Dir, at.shard, m.Shards}
		if same && m.Order > 0 && last.order > m.Order && last.saved.After(j.saved) &&
			!here[shardOf{m.Save, at.shard}] {
			return true
		}
	}
	return false
}
