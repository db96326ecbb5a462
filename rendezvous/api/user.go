package api

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// checkUser is for a daemon without a token: the caller has to be a process of the daemon's own user on this host, or a
// launcher on another host of the job. A request without a TCP connection is made within this process.
func (s *server) checkUser(req *http.Request) error {
	local, ok := req.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if s.cfg.Insecure || !ok {
		return nil
	}
	uid := -1
	peer, err := netip.ParseAddrPort(req.RemoteAddr)
	if err == nil {
		uid, err = UserOf(peer, local.AddrPort())
	}
	switch {
	case err == errNoSocket && s.cfg.Peers != nil && !peer.Addr().Unmap().IsLoopback():
		return s.checkPeer(req, peer.Addr())
	case err != nil:
		return fmt.Errorf("%w: this rendezvous has none and serves its own user alone, and the kernel does not tell whose "+
			"connection this is (%w); %s", ErrUnauthorized, err, tokenFix)
	case !MayAsk(uid, os.Geteuid()):
		return fmt.Errorf("%w: this rendezvous has none and serves its own user alone, uid %d, and this is uid %d; "+
			"become that user, or %s", ErrUnauthorized, os.Geteuid(), uid, tokenFix)
	}
	return nil
}

// MayAsk admits the user that a process runs as, and root, which has the same rights and more.
func MayAsk(uid, own int) bool { return uid == own || uid == 0 }

// The request of sock_diag(7), which package syscall lacks.
const (
	netlinkSockDiag  = 4
	sockDiagByFamily = 20
	diagRequestSize  = syscall.NLMSG_HDRLEN + 8 + diagIDSize
	diagIDSize       = 48
	diagAnswerSize   = syscall.NLMSG_HDRLEN + 4 + diagIDSize + 20
)

// UserOf asks the kernel for the user of the process that owns the TCP socket with the local address from, on this
// host, and that is connected to the address to.
func UserOf(from, to netip.AddrPort) (uid int, err error) {
	if uid, err = userByDiag(from, to); err == nil || err == errNoSocket {
		return uid, err
	}
	return userByTable(from, to) // of a kernel without sock_diag, such as gVisor's
}

func userByDiag(from, to netip.AddrPort) (uid int, err error) {
	fd, err := syscall.Socket(syscall.AF_NETLINK, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, netlinkSockDiag)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	defer syscall.Close(fd)
	kernel := &syscall.SockaddrNetlink{Family: syscall.AF_NETLINK}
	if err := syscall.Sendto(fd, diagRequest(from, to), 0, kernel); err != nil {
		return 0, os.NewSyscallError("sock_diag", err)
	}
	answer := make([]byte, 4096)
	n, _, err := syscall.Recvfrom(fd, answer, syscall.MSG_DONTWAIT) // sent before Sendto has returned
	if err != nil {
		return 0, os.NewSyscallError("sock_diag", err)
	}
	return readDiag(answer[:n], to.Port())
}

// diagRequest asks for one socket: its own end first, both in the byte order of the network.
func diagRequest(from, to netip.AddrPort) []byte {
	family := byte(syscall.AF_INET)
	if from.Addr().Unmap().Is6() {
		family = syscall.AF_INET6
	}
	b := make([]byte, 0, diagRequestSize)
	b = binary.NativeEndian.AppendUint32(b, diagRequestSize)
	b = binary.NativeEndian.AppendUint16(b, sockDiagByFamily)
	b = binary.NativeEndian.AppendUint16(b, syscall.NLM_F_REQUEST)
	b = append(b, make([]byte, 8)...) // number and port of the request
	b = append(b, family, syscall.IPPROTO_TCP, 0, 0)
	b = append(b, 0xff, 0xff, 0xff, 0xff) // in any state
	b = binary.BigEndian.AppendUint16(b, from.Port())
	b = binary.BigEndian.AppendUint16(b, to.Port())
	for _, a := range []netip.Addr{from.Addr(), to.Addr()} {
		at := len(b)
		b = append(b, make([]byte, 16)...)
		copy(b[at:], a.Unmap().AsSlice())
	}
	b = append(b, 0, 0, 0, 0)                                        // on any interface
	return append(b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff) // any cookie
}

var errNoSocket = errors.New("no process has the other end")

// readDiag reads the answer for a socket that is connected to a port. The kernel returns a listener where there is no
// such connection. A connection that its process has closed has no owner, but reads as root's.
func readDiag(b []byte, to uint16) (uid int, err error) {
	if len(b) < syscall.NLMSG_HDRLEN+4 {
		return 0, errNoSocket
	}
	kind, body := binary.NativeEndian.Uint16(b[4:]), b[syscall.NLMSG_HDRLEN:]
	if code := syscall.Errno(-int32(binary.NativeEndian.Uint32(body))); kind == syscall.NLMSG_ERROR && code != 0 {
		return 0, os.NewSyscallError("sock_diag", code)
	}
	if kind != sockDiagByFamily || len(b) < diagAnswerSize {
		return 0, errNoSocket
	}
	rest := body[4+diagIDSize:] // three counters, the user and the inode
	connected, open := binary.BigEndian.Uint16(body[6:]) == to, binary.NativeEndian.Uint32(rest[16:]) != 0
	if !connected || !open {
		return 0, errNoSocket
	}
	return int(binary.NativeEndian.Uint32(rest[12:])), nil
}

// userByTable looks for the connection among all of this network namespace.
func userByTable(from, to netip.AddrPort) (uid int, err error) {
	for _, name := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		text, err := os.ReadFile(name)
		if err != nil {
			return 0, err
		}
		if uid, ok := readTable(text, inTable(from, name), inTable(to, name)); ok {
			return uid, nil
		}
	}
	return 0, errNoSocket
}

// inTable is an end as the table writes it: words of the machine as hexadecimal numbers.
func inTable(a netip.AddrPort, table string) string {
	ip, text := a.Addr().Unmap().AsSlice(), ""
	if strings.HasSuffix(table, "6") {
		all := a.Addr().As16() // ::ffff:127.0.0.1 for 127.0.0.1
		ip = all[:]
	}
	for ; len(ip) > 0; ip = ip[4:] {
		text += fmt.Sprintf("%08X", binary.NativeEndian.Uint32(ip))
	}
	return fmt.Sprintf("%s:%04X", text, a.Port())
}

// readTable finds a connection that a process has.
func readTable(text []byte, from, to string) (uid int, ok bool) {
	const local, remote, user, inode = 1, 2, 7, 9
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) > inode && words[local] == from && words[remote] == to && words[inode] != "0" {
			uid, err := strconv.Atoi(words[user])
			return uid, err == nil
		}
	}
	return 0, false
}
