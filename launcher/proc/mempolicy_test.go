package proc

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestStartMemoryPolicy(t *testing.T) {
	s := newSupervisor(t, Config{})
	if err := (MemoryPolicy{BindNode, 0}).Try(); err != nil {
		t.Skipf("SKIPPED: MEMORY POLICIES ARE NOT TESTED: this process may not set a memory policy for node 0: %s", err)
	}
	policy := sh("sed -n '1s/^[^ ]* \\([^ ]*\\).*/\\1/p' /proc/self/numa_maps")
	_, before := runSpec(t, s, policy)
	for want, p := range map[string]MemoryPolicy{"bind:0": {BindNode, 0}, "prefer:0": {PreferNode, 0}} {
		policy.Memory = &p
		_, got := runSpec(t, s, policy)
		require.Equal(t, want, got)
	}
	policy.Memory = nil
	_, after := runSpec(t, s, policy)
	require.Equal(t, before, after, "the starting thread must get its policy back")

	for node, why := range map[int]string{-1: "must be 0 to 1023", 1024: "must be 0 to 1023", 1023: "node 1023"} {
		policy.Memory = &MemoryPolicy{BindNode, node}
		_, err := s.Start(policy)
		require.ErrorContains(t, err, why)
		require.ErrorContains(t, policy.Memory.Try(), why)
	}
}
