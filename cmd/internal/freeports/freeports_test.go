package freeports

import (
	"fmt"
	"net"
	"testing"

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
