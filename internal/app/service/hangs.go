package service

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"dlrover-run/hang"
	hangs "dlrover-run/hang/serve"
	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous"
)

// newHangs joins the judges of hangs to the rendezvous.
func (s *Service) newHangs() *hangs.Hub {
	return hangs.New(hangs.Config{
		Kept: s.hangsKept, Spec: s.hangSpec, Seat: s.seat, World: s.hangWorld, Saved: s.saved, Log: s.cfg.Log,
		Notify: s.askNodes, Order: s.endHang, Doubt: s.doubtAll, Drain: s.drain,
		Note: func(run string, n job.Note) {
			_ = s.Hub.Annotate(run, n.Event, n.Node, n.Text) // the run may be over
			s.logHang(run, n)
		},
		Slowed: func(run string, e job.EpochID, fewer float64) { // the run may be over
			_ = s.Hub.Report(context.Background(), run, rendezvous.Slowed{EpochID: e, Fewer: fewer})
		},
		Keep: func(run string) bool {
			_, err := s.Hub.Params(run)
			return err == nil
		},
	})
}

// logHang logs a line of the timeline. Verdicts are logged by launchers; ranks that slow the job are in no other log.
func (s *Service) logHang(run string, n job.Note) {
	level := slog.LevelDebug
	switch n.Event {
	case job.EventSlowFound, job.EventSlowChecked:
		level = slog.LevelWarn
	case job.EventSlowOver:
		level = slog.LevelInfo
	}
	s.cfg.Log.Log(context.Background(), level, string(n.Event)+": "+n.Text, "run_id", run, "node", n.Node)
}

// KeepHangs is what a later service has to know about the hangs of a run; nil: nothing.
func (s *Service) KeepHangs(run string) []byte {
	k := s.Hangs.Kept(run)
	if k.Restarts == 0 {
		return nil
	}
	data, _ := json.Marshal(k) // numbers and a digest
	return data
}

func (s *Service) hangsKept(run string) (k hang.Kept) {
	if s.cfg.HangsKept != nil {
		_ = json.Unmarshal(s.cfg.HangsKept(run), &k) // without any, there were no hangs
	}
	return k
}

// endsEpoch reports whether the event of a note ends an epoch.
func endsEpoch(e job.Event) bool {
	return e == job.EventBreak || e == job.EventSucceeded || e == job.EventFailed
}

func (s *Service) hangSpec(run string) (hang.Spec, error) {
	p, err := s.Hub.Params(run)
	if err != nil {
		return hang.Spec{}, err
	}
	return hang.ParseSpec(p.Hang)
}

func (s *Service) seat(run, id string) (hangs.Seat, error) {
	seat, err := s.Hub.Seat(run, id)
	if err != nil {
		return hangs.Seat{}, err
	}
	return hangs.Seat{
		Epoch: seat.EpochID, GroupRank: seat.GroupRank, Name: seat.Name, Running: seat.Running,
	}, nil
}

func (s *Service) hangWorld(run string) (hang.World, error) {
	epoch, crew, err := s.Hub.Crew(run)
	if err != nil {
		return hang.World{}, err
	}
	w := hang.World{Epoch: epoch, Nodes: make([]hang.WorldNode, len(crew))}
	for i, m := range crew {
		w.Nodes[i] = hang.WorldNode{Name: m.Node, RankBase: m.RankBase, Slots: m.Slots}
	}
	return w, nil
}

// saved is the newest step that all ranks have in memory or on disk, according to the daemons' reports.
func (s *Service) saved(run string) (step int64, known bool) {
	for i, a := range s.Checkpoints.Summary(run).Ages {
		newest := max(a.MemoryStep, a.DurableStep)
		if i == 0 || newest < step {
			step = newest
		}
		known = true
	}
	return step, known
}

// askNodes sends a notice to all nodes of a run, or to one.
func (s *Service) askNodes(run string, a hang.Ask) {
	var body strings.Builder
	enc := json.NewEncoder(&body)
	enc.SetEscapeHTML(false) // <module> is long enough
	_ = enc.Encode(a)        // into memory
	// the run may be over; nodes that report are asked by the answer
	if err := s.Hub.Notify(run, a.To, hang.Topic, body.String()); err != nil {
		s.cfg.Log.Debug("the nodes cannot be asked about a hang", "run_id", run, "err", err)
	}
}

// endHang ends the epoch that hangs, and no other.
func (s *Service) endHang(run string, o hang.Order) {
	order := rendezvous.Order{
		Kind: rendezvous.OrderRestart, Cause: job.CauseHang, Text: orderText(o.Text), Charge: true, Of: o.Epoch,
	}
	if o.Action == hang.ActStop {
		order.Kind = rendezvous.OrderStop
	}
	if err := s.Hub.Order(run, order); err != nil {
		s.cfg.Log.Warn("nothing is done about a hang", "run_id", run, "action", o.Action, "err", err)
	}
}

// drain has a node leave that slows the job. A rank that is slow on a second node is slow because of its work. The node
// that serves stays: which nodes have left is known here, and orders of a service that ends may get lost.
func (s *Service) drain(run string, d hang.Drain) error {
	if s.cfg.Self != "" && s.Hub.Names(run, []string{s.cfg.Self})[s.cfg.Self] == d.Node {
		return fmt.Errorf("node %s serves the rendezvous", d.Node)
	}
	st, err := s.Hub.Run(run)
	if err != nil {
		return err
	}
	for name, c := range st.Bars {
		if c.Kind == job.CauseSlow && d.Repeats(c.Text) {
			return fmt.Errorf("rank %s of node %s was slow on node %s, which has left for it: it is not the node", d.Ranks,
				d.Node, name)
		}
	}
	return s.Hub.Order(run, rendezvous.Order{Kind: rendezvous.OrderDrain, Node: d.Node, Cause: job.CauseSlow,
		Text: orderText(d.Line()), Of: d.Epoch, Least: d.Least})
}

// orderText is s as an order takes it, which is one line of at most 1 KiB.
func orderText(s string) string { return text.Line(s, 1000) }

// maxDoubted bounds the nodes that are doubted one by one, each with a line of the timeline. The end of the epoch makes
// the checks of all of them void in any case, if it was because of the hang.
const maxDoubted = 256

// doubtAll has every node of the run checked before it gets workers again.
func (s *Service) doubtAll(run, why string) {
	ids := s.Hub.IDs(run)
	if len(ids) > maxDoubted {
		return
	}
	for _, id := range ids {
		_ = s.Hub.Report(context.Background(), run, rendezvous.Doubt{ID: id, Reason: orderText(why)}) // it may have left
	}
}

// hangOf is the newest verdict about a hang that was made in the epoch, and led to its end.
func (s *Service) hangOf(run string, e job.EpochID) *hang.Verdict {
	p, err := s.Hangs.Picture(context.Background(), run, false)
	if err != nil {
		return nil
	}
	for _, t := range slices.Backward(p.Verdicts) {
		if t.Epoch == e && t.Action != hang.ActReport {
			return &t.Verdict
		}
	}
	return nil
}
