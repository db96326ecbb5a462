package conns

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRatesOfOneSenderAreItsOwn(t *testing.T) {
	r, at := NewRates(10, 3), time.Unix(1e9, 0)
	allowed := func(sender string, of int) (n int) {
		for range of {
			if r.Allow(sender, at) {
				n++
			}
		}
		return n
	}
	require.Equal(t, 3, allowed("a", 10))
	require.Equal(t, 3, allowed("b", 10))
	at = at.Add(200 * time.Millisecond)
	require.Equal(t, 2, allowed("a", 10))
	at = at.Add(time.Hour)
	require.Equal(t, 3, allowed("a", 10))
}

// Addresses without end take bounded memory, and one that goes on sending among them gains nothing.
func TestManySendersTakeLittleMemory(t *testing.T) {
	r, at, allowed := NewRates(1, 5), time.Unix(1e9, 0), 0
	for i := range 10 * mostSenders {
		r.Allow(fmt.Sprint(i), at)
		if i%100 == 0 && r.Allow("insistent", at) {
			allowed++
		}
		require.LessOrEqual(t, len(r.now)+len(r.before), 2*mostSenders)
	}
	require.Equal(t, 5, allowed)
}

func TestOrigin(t *testing.T) {
	for addr, want := range map[string]string{
		"10.1.2.3": "10.1.2.3", "::ffff:10.1.2.3": "10.1.2.3", "2001:db8:1:2:3:4:5:6": "2001:db8:1:2::/64",
		"2001:db8:1:2::9": "2001:db8:1:2::/64", "fe80::1%eth0": "fe80::/64", "::1": "::/64", "": "", "@": "@",
	} {
		require.Equal(t, want, Origin(addr), addr)
	}
}

// An address that opens connections all the time, and proves nothing, is answered rarely; another one always, and so is
// the first once it has proved something.
func TestAnAddressThatKeepsConnecting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, p, taken, log := listen(t, Limits{Total: 10, Unproven: 10})
		connect := func(ip byte) *Conn {
			a, b := net.Pipe()
			t.Cleanup(func() { a.Close() })
			p.accepts <- from{b, &net.TCPAddr{IP: net.IPv4(10, 0, 0, ip), Port: 1}}
			synctest.Wait()
			select {
			case c := <-taken:
				return c
			default:
				return nil
			}
		}
		crowd := func(of int) (served int) {
			for range of {
				if c := connect(1); c != nil {
					served++
					require.NoError(t, c.Close())
				}
			}
			return served
		}
		require.Equal(t, strangeBurst, crowd(strangeBurst))
		require.Equal(t, 10, crowd(10*servedOf), "one that has the token comes in if it tries again")
		require.Equal(t, 1, strings.Count(log.String(), "most are closed"))
		other := connect(2)
		require.NotNil(t, other)
		var known *Conn
		for known == nil {
			known = connect(1)
		}
		known.Prove(true)
		require.Equal(t, 100, crowd(100), "it may be the address of many nodes")
		known.Prove(false)
		require.Less(t, crowd(100), 50)
		require.NoError(t, known.Close())
		require.NoError(t, other.Close())
		require.Empty(t, l.known)
		require.Empty(t, l.from)
	})
}
