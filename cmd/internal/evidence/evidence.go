// Package evidence turns what a launcher knows of its workers' ends into what the rendezvous keeps, and back: neither
// of the two packages knows the other.
package evidence

import (
	"cmp"
	"encoding/json"
	"fmt"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/verdict"
)

// Pack makes the launcher's records travel with the rendezvous, which keeps them unread.
func Pack(fs []verdict.Failure) []job.Failure {
	out := make([]job.Failure, 0, len(fs))
	for _, f := range fs {
		detail, err := json.Marshal(f)
		if err != nil { // a Failure holds nothing that JSON cannot
			detail = nil
		}
		out = append(out, job.Failure{Rank: f.Rank, GroupRank: f.Node, At: f.At, Detail: detail,
			Fingerprint: f.Fingerprint(), Text: fmt.Sprintf("rank %d (node %d %s, local rank %d) failed: %s",
				f.Rank, f.Node, f.NodeName, f.LocalRank, f.Reason())})
	}
	return out
}

// Unpack reads them again. The daemon's clock, to which it has shifted every node's times, replaces each node's own.
func Unpack(e job.Evidence) verdict.Evidence {
	v := verdict.Evidence{RestartsUsed: e.Restarts, MaxRestarts: e.MaxRestarts, WorldSize: e.WorldSize}
	if e.Cause != nil && e.Cause.Kind == job.CauseHang {
		v.Hung = cmp.Or(e.Cause.Text, "the workers hung")
	}
	for _, f := range e.Failures {
		v.Failures = append(v.Failures, failure(f))
	}
	for _, l := range e.Losses {
		loss := verdict.Loss{Node: l.GroupRank, NodeName: l.Node, Reason: l.Reason, At: l.At}
		for i := range l.Slots {
			loss.Ranks = append(loss.Ranks, l.RankBase+i)
		}
		v.Losses = append(v.Losses, loss)
	}
	return v
}

// Follows reports whether f can be the consequence of another process' end.
func Follows(f job.Failure) bool {
	v := failure(f)
	return v.Stopped || v.Follows()
}

func failure(f job.Failure) verdict.Failure {
	var v verdict.Failure
	if json.Unmarshal(f.Detail, &v) != nil {
		return verdict.Failure{Rank: f.Rank, Node: f.GroupRank, Message: f.Text, At: f.At, ExitCode: 1}
	}
	if !v.ErrorTime.IsZero() {
		v.ErrorTime = v.ErrorTime.Add(f.At.Sub(v.At))
	}
	v.At = f.At
	return v
}
