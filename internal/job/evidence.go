package job

import (
	"encoding/json"
	"time"
)

// Failure is one worker's end as a node reports it. Detail is the launcher's own
// record; the rendezvous keeps it and never reads it.
type Failure struct {
	Rank      int             `json:"rank"`
	GroupRank int             `json:"group_rank"`
	Text      string          `json:"text"`
	At        time.Time       `json:"at"`
	Detail    json.RawMessage `json:"detail,omitempty"`
	// Fingerprint is the same for failures of one kind, whichever worker they are of; "" from older launchers.
	Fingerprint string `json:"fingerprint,omitempty"`
}

// Loss is a member that went away without finishing.
type Loss struct {
	Node      string    `json:"node"`
	GroupRank int       `json:"group_rank"`
	RankBase  int       `json:"rank_base"`
	Slots     int       `json:"slots"`
	Reason    string    `json:"reason"`
	At        time.Time `json:"at"`
	// Switch is that of the node; "" is unknown.
	Switch string `json:"switch,omitempty"`
	// Silent: it went away without a good-bye.
	Silent bool `json:"silent,omitempty"`
}

// Evidence is all that is known about the end of the newest epoch.
type Evidence struct {
	Outcome     Outcome   `json:"outcome"`
	Cause       *Cause    `json:"cause,omitempty"`
	Failures    []Failure `json:"failures,omitempty"`
	Losses      []Loss    `json:"losses,omitempty"`
	Restarts    int       `json:"restarts"`
	MaxRestarts int       `json:"max_restarts"`
	WorldSize   int       `json:"world_size"`
	// Time is the account of the time of a run that has ended, in a line; "" where no steps are counted.
	Time string `json:"time,omitempty"`
}

// Outcome is how a run ended.
type Outcome string

// The outcomes of a run; "" while it lives.
const (
	Succeeded Outcome = "succeeded"
	Failed    Outcome = "failed"
)
