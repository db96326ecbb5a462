package rendezvous

import "dlrover-run/internal/job"

// outbox collects the actions of one step. Every directive in it carries the epoch, the orders and the spent budget of
// the moment, every note the size of the run.
type outbox struct {
	params  *Params
	members *members
	epoch   *epoch
	orders  *orders
	account *account

	seq  uint64
	acts []Action
	told []*node // to Check, in this step
	free []*node // got another directive in this step, before they have answered
}

// direct gives n a new directive.
func (o *outbox) direct(n *node, d Directive) {
	o.seq++
	d.Seq, d.EpochID, d.Restarts = o.seq, o.epoch.id, o.account.restarts
	d.Paused, d.Barred, d.Command = o.orders.paused, o.orders.bars[n.Name], o.orders.command
	d.Hold, d.Leave, d.Spent = d.Kind == job.Run && o.epoch.held, n.drained, o.account.directive()
	if o.epoch.deputy(n.ID) {
		d.Bars = o.orders.directive()
	}
	if (d.Kind == job.Wait || d.Kind == job.Bar) && !o.epoch.seated(n) {
		d.Failover = o.epoch.plan // to follow the one that members elect
	}
	if n.differs {
		p := *o.params
		d.Params = &p
	}
	if n.asked && d.Kind != job.Check {
		o.free = append(o.free, n)
	}
	n.known = 0
	if d.Kind == job.Wait && d.Cause == nil && n.dir.leadsTo(d) && n.Agent == "" {
		n.known = n.dir.Seq
	}
	n.dir, n.optional, n.asked = d, false, n.asked && d.Kind == job.Check
	o.acts = append(o.acts, Action{Node: n.ID, Directive: &d})
}

// leadsTo reports whether the launcher that has ended its workers for d expects w, and learns nothing from it.
func (d Directive) leadsTo(w Directive) bool {
	stopped := d.Kind == job.Stop
	d.Seq, d.Kind, d.Cause, d.Params = w.Seq, w.Kind, w.Cause, w.Params
	return stopped && d == w
}

// check gives n a Check. The answer to an optional one is not waited for.
func (o *outbox) check(n *node, optional bool) {
	o.direct(n, Directive{Kind: job.Check})
	n.optional, n.asked = optional, true
	o.told = append(o.told, n)
}

// repeat sends the present directive again to nodes that f picks, and that still have workers to stop or are being
// resumed. The nodes may have to report the present orders to a restarted daemon before their next directive.
func (o *outbox) repeat(f func(*node) bool) {
	if !o.epoch.collecting() {
		return // nodes with workers will get a Stop
	}
	for _, n := range o.members.sorted(func(n *node) bool { return f(n) && n.state != "" && !n.idle() }) {
		o.direct(n, Directive{Kind: n.dir.Kind, Place: n.dir.Place, Cause: n.dir.Cause})
	}
}

// tellSpares sends the present directive again to nodes that wait beside a world: it has other deputies.
func (o *outbox) tellSpares() {
	if o.epoch.plan == nil {
		return
	}
	for _, n := range o.members.sorted((*node).idle) {
		if n.dir.Kind == job.Wait || n.dir.Kind == job.Bar {
			o.direct(n, Directive{Kind: n.dir.Kind, Cause: n.dir.Cause})
		}
	}
}

// tellDeputies sends the present directive again to running members that may serve next: bars have changed.
func (o *outbox) tellDeputies() {
	if o.epoch.plan == nil {
		return
	}
	for _, n := range o.members.sorted(func(n *node) bool { return n.state == member && n.dir.Kind == job.Run }) {
		if o.epoch.deputy(n.ID) {
			o.direct(n, Directive{Kind: job.Run, Place: n.dir.Place, Cause: n.dir.Cause, Failover: n.dir.Failover})
		}
	}
}

func (o *outbox) note(event job.Event, nodeName, text string) *Note {
	n := o.remark(event, nodeName, text)
	o.acts = append(o.acts, Action{Note: &n})
	return &n
}

func (o *outbox) remark(event job.Event, nodeName, text string) Note {
	return Note{
		Event: event, Round: o.epoch.id.Round, Epoch: o.epoch.id.Epoch, Node: nodeName, Text: text,
		Nodes: len(o.members.nodes), World: o.epoch.workers, Term: o.epoch.id.Term, Rank: -1,
	}
}

// ended hands out the evidence about the end of the newest epoch, before it is forgotten.
func (o *outbox) ended() {
	if e := o.epoch; !e.fresh() || e.phase == finished {
		o.acts = append(o.acts, Action{Ended: &EpochEvidence{EpochID: e.id, Evidence: o.evidence()}})
	}
}

func (o *outbox) evidence() job.Evidence {
	return o.epoch.evidence(o.account.restarts, o.params.MaxRestarts)
}
