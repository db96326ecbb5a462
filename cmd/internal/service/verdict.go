package service

import (
	"encoding/json"
	"net/http"

	"dlrover-run/cmd/internal/evidence"
	"dlrover-run/launcher/verdict"
	"dlrover-run/rendezvous"
)

// Verdict says why an epoch of a run ended. GET /v1/runs/{run}/verdict answers with that of the newest one whose end
// tells something.
type Verdict struct {
	Round   int                `json:"round"`
	Epoch   int                `json:"epoch"`
	Outcome rendezvous.Outcome `json:"outcome,omitempty"` // of the run, if it ended with the epoch
	Cause   *rendezvous.Cause  `json:"cause,omitempty"`

	Line     string       `json:"line"` // for people
	Rule     verdict.Rule `json:"rule"` // what decided
	RootRank *int         `json:"root_rank"`
	RootNode string       `json:"root_node,omitempty"` // the name of the node that is to blame, or that went away

	Failures    int `json:"failures"`
	Losses      int `json:"losses"`
	Restarts    int `json:"restarts"`
	MaxRestarts int `json:"max_restarts"`
	WorldSize   int `json:"world_size"`
}

// judge finds the verdict in the evidence of a run's epochs, the oldest first; false without any. An epoch that ended
// for new nodes says nothing about an earlier failure.
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
	return e.Outcome == rendezvous.Failed || len(e.Failures)+len(e.Losses) > 0
}

func judgeEpoch(e rendezvous.EpochEvidence) Verdict {
	j := verdict.Judge(evidence.Unpack(e.Evidence))
	v := Verdict{
		Round: e.Round, Epoch: e.Epoch, Outcome: e.Outcome, Cause: e.Cause, Line: j.Line(), Rule: j.Rule,
		Failures: len(e.Failures), Losses: len(e.Losses), Restarts: e.Restarts, MaxRestarts: e.MaxRestarts, WorldSize: e.WorldSize,
	}
	switch {
	case j.Root != nil:
		v.RootRank, v.RootNode = &j.Root.Rank, j.Root.NodeName
	case j.Loss != nil:
		v.RootNode = j.Loss.NodeName
	case e.Cause != nil:
		v.Line = e.Cause.Text + "; " + v.Line
	}
	return v
}

// verdicts serves the verdict of each run.
func verdicts(evidences func(run string) ([]rendezvous.EpochEvidence, error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		epochs, err := evidences(req.PathValue("run"))
		v, ok := judge(epochs)
		switch {
		case err != nil:
			answer(w, http.StatusNotFound, map[string]string{"code": "unknown_node", "error": err.Error()})
		case !ok:
			w.WriteHeader(http.StatusNoContent)
		default:
			answer(w, http.StatusOK, v)
		}
	})
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the peer may be gone
}
