package checkpoints

import (
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/run/feature"
)

// moving is a rendezvous whose server is another one each time that it is asked, until the last.
type moving struct {
	feature.Rendezvous
	servers []string
	follow  func(string)
}

func (m *moving) FollowDaemons(move func(string)) { m.follow = move }

func (m *moving) Daemons() (now string) {
	now = m.servers[0]
	m.servers = m.servers[min(1, len(m.servers)-1):]
	return now
}

// A checkpoint daemon hears of a server that was elected before it has followed the elections.
func TestDaemonsAreFollowed(t *testing.T) {
	var told []string
	move := func(addr string) { told = append(told, addr) }
	m := &moving{servers: []string{"a:1", "b:1", "c:1"}}
	follow(m, m.Daemons(), move)
	require.Equal(t, []string{"b:1", "c:1"}, told)
	m.follow("d:1")
	require.Equal(t, []string{"b:1", "c:1", "d:1"}, told)
	told = nil
	follow(m, "c:1", move)
	require.Empty(t, told, "nothing has changed")
}
