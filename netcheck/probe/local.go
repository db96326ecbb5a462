package probe

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/internal/stable"
	"dlrover-run/netcheck"
)

// Local examines the interfaces that c selects on this node, without a partner. A fatal finding means that the node
// need not be paired. An unknown property is no finding: virtual interfaces have no speed, and most hosts no
// InfiniBand.
func (h Host) Local(c Choice) []netcheck.Finding {
	links, err := h.links()
	if err != nil {
		return []netcheck.Finding{nicFinding(netcheck.Warn, "", "%v", err)}
	}
	var found []netcheck.Finding
	nics, err := h.NICs(c)
	if err != nil {
		found = append(found, nicFinding(netcheck.Fatal, "", "%v", err))
	}
	var all []string
	for _, l := range links {
		all = append(all, l.Name)
	}
	for _, name := range c.Sockets.missing(all) {
		found = append(found,
			nicFinding(netcheck.Warn, name, "NCCL_SOCKET_IFNAME names %s, and there is no such interface", name))
	}
	for _, l := range chosen(links, c) {
		found = append(found, h.link(l, c)...)
	}
	found = append(found, unlike(nics)...)
	found = append(found, h.ports(c.HCAs)...)
	return found[:min(len(found), netcheck.MaxFindings)]
}

func nicFinding(s netcheck.Severity, entity, format string, args ...any) netcheck.Finding {
	return netcheck.Finding{Check: "host", Kind: "host.nic", Severity: s, Entity: entity,
		Text: oneLine(fmt.Sprintf(format, args...))}
}

// link judges one interface by itself. An interface that only a prefix selects may be there and not be used. Its faults
// are then reported only if it has an address, as used ones have.
func (h Host) link(l Link, c Choice) []netcheck.Finding {
	var found []netcheck.Finding
	named := c.Sockets.all() || c.Sockets.Names(l.Name)
	if _, addressed := usableAddr(l, c.Addr); !running(l) && (named || addressed) {
		severity, why := netcheck.Warn, "it is switched off"
		if named {
			severity = netcheck.Fatal
		}
		if l.Up {
			why = "its link is " + l.Oper
		}
		found = append(found, nicFinding(severity, l.Name, "network interface %s does not work: %s", l.Name, why))
	}
	if running(l) && read(h.sys("class/net", l.Name, "duplex")) == "half" {
		found = append(found, nicFinding(netcheck.Warn, l.Name, "network interface %s runs half duplex", l.Name))
	}
	return append(found, h.slot(l.Name)...)
}

// slot reports a card with less of its PCI Express slot than it can use.
func (h Host) slot(name string) []netcheck.Finding {
	var found []netcheck.Finding
	for _, what := range []string{"link_width", "link_speed"} {
		now, now1 := leading(read(h.sys("class/net", name, "device/current_"+what)))
		most, most1 := leading(read(h.sys("class/net", name, "device/max_"+what)))
		if now1 && most1 && now < most {
			f := nicFinding(netcheck.Warn, name, "PCI Express %s of %s is %g and could be %g",
				strings.ReplaceAll(what, "_", " "), name, now, most)
			f.Metric, f.Value, f.Threshold = "pcie_"+what, now, most
			found = append(found, f)
		}
	}
	return found
}

// leading is the number that a text starts with, as in "16.0 GT/s PCIe" or "400 Gb/sec (4X NDR)". 0 is unknown.
func leading(s string) (float64, bool) {
	field, _, _ := strings.Cut(s, " ")
	v, err := strconv.ParseFloat(field, 64)
	return v, err == nil && v > 0 && v < 1e9
}

// unlike reports the interfaces of this node whose speed or MTU differs from most others. So one of eight that runs at
// a quarter is noticed without a nominal value.
func unlike(nics []netcheck.NIC) []netcheck.Finding {
	var found []netcheck.Finding
	for _, m := range []struct {
		metric, unit string
		of           func(netcheck.NIC) int
	}{
		{"speed", "Mbit/s", func(n netcheck.NIC) int { return n.Mbps }},
		{"mtu", "bytes", func(n netcheck.NIC) int { return n.MTU }},
	} {
		var values []int
		for _, n := range nics {
			if v := m.of(n); v > 0 {
				values = append(values, v)
			}
		}
		usual, ok := mode(values)
		for _, n := range nics {
			if v := m.of(n); ok && v > 0 && v != usual {
				f := nicFinding(netcheck.Warn, n.Name, "%s of %s is %d %s, of most others %d",
					m.metric, n.Name, v, m.unit, usual)
				f.Metric, f.Value, f.Unit, f.Median = m.metric, float64(v), m.unit, float64(usual)
				found = append(found, f)
			}
		}
	}
	return found
}

// mode is the value that more than half of at least three have.
func mode(values []int) (int, bool) {
	slices.Sort(values)
	if len(values) < 3 {
		return 0, false
	}
	middle, n := values[len(values)/2], 0
	for _, v := range values {
		if v == middle {
			n++
		}
	}
	return middle, 2*n > len(values)
}

// port is one port of an RDMA device.
type port struct {
	dev string
	n   int
}

func (p port) String() string { return p.dev + ":" + strconv.Itoa(p.n) }

// selectedPorts are the ports of RDMA devices that s selects.
func (h Host) selectedPorts(s selector) []port {
	var ports []port
	for _, dev := range names(h.sys("class/infiniband")) {
		for _, p := range names(h.sys("class/infiniband", dev, "ports")) {
			if n, err := strconv.Atoi(p); err == nil && s.match(dev, n) {
				ports = append(ports, port{dev, n})
			}
		}
	}
	stable.Sort(ports, func(a, b port) int {
		if a.dev == b.dev {
			return a.n - b.n
		}
		return byNumber(a.dev, b.dev)
	})
	return ports
}

func (h Host) portFile(p port, file string) string {
	return h.sys("class/infiniband", p.dev, "ports", strconv.Itoa(p.n), file)
}

// ports judges the RDMA devices that s selects. A broken one is fatal only if it was requested by name: else a port
// without a cable, as many cards have, would exclude its node.
func (h Host) ports(s selector) []netcheck.Finding {
	ports := h.selectedPorts(s)
	if len(ports) == 0 && !s.all() {
		f := nicFinding(netcheck.Fatal, "", "NCCL_IB_HCA=%q selects no port of an RDMA device; there are: %s", s, h.devices())
		f.Kind = "host.ib"
		return []netcheck.Finding{f}
	}
	var found []netcheck.Finding
	var rates []int
	for _, p := range ports {
		state, phys := read(h.portFile(p, "state")), read(h.portFile(p, "phys_state"))
		if state != "" && !strings.HasPrefix(state, "4:") {
			severity := netcheck.Info
			if s.Names(p.dev) {
				severity = netcheck.Fatal
			}
			f := nicFinding(severity, p.String(), "port %d of RDMA device %s is not active: state %s, physical state %s",
				p.n, p.dev, state, phys)
			f.Kind = "host.ib"
			found = append(found, f)
		} else if r, ok := h.rate(p); ok {
			rates = append(rates, int(r))
		}
	}
	usual, ok := mode(rates)
	for _, p := range ports {
		if r, known := h.rate(p); ok && known && int(r) < usual && strings.HasPrefix(read(h.portFile(p, "state")), "4:") {
			f := nicFinding(netcheck.Warn, p.String(), "port %d of RDMA device %s runs at %g Gbit/s, most others at %d",
				p.n, p.dev, r, usual)
			f.Kind, f.Metric, f.Value, f.Unit, f.Median = "host.ib", "rate", r, "Gbit/s", float64(usual)
			found = append(found, f)
		}
	}
	return found
}

// Ports are the RDMA ports that c selects and that are active, as interfaces with a name and a speed.
func (h Host) Ports(c Choice) (ports []netcheck.NIC) {
	for _, p := range h.selectedPorts(c.HCAs) {
		if r, known := h.rate(p); known && strings.HasPrefix(read(h.portFile(p, "state")), "4:") {
			ports = append(ports, netcheck.NIC{Name: p.String(), Mbps: int(1000 * r)})
		}
	}
	return ports
}

// rate of a port in 10^9 bit/s.
func (h Host) rate(p port) (float64, bool) { return leading(read(h.portFile(p, "rate"))) }

func (h Host) devices() string {
	var all []string
	for _, p := range h.selectedPorts(selector{}) {
		all = append(all, p.String())
	}
	if len(all) == 0 {
		return "none"
	}
	return strings.Join(all, ", ")
}
