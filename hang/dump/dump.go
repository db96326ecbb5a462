// Package dump is how a process asks the launchers of its machine for the stacks of their workers, without a token: by
// a socket in a directory that only the launcher's user may enter. A request is a line of JSON, and so is the answer.
package dump

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/openfile"
)

// Request is a request to a launcher.
type Request struct {
	// Dir is where the files go, an absolute path; it is made if need be. "": where the launcher writes the evidence of
	// hangs.
	Dir string `json:"dir,omitempty"`
	// Ranks are those that are meant, all of the launcher if there are none.
	Ranks []int `json:"ranks,omitempty"`
	// Which stacks: Python's, and native ones.
	Python bool `json:"python,omitempty"`
	Native bool `json:"native,omitempty"`
	// Steps of a timeline; 0: none is wanted.
	Steps int `json:"steps,omitempty"`
}

// Answer is its result. The answer to a Request without stacks and steps lists the workers, and does nothing.
type Answer struct {
	Run     string   `json:"run"`
	World   int      `json:"world"` // how many ranks it has
	Workers []Worker `json:"workers,omitempty"`
	Files   []string `json:"files,omitempty"`
	Notes   []string `json:"notes,omitempty"` // missing parts, and why
	Error   string   `json:"error,omitempty"`
}

// Worker is one of the launcher's.
type Worker struct {
	Rank int `json:"rank"`
	PID  int `json:"pid"`
}

// Bounds of data that is read from the other side.
const (
	maxRequest = 1 << 20
	maxAnswer  = 8 << 20
	askedAtOne = 4               // requests at a time; more wait
	sendTime   = 5 * time.Second // for a request to arrive, or an answer to leave
	closeTime  = 2 * time.Second // for running requests to end
)

const (
	answerTime = 5 * time.Second  // for a launcher to list its workers
	filesTime  = 15 * time.Second // to write stacks; many workers' may go to a network file system
)

// StackTime bounds the reading of stacks for a dump: stacks that could not be read by then are not in it.
const StackTime = 10 * time.Second

// ErrSilent: a launcher has not answered in time.
var ErrSilent = errors.New("has not answered")

// limit is how long a launcher may take for the request.
func (r Request) limit() time.Duration {
	limit := answerTime
	if r.Python || r.Native {
		limit += StackTime + filesTime
	}
	if r.Steps > 0 {
		limit += wholeTime
	}
	return limit
}

// socket is the name of a launcher's, in a directory hang-<anything>.
const socket = "dump"

// Server answers for one launcher.
type Server struct {
	l      *net.UnixListener
	answer func(context.Context, Request) Answer
	stop   context.CancelFunc
	wg     sync.WaitGroup
}

// Serve answers requests that arrive at a socket in dir. The context of a request ends when its client disconnects,
// or the server is closed.
func Serve(dir string, answer func(context.Context, Request) Answer) (*Server, error) {
	path := filepath.Join(dir, socket)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if errors.Is(err, syscall.EINVAL) {
		err = fmt.Errorf("%w: the path is longer than a socket's may be (107 bytes)", err)
	}
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	s := &Server{l: l, answer: answer, stop: stop}
	s.wg.Go(func() { s.accept(ctx) })
	return s, nil
}

// Close returns when nothing is answered any more, or cannot be stopped: a file system may hang.
func (s *Server) Close() error {
	s.stop()
	err := s.l.Close()
	done := make(chan struct{})
	go func() {
		s.wg.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(closeTime):
	}
	return err
}

func (s *Server) accept(ctx context.Context) {
	room := make(chan struct{}, askedAtOne)
	for {
		select {
		case room <- struct{}{}:
		case <-ctx.Done():
			return
		}
		c, err := s.l.Accept()
		if err != nil && ctx.Err() != nil {
			return
		}
		if err != nil { // no descriptors, for one
			<-room
			time.Sleep(100 * time.Millisecond)
			continue
		}
		s.wg.Go(func() {
			defer func() { <-room }()
			s.serve(ctx, c)
		})
	}
}

func (s *Server) serve(ctx context.Context, c net.Conn) {
	defer c.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	_ = c.SetReadDeadline(time.Now().Add(sendTime))
	in := bufio.NewReader(io.LimitReader(c, maxRequest))
	line, err := in.ReadBytes('\n')
	if err != nil {
		return
	}
	_ = c.SetReadDeadline(time.Time{})
	s.wg.Go(func() {
		_, _ = in.ReadByte() // only the end of the connection arrives
		cancel()
	})
	var r Request
	a := Answer{}
	if err := json.Unmarshal(line, &r); err != nil {
		a.Error = "the request cannot be read: launcher and tool need the same version"
	} else {
		a = s.answer(ctx, r)
	}
	if ctx.Err() == nil {
		_ = c.SetWriteDeadline(time.Now().Add(sendTime))
		_ = json.NewEncoder(c).Encode(a)
	}
}

// maxTable bounds how much of the kernel's list of sockets is read.
const maxTable = 64 << 20

// Find returns the sockets of the launchers in this network namespace.
func Find() ([]string, error) {
	table, err := openfile.Read("/proc/net/unix", maxTable)
	if err != nil {
		return nil, err
	}
	return sockets(string(table)), nil
}

func sockets(table string) (paths []string) {
	shape := regexp.MustCompile(`/hang-[^/]+/` + socket + `$`)
	for line := range strings.Lines(table) {
		i := strings.IndexByte(line, '/')
		if path := strings.TrimSuffix(line[max(i, 0):], "\n"); i >= 0 && shape.MatchString(path) {
			paths = append(paths, path)
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths) // a connection has the name of its listener
}

// Ask asks one launcher, which has to be this user's; root asks launchers of the users that own the directories. Any
// user may have made a socket that Find returns. Answer.Error is not looked at.
func Ask(ctx context.Context, path string, r Request) (Answer, error) {
	return askWithin(ctx, path, r, r.limit())
}

func askWithin(ctx context.Context, path string, r Request, limit time.Duration) (a Answer, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("the launcher at %s %w for %v: it is stopped, or the "+
		"machine or the storage of the files hangs", path, ErrSilent, limit))
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return a, err
	}
	defer c.Close()
	if err := trusted(c, path); err != nil {
		return a, err
	}
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	body, err := json.Marshal(r)
	if err == nil {
		_, err = c.Write(append(body, '\n'))
	}
	if err != nil {
		return a, err
	}
	err = json.NewDecoder(io.LimitReader(c, maxAnswer)).Decode(&a)
	switch {
	case ctx.Err() != nil:
		return a, context.Cause(ctx)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return a, errors.New("the launcher has ended meanwhile")
	}
	return a, err
}

// trusted checks the user of the listener.
func trusted(c net.Conn, path string) error {
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	var inner error
	if err := raw.Control(func(fd uintptr) {
		peer, inner = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || inner != nil {
		return errors.Join(err, inner)
	}
	me := os.Geteuid()
	if int(peer.Uid) == me {
		return nil
	}
	var dir unix.Stat_t
	if err := unix.Lstat(filepath.Dir(path), &dir); err != nil {
		return err
	}
	if me == 0 && peer.Uid == dir.Uid {
		return nil
	}
	return fmt.Errorf("uid %d listens at %s", peer.Uid, path)
}

// Gone reports whether the launcher of a socket has ended since it was found.
func Gone(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
}
