package console

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPOSIXZone(t *testing.T) {
	t.Parallel()
	winter, summer := time.Date(2026, 1, 15, 12, 0, 0, 0, time.UTC), time.Date(2026, 7, 15, 12, 0, 0, 0, time.UTC)
	for tz, want := range map[string][2]string{
		"CST-8":                      {"20:00 CST", "20:00 CST"},
		"<+0530>-5:30":               {"17:30 +0530", "17:30 +0530"},
		"EST5":                       {"07:00 EST", "07:00 EST"},
		"CET-1CEST,M3.5.0,M10.5.0/3": {"13:00 CET", "14:00 CEST"},
		"UTC0":                       {"12:00 UTC", "12:00 UTC"},
	} {
		l := posixZone(tz)
		if l == nil { // a machine may have a file of that name
			_, err := time.LoadLocation(tz)
			require.NoError(t, err, tz)
			continue
		}
		require.Equal(t, want[0], winter.In(l).Format("15:04 MST"), tz)
		require.Equal(t, want[1], summer.In(l).Format("15:04 MST"), tz)
	}
	for _, tz := range []string{"", "UTC", "Asia/Shanghai", "x9", "CST-", "C1", "../../etc/passwd1", "CST-8\nCST-9"} {
		require.Nil(t, posixZone(tz), tz)
	}
}

func FuzzPOSIXZone(f *testing.F) {
	f.Add("CST-8")
	f.Add("CET-1CEST,M3.5.0,M10.5.0/3")
	f.Fuzz(func(t *testing.T, tz string) {
		if l := posixZone(tz); l != nil {
			_ = time.Unix(1<<31, 0).In(l).String()
		}
	})
}
