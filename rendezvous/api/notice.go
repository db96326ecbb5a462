package api

import (
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/rendezvous"
)

// Bounds of a Notice, in bytes, and of those that a run keeps for nodes that are slow to ask.
const (
	maxTopic   = 64
	maxNotice  = 4 << 10
	maxNotices = 64
)

// News is the answer of a Watch: the present directive and new notices.
type News struct {
	rendezvous.Directive
	// Notices are those after the Cursor's, and NoticeSeq is where to go on; both only if the Cursor asks for them.
	Notices   []job.Notice `json:"notices,omitempty"`
	NoticeSeq uint64       `json:"notice_seq,omitempty"`
	// Waiting is for callers that ask for Waits; nil: they wait for nothing.
	Waiting *Waiting `json:"waiting,omitempty"`
}

// Cursor is the position of a Watch's caller: the news that it already has.
type Cursor struct {
	// Join is made first, in the same request; nil: the node waits for news alone.
	Join *rendezvous.Join
	// Directive is the sequence number of the newest directive, 0 for none.
	Directive uint64
	// WithNotices asks for notices after number Notices; after 0 come those from now on.
	WithNotices bool
	Notices     uint64
	// Waits is how often a caller that waits wants a Waiting, at most; 0: never.
	Waits time.Duration
}

// addressed is a Notice for the nodes of a name, "" for all.
type addressed struct {
	job.Notice
	node string
}

func validate(n job.Notice) error {
	switch {
	case n.Topic == "" || len(n.Topic) > maxTopic || !text.Printable(n.Topic):
		return fmt.Errorf("%w: the topic %.80q of a notice: %s, 1 to %d bytes",
			ErrBadRequest, n.Topic, text.PrintableRule, maxTopic)
	case len(n.Body) > maxNotice:
		return fmt.Errorf("%w: the body of a notice has %d bytes; at most %d are taken",
			ErrBadRequest, len(n.Body), maxNotice)
	case !utf8.ValidString(n.Body):
		return fmt.Errorf("%w: the body of a notice is not UTF-8", ErrBadRequest)
	}
	return nil
}

// Notify sends a notice to the nodes of one name, or to all if node is "". Nodes that do not ask for notices get none;
// errNoNotices is the error if that is the only one. ErrUnknownRun, ErrUnknownNode and ErrBadRequest are the other
// errors.
func (h *Hub) Notify(id, node, topic, body string) error {
	n := job.Notice{Topic: topic, Body: body}
	if err := validate(n); err != nil {
		return err
	}
	r, err := h.existing(id)
	if err != nil {
		return err
	}
	r.Lock()
	defer r.Unlock()
	return r.notifyLocked(node, n)
}

func (r *run) notifyLocked(node string, n job.Notice) error {
	if r.Err() != nil {
		return r.Err()
	}
	if node == "" {
		r.keepLocked(node, n)
		r.wakeAllLocked()
		return nil
	}
	var named []string // more than one while a launcher that was started again and the one before it are here
	able := false
	for m := range r.round.Members() {
		if m.Name == node {
			named = append(named, m.ID)
			able = able || slices.Contains(m.Can, rendezvous.CanNotice)
		}
	}
	if len(named) == 0 {
		return fmt.Errorf("%w: run %q has no node %q", rendezvous.ErrUnknownNode, r.id, node)
	}
	if !able {
		return fmt.Errorf("%w: node %q", errNoNotices, node)
	}
	r.keepLocked(node, n)
	for _, id := range named {
		r.wakeLocked(id)
	}
	return nil
}

func (r *run) keepLocked(node string, n job.Notice) {
	r.noticeSeq++
	n.Seq = r.noticeSeq
	r.notices.push(addressed{n, node})
}

// noticesLocked are the notices for a node after the given one. A number of the future is that of a daemon whose clock
// was ahead of ours: all notices are new then.
func (r *run) noticesLocked(id string, after uint64) (ns []job.Notice) {
	if after == r.noticeSeq || r.notices.count == 0 {
		return nil
	}
	if after > r.noticeSeq {
		after = 0
	}
	node, err := r.round.Member(id)
	if err != nil {
		return nil
	}
	for i := range r.notices.count {
		if n := r.notices.at(i); n.Seq > after && (n.node == "" || n.node == node.Name) {
			ns = append(ns, n.Notice)
		}
	}
	return ns
}
