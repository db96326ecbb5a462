package hang

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSpec(t *testing.T) {
	for _, a := range []Action{ActReport, ActRestart, ActStop} {
		s, err := ParseSpec(Spec{Action: a}.String())
		require.NoError(t, err)
		require.Equal(t, Spec{Action: a}, s)
	}
	late := Spec{Action: ActStop, After: 90 * time.Second}
	s, err := ParseSpec(late.String())
	require.NoError(t, err)
	require.Equal(t, late, s)
	for _, slow := range []Action{ActCheck, ActDrain} {
		acts := Spec{Action: ActReport, Slow: slow}
		s, err = ParseSpec(acts.String())
		require.NoError(t, err)
		require.Equal(t, acts, s)
	}
	loads := Spec{Action: ActReport, Slow: ActCheck, SlowLink: true}
	s, err = ParseSpec(loads.String())
	require.NoError(t, err)
	require.Equal(t, loads, s)
	s, err = ParseSpec("")
	require.NoError(t, err)
	require.Equal(t, Spec{Action: ActReport}, s)
	s, err = ParseSpec("after=60")
	require.NoError(t, err)
	require.Equal(t, time.Minute, s.After, "a plain number is in seconds")
	for _, text := range []string{"action=", "action=shoot", "x", "x=y", "action=stop later", "after=", "after=0s",
		"after=-1s", "slow=restart", "action=drain"} {
		_, err := ParseSpec(text)
		require.ErrorContains(t, err, fmt.Sprintf("hang detection %q", text))
	}
}
