//go:build linux

package sockets

import (
	"encoding/binary"
	"fmt"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Traffic returns a function that counts the bytes of the established TCP connections of processes, both ways.
// Connections from or to port are left out: workers ask their store in the background. Unknown connections count
// nothing, and neither do those in another network namespace than the caller.
func Traffic(port uint16) func(pids []int) uint64 {
	t := &traffic{port: port}
	return func(pids []int) (sum uint64) {
		carried, counted := t.newest(), map[string]bool{} // a connection may be inherited
		for _, pid := range pids {
			if len(carried) == 0 {
				return 0
			}
			_ = eachLink("/proc/"+strconv.Itoa(pid)+"/fd", func(link string) bool {
				if bytes, ok := carried[link]; ok && !counted[link] {
					counted[link], sum = true, sum+bytes
				}
				return len(counted) < len(carried)
			})
		}
		return sum
	}
}

// fresh is how long an answer of the kernel is used: the workers of a node are looked at one after the other.
const fresh = 200 * time.Millisecond

// traffic is the newest count of all connections, by the link to their socket.
type traffic struct {
	port uint16

	mu      sync.Mutex
	carried map[string]uint64 // never changed
	at      time.Time
}

func (t *traffic) newest() map[string]uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if time.Since(t.at) < fresh {
		return t.carried
	}
	t.carried = map[string]uint64{}
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		_ = dump(family, func(c connection) { // the connections until an error
			if c.local != t.port && c.remote != t.port && c.inode != 0 {
				t.carried["socket:["+strconv.FormatUint(uint64(c.inode), 10)+"]"] = c.bytes
			}
		})
	}
	t.at = time.Now()
	return t.carried
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

func dump(family byte, each func(connection)) error {
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
	buf := make([]byte, 64<<10)
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

// answer reads one datagram; done: it was the last.
func answer(b []byte, each func(connection)) (done bool, err error) {
	messages, err := syscall.ParseNetlinkMessage(b)
	if err != nil {
		return false, err
	}
	for _, m := range messages {
		switch m.Header.Type {
		case unix.NLMSG_DONE:
			return true, nil
		case unix.NLMSG_ERROR:
			return false, fmt.Errorf("sock_diag refuses: %x", m.Data[:min(len(m.Data), 4)])
		case unix.SOCK_DIAG_BY_FAMILY:
			if c, ok := parseAnswer(m.Data); ok {
				each(c)
			}
		}
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
