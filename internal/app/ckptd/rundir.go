package ckptd

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd"
	"dlrover-run/checkpointd/shm"
)

// runDir is the runtime directory of a run. Unless it is a sidecar's it is locked, and has a socket that its owner
// listens on: workers may connect before there is a daemon, and wait in the socket's queue.
type runDir struct {
	*shm.Dir
	release func() error // nil: a sidecar's, and so are all others
	ln      *net.UnixListener
	socket  *os.File // ln's, for the daemon
	watch   *os.File // ln's, to see the first call
}

// maxRunDirs bounds the launchers of one run on one machine.
const maxRunDirs = 1024

// openRunDir takes the first free directory of the run: that of a launcher that died has its memory, another that lives
// has its own.
func openRunDir(cfg SupervisorConfig) (*runDir, error) {
	if cfg.Sidecar != "" {
		dir, err := shm.Create(cfg.ShmDir, cfg.Sidecar)
		return &runDir{Dir: dir}, err
	}
	d, err := &runDir{}, shm.ErrOwned
	for i := 0; i < maxRunDirs && errors.Is(err, shm.ErrOwned); i++ {
		err = d.take(cfg.ShmDir, fmt.Sprintf("%s-%d", cfg.Key, i))
	}
	if err != nil {
		return nil, err
	}
	if err := d.listen(); err != nil {
		return nil, errors.Join(err, d.close())
	}
	return d, nil
}

// take makes a directory ours. The daemon of a launcher that was killed may remove the directory at this very moment;
// then a new one is made.
func (d *runDir) take(base, key string) (err error) {
	for range maxRunDirs {
		if d.Dir, err = shm.Create(base, key); err == nil {
			d.release, err = d.Own()
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return err
}

func (d *runDir) listen() (err error) {
	if d.ln, err = checkpointd.Listen(d.socketPath()); err != nil {
		return err
	}
	if d.socket, err = d.ln.File(); err != nil {
		return err
	}
	d.watch, err = pollable(d.socket)
	return err
}

func (d *runDir) socketPath() string { return filepath.Join(d.Path(), socketName) }

// pollable returns another descriptor of f that the runtime's poller waits for.
func pollable(f *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, err
	}
	err = unix.SetNonblock(fd, true) // os.NewFile gives only such files to the poller
	return os.NewFile(uintptr(fd), f.Name()), err
}

// awaitCall waits for a worker's first connection; false when it was interrupted.
func (d *runDir) awaitCall() bool {
	rc, err := d.watch.SyscallConn()
	if err != nil {
		return false
	}
	return rc.Read(func(fd uintptr) bool {
		n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n > 0
	}) == nil
}

// interrupt ends called.
func (d *runDir) interrupt() {
	if d.watch != nil {
		_ = d.watch.SetReadDeadline(time.Unix(1, 0))
	}
}

// close releases the directory, and removes it if it has no segments.
func (d *runDir) close() error {
	if d.ln != nil {
		_ = d.ln.Close()
	}
	for _, f := range []*os.File{d.socket, d.watch} {
		if f != nil {
			_ = f.Close()
		}
	}
	if d.release == nil {
		return nil
	}
	names, err := d.Names()
	if err == nil && len(names) == 0 {
		err = d.RemoveAll()
	}
	return errors.Join(err, d.release())
}

// staleAfter is how long the memory of a job that died is kept for its next launcher.
const staleAfter = 10 * time.Minute

// removeStale removes the memory of jobs that died some time ago, and at once directories without a checkpoint; own
// stays.
func removeStale(base, own string, log *slog.Logger) {
	dead, err := shm.Dead(base)
	if err != nil {
		log.Debug("look for the memory of dead jobs", "err", err)
	}
	for _, d := range dead {
		age := d.Age()
		names, _ := d.Names()
		if d.Path() == own || len(names) > 0 && age < staleAfter {
			continue
		}
		if err := d.RemoveAll(); err != nil {
			log.Debug("remove the checkpoint memory of a job that is dead", "dir", d.Path(), "err", err)
			continue
		}
		if len(names) == 0 {
			continue
		}
		log.Info("removed the checkpoint memory of a job that is dead", "dir", d.Path(),
			"age", age.Round(time.Second).String())
	}
}
