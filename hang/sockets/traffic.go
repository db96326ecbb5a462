//go:build linux

package sockets

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Traffic returns a function that counts the bytes of the established TCP connections of processes, both ways.
// Connections from or to port are left out: workers ask their store in the background. Unknown connections count
// nothing, and neither do those in another network namespace than the caller.
func Traffic(port uint16) func(pids []int) uint64 {
	return newTraffic(port).of
}

// fresh is how long an answer of the kernel is used: the workers of a node are looked at one after the other.
const fresh = 200 * time.Millisecond

// maxAnswer bounds the datagrams of a dump: NETLINK_SOCK_DIAG fills no larger ones.
const maxAnswer = 32 << 10

// traffic is the newest count of all connections, by the inode of their socket. A look leaves next to no garbage: the
// heap of an idle launcher would grow to the 4 MiB at which Go collects it for the first time.
type traffic struct {
	port uint16

	mu      sync.Mutex
	carried map[uint32]uint64
	at      time.Time
	buf     []byte
}

func newTraffic(port uint16) *traffic {
	return &traffic{port: port, carried: map[uint32]uint64{}, buf: make([]byte, maxAnswer)}
}

// of sums the bytes of processes.
func (t *traffic) of(pids []int) (sum uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.refresh()
	counted := map[uint32]bool{} // a connection may be inherited
	for _, pid := range pids {
		if len(t.carried) == 0 {
			return 0
		}
		_ = eachLink("/proc/"+strconv.Itoa(pid)+"/fd", func(link string) bool {
			inode := inodeOf(link)
			if bytes, ok := t.carried[inode]; ok && !counted[inode] {
				counted[inode], sum = true, sum+bytes
			}
			return len(counted) < len(t.carried)
		})
	}
	return sum
}

// inodeOf reads the inode of socket:[123]; it is 0 for a link to anything else.
func inodeOf(link string) uint32 {
	digits, socket := strings.CutPrefix(link, "socket:[")
	n, err := strconv.ParseUint(strings.TrimSuffix(digits, "]"), 10, 32)
	if !socket || err != nil {
		return 0
	}
	return uint32(n)
}

func (t *traffic) refresh() {
	if time.Since(t.at) < fresh {
		return
	}
	clear(t.carried)
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		_ = dump(family, t.buf, func(c connection) { // the connections until an error
			if c.local != t.port && c.remote != t.port && c.inode != 0 {
				t.carried[c.inode] = c.bytes
			}
		})
	}
	t.at = time.Now()
}

// connection is the kernel's data about one by sock_diag(7).
type connection struct {
	local, remote uint16 // ports
	inode         uint32
	bytes         uint64
}

// Lengths and offsets of inet_diag_req_v2, inet_diag_msg and tcp_info.
const (
	requestLen  = 56
	answerLen   = 72
	offPorts    = 4
	offInode    = 68
	attrInfo    = 2   // INET_DIAG_INFO
	offAcked    = 120 // tcpi_bytes_acked, and then tcpi_bytes_received
	established = 1   // TCP_ESTABLISHED
	answerTime  = 1   // seconds
)

func dump(family byte, buf []byte, each func(connection)) error {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: answerTime}); err != nil {
		return err
	}
	if err := unix.Sendto(fd, request(family), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	for {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if err != nil {
			return err
		}
		if done, err := answer(buf[:n], each); done || err != nil {
			return err
		}
	}
}

func request(family byte) []byte {
	b := make([]byte, unix.SizeofNlMsghdr+requestLen)
	binary.NativeEndian.PutUint32(b, uint32(len(b)))
	binary.NativeEndian.PutUint16(b[4:], unix.SOCK_DIAG_BY_FAMILY)
	binary.NativeEndian.PutUint16(b[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	r := b[unix.SizeofNlMsghdr:]
	r[0], r[1], r[2] = family, unix.IPPROTO_TCP, 1<<(attrInfo-1)
	binary.NativeEndian.PutUint32(r[4:], 1<<established)
	return b
}

// answer reads one datagram; done: it was the last. syscall.ParseNetlinkMessage would allocate for each connection.
func answer(b []byte, each func(connection)) (done bool, err error) {
	for len(b) >= unix.SizeofNlMsghdr {
		length := int(binary.NativeEndian.Uint32(b))
		if length < unix.SizeofNlMsghdr || length > len(b) {
			return false, unix.EINVAL
		}
		data := b[unix.SizeofNlMsghdr:length]
		switch binary.NativeEndian.Uint16(b[4:]) {
		case unix.NLMSG_DONE:
			return true, nil
		case unix.NLMSG_ERROR:
			return false, fmt.Errorf("sock_diag refuses: %x", data[:min(len(data), 4)])
		case unix.SOCK_DIAG_BY_FAMILY:
			if c, ok := parseAnswer(data); ok {
				each(c)
			}
		}
		b = b[min(len(b), (length+3)&^3):]
	}
	return false, nil
}

// parseAnswer reads one connection. Kernels before 4.1 do not count bytes.
func parseAnswer(b []byte) (c connection, ok bool) {
	if len(b) < answerLen {
		return c, false
	}
	c.local, c.remote = binary.BigEndian.Uint16(b[offPorts:]), binary.BigEndian.Uint16(b[offPorts+2:])
	c.inode = binary.NativeEndian.Uint32(b[offInode:])
	for rest := b[answerLen:]; len(rest) >= unix.SizeofRtAttr; {
		length, kind := int(binary.NativeEndian.Uint16(rest)), binary.NativeEndian.Uint16(rest[2:])
		if length < unix.SizeofRtAttr || length > len(rest) {
			return c, false
		}
		if info := rest[unix.SizeofRtAttr:length]; kind == attrInfo && len(info) >= offAcked+16 {
			c.bytes = binary.NativeEndian.Uint64(info[offAcked:]) + binary.NativeEndian.Uint64(info[offAcked+8:])
			return c, true
		}
		rest = rest[min(len(rest), (length+3)&^3):]
	}
	return c, false
}
