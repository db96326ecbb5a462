//go:build linux

package flight

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/hang"
	"dlrover-run/internal/openfile"
)

// Recorder knows where the flight recorders of the workers of an epoch are asked, and where they answer. Its methods
// may be called by several goroutines.
type Recorder struct {
	environ     []string
	pipe, dumps string // both go on with the rank
}

// The variables, by their present name and, last, the one that older PyTorch knows: before 2.9, of dumps at a timeout
// before 2.15. The shim removes the older ones where PyTorch is newer.
var (
	sizeNames    = []string{"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}
	timeoutNames = []string{"TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"}
	dumpNames    = []string{"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
	pipeNames    = []string{"TORCH_NCCL_DEBUG_INFO_PIPE_FILE"}
)

// New returns the Recorder of workers that will be started with Environ. Their fifos lie in the directory pipes,
// their dumps in dumps, which should outlive the epoch: PyTorch writes there, too, when a collective times out. user
// looks up the workers' environment: variables of the user are left alone, under either of their names.
func New(pipes, dumps string, user func(name string) (value string, ok bool)) *Recorder {
	r := &Recorder{}
	r.set(user, sizeNames, "2000")
	r.set(user, timeoutNames, "1")
	r.dumps = r.set(user, dumpNames, filepath.Join(dumps, "flight_rank_"))
	r.pipe = r.set(user, pipeNames, filepath.Join(pipes, "flight_rank_"))
	return r
}

// set sets a variable under all of its names, unless the user has, and returns the value that counts.
func (r *Recorder) set(user func(string) (string, bool), names []string, value string) string {
	for _, name := range names {
		if v, ok := user(name); ok {
			return v
		}
	}
	for _, name := range names {
		r.environ = append(r.environ, name+"="+value)
	}
	return value
}

// Environ is the addition to the workers' environment, as KEY=VALUE, under both names of each variable: newer PyTorch
// warns of the older one, if the shim does not remove it.
func (r *Recorder) Environ() []string { return r.environ }

// errNone means that a worker has no flight recorder that can be asked: no process group of NCCL, or not yet, or it
// has ended.
var errNone = errors.New("flight: no flight recorder listens")

const (
	patience = 5 * time.Second
	poll     = 50 * time.Millisecond // how often Read looks for the dump
)

// Read makes the recorder of a rank write a dump, and reads it. The rank answers within two seconds, or not at all:
// after five, or when ctx ends, that is an error. Without a listener the error is errNone, at once.
//
// A dump needs the lock of the worker's interpreter (GIL). While another thread holds that forever, the recorder's
// thread in the worker waits for it. PyTorch before 2.8 takes that for a watchdog that hangs: such a worker should
// not be asked.
func (r *Recorder) Read(ctx context.Context, rank int) (*hang.Flight, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	file := r.dumps + strconv.Itoa(rank)
	before, _ := os.Stat(file)
	if err := trigger(r.pipe + strconv.Itoa(rank) + ".pipe"); err != nil {
		return nil, err
	}
	tick := time.NewTicker(poll)
	defer tick.Stop()
	err := fs.ErrNotExist
	for {
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("flight: rank %d was asked for a dump, and wrote no whole one to %s: %w", rank, file, err)
		case <-tick.C:
		}
		now, statErr := os.Stat(file)
		if statErr != nil || same(before, now) {
			continue
		}
		var f hang.Flight
		if f, err = load(file); err == nil { // else it is still being written
			return &f, nil
		}
	}
}

// Load reads the newest dump of a rank, even if another process asked for it.
func (r *Recorder) Load(rank int) (*hang.Flight, error) {
	f, err := load(r.dumps + strconv.Itoa(rank))
	if err != nil {
		return nil, err
	}
	return &f, nil
}

// same reports whether a file was not written since before, which is nil when there was none.
func same(before, now fs.FileInfo) bool {
	return before != nil && os.SameFile(before, now) && before.Size() == now.Size() &&
		before.ModTime().Equal(now.ModTime())
}

// trigger writes a byte to a fifo, if it is one with a reader. It never waits: an os.File would, for a full one.
func trigger(pipe string) error {
	fd, err := unix.Open(pipe, unix.O_WRONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENXIO) {
		return errNone
	}
	if err != nil {
		return fmt.Errorf("flight: ask for a dump: open %s: %w", pipe, err)
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFIFO {
		return fmt.Errorf("flight: ask for a dump: %s is not a FIFO", pipe)
	}
	_, err = unix.Write(fd, []byte("1"))
	if err != nil && !errors.Is(err, unix.EAGAIN) { // full: it was asked often enough
		return fmt.Errorf("flight: ask for a dump: write to %s: %w", pipe, err)
	}
	return nil
}

func load(file string) (hang.Flight, error) {
	dump, err := openfile.Read(file, maxBytes)
	if err != nil {
		return hang.Flight{}, fmt.Errorf("flight: %w", err)
	}
	return parseDump(dump)
}
