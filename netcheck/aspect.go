package netcheck

import "strings"

// The aspects of a node that a check looks at, each or not, by their names in the rendezvous' events. What was found of
// one is not disproved by a check of another.
const (
	AspectInterfaces = "interfaces" // by what their drivers say
	AspectNetwork    = "network"    // tested with other nodes
	AspectTorch      = "pytorch"    // likewise
	AspectHealth     = "health"     // the site's own check
	AspectDevices    = "devices"    // by what their drivers say
	AspectCopies     = "copies"     // between devices
	AspectMemory     = "memory"     // errors of devices' memory, since their driver's start
	AspectXids       = "xids"       // during copies
)

// Aspect is what the verdict is about, by what has decided it; "" is nothing that a check can disprove.
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
		return AspectTorch
	case f.Kind == "host.health":
		return AspectHealth
	case f.Check == "switchbox", f.Kind == "gpu.copy":
		return AspectCopies
	case family == "gpu", f.Kind == "host.gpu":
		return AspectDevices
	case family == "host":
		return AspectInterfaces
	case family == "net":
		return AspectNetwork
	}
	return ""
}

// cover is what v has found to be sound of n.
func (n *node) cover(v Verdict) []string {
	if v.State == StateFaulty || v.State == StateUnreachable || v.Excluded {
		return nil
	}
	all := append([]string{AspectInterfaces}, n.Covered...)
	if v.State == StateOK && v.Paired {
		all = append(all, AspectNetwork)
	}
	if v.State == StateOK && n.torched {
		all = append(all, AspectTorch)
	}
	return all
}
