package probe

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"dlrover-run/netcheck"
)

// congestion are the congestion controls that tests use, best first. The kind in force changes a rate by a factor of
// up to five, so that only pairs with the same one can be compared; an unprivileged process may have reno only.
var congestion = []string{"cubic", "reno"}

// pin chooses the congestion control of a socket.
func pin(fd int) {
	for _, cc := range congestion {
		if unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, cc) == nil {
			return
		}
	}
}

// congestionControl names the TCP congestion control that tests on this host use, "" if it is unknown.
func congestionControl() string {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	pin(fd)
	cc, err := unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION)
	if err != nil {
		return ""
	}
	return cc
}

// outlet has the rules by which sockets of a rail are made. A listener is bound to the interface's address only. Where
// two interfaces are in one network, the kernel may answer for the address of one on the other; a listener bound to the
// interface would refuse such packets. A dialer is bound to the interface, where that is allowed and means anything. If
// that leads nowhere it falls back to its address, too.
type outlet struct {
	nic  netcheck.NIC
	from netip.Addr
	bind bool // connections to the interface
}

// newOutlet decides how to reach any of peers over nic. A peer on this host is reached by loopback, over any interface,
// and so is not bound.
func newOutlet(nic netcheck.NIC, peers []netip.Addr) (outlet, error) {
	from, err := netip.ParseAddr(nic.Addr)
	if err != nil {
		return outlet{}, fmt.Errorf("address %q of interface %q is not an IP address", nic.Addr, nic.Name)
	}
	o := outlet{nic: nic, from: from.Unmap()}
	o.bind = nic.Name != "" && bindable(nic.Name) && !anyLocal(peers)
	return o, nil
}

// anyLocal reports whether one of addrs is an address of this host.
func anyLocal(addrs []netip.Addr) bool {
	local, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, l := range local {
		p, err := netip.ParsePrefix(l.String())
		for _, a := range addrs {
			if err == nil && p.Addr().Unmap() == a || a.IsLoopback() {
				return true
			}
		}
	}
	return false
}

// control sets the options that must be set before a socket is bound.
func (o outlet) control(network, _ string, c syscall.RawConn) error {
	var failed error
	err := c.Control(func(fd uintptr) {
		if o.bind {
			failed = bindDevice(int(fd), o.nic.Name)
		}
		if network[:3] == "tcp" {
			pin(int(fd))
		} else if failed == nil {
			failed = undivided(int(fd))
		}
	})
	if err != nil {
		return err
	}
	return failed
}

// bindDevice binds a socket to an interface. Where that is not allowed the source address has to do.
func bindDevice(fd int, name string) error {
	if err := unix.BindToDevice(fd, name); err != nil && err != unix.EPERM && err != unix.EACCES {
		return err
	}
	return nil
}

// undivided has datagrams sent whole or not at all, even if the kernel knows of a smaller path MTU: see IP_MTU_DISCOVER
// in https://man7.org/linux/man-pages/man7/ip.7.html.
func undivided(fd int) error {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err == nil && domain == unix.AF_INET6 {
		return unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE)
	}
	return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE)
}

func (o outlet) listen(ctx context.Context) (*net.TCPListener, error) {
	o.bind = false
	lc := net.ListenConfig{Control: o.control, KeepAlive: -1}
	ln, err := lc.Listen(ctx, "tcp", netip.AddrPortFrom(o.from, 0).String())
	if err != nil {
		return nil, err
	}
	return ln.(*net.TCPListener), nil
}

func (o outlet) dial(ctx context.Context, to netip.AddrPort, wait time.Duration) (*net.TCPConn, error) {
	d := net.Dialer{Control: o.control, KeepAlive: -1, Timeout: wait,
		LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(o.from, 0))}
	c, err := d.DialContext(ctx, "tcp", to.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

func (o outlet) packets(ctx context.Context) (*net.UDPConn, error) {
	lc := net.ListenConfig{Control: o.control}
	c, err := lc.ListenPacket(ctx, "udp", netip.AddrPortFrom(o.from, 0).String())
	if err != nil {
		return nil, err
	}
	return c.(*net.UDPConn), nil
}

// tcpInfo adds up the kernel's statistics of connections.
type tcpInfo struct{ retrans, segments uint64 }

func infoOf(conns []*net.TCPConn) tcpInfo {
	var sum tcpInfo
	for _, c := range conns {
		raw, err := c.SyscallConn()
		if err != nil {
			continue
		}
		_ = raw.Control(func(fd uintptr) {
			if i, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
				sum.retrans += uint64(i.Total_retrans)
				sum.segments += uint64(i.Data_segs_out)
			}
		})
	}
	return sum
}

// discard closes a connection and drops its unsent data: nothing of a test outlives it.
func discard(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// pattern is the payload: no zeros, which a device on the way may compress.
var pattern = sync.OnceValue(func() []byte {
	b := make([]byte, bufferSize)
	x := uint32(2463534242)
	for i := range b {
		x ^= x << 13
		x ^= x >> 17
		x ^= x << 5
		b[i] = byte(x)
	}
	return b
})

// cpuTime is the CPU time of this process so far.
func cpuTime() time.Duration {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
