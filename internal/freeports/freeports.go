// Package freeports keeps TCP ports free for programs that are about to be started.
package freeports

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Ports are TCP ports of this machine. While they are held they are bound and not listened on, so that no other
// process gets them and connections are refused.
type Ports struct {
	numbers []int
	held    []int // descriptors; nil while others may use the ports
	never   []int
}

// Hold binds n free ports, none of them in never: servers with known ports are to start on those.
func Hold(n int, never ...int) (*Ports, error) {
	p := &Ports{numbers: make([]int, n), never: never}
	if err := p.HoldAgain(); err != nil {
		p.Release()
		return nil, err
	}
	return p, nil
}

// Numbers are the ports.
func (p *Ports) Numbers() []int { return p.numbers }

// HoldAgain binds the ports anew, and another one for each port that is taken. After an error it has those that
// could be bound.
func (p *Ports) HoldAgain() (err error) {
	p.Release()
	var numbers []int
	for _, n := range p.numbers {
		fd, got, e := p.bind(n)
		if e != nil && n != 0 {
			fd, got, e = p.bind(0)
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

// bind is bindPort for a port that is not one of never.
func (p *Ports) bind(n int) (fd, port int, err error) {
	fd, port, err = bindPort(n)
	if err != nil || !slices.Contains(p.never, port) {
		return fd, port, err
	}
	defer unix.Close(fd) // afterwards: the kernel does not choose it again
	return p.bind(0)
}

// Another launcher of this host that looks at the same moment has a port for a few microseconds.
const (
	looks    = 4
	lookTime = 3 * time.Millisecond // between two
)

// AreFree reports whether n ports from first on are free right now. One that is not is looked at again.
func AreFree(first, n int) bool {
	for port := first; port < first+n; port++ {
		for look := 1; !isFree(port); look++ {
			if look == looks {
				return false
			}
			time.Sleep(lookTime)
		}
	}
	return true
}

func isFree(port int) bool {
	fd, _, err := bindPort(port)
	if err != nil {
		return false
	}
	_ = unix.Close(fd)
	return true
}

// bindPort binds a TCP port of all addresses; 0 is any free one. It does not set SO_REUSEADDR. A port with a
// connection of a former server in TIME_WAIT would be of no use to workers, which do not set it either.
func bindPort(n int) (fd, port int, err error) {
	fd, any, err := portSocket(n)
	if err != nil {
		return -1, 0, err
	}
	if err = unix.Bind(fd, any); err == nil {
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

// Release leaves the ports to others.
func (p *Ports) Release() {
	for _, fd := range p.held {
		_ = unix.Close(fd)
	}
	p.held = nil
}

// Range is from First to Last; that without a port has a Last of 0.
type Range struct{ First, Last int }

// Outgoing are the ephemeral ports, which the kernel takes for sockets without a chosen port, such as outgoing
// connections. See ip_local_port_range in https://man7.org/linux/man-pages/man7/ip.7.html.
func Outgoing(root fs.FS) (r Range) {
	text, _ := fs.ReadFile(root, "proc/sys/net/ipv4/ip_local_port_range")
	if _, err := fmt.Sscan(string(text), &r.First, &r.Last); err != nil {
		return Range{}
	}
	return r
}

// Ports from which ForServer chooses, if they are below the outgoing ones: well-known ones are not among them.
const lowest, highest = 10_000, 29_000

// ForServer is a free port for a server that is about to start. With the kernel's default settings no other process
// gets it by chance meanwhile.
func ForServer() (int, error) {
	if out := Outgoing(os.DirFS("/")); out.First > highest {
		for range 100 {
			if n := lowest + rand.IntN(highest-lowest); isFree(n) {
				return n, nil
			}
		}
	}
	fd, n, err := bindPort(0)
	if err != nil {
		return 0, err
	}
	return n, unix.Close(fd)
}
