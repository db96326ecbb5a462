//go:build cgo && linux

package nvml

import (
	"encoding/csv"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/switchbox"
)

// smi asks nvidia-smi for the same facts.
func smi(t *testing.T, fields ...string) []map[string]string {
	t.Helper()
	if _, err := os.Stat("/dev/nvidia0"); err != nil {
		t.Skip("SKIPPED: NVIDIA'S DRIVER IS NOT TESTED: there is no /dev/nvidia0")
	}
	out, err := exec.Command("nvidia-smi", "--query-gpu="+strings.Join(fields, ","), "--format=csv,noheader,nounits").
		Output()
	if err != nil {
		t.Skipf("SKIPPED: NVIDIA'S DRIVER IS NOT TESTED: nvidia-smi: %v", err)
	}
	rows, err := csv.NewReader(strings.NewReader(string(out))).ReadAll()
	require.NoError(t, err)
	var all []map[string]string
	for _, row := range rows {
		gpu := map[string]string{}
		for i, field := range fields {
			gpu[field] = strings.TrimSpace(row[i])
		}
		all = append(all, gpu)
	}
	return all
}

func TestRealDriverSaysWhatNvidiaSMISays(t *testing.T) {
	theirs := smi(t, "index", "name", "uuid", "pci.bus_id", "memory.total", "driver_version", "ecc.mode.current",
		"mig.mode.current", "pcie.link.gen.max", "pcie.link.width.current")
	l, err := Open()
	require.NoError(t, err)
	defer l.Close()
	ours := switchbox.Read(l.Devices(), nil)
	require.Len(t, ours, len(theirs))
	for i, want := range theirs {
		f := ours[i]
		t.Logf("%+v", f)
		require.Equal(t, want["driver_version"], l.Driver())
		require.Equal(t, want["index"], strconv.Itoa(f.Index))
		require.Equal(t, want["name"], f.Name)
		require.Equal(t, want["uuid"], f.UUID)
		require.True(t, strings.HasSuffix(strings.ToLower(want["pci.bus_id"]), f.PCI), "%s %s", want["pci.bus_id"], f.PCI)
		require.Equal(t, want["memory.total"], strconv.FormatUint(f.Memory.Total>>20, 10))
		require.Equal(t, want["mig.mode.current"] == "Enabled", f.Mode.MIG)
		require.Equal(t, want["ecc.mode.current"] == "Enabled", f.ECC != nil && f.ECC.Enabled)
		require.Equal(t, want["pcie.link.gen.max"], strconv.Itoa(f.PCIe.MaxGen))
		require.Equal(t, want["pcie.link.width.current"], strconv.Itoa(f.PCIe.Width))
		require.Empty(t, f.Lost)
		require.Empty(t, f.Failed)
	}
}
