package netcheck

import "strings"

// The aspects of a node that a check may cover, by their names in the rendezvous' events. A check of one aspect does
// not disprove a finding about another.
const (
	aspectInterfaces = "interfaces" // as their drivers report them
	aspectNetwork    = "network"    // tested with other nodes
	aspectTorch      = "pytorch"    // likewise
	AspectHealth     = "health"     // the site's own check
	AspectDevices    = "devices"    // as their drivers report them
	AspectCopies     = "copies"     // between devices
	AspectMemory     = "memory"     // errors of devices' memory, since their driver's start
	AspectXids       = "xids"       // during copies
)

// Aspect is the aspect that decided the verdict; "" means that no check can disprove it.
func (v Verdict) Aspect() string {
	if f := fatal(v.Findings); f != nil {
		return f.aspect()
	}
	return Finding{Kind: v.Kind}.aspect()
}

func (f Finding) aspect() string {
	family, _, _ := strings.Cut(f.Kind, ".")
	switch {
	case f.Metric == "xid":
		return AspectXids
	case f.Metric == "ecc_uncorrected":
		return AspectMemory
	case f.Check == "torch", family == "compute", family == "torch":
		return aspectTorch
	case f.Kind == "host.health":
		return AspectHealth
	case f.Check == "switchbox", f.Kind == "gpu.copy":
		return AspectCopies
	case family == "gpu", f.Kind == "host.gpu":
		return AspectDevices
	case family == "host":
		return aspectInterfaces
	case family == "net":
		return aspectNetwork
	}
	return ""
}

// cover returns the aspects of n that v has found sound.
func (n *node) cover(v Verdict) []string {
	if v.State == StateFaulty || v.State == StateUnreachable || v.Excluded {
		return nil
	}
	all := append([]string{aspectInterfaces}, n.Covered...)
	if v.State == StateOK && v.Paired {
		all = append(all, aspectNetwork)
	}
	if v.State == StateOK && n.torched {
		all = append(all, aspectTorch)
	}
	return all
}
