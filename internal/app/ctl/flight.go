package ctl

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/rankset"
	"dlrover-run/hang/report"
	"dlrover-run/internal/stable"
	"dlrover-run/internal/text"
)

const flightAbout = `A line has the ranks that are in the same collective of a process group; those that are
behind come first. It needs --hang=auto at the launchers. NCCL has the recorder in PyTorch
2.2 and newer; gloo has it where PyTorch can write it to a file, as 2.15 can.`

// maxFlightLines bounds the lines of the text.
const maxFlightLines = 200

// flights are the flight recorders of all ranks, merged.
type flights struct {
	Run      string       `json:"run"`
	At       time.Time    `json:"at"`
	Ranks    int          `json:"ranks"`
	Answered int          `json:"answered"`
	Missing  []silent     `json:"missing,omitempty"`
	Lanes    []flightLane `json:"collectives"`
	Recorder []recorded   `json:"recorders"`
}

// silent are ranks without an answer.
type silent struct {
	Ranks string `json:"ranks"`
	Why   string `json:"why"`
}

// flightLane are the ranks that are in the same collective, or have completed it last.
type flightLane struct {
	Ranks string `json:"ranks"`
	hang.FlightEntry
}

// recorded is the end of one rank's recorder.
type recorded struct {
	Rank    int                `json:"rank"`
	Node    string             `json:"node"`
	Entries []hang.FlightEntry `json:"entries"`
}

// showFlight collects the flight recorders of all ranks, as it does stacks.
func showFlight(c *call) error {
	if _, err := c.daemon.status(c); err != nil {
		return err
	}
	found, err := c.daemon.collect(c, c.now())
	if err != nil {
		return err
	}
	f := flightsOf(found)
	if c.args.String("path") != "" {
		path, err := newFile(c, fileName(c, "flight", "")+".json", f.writeJSON)
		if err != nil {
			return err
		}
		fmt.Fprintf(c.stderr, "dlroverctl: the recorders are in %s\n", text.EscapeLine(path))
	}
	if c.args.Bool("json") {
		return f.writeJSON(text.JSON(c.stdout))
	}
	return f.writeText(c.stdout)
}

func (f *flights) writeJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", " ")
	return enc.Encode(f)
}

func (f *flights) writeText(w io.Writer) (err error) {
	printf := func(format string, args ...any) {
		if err == nil {
			_, err = fmt.Fprintf(w, format, args...)
		}
	}
	printf("%d of %d ranks answered\n", f.Answered, f.Ranks)
	for _, s := range f.Missing {
		printf("  no answer of ranks %s: %s\n", s.Ranks, text.EscapeLine(s.Why))
	}
	group := ""
	for i, l := range f.Lanes {
		if i == maxFlightLines {
			printf("and %d more lines; --json has them\n", len(f.Lanes)-i)
			break
		}
		if head := l.heading(); head != group {
			group = head
			printf("\n%s\n", text.EscapeLine(head))
		}
		of := strings.Join(strings.Fields(fmt.Sprintf("#%d %s %s %s", l.Seq, l.Op, l.Sizes, l.DType)), " ")
		printf("  ranks %s: %s, %s\n", l.Ranks, text.EscapeLine(of), text.EscapeLine(l.State))
	}
	return err
}

// heading names the process group, whose point-to-point operations are numbered by themselves.
func (l *flightLane) heading() string {
	kind := "process group "
	if l.IsP2P {
		kind = "point to point in process group "
	}
	return strings.TrimSpace(kind + l.Group + " " + l.Desc)
}

func flightsOf(found report.Incident) *flights {
	f := &flights{Run: found.Job, At: found.At, Ranks: found.World.Ranks().Len()}
	missing := map[string]*rankset.Set{}
	lack := func(why string, rank int) {
		if missing[why] == nil {
			missing[why] = &rankset.Set{}
		}
		missing[why].Add(rank)
	}
	lanes, seen := map[hang.FlightEntry]*rankset.Set{}, rankset.Set{}
	for i := range found.Evidence {
		e := &found.Evidence[i]
		seen.Add(e.Rank)
		if e.Flight == nil {
			lack(noFlight(e), e.Rank)
			continue
		}
		f.Answered++
		f.Recorder = append(f.Recorder, recorded{e.Rank, e.Node, e.Flight.Entries})
		for _, entry := range presentOf(e.Flight.Entries) {
			if lanes[entry] == nil {
				lanes[entry] = &rankset.Set{}
			}
			lanes[entry].Add(e.Rank)
		}
	}
	for _, n := range found.World.Nodes {
		for rank := n.RankBase; rank < n.RankBase+n.Slots; rank++ {
			if !seen.Has(rank) {
				lack("node "+n.Name+" has not answered in time", rank)
			}
		}
	}
	for why, ranks := range missing {
		f.Missing = append(f.Missing, silent{ranks.String(), why})
	}
	for entry, ranks := range lanes {
		f.Lanes = append(f.Lanes, flightLane{ranks.String(), entry})
	}
	slices.SortFunc(f.Missing, func(a, b silent) int { return cmp.Compare(a.Why, b.Why) })
	stable.Sort(f.Lanes, func(a, b flightLane) int {
		return cmp.Or(cmp.Compare(len(a.Group), len(b.Group)), cmp.Compare(a.heading(), b.heading()),
			cmp.Compare(a.Seq, b.Seq), cmp.Compare(a.Ranks, b.Ranks))
	})
	return f
}

// presentOf is the present collective of each process group: the oldest that is not completed, or the newest.
func presentOf(entries []hang.FlightEntry) (list []hang.FlightEntry) {
	for _, e := range entries {
		i := slices.IndexFunc(list, func(o hang.FlightEntry) bool { return o.Group == e.Group && o.IsP2P == e.IsP2P })
		switch {
		case i < 0:
			list = append(list, e)
		case list[i].State == "completed":
			list[i] = e // a later one: they are in order
		}
	}
	return list
}

// noFlight is why a rank's recorder has not answered.
func noFlight(e *hang.Evidence) string {
	switch {
	case e.Error != "" && e.Stacks == nil && e.Page() == nil:
		return e.Error
	case e.Page() == nil:
		return "nothing of ours is in it: its launcher was not given --hang=auto, or it has not begun to train"
	case len(e.Groups) == 0:
		return "it has no process group of torch.distributed"
	}
	return "its PyTorch has no recorder for this backend (NCCL: 2.2 and newer; gloo: as 2.15), or it does not answer"
}
