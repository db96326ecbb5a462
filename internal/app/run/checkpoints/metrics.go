package checkpoints

import (
	"context"
	"strconv"
	"time"

	"dlrover-run/checkpointd"
	"dlrover-run/internal/app/ckptd"
	"dlrover-run/internal/exposition"
)

// scrapeBudget bounds how long a scrape waits for the checkpoint daemon.
const scrapeBudget = time.Second

// ckptMetrics asks the checkpoint daemon at every scrape. Without a daemon it has no metrics.
type ckptMetrics struct{ daemon *ckptd.Supervisor }

func (c ckptMetrics) tell(s *exposition.Scrape) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeBudget)
	defer cancel()
	st, err := c.daemon.Status(ctx)
	if err != nil || st == nil {
		return // it is being started, or no worker has needed it
	}
	ckptStatus(s, *st, time.Now())
}

func ckptStatus(s *exposition.Scrape, st checkpointd.Status, now time.Time) {
	ckptCounters(s, st.Counters)
	ckptRanks(s, st, now)
	ckptGauge(s, "saves_pending", "Shards on their way to the disk.", float64(len(st.Saves)))
	full := 0.0
	if st.Trouble != "" {
		full = 1
	}
	ckptGauge(s, "storage_trouble", "1 while writing to storage fails and is tried again.", full)
}

func ckptName(name string) string { return "dlrover_checkpoint_" + name }

func ckptGauge(s *exposition.Scrape, name, help string, v float64, labels ...exposition.Label) {
	s.Gauge(ckptName(name), help, v, labels...)
}

func ckptCounters(s *exposition.Scrape, n checkpointd.Counters) {
	for _, m := range []struct {
		name, help string
		value      float64
	}{
		{"flushes_total", "Shards written to storage.", float64(n.Flushes)},
		{"flushed_bytes_total", "Bytes written to storage.", float64(n.FlushedBytes)},
		{"write_seconds_total", "Time spent writing to storage, fsync included.", n.WriteTime.Seconds()},
		{"commits_total", "Shards that became part of a committed step.", float64(n.Commits)},
		{"failures_total", "Shards whose step was not committed.", float64(n.Failures)},
		{"superseded_total", "Shards overwritten in memory before they could be written.", float64(n.Superseded)},
		{"retries_total", "Writes to storage that failed and were tried again.", float64(n.Retries)},
		{"copies_sent_total", "Shards copied to the memory of another node.", float64(n.CopiesSent)},
		{"copied_bytes_total", "Bytes copied to the memory of other nodes.", float64(n.CopiedBytes)},
		{"copies_failed_total", "Copies to other nodes that failed.", float64(n.CopiesFailed)},
		{"copies_fetched_total", "Shards fetched from the memory of another node.", float64(n.CopiesFetched)},
		{"breakpoints_total", "Requests to save what was in memory.", float64(n.Breakpoints)},
	} {
		s.Counter(ckptName(m.name), m.help, m.value)
	}
}

// ckptRanks reports the age of each rank's newest save in memory and on disk.
func ckptRanks(s *exposition.Scrape, st checkpointd.Status, now time.Time) {
	bytes := 0.0
	for _, seg := range st.Segments {
		bytes += float64(seg.Bytes)
	}
	ckptGauge(s, "memory_bytes", "Bytes of checkpoints in memory, copies of other nodes' included.", bytes)
	for _, r := range st.Ranks {
		tell := func(where string, n int64, at time.Time) {
			if n < 0 {
				return
			}
			labels := []exposition.Label{{Name: "rank", Value: strconv.Itoa(r.Rank)}, {Name: "where", Value: where}}
			ckptGauge(s, "step", "Newest step of a rank of this node, in memory and on disk.", float64(n), labels...)
			ckptGauge(s, "age_seconds", "Age of the newest step of a rank of this node, in memory and on disk.",
				now.Sub(at).Seconds(), labels...)
		}
		tell("memory", r.MemoryStep, r.MemoryAt)
		tell("disk", r.DurableStep, r.DurableAt)
	}
}
