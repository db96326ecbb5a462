package logs

import (
	"bytes"
	"io"
	"os"
	"slices"
	"sync"
	"time"

	"dlrover-run/internal/openfile"
)

// Follower receives the workers' output for a while: unlike a Tap it can be added and removed, and costs nothing while
// there is none.
type Follower struct {
	// Wants selects the workers. Nil: all.
	Wants func(id WorkerID) bool
	// Tail cuts the kept end of a stream, with whole lines, that is shown first. Nil: no kept output.
	Tail func(b []byte) []byte
	// Print receives the output of a worker to a stream, Stdout or Stderr, in that order. The worker may wait for it, so
	// that it must return at once; it must keep nothing of b.
	Print func(id WorkerID, stream Std, b []byte)
}

// following is a Follower from Follow on, until its end.
type following struct {
	Follower

	mu    sync.Mutex
	files []*followedFile // which workers write themselves
	ended bool
	wake  chan struct{} // the first file is there
}

// followedFile is read by the goroutine of its follower alone.
type followedFile struct {
	a    *Attempt
	path string
	id   WorkerID
	std  Std
	at   int64
}

// Follow shows f the output of the workers that run and of those to come, until end is called: f.Print may
// be called once more then. A file that workers write themselves is looked at ten times a second.
func (l *Logs) Follow(f Follower) (end func()) {
	if f.Wants == nil {
		f.Wants = func(WorkerID) bool { return true }
	}
	w := &following{Follower: f, wake: make(chan struct{}, 1)}
	quit, done := make(chan struct{}), make(chan struct{})
	l.change(func(all []*following) []*following { return append(slices.Clone(all), w) })
	l.forAttempts(func(a *Attempt) {
		for _, worker := range a.workers {
			w.begin(a, worker)
		}
	})
	go func() {
		defer close(done)
		w.readFiles(quit)
	}()
	return func() {
		l.change(func(all []*following) []*following {
			return slices.DeleteFunc(slices.Clone(all), func(o *following) bool { return o == w })
		})
		close(quit)
		<-done
		l.forAttempts(func(a *Attempt) {
			for _, worker := range a.workers {
				w.leave(worker)
			}
		})
	}
}

func (l *Logs) change(how func([]*following) []*following) {
	l.following.Lock()
	defer l.following.Unlock()
	all := how(l.followers())
	l.followed.Store(&all)
}

func (l *Logs) followers() []*following {
	if all := l.followed.Load(); all != nil {
		return *all
	}
	return nil
}

// forAttempts calls do for every attempt that is open, with its lock.
func (l *Logs) forAttempts(do func(*Attempt)) {
	l.mu.Lock()
	open := make([]*Attempt, 0, len(l.attempts))
	for a := range l.attempts {
		open = append(open, a)
	}
	l.mu.Unlock()
	for _, a := range open {
		a.mu.Lock()
		do(a)
		a.mu.Unlock()
	}
}

// showLocked shows a new worker to the followers.
func (a *Attempt) showLocked(w *Worker) {
	for _, f := range a.l.followers() {
		f.begin(a, w)
	}
}

// begin does nothing the second time: a worker that starts while a Follower begins is met twice.
func (f *following) begin(a *Attempt, w *Worker) {
	if !f.Wants(w.id) {
		return
	}
	for i, s := range w.streams {
		if s.pump != nil {
			s.pump.tail.follow(f)
		} else {
			f.addFile(&followedFile{a: a, path: s.path, id: w.id, std: Stdout << i}, s.tailBytes)
		}
	}
}

func (f *following) leave(w *Worker) {
	for _, s := range w.streams {
		if s.pump != nil {
			s.pump.tail.unfollow(f)
		}
	}
}

// follow shows f the kept output, and then the new output.
func (t *tail) follow(f *following) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if slices.Contains(t.followers, f) {
		return
	}
	if b := f.kept(t.bytesLocked(), len(t.buf) == t.max); len(b) > 0 {
		f.Print(t.id, t.std, b)
	}
	t.followers = append(t.followers, f)
}

func (t *tail) unfollow(f *following) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.followers = slices.DeleteFunc(t.followers, func(o *following) bool { return o == f })
}

// kept is the output that is shown first. If the output was cut, its first line is incomplete and dropped.
func (f *following) kept(b []byte, cut bool) []byte {
	if f.Tail == nil {
		return nil
	}
	if cut {
		b = b[bytes.IndexByte(b, '\n')+1:]
	}
	return f.Tail(b)
}

func (f *following) addFile(file *followedFile, tailBytes int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended || slices.ContainsFunc(f.files, func(o *followedFile) bool { return o.path == file.path }) {
		return
	}
	b, size := fileEnd(file.path, tailBytes)
	file.at = size
	if b := f.kept(b, file.at > int64(len(b))); len(b) > 0 {
		f.Print(file.id, file.std, b)
	}
	f.files = append(f.files, file)
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

const (
	lookEvery = 100 * time.Millisecond
	// maxLook is how much is read of a file at a time; of a worker that writes more than that only the newest is seen.
	maxLook = 1 << 20
)

// readFiles reads the files that workers write themselves, until quit is closed; once more at last.
func (f *following) readFiles(quit <-chan struct{}) {
	select {
	case <-f.wake:
	case <-quit:
		return
	}
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	buf := make([]byte, readSize)
	for {
		select {
		case <-look.C:
			f.look(buf)
		case <-quit:
			f.look(buf)
			f.mu.Lock()
			defer f.mu.Unlock()
			f.files, f.ended = nil, true
			return
		}
	}
}

func (f *following) look(buf []byte) {
	f.mu.Lock()
	files := slices.Clone(f.files)
	f.mu.Unlock()
	for _, file := range files {
		over := file.a.isClosed()
		file.read(f, buf)
		if over {
			f.mu.Lock()
			f.files = slices.DeleteFunc(f.files, func(o *followedFile) bool { return o == file })
			f.mu.Unlock()
		}
	}
}

func (a *Attempt) isClosed() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.closed
}

func (file *followedFile) read(f *following, buf []byte) {
	r, err := openfile.Open(file.path, os.O_RDONLY, 0)
	if err != nil {
		return // it may come back
	}
	defer r.Close()
	info, err := r.Stat()
	if err != nil || info.Size() == file.at {
		return
	}
	if info.Size() < file.at {
		file.at = 0 // the file was truncated
	}
	file.at = max(file.at, info.Size()-maxLook)
	for left := info.Size() - file.at; left > 0; {
		n, err := r.ReadAt(buf[:min(left, int64(len(buf)))], file.at)
		if n > 0 {
			f.Print(file.id, file.std, buf[:n])
		}
		file.at, left = file.at+int64(n), left-int64(n)
		if err != nil && err != io.EOF || n == 0 {
			return
		}
	}
}

// Taps makes one tap of two; either may be nil, and a stream for which both return nil is not read.
func Taps(a, b func(WorkerID, Std) Tap) func(WorkerID, Std) Tap {
	if a == nil || b == nil {
		if a == nil {
			return b
		}
		return a
	}
	return func(id WorkerID, stream Std) Tap {
		switch one, two := a(id, stream), b(id, stream); {
		case one == nil:
			return two
		case two == nil:
			return one
		default:
			return tapPair{one, two}
		}
	}
}

type tapPair struct{ one, two Tap }

// Feed implements Tap.
func (p tapPair) Feed(b []byte, now time.Time) {
	p.one.Feed(b, now)
	p.two.Feed(b, now)
}
