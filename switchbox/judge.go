package switchbox

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"dlrover-run/internal/stable"
)

// MemoryInUse is the share of a device's memory that other processes may hold before a job.
const MemoryInUse = 0.30

// Judge judges the devices of a node by their own Facts, worst first. A feature that a device does not support is
// skipped: it is a finding of its own only where the device is divided or virtual.
func Judge(devices []Facts) []Finding {
	var findings []Finding
	for _, d := range devices {
		if d.Lost != "" {
			findings = append(findings, fatal(d, "gpu.lost", "cannot be used: %s", d.Lost))
			continue
		}
		for _, rule := range []func(Facts, []Facts) []Finding{
			failedCalls, unsupported, fabric, links, p2p, recovery, remapped, eccErrors, memory, pcie, clocks,
		} {
			findings = append(findings, rule(d, devices)...)
		}
	}
	stable.Sort(findings, func(a, b Finding) int { return weight(b.Severity) - weight(a.Severity) })
	return findings
}

// of begins a Finding about a device; text goes on from its name.
func of(d Facts, kind string, s Severity, format string, args ...any) Finding {
	entity := fmt.Sprintf("GPU %d", d.Index)
	return Finding{
		Check: "nvml", Kind: kind, Severity: s, Entity: entity,
		Text: oneLine(entity + " " + fmt.Sprintf(format, args...)),
	}
}

func fatal(d Facts, kind, format string, args ...any) Finding {
	return of(d, kind, Fatal, format, args...)
}

func warn(d Facts, kind, format string, args ...any) Finding {
	return of(d, kind, Warn, format, args...)
}

// measured adds the measured value and its threshold.
func (f Finding) measured(metric string, value, threshold float64, unit string) Finding {
	f.Metric, f.Value, f.Threshold, f.Unit = metric, value, threshold, unit
	return f
}

// basic are the calls that a driver answers for every sound device, if only by ErrNotSupported.
var basic = []string{"Mode", "Memory", "ECC", "Remap", "PCIe"}

func failedCalls(d Facts, _ []Facts) (findings []Finding) {
	for _, call := range d.Failed {
		severity := Warn
		if method, _, _ := strings.Cut(call, ":"); slices.Contains(basic, method) {
			severity = Fatal
		}
		findings = append(findings, of(d, "gpu.driver", severity, "cannot be asked for %s", call))
	}
	return findings
}

func unsupported(d Facts, _ []Facts) []Finding {
	if len(d.Unsupported) == 0 || !d.Mode.MIG && !d.Mode.Virtual {
		return nil
	}
	why := "a virtual GPU"
	if d.Mode.MIG {
		why = "divided (MIG)"
	}
	return []Finding{of(d, "gpu.driver", Info, "is %s; skipped: %s", why, strings.Join(d.Unsupported, ", "))}
}

// fabric judges the registration: links that are active prove nothing while the device has not registered with its
// switches.
func fabric(d Facts, _ []Facts) (findings []Finding) {
	f := d.Fabric
	if f == nil || f.State == FabricNotSupported || f.State == "" || d.Mode.MIG {
		return nil
	}
	switch active := d.Active(); {
	case f.State != FabricCompleted && active > 0:
		findings = append(findings, fatal(d, "gpu.fabric", "has %d active links, but its fabric is %s: the fabric manager "+
			"does not run, or has not finished", active, f.State))
	case f.State != FabricCompleted:
		findings = append(findings, warn(d, "gpu.fabric", "has no active link, and its fabric is %s", f.State))
	case f.Status != "":
		findings = append(findings, fatal(d, "gpu.fabric", "could not register with its switches: %s", f.Status))
	}
	for _, h := range []struct {
		is       bool
		severity Severity
		text     string
	}{
		{f.Unhealthy, Fatal, "has broken routes through its switches"},
		{f.Timeouts, Fatal, "has accesses that time out in its switches"},
		{f.Misconfigured, Fatal, "has switches that are configured wrongly"},
		{f.Degraded, Warn, "has less bandwidth to its switches than it should have"},
		{f.Recovering, Warn, "has routes through its switches that are being repaired"},
	} {
		if h.is {
			findings = append(findings, of(d, "gpu.fabric", h.severity, "%s", h.text))
		}
	}
	return findings
}

// links: a device has as many active links as the best of its kind here. Behind switches all have the same; where
// devices are joined directly or by bridges it may be meant so.
func links(d Facts, all []Facts) []Finding {
	active, most, switched := d.Active(), 0, false
	var down []string
	for i, l := range d.Links {
		if !l.Active && !l.Unknown {
			down = append(down, fmt.Sprint(i))
		}
	}
	for _, other := range all {
		if other.Name == d.Name && len(other.Links) > 0 {
			most = max(most, other.Active())
			switched = switched || other.switched()
		}
	}
	if len(down) == 0 || active >= most {
		return nil
	}
	severity := Warn
	if switched {
		severity = Fatal
	}
	f := of(d, "gpu.link", severity, "has %d active links, others have %d; down: %s", active, most,
		strings.Join(down, " "))
	return []Finding{f.measured("links", float64(active), float64(most), "")}
}

// switched reports whether any link of the device ends at a switch.
func (f Facts) switched() bool {
	return slices.ContainsFunc(f.Links, func(l Link) bool { return l.Active && l.Remote == RemoteSwitch })
}

// p2p: behind switches every device reaches every other one in the same way. Elsewhere the devices still reach equally
// many of the others each.
func p2p(d Facts, all []Facts) []Finding {
	if d.Mode.MIG || len(d.Peers) == 0 {
		return nil
	}
	if slices.ContainsFunc(all, Facts.switched) {
		return switchedP2P(d, all)
	}
	usual, ok := modal(all, reach)
	if mine := reach(d); ok && mine != usual {
		return []Finding{warn(d, "gpu.p2p", "reaches the other devices by P2P as %s, most others as %s", mine, usual)}
	}
	return nil
}

// switchedP2P starts from the working pairs: of three devices with one at fault most pairs do not work.
func switchedP2P(d Facts, all []Facts) (findings []Finding) {
	usual, ok := workingPeer(all)
	if !ok {
		return []Finding{warn(d, "gpu.p2p", "cannot reach any other by P2P, though switches join them")}
	}
	if d.mostlyUnlike(usual) {
		n := len(d.unlike(usual))
		return []Finding{fatal(d, "gpu.p2p", "reaches only %d of %d others by P2P", len(d.Peers)-n, len(d.Peers))}
	}
	for _, other := range d.unlike(usual) {
		if i := slices.IndexFunc(all, func(f Facts) bool { return f.Index == other }); i >= 0 && all[i].mostlyUnlike(usual) {
			continue // it has a finding of its own
		}
		findings = append(findings, fatal(d, "gpu.p2p", "reaches GPU %d with %s, the others with %s", other,
			d.Peers[other], usual))
	}
	return findings
}

// unlike are the devices that f does not reach as usual.
func (f Facts) unlike(usual Peer) (odd []int) {
	for other, p := range f.Peers {
		if p != usual {
			odd = append(odd, other)
		}
	}
	slices.Sort(odd)
	return odd
}

func (f Facts) mostlyUnlike(usual Peer) bool { return 2*len(f.unlike(usual)) > len(f.Peers) }

// String writes the three abilities.
func (p Peer) String() string {
	return fmt.Sprintf("read %s, write %s, nvlink %s", p.Read, p.Write, p.NVLink)
}

// workingPeer is how most pairs work that do.
func workingPeer(all []Facts) (usual Peer, ok bool) {
	counts := map[Peer]int{}
	for _, f := range all {
		for _, p := range f.Peers {
			if p.Read != P2POK {
				continue
			}
			if counts[p]++; counts[p] > counts[usual] {
				usual, ok = p, true
			}
		}
	}
	return usual, ok
}

// reach counts the others that a device reaches, by how.
func reach(f Facts) string {
	var states []string
	for _, p := range f.Peers {
		states = append(states, string(p.Read))
	}
	slices.Sort(states)
	return strings.Join(states, " ")
}

// modal is the value that more items have than any other.
func modal[T any, K comparable](items []T, key func(T) K) (most K, ok bool) {
	counts := map[K]int{}
	for _, item := range items {
		counts[key(item)]++
	}
	highest := 0
	for k, n := range counts {
		switch {
		case n > highest:
			most, ok, highest = k, true, n
		case n == highest:
			ok = false
		}
	}
	return most, ok
}

func recovery(d Facts, _ []Facts) []Finding {
	what := map[Recovery]string{
		RecoverReset:    "must be reset",
		RecoverReboot:   "needs the node to be rebooted",
		RecoverDrainP2P: "must be drained of peer-to-peer traffic",
		RecoverDrain:    "must be drained and reset",
	}[d.Recovery]
	if what == "" {
		return nil
	}
	return []Finding{fatal(d, "gpu.reset", "%s, says the driver", what)}
}

func remapped(d Facts, _ []Facts) []Finding {
	switch r := d.Remap; {
	case r == nil:
		return nil
	case r.Failed:
		return []Finding{fatal(d, "gpu.memory", "has no spare rows of memory left for those with errors: replace it")}
	case r.Pending:
		return []Finding{fatal(d, "gpu.reset", "must be reset: rows of its memory wait to be remapped")}
	}
	return nil
}

func eccErrors(d Facts, _ []Facts) []Finding {
	if d.ECC == nil || d.ECC.Uncorrected == 0 {
		return nil
	}
	f := warn(d, "gpu.memory", "has had %d memory errors that could not be corrected since its driver started",
		d.ECC.Uncorrected)
	return []Finding{f.measured("ecc_uncorrected", float64(d.ECC.Uncorrected), 0, "")}
}

// memory judges the use by others: a job misses the memory that other processes hold, and then dies for lack of it.
func memory(d Facts, _ []Facts) []Finding {
	m := d.Memory
	if m == nil || m.Total == 0 || m.Used < m.Own {
		return nil
	}
	share := float64(m.Used-m.Own) / float64(m.Total)
	if share <= MemoryInUse {
		return nil
	}
	f := fatal(d, "gpu.memory", "has %.0f %% of its memory in use by %s; at most %.0f %% may be",
		share*100, users(m.Users), MemoryInUse*100)
	return []Finding{f.measured("memory_used", share*100, MemoryInUse*100, "%")}
}

// users names the processes, the largest first.
func users(us []User) string {
	if len(us) == 0 {
		return "processes that cannot be seen from here"
	}
	us = stable.Sorted(slices.Values(us), func(a, b User) int { return cmp.Compare(b.Used, a.Used) })
	var names []string
	for _, u := range us[:min(len(us), 3)] {
		names = append(names, fmt.Sprintf("%s (pid %d)", cmp.Or(u.Name, "a process"), u.PID))
	}
	if len(us) > len(names) {
		return fmt.Sprintf("%s and %d more", strings.Join(names, ", "), len(us)-len(names))
	}
	return strings.Join(names, ", ")
}

// pcie: the losses of a slot or a riser show against the other devices; an idle link may be slower, but not narrower,
// than theirs.
func pcie(d Facts, all []Facts) []Finding {
	if d.PCIe == nil || d.PCIe.Width == 0 {
		return nil
	}
	usual, ok := modal(all, func(f Facts) PCIe { return PCIe{Width: value(f.PCIe).Width, MaxGen: value(f.PCIe).MaxGen} })
	switch {
	case !ok:
		return nil
	case d.PCIe.Width < usual.Width:
		f := warn(d, "gpu.pcie", "has %d PCIe lanes, most others %d", d.PCIe.Width, usual.Width)
		return []Finding{f.measured("pcie_width", float64(d.PCIe.Width), float64(usual.Width), "lanes")}
	case d.PCIe.MaxGen < usual.MaxGen:
		f := warn(d, "gpu.pcie", "has PCIe generation %d at most, most others %d", d.PCIe.MaxGen, usual.MaxGen)
		return []Finding{f.measured("pcie_gen", float64(d.PCIe.MaxGen), float64(usual.MaxGen), "")}
	}
	return nil
}

// clocks: a device that is too hot, or lacks power, works for all that, and slows its job.
func clocks(d Facts, _ []Facts) []Finding {
	if d.Clocks == nil || len(d.Clocks.Held) == 0 {
		return nil
	}
	at := ""
	if d.Clocks.Celsius > 0 {
		at = fmt.Sprintf(" at %d C", d.Clocks.Celsius)
	}
	f := warn(d, "gpu.clocks", "has its clocks held down by %s: %d MHz%s", strings.Join(d.Clocks.Held, ", "),
		d.Clocks.MHz, at)
	return []Finding{f.measured("clock", float64(d.Clocks.MHz), 0, "MHz")}
}
