package probe

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/internal/stable"
	"dlrover-run/netcheck"
)

// Host is where this node's interfaces are looked up. The zero Host is the real one.
type Host struct {
	Sys   string                 // in place of /sys
	Proc  string                 // in place of /proc
	Links func() ([]Link, error) // in place of hostLinks
}

// Choice selects the interfaces of a check.
type Choice struct {
	// Sockets and HCAs are the values of NCCL_SOCKET_IFNAME and NCCL_IB_HCA.
	Sockets, HCAs selector
	// Addr is this node's address: without Sockets the interface that has it is chosen.
	Addr netip.Addr
}

// maxRails is how many interfaces a node may have tested.
const maxRails = 16

// maxSysfs bounds the bytes read from a file in sysfs.
const maxSysfs = 4096

func (h Host) links() ([]Link, error) {
	if h.Links != nil {
		return h.Links()
	}
	return hostLinks()
}

func (h Host) sys(path ...string) string {
	root := h.Sys
	if root == "" {
		root = "/sys"
	}
	return filepath.Join(append([]string{root}, path...)...)
}

// read returns the content of a file without the white space around it, or "" without one. Many files of sysfs cannot
// be read if the driver does not know the value.
func read(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	buf := make([]byte, maxSysfs)
	n, _ := f.Read(buf)
	return strings.TrimSpace(string(buf[:n]))
}

// names of a directory's entries, sorted, without hidden ones; nil when there is none.
func names(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var all []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			all = append(all, e.Name())
		}
	}
	return all
}

// NICs returns the interfaces to test in rail order, which is that of their names with numbers counted. So rail i is
// the same cable on nodes of one kind.
func (h Host) NICs(c Choice) ([]netcheck.NIC, error) {
	links, err := h.links()
	if err != nil {
		return nil, err
	}
	var nics []netcheck.NIC
	cc := congestionControl()
	for _, l := range chosen(links, c) {
		addr, ok := usableAddr(l, c.Addr)
		if !ok || !running(l) {
			continue
		}
		nics = append(nics, netcheck.NIC{Name: l.Name, Addr: addr.String(), Mbps: h.speed(l.Name), MTU: l.MTU,
			HCA: h.hcaOf(l.Name, c.HCAs), CC: cc})
	}
	if len(nics) == 0 {
		return nil, noMatch(links, c)
	}
	return nics[:min(len(nics), maxRails)], nil
}

// chosen are the links that c is about, also those that are down.
func chosen(links []Link, c Choice) []Link {
	var all []Link
	for _, l := range links {
		switch {
		case c.Sockets.all():
			if slices.ContainsFunc(l.Addrs, func(p netip.Prefix) bool { return p.Addr() == c.Addr }) {
				return []Link{l}
			}
		case c.Sockets.match(l.Name, 0) && (!l.Loopback || c.Sockets.Names(l.Name)):
			all = append(all, l)
		}
	}
	stable.Sort(all, func(a, b Link) int { return byNumber(a.Name, b.Name) })
	return all
}

// byNumber compares names so that eth2 comes before eth10.
func byNumber(a, b string) int {
	stem := func(s string) (string, int) {
		digits := strings.TrimRight(s, "0123456789")
		n, _ := strconv.Atoi(s[len(digits):])
		return digits, n
	}
	as, an := stem(a)
	bs, bn := stem(b)
	if as != bs {
		return strings.Compare(as, bs)
	}
	return an - bn
}

// usableAddr is the address to use of a link: like, if it has it, else the first of like's family, else the first.
func usableAddr(l Link, like netip.Addr) (netip.Addr, bool) {
	var best netip.Addr
	for _, p := range l.Addrs {
		a := p.Addr()
		switch {
		case a == like:
			return a, true
		case a.IsLinkLocalUnicast(): // needs a zone
		case !best.IsValid(), like.IsValid() && best.Is4() != like.Is4() && a.Is4() == like.Is4(),
			!like.IsValid() && !best.Is4() && a.Is4():
			best = a
		}
	}
	return best, best.IsValid()
}

// running reports whether a link carries packets. A state that the driver does not know is no news.
func running(l Link) bool {
	return l.Up && !slices.Contains([]string{"down", "lower-layer-down", "not-present"}, l.Oper)
}

// noMatch names the selection and the interfaces that exist.
func noMatch(links []Link, c Choice) error {
	var have []string
	for _, l := range links {
		what := l.Name
		if a, ok := usableAddr(l, c.Addr); ok {
			what += " " + a.String()
		} else {
			what += " without an address"
		}
		if !running(l) {
			what += ", down"
		}
		have = append(have, what)
	}
	there := "there are: " + strings.Join(have, "; ")
	if c.Sockets.all() {
		return fmt.Errorf("no network interface has this node's address %v: name one by NCCL_SOCKET_IFNAME; %s",
			c.Addr, there)
	}
	return fmt.Errorf("NCCL_SOCKET_IFNAME=%q selects no network interface that is up and has an address; %s",
		c.Sockets, there)
}

// speed is the nominal speed in 10^6 bit/s, 0 when it is not known, as with everything virtual.
func (h Host) speed(name string) int {
	n, err := strconv.Atoi(read(h.sys("class/net", name, "speed")))
	if err != nil || n < 0 || n > 1e8 {
		return 0
	}
	return n
}

// hcaOf is the RDMA device on the same card as an interface, "" for none or one that was not selected.
func (h Host) hcaOf(name string, want selector) string {
	for _, dev := range names(h.sys("class/net", name, "device/infiniband")) {
		port := 1
		if n, err := strconv.Atoi(read(h.sys("class/net", name, "dev_port"))); err == nil {
			port += n
		}
		if want.match(dev, port) {
			return dev
		}
	}
	return ""
}

var errNoAddr = errors.New("this node's address is not an IP address")

// ChoiceOf reads the variables of an environment for a node with an address.
func ChoiceOf(getenv func(string) string, addr string) (Choice, error) {
	var c Choice
	var err error
	if c.Sockets, err = parseSelector("NCCL_SOCKET_IFNAME", getenv("NCCL_SOCKET_IFNAME")); err != nil {
		return c, err
	}
	if c.HCAs, err = parseSelector("NCCL_IB_HCA", getenv("NCCL_IB_HCA")); err != nil {
		return c, err
	}
	if c.Addr, err = netip.ParseAddr(addr); err != nil {
		return c, fmt.Errorf("%w: %q", errNoAddr, oneLine(addr))
	}
	c.Addr = c.Addr.Unmap().WithZone("")
	return c, nil
}
