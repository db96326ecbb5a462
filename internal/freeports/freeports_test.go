package freeports

import (
	"fmt"
	"net"
	"os"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"
)

func listen(port int) error {
	l, err := net.Listen("tcp", fmt.Sprintf(":%d", port))
	if err != nil {
		return err
	}
	return l.Close()
}

func TestPorts(t *testing.T) {
	p, err := Hold(2)
	require.NoError(t, err)
	defer p.Release()
	first := p.Numbers()
	require.NotEqual(t, first[0], first[1])
	for _, n := range first {
		require.ErrorContains(t, listen(n), "address already in use")
	}
	p.Release()
	require.NoError(t, listen(first[0]))
	taken, err := net.Listen("tcp", fmt.Sprintf(":%d", first[1]))
	require.NoError(t, err)
	defer taken.Close()
	require.NoError(t, p.HoldAgain())
	require.Equal(t, first[0], p.Numbers()[0])
	require.NotEqual(t, first[1], p.Numbers()[1], "somebody has it")
	require.ErrorContains(t, listen(first[0]), "address already in use")
}

// Half of all ports are a server's that may start later: by chance there would be one among so many.
func TestPortsOfServersAreLeft(t *testing.T) {
	var never []int
	for n := range 1 << 16 {
		if n%4 < 2 {
			never = append(never, n)
		}
	}
	p, err := Hold(16, never...)
	require.NoError(t, err)
	defer p.Release()
	for _, n := range p.Numbers() {
		require.GreaterOrEqual(t, n%4, 2)
		require.ErrorContains(t, listen(n), "address already in use")
	}
	p.Release()
	taken, err := net.Listen("tcp", fmt.Sprintf(":%d", p.Numbers()[0]))
	require.NoError(t, err)
	defer taken.Close()
	require.NoError(t, p.HoldAgain())
	require.GreaterOrEqual(t, p.Numbers()[0]%4, 2)
}

func TestOutgoing(t *testing.T) {
	for text, want := range map[string]Range{"32768\t60999\n": {32768, 60999}, "": {}, "x": {}, "1": {}} {
		root := fstest.MapFS{"proc/sys/net/ipv4/ip_local_port_range": {Data: []byte(text)}}
		require.Equal(t, want, Outgoing(root))
	}
}

func TestForServer(t *testing.T) {
	n, err := ForServer()
	require.NoError(t, err)
	require.NoError(t, listen(n))
	if out := Outgoing(os.DirFS("/")); out.First > highest {
		require.Less(t, n, out.First)
	}
}
