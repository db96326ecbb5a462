package warm

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"dlrover-run/launcher/proc"
)

// maxMessage bounds the bytes of one message. A larger message is written to a file in memory, and its descriptor is
// sent with the message: the fields of the object in that file are the message's as well.
const (
	maxMessage = 64 << 10
	maxBody    = 16 << 20
)

// The operations of messages.
const (
	// To a parent, or to an interpreter that stands by.
	opPrepare = "prepare" // import; answered by prepared or unsafe
	opFork    = "fork"    // with the socket of the child, which answers with parked
	opQuit    = "quit"    // so is the end of the connection
	// To a parked child, with the descriptors of order, standard input, output and error.
	opRun = "run" // answered by running or refused

	opImported = "imported" // what follows is a trial: time to ask for forks, if workers wait for them
	opPrepared = "prepared" // and that has succeeded
	opFiles    = "files"    // that modules are from; if workers wait, after their start
	opUnsafe   = "unsafe"
	opParked   = "parked"
	opRunning  = "running"
	opRefused  = "refused"
)

// request is a message to a process that prepares, and answer one from there: one packet of a SOCK_SEQPACKET socket
// each, as JSON.
type request struct {
	Op      string   `json:"op"`
	Python  string   `json:"python,omitempty"` // argv[0] of the workers
	Modules []string `json:"modules"`
	// Script, a file or with Module the name of one, is read for its imports at its top level and the variables that it
	// sets for them. Only: of these imports those that Modules names.
	Script string `json:"script,omitempty"`
	Module bool   `json:"module,omitempty"`
	Only   bool   `json:"only,omitempty"`
	// Learned: workers have told which variables the script sets for its imports, so Env has these.
	Learned bool `json:"learned,omitempty"`
	// AtImport begin the names of variables that imports read, apart from those that Later begin.
	AtImport []string `json:"at_import"`
	Later    []string `json:"later"`
	Standby  bool     `json:"standby"` // this process will become a worker; it need not fork
	Deny     []string `json:"deny"`    // is not imported
	// Env are variables that the script sets for its imports to read.
	Env      map[string]string `json:"env"`
	Urgent   bool              `json:"urgent"`   // workers wait for it
	Launcher int               `json:"launcher"` // the pid that adopts them
}

type answer struct {
	Op      string   `json:"op"`
	V       int      `json:"v"`
	PID     int      `json:"pid"`
	Modules int      `json:"modules"` // how many there are now
	Names   []string `json:"names"`   // theirs
	Failed  []failed `json:"failed"`
	Files   []file   `json:"files"` // of the modules
	Threads int      `json:"threads"`
	Seconds float64  `json:"seconds"`
	Why     string   `json:"why"`
	Module  string   `json:"module"` // that is to blame
	First   bool     `json:"first"`  // unsafe for the first workers only
}

// order is the worker that a parked child becomes.
type order struct {
	Argv []string `json:"argv"` // as exec would get it
	Env  []string `json:"env"`
	Dir  string   `json:"cwd"`
	CPUs []int    `json:"cpus"` // null: unchanged
	// Memory is its memory policy; null: that which it has.
	Memory *memory `json:"memory,omitempty"`
}

// memory are the arguments of a system call that sets a memory policy. Python has no name for it.
type memory struct {
	Call  int      `json:"call"` // its number
	Mode  int      `json:"mode"`
	Nodes []uint64 `json:"nodes"` // a set, in words of 64 bits
}

func memoryOf(p *proc.MemoryPolicy) *memory {
	if p == nil {
		return nil
	}
	call, mode, nodes := p.Words()
	return &memory{Call: call, Mode: mode, Nodes: nodes}
}

// file is one that was imported, as it was then: a list of path, time of change in nanoseconds and size.
type file struct {
	Path  string
	MTime int64
	Size  int64
}

// failed is a module that cannot be imported, and why not: a list of two texts.
type failed [2]string

// UnmarshalJSON implements json.Unmarshaler.
func (f *file) UnmarshalJSON(text []byte) error {
	fields := []any{&f.Path, &f.MTime, &f.Size}
	n := len(fields)
	if err := json.Unmarshal(text, &fields); err != nil {
		return err
	}
	if len(fields) != n {
		return fmt.Errorf("file %s: need path, time and size", text)
	}
	return nil
}

// conn is our end of a socket.
type conn struct{ *net.UnixConn }

// pair makes a socket; theirs is for another process.
func pair() (ours conn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return conn{}, nil, fmt.Errorf("make a socket: %w", err)
	}
	theirs = os.NewFile(uintptr(fds[1]), "theirs")
	if ours, err = connOf(os.NewFile(uintptr(fds[0]), "ours")); err != nil {
		theirs.Close()
	}
	return ours, theirs, err
}

// connOf owns the file.
func connOf(f *os.File) (conn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return conn{}, err
	}
	return conn{c.(*net.UnixConn)}, nil
}

// send sends a message with the descriptors of files.
func (c conn) send(m request, files ...*os.File) error {
	data, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(data) > maxMessage {
		body, err := inMemory("message", data)
		if err != nil {
			return err
		}
		defer body.Close()
		data, files = []byte(`{"op":"`+m.Op+`"}`), append([]*os.File{body}, files...)
	}
	return c.write(data, files)
}

func (c conn) write(data []byte, files []*os.File) error {
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	_, _, err := c.WriteMsgUnix(data, rights, nil)
	return err
}

// receive returns the next message. After the last one there is an error.
func (c conn) receive() (a answer, err error) {
	data, oob := make([]byte, maxMessage+1), make([]byte, unix.CmsgSpace(4))
	n, oobn, flags, _, err := c.ReadMsgUnix(data, oob)
	var more io.ReaderAt
	if f := received(oob[:oobn]); f != nil {
		defer f.Close()
		more = f
	}
	switch {
	case err != nil:
		return a, err
	case n > maxMessage || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
		return a, fmt.Errorf("a message of more than %d bytes", maxMessage)
	}
	return decode(data[:n], more)
}

// received is the first file that came with a message; nil: none did.
func received(oob []byte) *os.File {
	list, err := unix.ParseSocketControlMessage(oob)
	if err != nil || len(list) == 0 {
		return nil
	}
	fds, err := unix.ParseUnixRights(&list[0])
	if err != nil || len(fds) == 0 {
		return nil
	}
	return os.NewFile(uintptr(fds[0]), "body")
}

// decode reads an answer, and more of it from a file; nil: there is none.
func decode(data []byte, more io.ReaderAt) (a answer, err error) {
	if err := json.Unmarshal(data, &a); err != nil || more == nil {
		return a, err
	}
	if data, err = io.ReadAll(io.NewSectionReader(more, 0, maxBody+1)); err != nil {
		return a, err
	}
	if len(data) > maxBody {
		return a, fmt.Errorf("a message of more than %d bytes", maxBody)
	}
	return a, json.Unmarshal(data, &a)
}

// inMemory is a file with these bytes that has no name.
func inMemory(name string, data []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make a file in memory: %w", err)
	}
	f := os.NewFile(uintptr(fd), name)
	if _, err := f.Write(data); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}
