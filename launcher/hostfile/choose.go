package hostfile

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Node is a host with the slots that are used on it, which are the numbers of its devices, in ascending order.
type Node struct {
	Name  string
	Slots []int
}

// Nodes are the hosts with all of their slots.
func Nodes(hosts []Host) []Node {
	nodes := make([]Node, len(hosts))
	for i, h := range hosts {
		nodes[i] = Node{h.Name, upTo(h.Slots)}
	}
	return nodes
}

func upTo(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// Include keeps the nodes and slots of the list, in the order of nodes: "host@host:0,2" is all slots of the one and two
// of the other.
func Include(nodes []Node, list string) ([]Node, error) {
	chosen, err := choose(nodes, list)
	if err != nil {
		return nil, err
	}
	var kept []Node
	for _, n := range nodes {
		if c := find(chosen, n.Name); c != nil {
			kept = append(kept, *c)
		}
	}
	return kept, nil
}

// Exclude drops the nodes and slots of the list, and nodes without a remaining slot.
func Exclude(nodes []Node, list string) ([]Node, error) {
	chosen, err := choose(nodes, list)
	if err != nil {
		return nil, err
	}
	var kept []Node
	for _, n := range nodes {
		left := slices.Clone(n.Slots)
		if c := find(chosen, n.Name); c != nil {
			left = slices.DeleteFunc(left, func(s int) bool { return slices.Contains(c.Slots, s) })
		}
		if len(left) > 0 {
			kept = append(kept, Node{n.Name, left})
		}
	}
	if len(kept) == 0 {
		return nil, errors.New("nothing is left to run on")
	}
	return kept, nil
}

// First keeps the first nodes, all if there are fewer or n is 0.
func First(nodes []Node, n int) []Node {
	if n < 1 {
		return nodes
	}
	return nodes[:min(n, len(nodes))]
}

func find(nodes []Node, name string) *Node {
	if i := slices.IndexFunc(nodes, func(n Node) bool { return n.Name == name }); i >= 0 {
		return &nodes[i]
	}
	return nil
}

// choose reads a list. A host may be named several times.
func choose(nodes []Node, list string) ([]Node, error) {
	var chosen []Node
	for item := range strings.SplitSeq(list, "@") {
		name, text, some := splitCount(item)
		of := find(nodes, name)
		if of == nil {
			return nil, fmt.Errorf("%.100q: there is no such host; there are %s", name, Names(nodes))
		}
		slots := of.Slots
		if some {
			var err error
			if slots, err = pick(*of, text); err != nil {
				return nil, err
			}
		}
		if c := find(chosen, name); c != nil {
			c.Slots = union(c.Slots, slots)
		} else {
			chosen = append(chosen, Node{name, union(nil, slots)})
		}
	}
	return chosen, nil
}

func union(a, b []int) []int {
	return slices.Compact(slices.Sorted(slices.Values(slices.Concat(a, b))))
}

func pick(of Node, list string) ([]int, error) {
	var slots []int
	for text := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(text)
		if err != nil {
			return nil, fmt.Errorf("%.100q: need numbers of slots with commas between, as in %s:0,2", of.Name+":"+list, of.Name)
		}
		if !slices.Contains(of.Slots, n) {
			return nil, fmt.Errorf("host %s has no slot %d; it has %s", of.Name, n, numbers(of.Slots))
		}
		slots = append(slots, n)
	}
	return slots, nil
}

func numbers(slots []int) string {
	if n := len(slots); n > 2 && slots[n-1]-slots[0] == n-1 {
		return fmt.Sprintf("%d to %d", slots[0], slots[n-1])
	}
	text := make([]string, len(slots))
	for i, s := range slots {
		text[i] = strconv.Itoa(s)
	}
	return strings.Join(text, ", ")
}

// Names lists nodes for messages, five at most.
func Names(nodes []Node) string {
	const shown = 5
	var text []string
	for _, n := range nodes[:min(shown, len(nodes))] {
		text = append(text, n.Name)
	}
	list := strings.Join(text, ", ")
	if len(nodes) > shown {
		list += fmt.Sprintf(" and %d more", len(nodes)-shown)
	}
	return list
}
