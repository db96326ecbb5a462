package preset

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Undecided stands for a value that is unknown until the nodes have met.
const Undecided = "<from the rendezvous>"

// service is the address and port of the framework's own service on node 0.
func (v Vars) service() (addr, port string, err error) {
	if len(v.World) == 0 {
		return "", "", errNoWorld
	}
	n := v.World[0]
	if v.ServicePort != 0 {
		return n.Addr, strconv.Itoa(v.ServicePort), nil
	}
	if len(n.Ports) == 0 {
		return "", "", n.tooFew(1)
	}
	return n.Addr, portText(n.Ports[0]), nil
}

// The functions below are values of rows.

func serviceAddr(v Vars) (string, bool, error) {
	addr, _, err := v.service()
	return addr, true, err
}

func servicePort(v Vars) (string, bool, error) {
	_, port, err := v.service()
	return port, true, err
}

func serviceEndpoint(v Vars) (string, bool, error) {
	addr, port, err := v.service()
	return endpoint(addr, port), true, err
}

// endpoints are address and port of every rank, in the order of the ranks.
func (v Vars) endpoints() (all []string, err error) {
	if len(v.World) == 0 {
		return nil, errNoWorld
	}
	for _, n := range v.World {
		if len(n.Ports) < n.Slots {
			return nil, n.tooFew(n.Slots)
		}
		for _, port := range n.Ports[:n.Slots] {
			all = append(all, endpoint(n.Addr, portText(port)))
		}
	}
	if v.Rank >= len(all) {
		return nil, fmt.Errorf("rank %d is not among the %d of the nodes", v.Rank, len(all))
	}
	return all, nil
}

var errNoWorld = errors.New("the addresses of the nodes are not known")

func (n Node) tooFew(need int) error {
	return fmt.Errorf("node %d (%s) offers %d ports and needs %d: give every node the same --preset",
		n.GroupRank, n.Addr, len(n.Ports), need)
}

func portText(port int) string {
	if port == 0 {
		return Undecided
	}
	return strconv.Itoa(port)
}

func endpoint(addr, port string) string {
	if port == Undecided {
		return Undecided
	}
	if strings.Contains(addr, ":") {
		addr = "[" + addr + "]" // IPv6
	}
	return addr + ":" + port
}
