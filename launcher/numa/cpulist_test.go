package numa

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseCPUs(t *testing.T) {
	for _, tt := range []struct {
		name, list string
		want       []int
	}{
		{"empty", "\n", nil},
		{"one", "7\n", []int{7}},
		{"ranges", "0-2,8,10-11\n", []int{0, 1, 2, 8, 10, 11}},
		{"unordered and repeated", "4-5,0,5", []int{0, 4, 5}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseCPUs(tt.list)
			require.NoError(t, err)
			require.Equal(t, tt.want, got)
		})
	}
	for _, bad := range []string{
		",", "1,", "a", "-1", "1-", "3-2", "1-2-3", "0-65536", "0-99999999999", "+1", "0x1", "1 2",
	} {
		t.Run("refuses "+bad, func(t *testing.T) {
			_, err := ParseCPUs(bad)
			require.ErrorContains(t, err, bad)
		})
	}
}

func TestFormat(t *testing.T) {
	require.Empty(t, Format(nil))
	require.Equal(t, "0-3,8,10-11", Format([]int{8, 0, 1, 2, 3, 11, 10, 8}))
}

func FuzzParseCPUs(f *testing.F) {
	for _, seed := range []string{"", "0", "0-3,8\n", "3-2", "1,,2", "0-65535", "65536", "4-5,0,5"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, list string) {
		cpus, err := ParseCPUs(list)
		if err != nil {
			require.Nil(t, cpus)
			return
		}
		again, err := ParseCPUs(Format(cpus))
		require.NoError(t, err)
		require.Equal(t, cpus, again)
	})
}
