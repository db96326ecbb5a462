package upstream

import (
	"context"
	"log/slog"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/pyproto"
)

// enrolment is the master's knowledge of this node while it waits for a world or leads one. It belongs to the goroutine
// that follows the world.
type enrolment struct {
	master *master
	every  *intervals
	log    *slog.Logger

	joined  time.Time // when this node last asked the master to be in a world, or in a check
	round   int       // the master's, then
	shown   time.Time // when a leader has last published the meeting place
	shownAt string    // the key of that; "": nowhere

	waits  bool   // the master knows that this node waits for the check of the job
	passed bool   // the job has passed that
	status string // of that check, the last one
}

// enlist joins a rendezvous. If an answer was lost, this node may have joined after the round before already. So it
// looks first whether a world was sealed with it, which another join would make void. -1: it has not joined.
func (e *enrolment) enlist(ctx context.Context, t turn, p rendezvous.Params, name string, before int) error {
	err := t.insist(ctx, func() error {
		if err := e.master.introduce(ctx, p); err != nil { // a new master has not heard the rules
			return err
		}
		w, mine, err := e.master.world(ctx, name)
		if err != nil || mine && before >= 0 && w.round > before {
			return err
		}
		before = w.round
		if err := e.hide(ctx); err != nil {
			return err
		}
		round, err := e.master.join(ctx, name)
		if err == nil {
			e.round = round
		}
		return err
	})
	e.joined = time.Now()
	return err
}

// forgotten reports that the master, which counts waiting nodes, no longer has this node's join. Either it was started
// again, or it has sealed a world with this node that another node's join has made void.
func (e *enrolment) forgotten(w world, waiting int) bool {
	waited := time.Since(e.joined)
	return len(w.nodes) == 0 && (w.round != e.round || waiting == 0 && waited > e.every.ask || waited > 10*e.every.ask)
}

// renew is for a master that was started again, and has forgotten this node.
func (e *enrolment) renew() { e.waits, e.joined = false, time.Time{} }

// show publishes the meeting place of a world that this node leads, if it is time to do so again.
func (e *enrolment) show(ctx context.Context, w world, epoch job.EpochID) error {
	if w.own != 0 || time.Since(e.shown) <= e.every.show {
		return nil
	}
	e.shown, e.shownAt = time.Now(), w.key(masterAddr)
	return e.master.kv.lead(ctx, w, epoch, w.addr, w.port)
}

// hide removes the address that show has published. A restarted master counts its rounds anew. The nodes of the next
// world with the number of this one would use this one's meeting place.
func (e *enrolment) hide(ctx context.Context) error {
	if e.shownAt == "" {
		return nil
	}
	err := e.master.kv.set(ctx, e.shownAt, []byte{})
	if err == nil {
		e.shownAt = ""
	}
	return err
}

// passes asks whether the master has checked the job; 0.4 checks nothing.
func (e *enrolment) passes(ctx context.Context) (bool, error) {
	client := e.master.client
	if e.passed || client.Dialect() == pyproto.Grpc {
		return true, nil
	}
	if !e.waits {
		if err := e.master.event(ctx, "WAIT_PRE_CHECK"); err != nil {
			return false, err
		}
		e.waits = true
	}
	m, err := client.Get(ctx, client.New("PreCheckRequest",
		pyproto.Field{Name: "timestamp", Value: int(time.Now().Unix())}, pyproto.Field{Name: "type", Value: ""}))
	if err != nil {
		return false, err
	}
	status := m.Str("status")
	if e.passed = m == nil || status == "PASS" || status == "DISABLED"; !e.passed && status != e.status {
		e.log.Info("waiting for the master's check of the job", "status", status, "reason", m.Str("reason"))
	}
	e.status = status
	return e.passed, nil
}
