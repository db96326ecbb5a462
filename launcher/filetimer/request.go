// Package filetimer serves torch.distributed.elastic.timer's FileTimerClient: FIFO is the named pipe that workers write
// to, parse reads their requests, Table keeps the running timers. The launcher decides which process an expired timer
// kills.
//
// parse and Table are pure. A FIFO owns one goroutine, which ends with Close.
package filetimer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"syscall"
	"time"
)

// maxLine is the longest request in bytes: PIPE_BUF, up to which the kernel does not mix the writes of several
// processes.
const maxLine = 4096

// maxAfter is for timers that are meant never to expire.
const maxAfter = 100 * 365 * 24 * time.Hour

// Request starts a timer of a process, or releases it. The kind is the same in torch 1.13 to 2.15.
type Request struct {
	PID     int
	Scope   string // the purpose of the timer; with PID it names the timer
	Release bool
	After   time.Duration  // from now on until it expires
	Signal  syscall.Signal // for the process then; 0 is none
}

// parse reads one line that arrived at now. The request carries the wall clock's time.
func parse(line []byte, now time.Time) (Request, error) {
	var in struct {
		PID     *int     `json:"pid"`
		Scope   *string  `json:"scope_id"`
		Expires *float64 `json:"expiration_time"`
		Signal  int      `json:"signal"`
	}
	switch err := json.Unmarshal(finite(line), &in); {
	case len(line) > maxLine:
		return Request{}, errors.New("longer than 4096 bytes")
	case err != nil:
		return Request{}, err
	case in.PID == nil || in.Scope == nil || in.Expires == nil:
		return Request{}, errors.New("needs pid, scope_id and expiration_time")
	case *in.PID < 1:
		return Request{}, fmt.Errorf("pid %d: need one from 1", *in.PID)
	case in.Signal > 64:
		return Request{}, fmt.Errorf("signal %d: there is none above 64", in.Signal)
	}
	r := Request{PID: *in.PID, Scope: *in.Scope, Release: *in.Expires < 0, Signal: syscall.Signal(max(in.Signal, 0))}
	if !r.Release {
		r.After = until(*in.Expires, now)
	}
	return r, nil
}

// until is the time from now to unix, which may be any number from 0.
func until(unix float64, now time.Time) time.Duration {
	seconds := unix - float64(now.UnixNano())/1e9
	return time.Duration(min(max(seconds, 0), maxAfter.Seconds()) * 1e9)
}

// finite replaces the numbers of Python's json that are not JSON's. An unescaped quote cannot stand before the colon
// within a string, so only the field itself is found.
func finite(line []byte) []byte {
	for _, odd := range [][2]string{{"-Infinity", "-1"}, {"Infinity", "1e300"}, {"NaN", "1e300"}} {
		line = bytes.Replace(line, []byte(`"expiration_time": `+odd[0]), []byte(`"expiration_time": `+odd[1]), 1)
	}
	return line
}
