// Package trainingport gives the workers of all nodes the same HCCL_IF_BASE_PORT.
package trainingport

import (
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/freeports"
	"dlrover-run/internal/job"
	"dlrover-run/launcher"
	"dlrover-run/launcher/preset"
)

// Ports of HCCL, the collectives of Ascend's devices: it listens on hcclPorts from HCCL_IF_BASE_PORT on, which has to
// be the same on all nodes.
const (
	hcclVariable = "HCCL_IF_BASE_PORT"
	hcclPorts    = 16
	hcclLowest   = 1024
	hcclHighest  = 65535 - hcclPorts + 1
)

// offeredBases is the number of first ports that each node offers; the nodes choose one that all of them have.
const offeredBases = 8

// trainingPort gives the workers of all nodes the same HCCL_IF_BASE_PORT: every node offers some, and the world
// takes the lowest that all have offered. In DLRover, nodes report one after the other until they agree.
type trainingPort struct {
	bases func() []int // that are free now
	offer func([]int)
	log   *slog.Logger
}

// New is the feature.
func New() feature.Feature {
	var start int
	return feature.Feature{
		Name: "training-port",
		Settings: func(o feature.Options) (err error) {
			start, err = read(o)
			return err
		},
		Plan: func(p *feature.Plan) {
			if start > 0 {
				p.Features["training-port"] = map[string]any{"from": start, hcclVariable: preset.Undecided}
			}
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			if start == 0 {
				return nil, nil
			}
			bases := func() []int { return freeBases(start, freeports.Outgoing(os.DirFS("/"))) }
			n.Job().Node.Bases = bases()
			p := &trainingPort{bases: bases, offer: n.SetBases, log: n.Log()}
			part := launcher.Part{Start: p.start, Stop: p.stop}
			return &feature.Opened{Part: part, Configure: feature.NeedsWorld}, nil
		},
	}
}

// read returns the first port, 0 without devices of Ascend.
func read(o feature.Options) (int, error) {
	start, from := o.Int("training-port"), "--training-port"
	ascend := o.String("accelerator") == "ascend-npu"
	if !ascend && o.IsSet("training-port") && start > 0 && !o.IsSet("accelerator") {
		_, kind := o.GPUs()
		ascend = kind == "ascend"
	}
	if text := o.Lookup(hcclVariable); ascend && start > 0 && text != "" {
		var err error
		if start, err = strconv.Atoi(text); err != nil {
			return 0, fmt.Errorf("$%s=%q: need a number from %d to %d", hcclVariable, text, hcclLowest, hcclHighest)
		}
		from = "$" + hcclVariable
	}
	switch {
	case start == 0:
		return 0, nil
	case start < hcclLowest || start > hcclHighest:
		return 0, fmt.Errorf("%s=%d: need a port from %d to %d, as HCCL takes %d from there on", from, start, hcclLowest,
			hcclHighest, hcclPorts)
	case !ascend && o.IsSet("training-port"):
		o.Warn("--training-port has no effect: it is for Ascend's devices, and none is here; --accelerator=ascend-npu " +
			"uses it all the same")
	}
	if !ascend {
		return 0, nil
	}
	return start, nil
}

// freeBases are those from start on with enough free ports behind them. First is start. Then come those with ports
// that no outgoing connection takes by chance, which are likely to be free on the other nodes as well. The rest
// follows.
func freeBases(start int, outgoing freeports.Range) (bases []int) {
	var chancy []int
	for base := start; base <= hcclHighest; base += hcclPorts {
		if base != start && base <= outgoing.Last && base+hcclPorts > outgoing.First {
			chancy = append(chancy, base)
		} else if bases = offerFree(bases, base); len(bases) == offeredBases {
			return bases
		}
	}
	for _, base := range chancy {
		if bases = offerFree(bases, base); len(bases) == offeredBases {
			break
		}
	}
	return bases
}

func offerFree(bases []int, base int) []int {
	if freeports.AreFree(base, hcclPorts) {
		return append(bases, base)
	}
	return bases
}

func (p *trainingPort) start(r *launcher.StartRequest) {
	base := commonBase(r.World)
	if base == 0 {
		p.log.Warn("no range of ports for HCCL is free on all nodes: its variable stays as it is", "variable", hcclVariable,
			"ports", hcclPorts)
		return
	}
	r.Setenv(hcclVariable + "=" + strconv.Itoa(base))
}

// commonBase is the lowest that every node has offered, so that all nodes find the same; 0 is none.
func commonBase(world []job.Member) int {
	if len(world) == 0 {
		return 0
	}
	for _, base := range slices.Sorted(slices.Values(world[0].Bases)) {
		if !slices.ContainsFunc(world, func(m job.Member) bool { return !slices.Contains(m.Bases, base) }) {
			return base
		}
	}
	return 0
}

func (p *trainingPort) stop(r launcher.StopRequest) {
	if !r.Early {
		p.offer(p.bases())
	}
}
