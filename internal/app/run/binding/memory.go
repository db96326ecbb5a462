package binding

import (
	"errors"
	"io/fs"

	"golang.org/x/sys/unix"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/launcher/numa"
	"dlrover-run/launcher/proc"
)

// Near implements DLRover's --numa-affinity: every worker gets the CPUs of its accelerator's NUMA node, and
// its memory comes from there. A worker that cannot be bound is reported, and runs as it would without the option.
func (b *Binding) Near(o feature.Options, root fs.FS, slots int) {
	if !o.Bool("numa-affinity") {
		if o.IsSet("membind-policy") {
			o.Warn("--membind-policy=%s has no effect without --numa-affinity", o.String("membind-policy"))
		}
		return
	}
	if slots == 0 {
		return
	}
	places, err := places(o, root, slots)
	if err != nil {
		o.Warn("--numa-affinity: workers are not bound: %s", err)
		return
	}
	warnUnbound(o, places)
	if b.CPUs == nil { // else --numa-binding has decided
		b.CPUs = func(localRank int) []int { return places[localRank].CPUs }
	}
	b.bindMemory(o, places)
}

func places(o feature.Options, root fs.FS, slots int) ([]numa.Place, error) {
	devices, allowed, err := bindable(o, root)
	if err != nil {
		return nil, err
	}
	return numa.Near(root, devices, slots, allowed)
}

// warnUnbound names the workers without a known place, and the reason for the first one.
func warnUnbound(o feature.Options, places []numa.Place) {
	var ranks []int
	for i, p := range places {
		if p.Err != nil {
			ranks = append(ranks, i)
		}
	}
	if len(ranks) > 0 {
		o.Warn("--numa-affinity: local ranks %s are not bound; that of %d: %s", numa.Format(ranks), ranks[0],
			places[ranks[0]].Err)
	}
}

// bindMemory implements --membind-policy. As in DLRover, every word except bind and preferred binds CPUs only.
func (b *Binding) bindMemory(o feature.Options, places []numa.Place) {
	word := o.String("membind-policy")
	modes := map[string]proc.MemoryMode{"bind": proc.BindNode, "preferred": proc.PreferNode}
	mode, known := modes[word]
	if !known {
		if word != "none" {
			o.Warn("--membind-policy=%s is neither bind, preferred nor none: only CPUs are bound", word)
		}
		return
	}
	policies := make([]*proc.MemoryPolicy, len(places))
	refused := map[int]bool{}
	for i, p := range places {
		if p.Err != nil || refused[p.Node] {
			continue
		}
		policy := &proc.MemoryPolicy{Mode: mode, Node: p.Node}
		if err := policy.Try(); err != nil {
			refused[p.Node] = true
			o.Warn("--membind-policy=%s: only CPUs are bound: %s%s", word, err, whyNoMemory(err))
			continue
		}
		policies[i] = policy
	}
	b.Memory = func(localRank int) *proc.MemoryPolicy { return policies[localRank] }
}

func whyNoMemory(err error) string {
	switch {
	case errors.Is(err, unix.EPERM):
		return ": give the container the capability SYS_NICE, or a seccomp profile that allows set_mempolicy"
	case errors.Is(err, unix.EINVAL):
		return ": the node has no memory, or none for this container"
	}
	return ""
}
