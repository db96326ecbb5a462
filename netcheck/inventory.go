package netcheck

import (
	"fmt"
	"strings"
)

// compareInventories looks for nodes that differ from most others, once all are there: it needs no list of expected
// hardware. Hardware that differs is reported. A node without a GPU is not tested if others have GPUs.
func (c *Check) compareInventories() {
	nodes := c.roster.here(func(*node) bool { return true })
	if len(nodes) < 3 { // two nodes have no majority
		return
	}
	withGPU, working := 0, 0
	for _, n := range nodes {
		if n.GPUs > 0 && !n.Bare {
			withGPU++
		}
		if !n.Bare {
			working++
		}
	}
	usual := usualInventory(nodes)
	for _, n := range nodes {
		if n.GPUs == 0 && !n.Bare && working > 2 && 2*withGPU > working {
			c.decide(n, noGPU(fmt.Sprintf("%d of %d nodes have some", withGPU, working)))
			continue
		}
		n.compare(usual)
	}
}

// item is one thing of a node's inventory.
type item struct {
	entity, metric, unit string
	value                int
}

// items are the properties to compare. Unknown ones are left out.
func (n *node) items() []item {
	var items []item
	if !n.Bare {
		items = append(items, item{"node", "GPUs", "", n.GPUs})
	}
	items = append(items, item{"node", "interfaces", "", len(n.NICs)})
	if n.CPU > 0 && !n.Bare {
		items = append(items, item{"node", "CPU time", "% of a CPU", n.CPU})
	}
	for i, nic := range n.NICs {
		rail := fmt.Sprintf("rail %d", i)
		if nic.Mbps > 0 {
			items = append(items, item{rail, "speed", "Mbit/s", nic.Mbps})
		}
		if nic.MTU > 0 {
			items = append(items, item{rail, "MTU", "bytes", nic.MTU})
		}
	}
	return items
}

// usualInventory is the value of every item that more than half of those that have it agree on.
func usualInventory(nodes []*node) map[item]int {
	count, of := map[item]int{}, map[item]int{}
	for _, n := range nodes {
		for _, x := range n.items() {
			count[x]++
			x.value = 0
			of[x]++
		}
	}
	usual := map[item]int{}
	for x, n := range count {
		k := x
		k.value = 0
		if 2*n > of[k] && of[k] > 2 {
			usual[k] = x.value
		}
	}
	return usual
}

// compare adds a warning for every item in which n differs.
func (n *node) compare(usual map[item]int) {
	for _, x := range n.items() {
		k := x
		k.value = 0
		want, known := usual[k]
		if !known || want == x.value {
			continue
		}
		kind := "host.nic"
		if x.metric == "GPUs" {
			kind = "host.gpu"
		}
		n.Findings = append(n.Findings, Finding{Check: "host", Kind: kind, Severity: Warn, Entity: x.entity, Metric: x.metric,
			Value: float64(x.value), Unit: x.unit, Median: float64(want),
			Text: fmt.Sprintf("%s %s is %s, most other nodes have %d", x.entity, x.metric,
				strings.TrimSpace(fmt.Sprint(x.value, " ", x.unit)), want)})
	}
}
