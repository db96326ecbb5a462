package switchbox

import "slices"

// hardXids are the errors that mean broken hardware or a device that is of no use until its reset; others come from
// programs, too.
var hardXids = []int{48, 62, 63, 64, 74, 79, 92, 94, 95, 109, 110, 119, 120, 136, 140, 143, 144, 145, 149, 154}

// JudgeGrowth judges the changes between two readings of the same devices, with an active copy in between. copied has
// the bytes that each device, by index, has sent to others meanwhile.
func JudgeGrowth(before, after []Facts, copied map[int]uint64) (findings []Finding) {
	for _, b := range after {
		i := slices.IndexFunc(before, func(a Facts) bool { return a.Index == b.Index })
		if i < 0 || before[i].Lost != "" {
			continue
		}
		if b.Lost != "" {
			findings = append(findings, fatal(b, "gpu.lost", "was lost during the copies: %s", b.Lost))
			continue
		}
		a := before[i]
		for _, rule := range []func(a, b Facts) []Finding{linkGrowth, linkLoss, eccGrowth, pcieGrowth, newXids} {
			findings = append(findings, rule(a, b)...)
		}
		findings = append(findings, route(a, b, copied[b.Index])...)
	}
	return findings
}

func linkGrowth(a, b Facts) (findings []Finding) {
	for i := range min(len(a.Errors), len(b.Errors)) {
		x, y := a.Errors[i], b.Errors[i]
		for _, c := range []struct {
			metric, text  string
			before, after int64
			severity      Severity
		}{
			{"link_replay", "packets were sent again", x.Replay, y.Replay, Warn},
			{"link_crc", "damaged packets", x.CRC, y.CRC, Warn},
			{"link_recovery", "recoveries", x.Recovery, y.Recovery, Warn},
			{"link_recovery_failed", "failed recoveries", x.RecoveryFailed, y.RecoveryFailed, Fatal},
		} {
			if grown := c.after - c.before; c.before >= 0 && grown > 0 {
				f := of(b, "gpu.link", c.severity, "had errors on link %d during the copies: %d %s", i, grown, c.text)
				findings = append(findings, f.measured(c.metric, float64(grown), 0, ""))
			}
		}
	}
	return findings
}

func linkLoss(a, b Facts) (findings []Finding) {
	for i := range min(len(a.Links), len(b.Links)) {
		if a.Links[i].Active && !b.Links[i].Active {
			findings = append(findings, fatal(b, "gpu.link", "lost link %d during the copies", i))
		}
	}
	return findings
}

func eccGrowth(a, b Facts) []Finding {
	if a.ECC == nil || b.ECC == nil || b.ECC.Uncorrected <= a.ECC.Uncorrected {
		return nil
	}
	grown := b.ECC.Uncorrected - a.ECC.Uncorrected
	f := fatal(b, "gpu.memory", "had %d memory errors during the copies that could not be corrected", grown)
	return []Finding{f.measured("ecc_uncorrected", float64(grown), 0, "")}
}

func pcieGrowth(a, b Facts) []Finding {
	if a.PCIe == nil || b.PCIe == nil || a.PCIe.Replay < 0 || b.PCIe.Replay <= a.PCIe.Replay {
		return nil
	}
	grown := b.PCIe.Replay - a.PCIe.Replay
	f := warn(b, "gpu.pcie", "had to send %d packets over PCIe again during the copies", grown)
	return []Finding{f.measured("pcie_replay", float64(grown), 0, "")}
}

func newXids(a, b Facts) (findings []Finding) {
	for _, x := range b.Xids[min(len(a.Xids), len(b.Xids)):] {
		severity := Warn
		if slices.Contains(hardXids, x.Number) {
			severity = Fatal
		}
		f := of(b, "gpu.driver", severity, "had Xid %d during the copies: %s", x.Number, x.Text)
		findings = append(findings, f.measured("xid", float64(x.Number), 0, ""))
	}
	return findings
}

// route checks that a copy went over the links; another copy proves nothing about them.
func route(a, b Facts, copied uint64) []Finding {
	if copied == 0 || a.Traffic == nil || b.Traffic == nil || b.Active() == 0 {
		return nil
	}
	sent := b.Traffic.Sent - a.Traffic.Sent
	if b.Traffic.Sent >= a.Traffic.Sent && sent >= copied/2 {
		return nil
	}
	f := warn(b, "gpu.link", "sent %d of %d MB over its links: the rest went another way", sent/1e6, copied/1e6)
	return []Finding{f.measured("link_sent", float64(sent/1e6), float64(copied/1e6), "MB")}
}
