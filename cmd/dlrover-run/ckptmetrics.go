package main

import (
	"context"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"dlrover-run/checkpointd"
	"dlrover-run/cmd/internal/ckptd"
)

// scrapeBudget bounds how long a scrape waits for the checkpoint daemon.
const scrapeBudget = time.Second

// ckptCollector asks the checkpoint daemon at every scrape. Without a daemon there is
// nothing to tell.
type ckptCollector struct{ daemon *ckptd.Supervisor }

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("dlrover_checkpoint_"+name, help, labels, nil)
}

// Describe implements prometheus.Collector; what there is depends on the daemon.
func (c ckptCollector) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (c ckptCollector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeBudget)
	defer cancel()
	st, err := c.daemon.Status(ctx)
	if err != nil || st == nil {
		return // it is being started, or nobody has needed it
	}
	c.counters(out, st.Counters)
	c.ranks(out, *st, time.Now())
	gauge(out, desc("saves_pending", "Shards on their way to the disk."), float64(len(st.Saves)))
	full := 0.0
	if st.Trouble != "" {
		full = 1
	}
	gauge(out, desc("storage_trouble", "1 while writing to storage fails and is tried again."), full)
}

func gauge(out chan<- prometheus.Metric, d *prometheus.Desc, v float64, labels ...string) {
	out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func (c ckptCollector) counters(out chan<- prometheus.Metric, n checkpointd.Counters) {
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
		out <- prometheus.MustNewConstMetric(desc(m.name, m.help), prometheus.CounterValue, m.value)
	}
}

// ranks tells how old the newest save of each rank in memory and on disk is.
func (c ckptCollector) ranks(out chan<- prometheus.Metric, st checkpointd.Status, now time.Time) {
	bytes := 0.0
	for _, s := range st.Segments {
		bytes += float64(s.Bytes)
	}
	gauge(out, desc("memory_bytes", "Bytes of checkpoints in memory, copies of other nodes' included."), bytes)
	step := desc("step", "Newest step of a rank of this node, in memory and on disk.", "rank", "where")
	age := desc("age_seconds", "Age of that step: what would be lost.", "rank", "where")
	for _, r := range st.Ranks {
		tell := func(where string, n int64, at time.Time) {
			if n >= 0 {
				gauge(out, step, float64(n), strconv.Itoa(r.Rank), where)
				gauge(out, age, now.Sub(at).Seconds(), strconv.Itoa(r.Rank), where)
			}
		}
		tell("memory", r.MemoryStep, r.MemoryAt)
		tell("disk", r.DurableStep, r.DurableAt)
	}
}
