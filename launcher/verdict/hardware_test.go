package verdict

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestXids(t *testing.T) {
	for text, want := range map[string][]int{
		"nvrm: xid (pci:0000:3b:00): 79, pid=7, gpu has fallen off": {79},
		"xid 48 xid: 13 xid=94":  {48, 13, 94},
		"xid(pci:0):119":         {119},
		"xid (pci:0000:\n): 79":  nil,
		"xid (pci:0000":          nil,
		"maxid 79 xid79a xid_79": nil,
		"xid":                    nil,
		"xid 79797":              nil,
		"xids: 79":               nil,
		"":                       nil,
	} {
		require.Equal(t, want, xids(text), "%q", text)
	}
}

// Xids that programs cause are nobody's hardware.
func TestHardwareXids(t *testing.T) {
	for _, n := range []int{48, 64, 74, 79, 94, 95, 119, 120, 140, 145} {
		require.True(t, isHardwareXid(n), "%d", n)
	}
	for _, n := range []int{0, 8, 13, 31, 43, 45, 63, 68, 92, 109, 151} {
		require.False(t, isHardwareXid(n), "%d", n)
	}
}

func FuzzXids(f *testing.F) {
	f.Add("nvrm: xid (pci:0000:3b:00): 79, pid=7")
	f.Add("xid 1xid(xid):xid=9999 xid 10000")
	f.Fuzz(func(t *testing.T, text string) {
		found := xids(text)
		require.LessOrEqual(t, len(found), strings.Count(text, "xid"))
		for _, n := range found {
			require.True(t, 0 <= n && n <= 9999, "%d", n)
		}
	})
}
