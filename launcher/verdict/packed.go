package verdict

import (
	"cmp"
	"encoding/json"
	"fmt"

	"dlrover-run/internal/job"
)

// Pack makes records travel with the rendezvous, which keeps them unread.
func Pack(fs []Failure) []job.Failure {
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
func Unpack(e job.Evidence) Evidence {
	v := Evidence{RestartsUsed: e.Restarts, MaxRestarts: e.MaxRestarts, WorldSize: e.WorldSize, Time: e.Time}
	if e.Cause != nil && e.Cause.Kind == job.CauseHang {
		v.Hung = cmp.Or(e.Cause.Text, "the workers hung")
	}
	for _, f := range e.Failures {
		v.Failures = append(v.Failures, unpacked(f))
	}
	for _, l := range e.Losses {
		loss := Loss{Node: l.GroupRank, NodeName: l.Node, Reason: l.Reason, At: l.At}
		for i := range l.Slots {
			loss.Ranks = append(loss.Ranks, l.RankBase+i)
		}
		v.Losses = append(v.Losses, loss)
	}
	return v
}

// Follows reports whether f can be the consequence of another process' end.
func Follows(f job.Failure) bool {
	v := unpacked(f)
	return v.Stopped || v.Follows()
}

func unpacked(f job.Failure) Failure {
	var v Failure
	if json.Unmarshal(f.Detail, &v) != nil {
		return Failure{Rank: f.Rank, Node: f.GroupRank, Message: f.Text, At: f.At, ExitCode: 1}
	}
	if !v.ErrorTime.IsZero() {
		v.ErrorTime = v.ErrorTime.Add(f.At.Sub(v.At))
	}
	v.At = f.At
	return v
}
