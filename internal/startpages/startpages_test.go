package startpages

import (
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// fileMemory is what this process has of files in memory, in KiB.
func fileMemory(t *testing.T) int {
	status, err := os.ReadFile("/proc/self/status")
	require.NoError(t, err)
	m := regexp.MustCompile(`RssFile:\s+(\d+) kB`).FindSubmatch(status)
	require.NotNil(t, m)
	n, err := strconv.Atoi(string(m[1]))
	require.NoError(t, err)
	return n
}

func TestReleaseGivesPagesBackAndTheProgramGoesOn(t *testing.T) {
	before := fileMemory(t)
	Release()
	after := fileMemory(t)
	require.Less(t, after, before*3/4)
	require.Equal(t, []string{"a"}, regexp.MustCompile(`a+`).FindAllString("bab", -1))
}

func TestReadOnly(t *testing.T) {
	const exe = "/opt/a program"
	for _, tt := range []struct {
		line        string
		start, size uintptr
	}{
		{"00400000-00adc000 r-xp 00000000 08:01 1234 /opt/a program\n", 0x400000, 0x6dc000},
		{"00adc000-01233000 r--p 006dc000 08:01 1234                     /opt/a program\n", 0xadc000, 0x757000},
		{"01233000-01297000 rw-p 00e33000 08:01 1234 /opt/a program\n", 0, 0},
		{"00400000-00adc000 r-xp 00000000 08:01 1234 /opt/another\n", 0, 0},
		{"7f8cfa424000-7f8cfa4d6000 r--p 00000000 00:00 0 \n", 0, 0},
		{"00400000-00adc000 r-xp 00000000 08:01 1234 /opt/a program (deleted)\n", 0, 0},
		{"zz-00adc000 r-xp 00000000 08:01 1234 /opt/a program\n", 0, 0},
		{"00400000-zz r-xp 00000000 08:01 1234 /opt/a program\n", 0, 0},
		{"00400000-00300000 r-xp 00000000 08:01 1234 /opt/a program\n", 0, 0},
		{"00400000 r-xp\n", 0, 0},
		{"", 0, 0},
	} {
		start, size := readOnly(tt.line, exe)
		require.Equal(t, tt.start, start, tt.line)
		require.Equal(t, tt.size, size, tt.line)
	}
}
