// Package preflight warns of processes on this node that will get into the way of the job.
package preflight

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/text"
	"dlrover-run/launcher/preflight"
)

// New is the feature. It warns of processes on this node that will get into the job's way. It refuses nothing.
func New() feature.Feature {
	return feature.Feature{
		Name: "preflight",
		Settings: func(o feature.Options) error {
			if o.Bool("check-only") {
				return nil
			}
			if free, known := o.SharedMemory(); known {
				if w := preflight.SharedMemory(free, o.Job().Slots); w != "" {
					o.Warn("%s", w)
				}
			}
			return nil
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			if root := os.DirFS("/"); HasDevices(root) {
				return &feature.Opened{Close: lookAtDevices(root, n.Log()).close}, nil
			}
			return nil, nil
		},
	}
}

// HasDevices looks for the file that every driver of accelerators makes: there may be hundreds of other files in
// /dev.
func HasDevices(root fs.FS) bool {
	for _, name := range []string{"dev/nvidiactl", "dev/kfd", "dev/davinci_manager", "dev/mxcd"} {
		if _, err := fs.Stat(root, name); err == nil {
			return true
		}
	}
	return false
}

// deviceLook warns of devices that are in use, in parallel with the start.
type deviceLook struct{ wg sync.WaitGroup }

func lookAtDevices(root fs.FS, log *slog.Logger) *deviceLook {
	l := &deviceLook{}
	own := os.Getpid()
	if parent := os.Getppid(); parent > 1 {
		own = parent // the guard
	}
	l.wg.Go(func() {
		devices := preflight.Chosen(preflight.Devices(names(root, "dev"), names(root, "dev/dri")), os.LookupEnv)
		if len(devices) == 0 {
			return
		}
		all := processes(root, func(file string) bool { return strings.HasPrefix(file, "/dev/") })
		if busy := preflight.Busy(devices, all, own); busy != "" {
			log.Warn(busy)
		}
	})
	return l
}

func (l *deviceLook) close() error {
	l.wg.Wait()
	return nil
}

func names(root fs.FS, dir string) (list []string) {
	entries, _ := fs.ReadDir(root, dir) // an unreadable directory adds nothing
	for _, e := range entries {
		list = append(list, e.Name())
	}
	return list
}

// processes lists the processes that /proc shows to this user, with their open files for which wanted is true. It
// leaves out processes of other users, and those that end meanwhile.
func processes(root fs.FS, wanted func(file string) bool) (all []preflight.Process) {
	for _, name := range names(root, "proc") {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		p := preflight.Process{PID: pid}
		if p.Name, p.Parent, err = statOf(root, "proc/"+name+"/stat"); err != nil {
			continue
		}
		for _, fd := range names(root, "proc/"+name+"/fd") {
			file, err := fs.ReadLink(root, "proc/"+name+"/fd/"+fd)
			if err == nil && wanted(file) {
				p.Files = append(p.Files, file)
			}
		}
		if len(p.Files) > 0 {
			p.Command = commandOf(root, "proc/"+name+"/cmdline")
		}
		all = append(all, p)
	}
	return all
}

// statOf reads the name of a process, which may contain any character, and its parent.
func statOf(root fs.FS, path string) (name string, parent int, err error) {
	line, err := fs.ReadFile(root, path)
	if err != nil {
		return "", 0, err
	}
	from, to := strings.IndexByte(string(line), '('), strings.LastIndexByte(string(line), ')')
	if from < 0 || to < from {
		return "", 0, errors.New("no name")
	}
	rest := strings.Fields(string(line[to+1:]))
	if len(rest) < 2 {
		return "", 0, errors.New("no parent")
	}
	parent, err = strconv.Atoi(rest[1])
	return text.EscapeLine(string(line[from+1 : to])), parent, err
}

// commandOf is the beginning of a process's command line.
func commandOf(root fs.FS, path string) string {
	f, err := root.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	words, _ := io.ReadAll(io.LimitReader(f, 256)) // on an error, use the words read so far
	return text.EscapeLine(strings.TrimSpace(strings.ReplaceAll(string(words), "\x00", " ")))
}

// Listenable returns an error that names the process in the way of a server of this node at host:port; host may be
// empty.
func Listenable(root fs.FS, host string, port int) error {
	l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	switch {
	case err == nil:
		return l.Close()
	case errors.Is(err, syscall.EADDRINUSE):
		return fmt.Errorf("port %d is taken%s", port, listener(root, host, port))
	case errors.Is(err, syscall.EACCES):
		return fmt.Errorf("port %d is for root; take one from 1024", port)
	}
	return nil // an address of another machine, or a name: its listen will fail by itself
}

// listener names the process that listens on a port.
func listener(root fs.FS, host string, port int) string {
	if by := Holder(root, host, port); by != "" {
		return by
	}
	return " by a program of another user or of another container"
}

// Holder names the process that listens on a port, as far as this user may see it.
func Holder(root fs.FS, host string, port int) string {
	addr, err := netip.ParseAddr(host)
	if err != nil {
		addr = netip.IPv4Unspecified()
	}
	var sockets []string
	for _, table := range []string{"proc/self/net/tcp", "proc/self/net/tcp6"} {
		text, _ := fs.ReadFile(root, table) // no table, no holder
		sockets = append(sockets, preflight.Listeners(string(text), addr, port)...)
	}
	holders := preflight.Holders(
		processes(root, func(file string) bool { return strings.HasPrefix(file, "socket:") }), sockets)
	if len(holders) == 0 {
		return ""
	}
	return " by " + holders[0]
}
