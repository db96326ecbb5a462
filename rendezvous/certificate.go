package rendezvous

import (
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
)

// A certificate is the result of a check that has passed: the node needs no other one until the certificate runs out.
// Its clock stands still from the seal of a world until all of its workers have been stopped. So a restart of the same
// world never leads to a check. An event that the check cannot have covered makes it void. For one node that is a
// Doubt; for all nodes, an end of an epoch that Config.Suspicious finds suspicious.
//
// A node without a partner has passed alone: its certificate runs out at once. It waits like a cleared node, and the
// next gate checks it again if there is a partner.

// mustCheck reports whether n needs a check before it may have workers.
func (r *Round) mustCheck(now time.Time, n *node) bool {
	valid := n.cleared && (n.until.IsZero() || now.Before(n.until))
	return r.params.Gate && n.can(CanGate) && !valid
}

func (r *Round) clear(now time.Time, e Cleared) error {
	n := r.members.nodes[e.ID]
	if n == nil {
		return ErrUnknownNode
	}
	n.asked = false
	r.certify(now, n, e)
	if !n.unpaired {
		delete(r.wary, n.machine())
	}
	if n.bar != nil {
		r.members.setBar(n, nil, false)
		n.unsure = false
		r.out.note(job.EventCleared, n.Name, "its check has passed")
	}
	switch {
	case r.epoch.phase == finished:
		return nil
	case n.state == checking || n.state == barred && r.orders.bars[n.Name] == nil:
		r.members.become(n, waiting)
	case n.optional:
		n.optional = false
	default:
		return nil
	}
	if r.epoch.phase != gating || n.dir.Kind != job.Check {
		r.out.direct(n, r.wait())
	}
	return nil
}

// certify gives n a certificate. The short one of a witness does not replace a longer one.
func (r *Round) certify(now time.Time, n *node, e Cleared) {
	delete(r.gone, n.Name)
	at, until := now, e.Until
	if !n.idle() && !r.epoch.sealedAt.IsZero() { // an answer that comes late: the clock stands still already
		at = r.epoch.sealedAt
	}
	if !until.IsZero() {
		until = until.Add(at.Sub(now))
	}
	if e.Domain != "" {
		n.domain = text.Clip(e.Domain, MaxName)
	}
	shorter := n.until.IsZero() || !until.IsZero() && !until.After(n.until)
	if (n.optional || !n.idle()) && shorter && !r.mustCheck(at, n) {
		return
	}
	n.cleared, n.until, n.unpaired = true, until, !until.IsZero() && !at.Before(until)
}

// void takes the certificate of n away.
func (n *node) void() { n.cleared, n.unpaired = false, false }

// doubt voids the certificate of a node. A node that waits while a sealed world runs is checked again at once, all
// others at the next gate.
func (r *Round) doubt(now time.Time, e Doubt) error {
	n := r.members.nodes[e.ID]
	if n == nil {
		return ErrUnknownNode
	}
	if !n.cleared || r.epoch.phase == finished {
		return nil
	}
	n.void()
	r.out.note(job.EventRecheck, n.Name, text.Clip(e.Reason, maxReason))
	if n.state == waiting {
		r.queue(now, n)
	}
	return nil
}

// epochOver lets the certificates of the last world's members run on, and voids all if the end of the epoch was
// suspicious. It is called when the last member has stopped its workers: everything about that end is known.
func (r *Round) epochOver(now time.Time) {
	if r.epoch.sealedAt.IsZero() {
		return
	}
	stood := now.Sub(r.epoch.sealedAt)
	r.epoch.sealedAt = time.Time{}
	for _, n := range r.epoch.world {
		if !n.until.IsZero() {
			n.until = n.until.Add(stood)
		}
	}
	if !r.params.Gate || r.cfg.Suspicious == nil {
		return
	}
	if why := r.cfg.Suspicious(r.out.evidence()); why != "" {
		for _, n := range r.members.nodes {
			n.void()
		}
		r.out.note(job.EventRecheck, "", text.Clip(why, maxReason))
	}
}
