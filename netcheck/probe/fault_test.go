package probe

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"dlrover-run/netcheck"
)

func TestClasses(t *testing.T) {
	for err, want := range map[error][2]netcheck.Class{ // while connecting, and later
		syscall.ECONNREFUSED:     {netcheck.Refused, netcheck.Reset},
		syscall.EHOSTUNREACH:     {netcheck.Unreachable, netcheck.Stalled},
		syscall.ENETUNREACH:      {netcheck.Unreachable, netcheck.Stalled},
		syscall.ETIMEDOUT:        {netcheck.Unreachable, netcheck.Stalled},
		os.ErrDeadlineExceeded:   {netcheck.Unreachable, netcheck.Stalled},
		syscall.ECONNRESET:       {netcheck.Reset, netcheck.Reset},
		syscall.EPIPE:            {netcheck.Reset, netcheck.Reset},
		io.ErrUnexpectedEOF:      {netcheck.Reset, netcheck.Reset},
		errFrame:                 {netcheck.Unreachable, netcheck.Reset},
		syscall.EMFILE:           {netcheck.Own, netcheck.Own},
		syscall.EADDRNOTAVAIL:    {netcheck.Own, netcheck.Own},
		syscall.ENOBUFS:          {netcheck.Own, netcheck.Own},
		&net.AddrError{Err: "x"}: {netcheck.Own, netcheck.Reset},
		context.Canceled:         {netcheck.Canceled, netcheck.Canceled},
	} {
		wrapped := fmt.Errorf("dial: %w", &net.OpError{Op: "dial", Err: err})
		require.Equal(t, want[0], connectClass(wrapped), "%v", err)
		require.Equal(t, want[1], brokenClass(wrapped), "%v", err)
	}
}

func TestTheWorstRailCounts(t *testing.T) {
	of := func(classes ...netcheck.Class) netcheck.Class {
		var all []*fault
		for _, c := range classes {
			all = append(all, faultf(c, "x"))
		}
		return worst(append(all, nil)).class
	}
	require.Nil(t, worst([]*fault{nil, nil}))
	require.Equal(t, netcheck.Refused, of(netcheck.Own, netcheck.Refused))
	require.Equal(t, netcheck.MTU, of(netcheck.MTU, netcheck.Stalled))
	require.Equal(t, netcheck.Canceled, of(netcheck.Refused, netcheck.Canceled))
}

func TestOneLine(t *testing.T) {
	require.Equal(t, "a b \uFFFDc [2J", oneLine("a\nb \xffc\x1b[2J"))
	long := oneLine(strings.Repeat("\u00e4", maxText))
	require.LessOrEqual(t, len(long), maxText)
	require.True(t, utf8.ValidString(long))
}
