package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"dlrover-run/launcher"
	"dlrover-run/rendezvous"
)

// ports are free TCP ports of this node for the servers of its workers, which the workers of all nodes are told of. They
// are held, bound and not listened on, from the join to the start of the workers, and again between two epochs.
type ports struct {
	numbers []int
	held    []int // descriptors; nil while workers may use the ports
	offer   func([]int)
	dir     string // has the world file
	log     *slog.Logger
}

func portsFeature() feature {
	var n int
	return feature{
		name: "ports",
		settings: func(r *resolver) error {
			if n = r.c.Int("ports"); n < 0 || n > rendezvous.MaxPorts {
				return fmt.Errorf("--ports=%d: need 0 to %d ports on this node", n, rendezvous.MaxPorts)
			}
			return nil
		},
		plan: func(p *plan) {
			if n > 0 {
				p.Features["ports"] = n
			}
		},
		open: func(j *job) (launcher.Part, error) {
			if n == 0 {
				return nil, nil
			}
			return openPorts(j, n)
		},
	}
}

func openPorts(j *job, n int) (*ports, error) {
	p := &ports{numbers: make([]int, n), log: j.log}
	if err := p.hold(); err != nil {
		return nil, unusableOption(fmt.Errorf("--ports=%d: %w; ask for fewer", n, err))
	}
	dir, err := os.MkdirTemp("", "dlrover-world-") // mode 0700
	if err != nil {
		p.letGo()
		return nil, unusableOption(fmt.Errorf("--ports: no place for the file that tells workers of all nodes: %w; set TMPDIR to a directory that this user may write to", err))
	}
	p.dir, j.s.node.Ports = dir, p.numbers
	return p, nil
}

// Name implements launcher.Part.
func (p *ports) Name() string { return "ports" }

// NeedsWorld implements launcher.WorldNeeder.
func (p *ports) NeedsWorld() bool { return true }

func (p *ports) joined(j *job) { p.offer = j.adapter.session.SetPorts }

// Starting implements launcher.Starter: from now on the ports are the workers'.
func (p *ports) Starting(e launcher.Epoch) {
	if err := p.writeWorld(e.World); err != nil {
		p.log.Error("cannot write the world file: workers that read it fail", "path", p.worldFile(), "err", err)
	}
	p.letGo()
}

// Environ implements launcher.Environer.
func (p *ports) Environ(launcher.Epoch, int) []string {
	list := make([]string, len(p.numbers))
	for i, n := range p.numbers {
		list[i] = strconv.Itoa(n)
	}
	return []string{"DLROVER_PORTS=" + strings.Join(list, ","), "DLROVER_WORLD_FILE=" + p.worldFile()}
}

// Stopped implements launcher.Stopper. Whoever took a port meanwhile, such as a worker's child that is still there, has
// it; the next world is told of another.
func (p *ports) Stopped(why launcher.StopInfo) {
	if why.Early {
		return
	}
	if err := p.hold(); err != nil {
		p.log.Warn("fewer ports are offered to the next world", "ports", p.numbers, "err", err)
	}
	p.offer(p.numbers)
}

// hold binds the ports anew, and another one for each that cannot be bound. After an error it has those that could.
func (p *ports) hold() (err error) {
	p.letGo()
	var numbers []int
	for _, n := range p.numbers {
		fd, got, e := bindPort(n)
		if e != nil && n != 0 {
			fd, got, e = bindPort(0)
		}
		if e != nil {
			err = errors.Join(err, e)
			continue
		}
		p.held, numbers = append(p.held, fd), append(numbers, got)
	}
	p.numbers = numbers
	return err
}

// bindPort binds a TCP port of all addresses; 0 is any free one.
func bindPort(n int) (fd, port int, err error) {
	fd, any, err := portSocket(n)
	if err != nil {
		return -1, 0, err
	}
	// Connections of former servers, which wait for their end, do not count; whoever wants to listen does, afterwards.
	err = errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1), unix.Bind(fd, any),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 0))
	if err == nil {
		port, err = boundTo(fd)
	}
	if err != nil {
		_ = unix.Close(fd)
		return -1, 0, fmt.Errorf("bind port %d: %w", n, err)
	}
	return fd, port, nil
}

// portSocket is a socket for a port of all addresses, where there is IPv6 of both kinds.
func portSocket(n int) (fd int, any unix.Sockaddr, err error) {
	const kind = unix.SOCK_STREAM | unix.SOCK_CLOEXEC
	if fd, err = unix.Socket(unix.AF_INET6, kind, 0); err == nil {
		return fd, &unix.SockaddrInet6{Port: n}, unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0)
	}
	if fd, err = unix.Socket(unix.AF_INET, kind, 0); err != nil {
		return -1, nil, fmt.Errorf("a socket for a port: %w", err)
	}
	return fd, &unix.SockaddrInet4{Port: n}, nil
}

func boundTo(fd int) (int, error) {
	name, err := unix.Getsockname(fd)
	switch a := name.(type) {
	case *unix.SockaddrInet6:
		return a.Port, err
	case *unix.SockaddrInet4:
		return a.Port, err
	}
	return 0, err
}

func (p *ports) letGo() {
	for _, fd := range p.held {
		_ = unix.Close(fd)
	}
	p.held = nil
}

// worldNode is one node in the world file.
type worldNode struct {
	GroupRank int    `json:"group_rank"`
	Node      string `json:"node"`
	Addr      string `json:"addr"`
	RankBase  int    `json:"rank_base"`
	Slots     int    `json:"slots"`
	Role      string `json:"role"`
	Ports     []int  `json:"ports"`
}

func (p *ports) worldFile() string { return filepath.Join(p.dir, "world.json") }

// writeWorld writes the nodes in rank order. A reader sees all of it or what was there before.
func (p *ports) writeWorld(world []launcher.Member) error {
	nodes := make([]worldNode, len(world))
	for i, m := range world {
		nodes[i] = worldNode(m)
		if m.Ports == nil {
			nodes[i].Ports = []int{} // a list to every reader
		}
	}
	data, err := json.Marshal(nodes)
	if err != nil {
		return err
	}
	next := p.worldFile() + ".next"
	if err := os.WriteFile(next, append(data, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(next, p.worldFile())
}

func (p *ports) close() error {
	p.letGo()
	return os.RemoveAll(p.dir)
}
