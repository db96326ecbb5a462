package run

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"dlrover-run/internal/text"
	"dlrover-run/launcher/scheduler"
	"dlrover-run/rendezvous"
)

// readNode finds the identity of this node: DLRover's pods have it in the environment.
func readNode(o *options, f *scheduler.Facts, slots, nodes int) (n rendezvous.Node, err error) {
	n = rendezvous.Node{
		ID: o.host.id, Name: cmp.Or(o.Lookup("POD_NAME"), o.host.name), Slots: slots, Role: o.String("role"),
		Machine: cmp.Or(o.Lookup("NODE_NAME"), o.Lookup("NODE_IP")), Devices: o.devices(),
		IP:  cmp.Or(o.Lookup("NODE_IP"), o.Lookup("POD_IP")),
		Can: []rendezvous.Ability{rendezvous.CanGate, rendezvous.CanNotice, rendezvous.CanStream, rendezvous.CanProfile},
	}
	if text := o.Lookup("NODE_ID"); text != "" {
		id, err := strconv.Atoi(text)
		if err != nil || id < 0 {
			return n, fmt.Errorf("$NODE_ID=%q: need a number from 0", text)
		}
		n.Generation = id + 1
	}
	if !scheduled(f) || nodes == 1 {
		f = &scheduler.Facts{NodeRank: -1}
	}
	n.Rank, err = nodeRank(o, f)
	return n, err
}

// nodeRank is the rank that this node wishes; -1 for any.
func nodeRank(o *options, f *scheduler.Facts) (rank int, err error) {
	if o.IsSet("node-rank") {
		rank = o.Int("node-rank")
	} else if rank, err = inheritedRank(o, f); err != nil {
		return rank, err
	}
	if rank >= rendezvous.MaxNodes || o.IsSet("node-rank") && rank < 0 {
		return rank, fmt.Errorf("--node-rank=%d: need a number from 0 to %d", rank, rendezvous.MaxNodes-1)
	}
	return rank, nil
}

// inheritedRank refuses a variable that contradicts the scheduler's.
func inheritedRank(o *options, f *scheduler.Facts) (int, error) {
	for _, name := range []string{"NODE_RANK", "WORKER_RANK"} {
		text := o.Lookup(name)
		if text == "" {
			continue
		}
		rank, err := strconv.Atoi(text)
		if err != nil || rank < 0 {
			return 0, fmt.Errorf("$%s=%q: need the rank of this node, a number from 0", name, text)
		}
		if f.NodeRank >= 0 && rank != f.NodeRank {
			return 0, fmt.Errorf("$%s=%d and %s's node rank %d (from $%s) contradict each other: unset one, or give --node-rank",
				name, rank, f.Name, f.NodeRank, strings.Join(f.From, ", $"))
		}
		return rank, nil
	}
	return f.NodeRank, nil
}

// checkNames refuses names that cannot be printed, because every node shows them.
func checkNames(o *options, runID string, n *rendezvous.Node) error {
	node := "host name"
	if o.Lookup("POD_NAME") != "" {
		node = "$POD_NAME"
	}
	for _, n := range [][2]string{{"run id (--rdzv-id)", runID}, {"--role", n.Role}, {node, n.Name},
		{"$NODE_NAME", cmp.Or(n.Machine, n.Name)}} {
		if !text.Printable(n[1]) {
			return fmt.Errorf("%s %.100q: %s", n[0], n[1], text.PrintableRule)
		}
	}
	return nil
}
