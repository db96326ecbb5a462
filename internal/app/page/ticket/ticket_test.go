package ticket

import (
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestProofs(t *testing.T) {
	now := time.Unix(1700000000, 0)
	until := now.Add(time.Hour)
	good := New("secret", Cookie, until)
	require.NotEqual(t, good, New("secret", Cookie, until), "each is another one")
	require.True(t, Proves([]string{"older", "secret"}, Cookie, good, now))
	require.True(t, Proves([]string{"secret"}, Cookie, good, until))
	require.False(t, Proves([]string{"secret"}, Cookie, good, until.Add(time.Second)))
	require.False(t, Proves([]string{"secret"}, Link, good, now))
	require.False(t, Proves([]string{"another"}, Cookie, good, now))
	require.False(t, Proves(nil, Cookie, good, now))
	for i := range good {
		other := []byte(good)
		other[i] ^= 1
		require.False(t, Proves([]string{"secret"}, Cookie, string(other), now), i)
	}
	for _, text := range []string{"", "x", good[:len(good)-1], good + "A", good + "="} {
		require.False(t, Proves([]string{"secret"}, Cookie, text, now), text)
	}
}

func TestQuery(t *testing.T) {
	now := time.Unix(1700000000, 0)
	q, err := url.ParseQuery(Query("secret", "/ui/runs/a b", now))
	require.NoError(t, err)
	require.Equal(t, "/ui/runs/a b", q.Get("next"))
	require.True(t, Proves([]string{"secret"}, Link, q.Get("ticket"), now.Add(LinkTime)))
	require.False(t, Proves([]string{"secret"}, Link, q.Get("ticket"), now.Add(LinkTime+time.Second)))
}
