package netcheck

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAspects(t *testing.T) {
	for _, c := range []struct {
		f    Finding
		want string
	}{
		{Finding{Check: "netcheck", Kind: "net.both"}, aspectNetwork},
		{Finding{Check: "torch", Kind: "net.both"}, aspectTorch},
		{Finding{Check: "torch", Kind: "compute"}, aspectTorch}, {Finding{Kind: "host.health"}, AspectHealth},
		{Finding{Kind: "host.nic"}, aspectInterfaces}, {Finding{Kind: "host.ib"}, aspectInterfaces},
		{Finding{Kind: "host.gpu"}, AspectDevices}, {Finding{Check: "nvml", Kind: "gpu.lost"}, AspectDevices},
		{Finding{Check: "nvml", Kind: "gpu.driver", Metric: "xid"}, AspectXids},
		{Finding{Check: "nvml", Kind: "gpu.memory", Metric: "ecc_uncorrected"}, AspectMemory},
		{Finding{Check: "switchbox", Kind: "gpu.copy"}, AspectCopies}, {Finding{Kind: "something"}, ""}, {Finding{}, ""},
	} {
		c.f.Severity = Fatal
		require.Equal(t, c.want, Verdict{Findings: []Finding{{Severity: Warn, Kind: "net.loss"}, c.f}}.Aspect(), c.f)
	}
	require.Equal(t, aspectNetwork, Verdict{Kind: "net.silent"}.Aspect())
}

// A verdict says what was found to be sound, and nothing else.
func TestWhatAVerdictCovers(t *testing.T) {
	covered := func(s *sim, i int) []string {
		s.run()
		return s.nodes[i].verdict.Covered
	}
	host := newSim(1, 8)
	host.nodes[1].node.Covered = []string{AspectHealth, AspectDevices}
	require.Equal(t, []string{aspectInterfaces, AspectHealth, AspectDevices, aspectNetwork}, covered(host, 1))
	require.Equal(t, []string{aspectInterfaces, aspectNetwork}, host.nodes[2].verdict.Covered)
	require.Equal(t, []string{aspectInterfaces}, covered(newSim(1, 1), 0), "it had no partner")
	torch := full(1, 8)
	torch.nodes[3].node.Torch = false
	require.Equal(t, []string{aspectInterfaces, aspectNetwork, aspectTorch}, covered(torch, 1))
	require.Equal(t, []string{aspectInterfaces, aspectNetwork}, torch.nodes[3].verdict.Covered)
	bad := newSim(1, 8)
	bad.nodes[1].fails, bad.nodes[1].node.Covered = 1, []string{AspectHealth}
	require.Empty(t, covered(bad, 1))
	slow := newSim(1, 8)
	slow.nodes[1].tx, slow.nodes[1].node.Covered = 0.3, []string{AspectHealth}
	require.Equal(t, []string{aspectInterfaces, AspectHealth}, covered(slow, 1))
	ill := newSim(1, 8)
	ill.nodes[1].notices(noticed(Fatal, "host.nic", "eth0"))
	require.Empty(t, covered(ill, 1))
}
