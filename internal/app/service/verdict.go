package service

import (
	"dlrover-run/hang"
	"dlrover-run/internal/job"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// Verdict is the reason for the end of an epoch. GET /v1/runs/{run}/verdict returns that of the newest epoch whose end
// is informative.
type Verdict struct {
	Round   int `json:"round"`
	Epoch   int `json:"epoch"`
	epoch   job.EpochID
	Outcome job.Outcome `json:"outcome,omitempty"` // of the run, if it ended with the epoch
	Cause   *job.Cause  `json:"cause,omitempty"`

	Line     string        `json:"line"`  // for people
	Rule     verdict.Rule  `json:"rule"`  // the rule that decided
	Class    verdict.Class `json:"class"` // the kind of fault
	RootRank *int          `json:"root_rank"`
	RootNode string        `json:"root_node,omitempty"` // the name of the node that is to blame, or that went away

	Failures    int `json:"failures"`
	Losses      int `json:"losses"`
	Restarts    int `json:"restarts"`
	MaxRestarts int `json:"max_restarts"`
	WorldSize   int `json:"world_size"`

	// Hang is the verdict about a hang that the epoch was ended for, as far as it is still known.
	Hang *hang.Verdict `json:"hang,omitempty"`
}

// judge finds the verdict in the evidence of a run's epochs, the oldest first; false without any. An epoch that ended
// for new nodes has no bearing on an earlier failure.
func judge(epochs []rendezvous.EpochEvidence) (Verdict, bool) {
	if len(epochs) == 0 {
		return Verdict{}, false
	}
	newest := epochs[len(epochs)-1]
	for i := len(epochs) - 1; i >= 0; i-- {
		if tells(epochs[i]) {
			newest = epochs[i]
			break
		}
	}
	return judgeEpoch(newest), true
}

func tells(e rendezvous.EpochEvidence) bool {
	return e.Outcome == job.Failed || len(e.Failures)+len(e.Losses) > 0 || endedByHang(e)
}

func endedByHang(e rendezvous.EpochEvidence) bool {
	return e.Cause != nil && e.Cause.Kind == job.CauseHang
}

func judgeEpoch(e rendezvous.EpochEvidence) Verdict {
	j := verdict.Judge(verdict.Unpack(e.Evidence))
	v := Verdict{
		Round: e.Round, Epoch: e.Epoch, epoch: e.EpochID, Outcome: e.Outcome, Cause: e.Cause, Line: j.Line(), Rule: j.Rule,
		Class: j.Class, Failures: len(e.Failures), Losses: len(e.Losses),
		Restarts: e.Restarts, MaxRestarts: e.MaxRestarts, WorldSize: e.WorldSize,
	}
	switch {
	case j.Root != nil:
		v.RootRank, v.RootNode = &j.Root.Rank, j.Root.NodeName
	case j.Loss != nil:
		v.RootNode = j.Loss.NodeName
	case e.Cause != nil && j.Hung == "":
		v.Line = e.Cause.Text + "; " + v.Line
	}
	return v
}

// Judge returns the reason for the end of an epoch, and whether it is informative: new nodes and orders are not.
func (s *Service) Judge(run string, e rendezvous.EpochEvidence) (Verdict, bool) {
	v := judgeEpoch(e)
	if v.Rule == verdict.WasHung {
		v.blame(s.hangOf(run, e.EpochID))
	}
	return v, tells(e)
}

// Verdict is that of the newest epoch of a run whose end is informative; ErrNothingNew: none has ended.
func (s *Service) Verdict(run string) (Verdict, error) {
	epochs, err := s.Hub.Evidences(run)
	if err != nil {
		return Verdict{}, err
	}
	v, ok := judge(epochs)
	if !ok {
		return Verdict{}, api.ErrNothingNew
	}
	if v.Rule == verdict.WasHung {
		v.blame(s.hangOf(run, v.epoch))
	}
	return v, nil
}

// blame takes over the first node that a verdict about a hang names; nil: it is not known any more.
func (v *Verdict) blame(h *hang.Verdict) {
	v.Hang = h
	if h != nil && len(h.Suspects) > 0 {
		v.RootRank, v.RootNode = &h.Suspects[0].Rank, h.Suspects[0].Node
	}
}
