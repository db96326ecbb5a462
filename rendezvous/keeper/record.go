package keeper

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
	"dlrover-run/rendezvous/lead"
)

// version is that of all records. A reader takes older ones, too.
const version = 1

// Keys: prefix, the run as escaped, roundName, or lineName and a number.
const (
	prefix    = "runs/"
	roundName = "/round"
	lineName  = "/events/"
	maxEscape = 120 // bytes of a run's name in a key
)

// loaded is the record of a run's Round.
type loaded struct {
	Version int             `json:"version"`
	Run     string          `json:"run"`
	Base    uint64          `json:"base"` // Base and Lost of its api.KeptLine
	Lost    uint64          `json:"lost"`
	Kept    rendezvous.Kept `json:"kept"`
	Hangs   json.RawMessage `json:"hangs,omitempty"`
}

func roundKey(run string) string { return prefix + escape(run) + roundName }

// escape makes a part of a key of a run's name. Records have the name itself.
func escape(run string) string {
	var b strings.Builder
	for _, c := range []byte(run) {
		if c|0x20 >= 'a' && c|0x20 <= 'z' || c >= '0' && c <= '9' || c == '.' || c == '-' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "_%02x", c)
		}
	}
	if b.Len() <= maxEscape {
		return b.String()
	}
	sum := sha256.Sum256([]byte(run))
	return b.String()[:maxEscape-34] + "__" + hex.EncodeToString(sum[:16])
}

// load takes over a record of an earlier leader.
func (k *Keeper) load(r lead.Record) {
	if !strings.HasPrefix(r.Key, prefix) || !strings.HasSuffix(r.Key, roundName) {
		return
	}
	l := new(loaded)
	err := json.Unmarshal(r.Value, l)
	switch {
	case l.Version > version:
		err = fmt.Errorf("it is of version %d, and this program knows %d: use one as new as its writer", l.Version, version)
	case err == nil && (l.Version < 1 || roundKey(l.Run) != r.Key):
		err = fmt.Errorf("it is damaged")
	}
	if err != nil {
		k.log.Warn("what earlier leaders have decided about a run cannot be used", "key", r.Key, "run_id", l.Run, "err", err)
		return
	}
	past := api.KeptRun{Round: l.Kept, Line: api.KeptLine{Base: l.Base, Lost: l.Lost}}
	k.runs[l.Run] = &record{round: r.Value, past: past, hangs: l.Hangs, line: line{base: l.Base, lost: l.Lost}}
}

// shortText is how long texts may be in a record that is too large, in bytes.
const shortText = 100

// lighter are the parts that a record is written without, one after the other, until it fits.
var lighter = []func(*rendezvous.Kept){
	func(k *rendezvous.Kept) { k.Passes = nil },
	func(k *rendezvous.Kept) {
		if k.End != nil {
			end := *k.End
			end.Nodes, k.End = nil, &end
		}
	},
	func(k *rendezvous.Kept) {
		if k.End == nil {
			return
		}
		end := *k.End
		end.Evidence.Failures = nil
		for _, f := range k.End.Evidence.Failures {
			end.Evidence.Failures = append(end.Evidence.Failures, job.Failure{Rank: f.Rank, GroupRank: f.GroupRank, At: f.At,
				Text: text.Head(f.Text, shortText)})
		}
		k.End = &end
	},
	func(k *rendezvous.Kept) { k.Works = k.Works[:min(len(k.Works), 1)] },
	func(k *rendezvous.Kept) { k.Unbarred = nil },
	func(k *rendezvous.Kept) { // barred returns a map that nobody else has
		for name, c := range k.Bars {
			c.Text = text.Head(c.Text, shortText)
			k.Bars[name] = c
		}
	},
}

// ofEnd is how many of lighter a run is kept without that has ended, in a store that is full.
const ofEnd = 3

func shorten(k *rendezvous.Kept) {
	for _, f := range lighter[:ofEnd] {
		f(k)
	}
}

// encode is the record of a run, in a form that a store takes.
func encode(l loaded) ([]byte, error) {
	for i := 0; ; i++ {
		data, err := json.Marshal(l)
		if err != nil || len(data) <= lead.MaxValue {
			return data, err
		}
		if i == len(lighter) {
			return nil, fmt.Errorf("%d bytes; a store takes %d: unbar some nodes", len(data), lead.MaxValue)
		}
		lighter[i](&l.Kept)
	}
}
