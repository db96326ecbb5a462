// Package streamhub is the daemon's side of streams. It connects callers with the launchers of a run: to follow output,
// or to execute a command next to a worker.
//
// It buffers nothing: unread output waits in the kernel and then at the launchers, which drop it. A stream has two
// goroutines and one for each of its nodes, which end with the caller's connection.
package streamhub

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/text"
	"dlrover-run/launcher/streams"
	"dlrover-run/rendezvous"
)

// Bounds of a Hub.
const (
	maxStreams = 64  // of all runs
	maxOfRun   = 8   // of one
	maxNodes   = 256 // that one stream follows

	answerTime = 5 * time.Second        // for a launcher to open a stream
	askAgain   = 2 * time.Second        // how often launchers are asked again that have not
	settle     = 100 * time.Millisecond // nodes that come are asked together
	lastWord   = 2 * time.Second        // for frames on their way when a run, or a command, has ended
	stalled    = 10 * time.Minute       // until a caller that reads nothing is cut off
)

// Errors of a request for a stream. rendezvous.ErrUnknownNode is another one.
var (
	errNoRank  = errors.New("no such rank")
	errRefused = errors.New("refused")
	errTooMany = errors.New("too many streams")
	errOld     = errors.New("the launcher is of a version without streams")
	errBad     = errors.New("a bad request")
	errGone    = errors.New("nobody wants this stream any more")
)

// Config connects a Hub to the rendezvous.
type Config struct {
	// Secure: requests come with a job token. Without one nothing is executed.
	Secure bool
	Nodes  func(run string) ([]rendezvous.Member, error)
	// Notify asks the nodes of a name, or all for "", to connect.
	Notify func(run, node, body string) error
	// Note writes into the timeline of a run.
	Note func(run string, event job.Event, node, text string)
	Log  *slog.Logger
}

// Hub keeps the streams of all runs.
type Hub struct {
	cfg  Config
	live atomic.Int32 // streams
	wg   sync.WaitGroup

	mu     sync.Mutex
	open   map[string]*stream // by id
	closed bool
}

// New returns a Hub without streams.
func New(cfg Config) *Hub { return &Hub{cfg: cfg, open: map[string]*stream{}} }

// stream is one follower, or one command.
type stream struct {
	hub  *Hub
	id   string
	run  string
	node string // "": all
	req  streams.Request
	news chan struct{} // something may have changed: the nodes present, or the ended feeds
	over chan struct{} // closed when it ends
	once sync.Once

	mu      sync.Mutex
	asker   net.Conn
	nodes   map[string]*peer // by the launcher's ID
	count   uint16           // of nodes that have had a number
	asked   time.Time        // when launchers were last asked
	runOver string           // how the run has ended
	exited  *streams.Exit    // how the command has ended; the asker has heard it
	met     map[string]bool  // the launchers that have opened the stream before

	writing sync.Mutex // of frames to asker
	buf     []byte
	begun   time.Time
}

// peer is a launcher that has opened the stream.
type peer struct {
	name string
	conn net.Conn
	done bool // it has sent everything
}

// Happened receives an event of a run. It only records it.
func (h *Hub) Happened(run string, event job.Event) {
	if h.live.Load() == 0 {
		return
	}
	over := ""
	switch event {
	case job.EventSucceeded, job.EventFailed:
		over = "the run has " + string(event)
	case job.EventJoin, job.EventRun, job.EventResumed, job.EventResume:
	default:
		return
	}
	for _, s := range h.ofRun(run) {
		s.mu.Lock()
		s.runOver = over
		s.mu.Unlock()
		s.wake()
	}
}

func (h *Hub) ofRun(run string) (list []*stream) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.open {
		if s.run == run {
			list = append(list, s)
		}
	}
	return list
}

// Close ends all streams.
func (h *Hub) Close() {
	h.mu.Lock()
	h.closed = true
	list := make([]*stream, 0, len(h.open))
	for _, s := range h.open {
		list = append(list, s)
	}
	h.mu.Unlock()
	for _, s := range list {
		s.mu.Lock()
		over := s.runOver
		s.mu.Unlock()
		if over != "" {
			s.finish(over)
		}
		s.end()
	}
	h.wg.Wait()
}

// Finish informs all followers that nothing follows. Close is next.
func (h *Hub) Finish(why string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for _, s := range h.open {
		s.mu.Lock()
		s.runOver = cmp.Or(s.runOver, why)
		s.mu.Unlock()
	}
}

// admit makes a stream of a request, or returns why not. Its caller is not connected yet.
func (h *Hub) admit(run, node string, req streams.Request) (*stream, error) {
	command := len(req.Args) > 0
	if command && !h.cfg.Secure {
		return nil, fmt.Errorf("%w: commands are executed only where daemon and launchers have a job token: "+
			"set DLROVER_TOKEN, DLROVER_TOKEN_FILE or --token-file on all of them", errRefused)
	}
	nodes, err := h.cfg.Nodes(run)
	if err != nil {
		return nil, err
	}
	s := &stream{
		hub: h, id: rand.Text(), run: run, node: node, req: req, news: make(chan struct{}, 1), over: make(chan struct{}),
		nodes: map[string]*peer{}, met: map[string]bool{}, begun: time.Now(),
	}
	if err := s.check(nodes); err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	own := 0
	for _, o := range h.open {
		if o.run == run {
			own++
		}
	}
	switch {
	case h.closed:
		return nil, errGone
	case own >= maxOfRun || len(h.open) >= maxStreams:
		return nil, fmt.Errorf("%w: %d of this run are open, and %d of all; at most %d and %d can be; end one of them",
			errTooMany, own, len(h.open), maxOfRun, maxStreams)
	}
	h.open[s.id] = s
	h.live.Add(1)
	h.wg.Add(1)
	return s, nil
}

// drop forgets a stream that admit has made.
func (h *Hub) drop(s *stream) {
	s.end()
	h.mu.Lock()
	delete(h.open, s.id)
	h.mu.Unlock()
	h.live.Add(-1)
	h.wg.Done()
}

// check reports a request that the present nodes cannot serve.
func (s *stream) check(nodes []rendezvous.Member) error {
	ranks := 0
	for _, o := range nodes {
		if o.RankBase >= 0 {
			ranks = max(ranks, o.RankBase+o.Slots)
		}
	}
	if len(nodes) == 0 {
		return fmt.Errorf("%w: run %q has no nodes any more, or none yet", errNoRank, s.run)
	}
	patient := s.req.Follow && ranks == 0 // there may be one later
	if s.req.Rank >= ranks && !patient {
		return fmt.Errorf("%w: run %q has no rank %d; it has %s", errNoRank, s.run, s.req.Rank, ranksText(ranks))
	}
	wanted := s.wanted(nodes)
	switch {
	case s.node != "" && !slices.ContainsFunc(nodes, func(o rendezvous.Member) bool { return o.Name == s.node }):
		return fmt.Errorf("%w: run %q has no node %q", rendezvous.ErrUnknownNode, s.run, s.node)
	case len(wanted) == 0 && !patient:
		return fmt.Errorf("%w: run %q: rank %d is not on node %q", errNoRank, s.run, s.req.Rank, s.node)
	case len(wanted) > maxNodes:
		return fmt.Errorf("%w: run %q has %d nodes; at most %d are followed at a time: name one by --node or --rank",
			errTooMany, s.run, len(wanted), maxNodes)
	case s.req.Profile > 0 && !slices.Contains(wanted[0].Can, rendezvous.CanProfile):
		return fmt.Errorf("%w, and without profiles: node %q; start it with this version", errOld, wanted[0].Name)
	case len(wanted) > 0 && !slices.ContainsFunc(wanted, able):
		return fmt.Errorf("%w: node %q; start it with this version", errOld, wanted[0].Name)
	}
	return nil
}

func ranksText(ranks int) string {
	if ranks == 0 {
		return "no workers at the moment"
	}
	return fmt.Sprintf("ranks 0 to %d", ranks-1)
}

func able(o rendezvous.Member) bool {
	return slices.Contains(o.Can, rendezvous.CanNotice) && slices.Contains(o.Can, rendezvous.CanStream)
}

// wanted returns the nodes whose workers the stream is about.
func (s *stream) wanted(nodes []rendezvous.Member) (list []rendezvous.Member) {
	for _, o := range nodes {
		has := s.req.Rank < 0 || o.RankBase >= 0 && s.req.Rank >= o.RankBase && s.req.Rank < o.RankBase+o.Slots
		if has && (s.node == "" || o.Name == s.node) {
			list = append(list, o)
		}
	}
	return list
}

func (s *stream) wake() {
	select {
	case s.news <- struct{}{}:
	default:
	}
}

// end closes all connections of the stream.
func (s *stream) end() {
	s.once.Do(func() { close(s.over) })
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.asker != nil {
		_ = s.asker.Close()
	}
	for _, p := range s.nodes {
		_ = p.conn.Close()
	}
}

// serve talks to the caller until the stream ends.
func (s *stream) serve(asker net.Conn) {
	s.mu.Lock()
	s.asker = asker
	s.mu.Unlock()
	var wg sync.WaitGroup
	wg.Go(s.manage)
	s.listen(asker)
	s.end()
	wg.Wait()
}

// listen forwards the caller's input to a command, until the caller is gone.
func (s *stream) listen(asker net.Conn) {
	in := streams.NewReader(asker)
	for {
		f, err := in.Next()
		if err != nil {
			return
		}
		if f.Kind != streams.KindInput && f.Kind != streams.KindInputEnd || !s.req.Ends() {
			continue
		}
		if p := s.executor(); p == nil || write(p.conn, f.Append(nil)) != nil {
			return // input comes only when the launcher has answered
		}
	}
}

// executor is the launcher that executes the command.
func (s *stream) executor() *peer {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.nodes {
		return p
	}
	return nil
}

// write gives the other side some time.
func write(c net.Conn, b []byte) error {
	_ = c.SetWriteDeadline(time.Now().Add(stalled))
	_, err := c.Write(b)
	return err
}

// send writes a frame to the caller. Nodes wait for each other.
func (s *stream) send(f streams.Frame) error {
	s.mu.Lock()
	asker := s.asker
	s.mu.Unlock()
	if asker == nil {
		return errGone
	}
	s.writing.Lock()
	defer s.writing.Unlock()
	s.buf = f.Append(s.buf[:0])
	return write(asker, s.buf)
}

// tell sends a message for people.
func (s *stream) tell(format string, args ...any) {
	text := text.EscapeLine(fmt.Sprintf(format, args...))
	_ = s.send(streams.Frame{Kind: streams.KindNote, Rank: -1, Data: []byte(text)})
}

// finish announces the end.
func (s *stream) finish(why string) {
	_ = s.send(streams.Frame{Kind: streams.KindEnd, Rank: -1, Data: []byte(why)})
}

// invitation is the body of the notice that asks for this stream.
func (s *stream) invitation() string { return string(streams.JSON(streams.Invitation{ID: s.id})) }

// manage asks the launchers for the stream, and ends it when it has come to its end.
func (s *stream) manage() {
	defer s.end()
	alarm := time.NewTimer(0)
	defer alarm.Stop()
	said := map[string]bool{}
	for {
		select {
		case <-s.over:
			return
		case <-s.news:
			alarm.Reset(settle)
			continue
		case <-alarm.C:
		}
		if why, ended := s.look(said); ended {
			s.finish(why)
			s.linger()
			return
		}
		alarm.Reset(askAgain)
	}
}

// linger leaves the asker the time to read, and to close the connection.
func (s *stream) linger() {
	t := time.NewTimer(lastWord)
	defer t.Stop()
	select {
	case <-s.over:
	case <-t.C:
	}
}

// look asks the missing nodes, and reports whether the stream has ended, and why.
func (s *stream) look(said map[string]bool) (why string, ended bool) {
	nodes, err := s.hub.cfg.Nodes(s.run)
	s.mu.Lock()
	over, exited := s.runOver, s.exited != nil
	missing, open := s.missingLocked(nodes)
	s.mu.Unlock()
	late := s.late()
	switch {
	case exited:
		return "", true
	case over != "" && open == 0:
		return over, true
	case err != nil:
		return "the run is over", true
	case !s.req.Follow && open == 0 && (late || len(missing) == 0) && !s.req.Ends():
		s.reportMissing(missing, said)
		return "", true
	case s.req.Ends() && len(missing) > 0 && late:
		s.exit(streams.Exit{Code: streams.CodeRefused, Error: fmt.Sprintf(
			"the launcher of node %s has not answered within %s", missing[0].Name, answerTime)})
		return "", true
	}
	if late {
		s.reportMissing(missing, said)
	}
	s.ask(missing)
	return "", false
}

// missingLocked are the nodes that are wanted and have not opened the stream, and how many that have are not done.
func (s *stream) missingLocked(nodes []rendezvous.Member) (missing []rendezvous.Member, open int) {
	for _, p := range s.nodes {
		if !p.done {
			open++
		}
	}
	if s.req.Ends() && len(s.nodes) > 0 {
		return nil, open // wherever the rank is by now
	}
	for _, o := range s.wanted(nodes) {
		if s.nodes[o.ID] == nil {
			missing = append(missing, o)
		}
	}
	return missing, open
}

// reportMissing reports once the nodes that do not answer.
func (s *stream) reportMissing(missing []rendezvous.Member, said map[string]bool) {
	for _, o := range missing {
		if said[o.ID] {
			continue
		}
		said[o.ID] = true
		if able(o) {
			s.tell("node %s has not answered within %s", o.Name, answerTime)
		} else {
			s.tell("node %s shows nothing: its launcher is of a version without streams", o.Name)
		}
	}
}

// ask invites the missing launchers. A node that has already connected is not asked again.
func (s *stream) ask(missing []rendezvous.Member) {
	missing = slices.DeleteFunc(missing, func(o rendezvous.Member) bool { return !able(o) })
	whom := ""
	switch len(missing) {
	case 0:
		return
	case 1:
		whom = missing[0].Name
	}
	if err := s.hub.cfg.Notify(s.run, whom, s.invitation()); err != nil {
		s.hub.cfg.Log.Debug("launchers cannot be asked for a stream", "run_id", s.run, "err", err)
	}
}

// exit sends the result of the command to the caller.
func (s *stream) exit(e streams.Exit) {
	s.mu.Lock()
	first := s.exited == nil
	if first {
		s.exited = &e
	}
	s.mu.Unlock()
	if first {
		_ = s.send(streams.Frame{Kind: streams.KindExit, Rank: int32(s.req.Rank), Data: streams.JSON(e)})
	}
}

// Dial is how a launcher in this process opens a stream.
func (h *Hub) Dial(_ context.Context, run, id, node string) (io.ReadWriteCloser, error) {
	s, o, err := h.find(run, id, node)
	if err != nil {
		return nil, err
	}
	own, theirs := net.Pipe()
	h.wg.Go(func() { s.feed(o, own) })
	return theirs, nil
}

// find is the stream that a launcher has been asked for.
func (h *Hub) find(run, id, node string) (s *stream, o rendezvous.Member, err error) {
	h.mu.Lock()
	s = h.open[id]
	h.mu.Unlock()
	if s == nil || s.run != run {
		return nil, o, errGone
	}
	nodes, err := h.cfg.Nodes(run)
	if err != nil {
		return nil, o, err
	}
	wanted := s.wanted(nodes)
	i := slices.IndexFunc(wanted, func(o rendezvous.Member) bool { return o.ID == node })
	if i < 0 {
		return nil, o, errGone // it was a notice for all
	}
	return s, wanted[i], nil
}

// feed reads a launcher's frames until the launcher is done or disconnects.
func (s *stream) feed(o rendezvous.Member, nc net.Conn) {
	defer nc.Close()
	p, number := s.join(o, nc)
	if p == nil {
		return
	}
	err := s.copy(p, number, nc)
	s.mu.Lock()
	p.done = true
	if s.req.Follow {
		delete(s.nodes, o.ID) // it may come back
	}
	s.mu.Unlock()
	if s.req.Ends() {
		s.exit(streams.Exit{Code: streams.CodeRefused,
			Error: fmt.Sprintf("the connection to the launcher of node %s is lost, or it has ended", o.Name)})
		s.note(job.EventExecEnded, o.Name, s.exitText())
	} else if err != nil {
		s.hub.cfg.Log.Debug("a launcher has left a stream", "run_id", s.run, "node", o.Name, "err", err)
	}
	s.wake()
}

// join registers the launcher and sends it the request; nil: it is here already, or too late.
func (s *stream) join(o rendezvous.Member, nc net.Conn) (*peer, uint16) {
	s.mu.Lock()
	ends := s.req.Ends()
	if s.nodes[o.ID] != nil || s.asker == nil || ends && (len(s.nodes) > 0 || s.exited != nil) || s.isOver() {
		s.mu.Unlock()
		return nil, 0
	}
	p, number, req := &peer{name: o.Name, conn: nc}, s.count, s.req
	switch {
	case s.met[o.ID]:
		req.Tail = 0 // it has been shown
	case s.late():
		req.Tail = -1 // it is new
	}
	s.nodes[o.ID], s.met[o.ID] = p, true
	s.count++
	s.mu.Unlock()
	if ends {
		s.note(job.EventExec, o.Name, s.commandText())
	}
	if write(nc, streams.Frame{Kind: streams.KindRequest, Rank: -1, Data: streams.JSON(req)}.Append(nil)) != nil ||
		s.send(streams.Frame{Kind: streams.KindNode, Node: number, Rank: -1, Data: []byte(o.Name)}) != nil {
		_ = nc.Close() // copy reports it
	}
	return p, number
}

// late: the launchers have had their time to open the stream.
func (s *stream) late() bool { return time.Since(s.begun) > answerTime }

func (s *stream) isOver() bool {
	select {
	case <-s.over:
		return true
	default:
		return false
	}
}

// copy forwards a launcher's frames; nil: they were complete.
func (s *stream) copy(p *peer, number uint16, nc net.Conn) error {
	in := streams.NewReader(nc)
	for {
		f, err := in.Next()
		if err != nil {
			return err
		}
		f.Node = number
		switch f.Kind {
		case streams.KindEnd:
			return nil
		case streams.KindExit:
			var e streams.Exit
			if err := f.Decode(&e); err != nil {
				return err
			}
			s.exit(e)
			return nil
		case streams.KindOutput, streams.KindDropped, streams.KindNote, streams.KindAck:
			if err := s.send(f); err != nil {
				return err
			}
		}
	}
}

// note records the command, and its author, in the run's timeline.
func (s *stream) note(event job.Event, node, text string) {
	s.hub.cfg.Note(s.run, event, node, text)
}

// maxNoted bounds the command in a note, in bytes.
const maxNoted = 512

func (s *stream) commandText() string {
	if s.req.Profile > 0 {
		return fmt.Sprintf("rank %d, from %s: a profile of %v", s.req.Rank, s.req.From, s.req.Profile)
	}
	command := text.Head(text.EscapeLine(strings.Join(s.req.Args, " ")), maxNoted)
	return fmt.Sprintf("rank %d, from %s: %s", s.req.Rank, s.req.From, command)
}

func (s *stream) exitText() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	said := s.commandText() + fmt.Sprintf(": exit code %d", s.exited.Code)
	if s.exited.Error != "" {
		said += ", " + text.EscapeLine(s.exited.Error)
	}
	return said
}
