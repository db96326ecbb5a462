package dump

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"dlrover-run/hang/page"
	"dlrover-run/internal/openfile"
)

// MaxSteps bounds a timeline: all of it is in the worker's memory before it is written.
const MaxSteps = 100

// How long a timeline may take.
const (
	beginTime = 2 * time.Minute // until the next step ends
	wholeTime = 10 * time.Minute
	// answerSoon is when a worker's thread begins to record seconds, which needs no step: it looks twice a second.
	answerSoon = 20 * time.Second
	lookEvery  = 50 * time.Millisecond
)

// Values of the page's word other than the number of the wanted request.
const (
	begun = 1 << 63 // the bit that a worker sets while it records
	timed = 1 << 62 // the bit of a request for seconds, of all threads
	// stop ends the recording. It is not 0, at which a worker does not look: it may begin just now.
	stop = 1
)

// result is a worker's report of a timeline.
type result struct {
	Word  uint64 `json:"word"`
	Path  string `json:"path"`
	Steps int    `json:"steps"`
	Error string `json:"error"`
	// Seconds were recorded, of a request for seconds.
	Seconds float64 `json:"seconds"`
}

// Timeline requests a timeline from the worker that has the page of a local rank in a directory. The worker records
// its next steps with PyTorch's profiler, and writes a trace of Chrome's format to a path. Timeline returns when that
// is there. A note gives the reason if the trace has less than was wanted.
func Timeline(ctx context.Context, pages string, local, steps int, to string) (note string, err error) {
	r, err := newTimeline(pages, local, 0).of(ctx, map[string]any{"path": to, "steps": steps})
	if err == nil && r.Error != "" {
		note = fmt.Sprintf("%d of %d steps: %s", r.Steps, steps, r.Error)
	}
	return note, err
}

// Profile requests a trace of all threads, with their functions of Python, for some time from now on. It is otherwise
// as Timeline, and the note says what was recorded.
func Profile(ctx context.Context, pages string, local int, last time.Duration, to string) (note string, err error) {
	r, err := newTimeline(pages, local, timed).of(ctx, map[string]any{"path": to, "seconds": last.Seconds()})
	if err != nil {
		return "", err
	}
	note = fmt.Sprintf("%.1f s with %d steps", r.Seconds, r.Steps)
	if r.Error != "" {
		note += ", and no more: " + r.Error
	}
	return note, nil
}

func newTimeline(pages string, local int, kind uint64) *timeline {
	return &timeline{page: filepath.Join(pages, fmt.Sprintf("l%d.page", local)),
		request: filepath.Join(pages, fmt.Sprintf("l%d.timeline", local)),
		word:    uint64(time.Now().UnixNano())&^(begun|timed) | kind}
}

// of makes a request, and returns its result if there is a trace.
func (t *timeline) of(ctx context.Context, request map[string]any) (r result, err error) {
	if err := t.ask(request); err != nil {
		return r, err
	}
	defer t.withdraw()
	r, err = t.await(ctx)
	if err == nil && r.Path == "" {
		err = errors.New(cmp.Or(r.Error, "the worker has not said why there is none"))
	}
	return r, err
}

type timeline struct {
	page, request string
	word          uint64
}

// asking holds off a second request between the look at the word and its change.
var asking sync.Mutex

// ask leaves the request, and then the word by which the worker sees it at the end of its next step.
func (t *timeline) ask(request map[string]any) error {
	asking.Lock()
	defer asking.Unlock()
	switch word, err := t.wanted(); {
	case err != nil:
		return err
	case word != 0 && word != stop:
		return errors.New("another timeline of this worker is wanted, or being recorded")
	}
	body, err := json.Marshal(request)
	if err == nil {
		_ = os.Remove(t.request + ".done") // an earlier one's
		err = openfile.Replace(t.request, body, 0o600)
	}
	if err == nil {
		err = t.put(t.word)
	}
	return err
}

// wanted is the page's word.
func (t *timeline) wanted() (uint64, error) {
	b, err := openfile.Read(t.page, page.Size)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, errors.New("no optimizer of PyTorch steps in it, and it has no process group")
	}
	if err == nil {
		_, err = page.Read(b)
	}
	if err != nil {
		return 0, err
	}
	return binary.LittleEndian.Uint64(b[page.Wanted:]), nil
}

func (t *timeline) put(word uint64) error {
	f, err := openfile.Open(t.page, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(binary.LittleEndian.AppendUint64(nil, word), page.Wanted)
	return errors.Join(err, f.Close())
}

// withdraw takes the request back, or ends the recording for it.
func (t *timeline) withdraw() {
	if word, err := t.wanted(); err == nil && word&^begun == t.word {
		_ = t.put(stop)
	}
}

// await returns the worker's result.
func (t *timeline) await(ctx context.Context) (r result, err error) {
	ctx, cancel := context.WithTimeout(ctx, wholeTime)
	defer cancel()
	begin, late := time.Now().Add(beginTime), fmt.Errorf("no step has ended within %v", beginTime)
	if t.word&timed != 0 {
		begin, late = time.Now().Add(answerSoon), fmt.Errorf("the worker has not begun within %v: it is stopped, or a "+
			"thread keeps the interpreter's lock", answerSoon)
	}
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		word, err := t.wanted()
		if err != nil {
			return r, fmt.Errorf("the worker has ended: %w", err)
		}
		if word&^begun != t.word {
			return t.result()
		}
		if word == t.word && time.Now().After(begin) {
			return r, late
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return r, fmt.Errorf("it has not ended: %w", ctx.Err())
		}
	}
}

func (t *timeline) result() (r result, err error) {
	b, err := openfile.Read(t.request+".done", maxRequest)
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err == nil && r.Word != t.word {
		err = errors.New("the worker has made another timeline meanwhile")
	}
	return r, err
}
