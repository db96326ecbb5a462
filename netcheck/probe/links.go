package probe

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Link is one network interface as the kernel has it.
type Link struct {
	Name     string
	Kind     string // "device" for hardware, else veth, bond, dummy, ...
	MTU      int
	Up       bool // switched on
	Loopback bool
	Oper     string // up, down, lower-layer-down, not-present, testing, dormant or unknown
	Addrs    []netip.Prefix
	// Errors and drops since the interface exists.
	RxErrors, TxErrors, RxDropped, TxDropped, RxCRC, TxCarrier uint64
}

// hostLinks returns the interfaces of this host, in the kernel's order.
func hostLinks() ([]Link, error) {
	all, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("listing network interfaces: %w", err)
	}
	addrs := addrsByIndex()
	var links []Link
	for _, l := range all {
		a := l.Attrs()
		link := Link{Name: a.Name, Kind: l.Type(), MTU: a.MTU, Up: a.RawFlags&unix.IFF_UP != 0,
			Loopback: a.RawFlags&unix.IFF_LOOPBACK != 0, Oper: a.OperState.String(), Addrs: addrs[a.Index]}
		if s := a.Statistics; s != nil {
			link.RxErrors, link.TxErrors, link.RxDropped, link.TxDropped = s.RxErrors, s.TxErrors, s.RxDropped, s.TxDropped
			link.RxCRC, link.TxCarrier = s.RxCrcErrors, s.TxCarrierErrors
		}
		links = append(links, link)
	}
	return links, nil
}

// addrsByIndex are the addresses that can be used now, in the kernel's order.
func addrsByIndex() map[int][]netip.Prefix {
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil
	}
	by := map[int][]netip.Prefix{}
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		if !ok || a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) != 0 {
			continue
		}
		bits, _ := a.Mask.Size()
		ip = ip.Unmap()
		by[a.LinkIndex] = append(by[a.LinkIndex], netip.PrefixFrom(ip, min(bits, ip.BitLen())))
	}
	return by
}

// bindable reports whether binding a socket to an interface means anything: a packet does not leave by one that only
// holds an address.
func bindable(name string) bool {
	link, err := netlink.LinkByName(name)
	return err == nil && link.Type() != "dummy" && link.Attrs().RawFlags&unix.IFF_LOOPBACK == 0
}

// routeFault reports that packets to a peer would leave by another interface; "" if they do not, or if it is unknown.
func (o outlet) routeFault(to netip.Addr) string {
	if o.nic.Name == "" || to.IsLoopback() || !bindable(o.nic.Name) {
		return ""
	}
	link, err := netlink.LinkByName(o.nic.Name)
	if err != nil {
		return ""
	}
	routes, err := netlink.RouteGetWithOptions(to.AsSlice(), &netlink.RouteGetOptions{SrcAddr: o.from.AsSlice()})
	if err != nil || len(routes) == 0 || routes[0].LinkIndex == link.Attrs().Index {
		return ""
	}
	via := fmt.Sprint(routes[0].LinkIndex)
	if l, err := netlink.LinkByIndex(routes[0].LinkIndex); err == nil {
		via = l.Attrs().Name
	}
	return fmt.Sprintf("packets from %s to %s leave by %s and not by %s", o.from, to, via, o.nic.Name)
}
