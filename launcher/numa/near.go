package numa

import (
	"fmt"
	"io/fs"
)

// Place is where a worker is near its accelerator.
type Place struct {
	Node int   // -1: not known
	CPUs []int // of the node, limited to CPUs that this process may use
	Err  error // why the worker has no place; nil: it has
}

// Near finds the place of each worker, like Plan with modeNode, but one after the other. A worker with an accelerator
// on an unknown node does not take the place of the others. An error concerns them all.
func Near(root fs.FS, devices []string, workers int, allowed []int) ([]Place, error) {
	t, err := readTopology(root, allowed)
	if err != nil {
		return nil, err
	}
	places := make([]Place, workers)
	for i := range places {
		if i >= len(devices) {
			places[i] = Place{Node: -1, Err: fmt.Errorf("it has no accelerator of its own: %d are visible", len(devices))}
			continue
		}
		places[i] = t.near(devices[i])
	}
	return places, nil
}

func (t topology) near(device string) Place {
	node, err := t.nodeOf(device)
	if err != nil {
		return Place{Node: -1, Err: fmt.Errorf("its accelerator is %s: %w", device, err)}
	}
	cpus, err := t.bind(modeNode, node, 0, 1)
	if err != nil {
		return Place{Node: -1, Err: fmt.Errorf("its accelerator is %s: %w", device, err)}
	}
	return Place{Node: node, CPUs: cpus}
}
