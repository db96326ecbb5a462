package run

import (
	"errors"

	"golang.org/x/sys/unix"

	"dlrover-run/launcher/numa"
	"dlrover-run/launcher/proc"
)

// numaAffinity implements DLRover's --numa-affinity: every worker gets the CPUs of its accelerator's NUMA node, and
// its memory comes from there. A worker that cannot be bound is reported, and runs as it would without the option.
func (r *resolver) numaAffinity() error {
	if !r.c.Bool("numa-affinity") {
		if r.c.IsSet("membind-policy") {
			r.warn("--membind-policy=%s has no effect without --numa-affinity", r.c.String("membind-policy"))
		}
		return nil
	}
	if r.s.slots == 0 {
		return nil
	}
	places, err := r.places()
	if err != nil {
		r.warn("--numa-affinity: workers are not bound: %s", err)
		return nil
	}
	r.tellUnbound(places)
	if r.s.cpus == nil { // else --numa-binding has decided
		r.s.cpus = func(localRank int) []int { return places[localRank].CPUs }
	}
	r.bindMemory(places)
	return nil
}

func (r *resolver) places() ([]numa.Place, error) {
	devices, allowed, err := r.bindable()
	if err != nil {
		return nil, err
	}
	return numa.Near(r.host.root, devices, r.s.slots, allowed)
}

// tellUnbound names the workers without a known place, and the reason for the first one.
func (r *resolver) tellUnbound(places []numa.Place) {
	var ranks []int
	for i, p := range places {
		if p.Err != nil {
			ranks = append(ranks, i)
		}
	}
	if len(ranks) > 0 {
		r.warn("--numa-affinity: local ranks %s are not bound; that of %d: %s", numa.Format(ranks), ranks[0],
			places[ranks[0]].Err)
	}
}

// bindMemory implements --membind-policy. As in DLRover, every word except bind and preferred binds CPUs only.
func (r *resolver) bindMemory(places []numa.Place) {
	word := r.c.String("membind-policy")
	modes := map[string]proc.MemoryMode{"bind": proc.BindNode, "preferred": proc.PreferNode}
	mode, known := modes[word]
	if !known {
		if word != "none" {
			r.warn("--membind-policy=%s is neither bind, preferred nor none: only CPUs are bound", word)
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
			r.warn("--membind-policy=%s: only CPUs are bound: %s%s", word, err, whyNoMemory(err))
			continue
		}
		policies[i] = policy
	}
	r.s.memory = func(localRank int) *proc.MemoryPolicy { return policies[localRank] }
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

// withoutEffect names options of DLRover that are accepted and do nothing.
func (r *resolver) withoutEffect() error {
	if r.c.IsSet("ucp-device-type") {
		r.warn("--ucp-device-type=%s has no effect, as in DLRover itself, which converts universal checkpoints on the CPU",
			r.c.String("ucp-device-type"))
	}
	if r.c.Bool("auto-tunning") {
		r.warn("--auto-tunning has no effect: the settings of the data loader come from the tuner in DLRover's Python " +
			"master, and the rendezvous of this job has none")
	}
	return nil
}
