package logs

import (
	"bytes"
	"io"
	"os"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// owner names a stream that writes to an output.
type owner uint32

const (
	nobody   owner = 0
	launcher owner = ^nobody
	status   owner = launcher - 1 // the launcher's line that the next output replaces
)

const (
	// patience is how long an unfinished line that is on an output already keeps the others from writing.
	patience = time.Second
	// maxHeld is how many bytes of the others wait for its end, or patience.
	maxHeld = 1 << 20
	// gap is scratch space in front of a piece, for the sequence that ends the line of another stream.
	gap = len(eraseLine)

	newline   = "\n"
	eraseLine = "\x1b[2K"
	eraseRest = "\x1b[K"
)

// output joins the lines of several streams: the console, or a filtered_*.log. Each write is whole, and a line is not
// cut by another stream. A stream that finds an unfinished line on the output waits until the line or its stream ends,
// or patience is over, and then begins on a new line.
type output struct {
	write    func(p []byte) (int, error)
	now      func() time.Time
	terminal *os.File // nil: it is none
	failed   func(err error)
	dropped  atomic.Int64 // bytes
	took     atomic.Int64 // bytes
	owners   atomic.Uint32

	mu        sync.Mutex
	open      owner     // the owner of the unfinished last line, else nobody
	bar       bool      // a \r was on that line, so that it is drawn again as a whole
	column0   bool      // it ends with \r
	yields    time.Time // until when others wait for its end
	last      time.Time // of the last write
	held      []piece   // waiting pieces, oldest first
	heldBytes int
	timer     *time.Timer // for yields, once something was held
	err       error       // of a write, for unlock to report
}

// piece is a part of a stream that is sent at a time. text[:head] is scratch space: a gap, then the prefix of the
// stream. cont means that the text continues a line that is on the output already. If another stream came between, that
// line was ended there, and the rest gets a prefix of its own.
type piece struct {
	by   owner
	text []byte
	head int
	cont bool
}

// tee adds a stream of its own. It does not wait for an output that is blocked: a start of workers must not.
func (o *output) tee(l lines) *lines {
	by := owner(o.owners.Add(1))
	l.by, l.send = by, o.put
	l.quiet = func() time.Time { return o.quiet(by) }
	l.leave = func() { o.leave(by) }
	return &l
}

// pass adds a raw stream: its text stays as it is, except that progress bars are folded unless the output is a
// terminal.
func (o *output) pass() *lines {
	return o.tee(lines{raw: true, hold: rawDelay, fold: o.terminal == nil})
}

// unlock reports a failed write without the lock: that may lead to a line of the launcher's on this output.
func (o *output) unlock() {
	err := o.err
	o.err = nil
	o.mu.Unlock()
	if err != nil {
		o.failed(err)
	}
}

// ownLines is the stream of the launcher's own lines, which do not wait: an unfinished line is ended for them. A text
// that ends in \r is replaced by the next one, whoever writes that.
type ownLines struct{ o *output }

// Write returns the error and reports it nowhere else: the writer may be the logger itself, with its lock.
func (w ownLines) Write(p []byte) (int, error) {
	w.o.mu.Lock()
	defer w.o.mu.Unlock()
	return len(p), w.o.ownLocked(string(p))
}

// FreshLine ends the unfinished line of a worker. It does not wait for a console that is blocked.
func (w ownLines) FreshLine() {
	if w.o.mu.TryLock() {
		defer w.o.mu.Unlock()
		if w.o.open != nobody && w.o.open != status {
			w.o.open = launcher
			_ = w.o.ownLocked(newline)
		}
	}
}

func (o *output) ownLocked(text string) error {
	by := launcher
	if strings.HasSuffix(text, "\r") {
		by = status
	}
	o.emitLocked(&piece{by, []byte(eraseLine + text), gap, false}, o.now())
	err := o.err
	o.err = nil
	return err
}

// put writes p, or keeps a copy of it until it may be written. p was read at now; a blocked console makes it long ago.
func (o *output) put(p piece, now time.Time) {
	o.mu.Lock()
	defer o.unlock()
	if o.open == nobody || o.open == p.by {
		o.emitLocked(&p, now)
		return
	}
	o.putLocked(p, o.now())
}

func (o *output) putLocked(p piece, now time.Time) {
	if len(o.held) > 0 && o.open != p.by && !now.Before(o.yields) {
		o.releaseLocked(now) // they came first
	}
	if o.open == nobody || o.open == p.by || !now.Before(o.yields) {
		o.emitLocked(&p, now)
		return
	}
	p.text = bytes.Clone(p.text)
	o.held = append(o.held, p)
	if o.heldBytes += len(p.text); o.heldBytes > maxHeld {
		o.yieldLocked(now)
	} else if len(o.held) == 1 {
		o.wakeLocked(o.yields.Sub(now))
	}
}

// emitLocked writes p now.
func (o *output) emitLocked(p *piece, now time.Time) {
	if p.cont && o.open != p.by {
		if p.text[p.head] == '\n' {
			p.head++ // another stream came between and ended it
		} else {
			p.head = gap
		}
	}
	if p.head == len(p.text) {
		return
	}
	if o.open != nobody && o.open != p.by {
		end := o.lineEndLocked(p)
		p.head -= len(end)
		copy(p.text[p.head:], end)
	}
	out := p.text[p.head:]
	o.last = now
	n, err := o.write(out)
	o.took.Add(int64(n))
	if err != nil {
		o.dropped.Add(int64(len(out) - n))
		o.err = err
	}
	o.endsLocked(p.by, out, now)
}

// lineEndLocked returns the separator between the open line and p of another stream. On a terminal, where cursor and
// bar are known, the next bar or line takes the place of a bar.
func (o *output) lineEndLocked(p *piece) string {
	switch {
	case o.terminal == nil || !o.bar:
		return newline
	case o.column0:
		return eraseRest
	case p.text[p.head] == '\r':
		return eraseLine
	}
	return newline
}

// endsLocked notes how out, which by has just written, leaves the last line.
func (o *output) endsLocked(by owner, out []byte, now time.Time) {
	rest := out[bytes.LastIndexByte(out, '\n')+1:]
	if len(rest) == 0 {
		o.open = nobody
		o.releaseLocked(now)
		return
	}
	if o.open != by || len(rest) < len(out) {
		o.open, o.bar, o.yields = by, false, o.now().Add(patience)
	}
	o.column0 = rest[len(rest)-1] == '\r'
	if o.bar = o.bar || bytes.IndexByte(rest, '\r') >= 0; o.bar {
		o.yields = now
	}
}

// releaseLocked writes the pieces that may be written now, and holds the rest again.
func (o *output) releaseLocked(now time.Time) {
	held := o.held
	o.held, o.heldBytes = nil, 0
	for _, p := range held {
		o.putLocked(p, now)
	}
}

// yieldLocked ends the wait for the line that is open.
func (o *output) yieldLocked(now time.Time) {
	o.yields = now
	o.releaseLocked(now)
}

// wakeLocked writes the held pieces after d, if the line has not ended by then.
func (o *output) wakeLocked(d time.Duration) {
	if o.timer == nil {
		o.timer = time.AfterFunc(d, o.woken)
		return
	}
	o.timer.Reset(d)
}

func (o *output) woken() {
	o.mu.Lock()
	defer o.unlock()
	if now := o.now(); len(o.held) > 0 && now.Before(o.yields) {
		o.wakeLocked(o.yields.Sub(now)) // another line has been opened meanwhile
	} else {
		o.releaseLocked(now)
	}
}

// quiet returns the time from which an unfinished line of by would disturb no other stream, if none writes until then.
func (o *output) quiet(by owner) time.Time {
	o.mu.Lock()
	defer o.unlock()
	t := o.last.Add(rawDelay)
	if o.open != nobody && o.open != by {
		t = later(t, o.yields)
	}
	return t
}

// leave is the end of a stream: no other stream waits for the end of its line.
func (o *output) leave(by owner) {
	o.mu.Lock()
	defer o.unlock()
	if o.open == by {
		o.yieldLocked(o.now())
	}
}

// close writes the held pieces. An output that is blocked is left alone.
func (o *output) close() {
	if !o.mu.TryLock() {
		return
	}
	defer o.unlock()
	for len(o.held) > 0 {
		o.yieldLocked(o.now())
	}
	if o.timer != nil {
		o.timer.Stop()
	}
}

// openConsole wraps the launcher's stdout and stderr: once, when they are the same terminal, pipe or file, so that
// lines of the two do not mix.
func (l *Logs) openConsole() error {
	out, err := l.newConsole(l.cfg.Stdout)
	if err != nil {
		return err
	}
	l.console = [2]*output{out, out}
	if !sameWriter(l.cfg.Stdout, l.cfg.Stderr) {
		l.console[1], err = l.newConsole(l.cfg.Stderr)
	}
	return err
}

func (l *Logs) newConsole(w io.Writer) (*output, error) {
	o := &output{now: time.Now, failed: l.consoleFailed}
	if f, ok := w.(*os.File); ok {
		// Go ends the program on EPIPE from descriptors 1 and 2 (os/signal, "SIGPIPE"); a copy returns the error.
		fd, err := dupFile(f)
		if err != nil {
			return nil, os.NewSyscallError("dup the console "+f.Name(), err)
		}
		dup := os.NewFile(uintptr(fd), f.Name())
		if _, err = unix.IoctlGetTermios(fd, unix.TCGETS); err == nil {
			o.terminal = dup
		}
		l.dups = append(l.dups, dup)
		w = dup
	}
	o.write = w.Write
	return o, nil
}

// dupFile does not use f.Fd(), which would make a non-blocking descriptor blocking for every process that shares it.
func dupFile(f *os.File) (fd int, err error) {
	c, err := f.SyscallConn()
	if err != nil {
		return -1, err
	}
	cerr := c.Control(func(old uintptr) { fd, err = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 3) })
	if cerr != nil {
		return -1, cerr
	}
	return fd, err
}

func (l *Logs) consoleFailed(err error) {
	if l.consoleSaid.CompareAndSwap(false, true) {
		l.cfg.Logger.Warn("cannot write to the console: the workers go on, their output is dropped and counted", "err", err)
	}
}

func sameWriter(a, b io.Writer) bool {
	fa, oka := a.(*os.File)
	fb, okb := b.(*os.File)
	if oka && okb {
		ia, erra := fa.Stat()
		ib, errb := fb.Stat()
		return erra == nil && errb == nil && os.SameFile(ia, ib)
	}
	return reflect.TypeOf(a) == reflect.TypeOf(b) && reflect.TypeOf(a).Comparable() && a == b
}
