package master

import (
	"bytes"
	"io"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/tools/flagtest"
)

func TestExposure(t *testing.T) {
	for name, c := range map[string]struct {
		listen          string
		token, insecure bool
		want            string
	}{
		"loopback":            {"127.0.0.1:0", false, false, ""},
		"IPv6 loopback":       {"[::1]:0", false, false, ""},
		"network":             {"0.0.0.0:1", false, false, "needs a job token"},
		"every interface":     {":1", false, false, "needs a job token"},
		"network with token":  {":1", true, false, ""},
		"network, insecurely": {":1", false, true, ""},
		"no port":             {"localhost", true, false, "need host:port"},
	} {
		t.Run(name, func(t *testing.T) {
			err := checkExposure(c.listen, c.token, c.insecure)
			if c.want == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.want)
			}
		})
	}
}

func TestUsage(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		code int
		out  string
	}{
		"help":             {[]string{"--help"}, 0, "--listen HOST:PORT"},
		"version":          {[]string{"--version"}, 0, "dlrover-master dev"},
		"unknown option":   {[]string{"--nope"}, 2, ""},
		"argument":         {[]string{"x"}, 2, ""},
		"missing topology": {[]string{"--topology-file=/nope"}, 2, ""},
		"missing token":    {[]string{"--token-file=/nope"}, 2, ""},
		"keep-runs":        {[]string{"--keep-runs=9m"}, 2, ""},
		"keep-runs ever":   {[]string{"--keep-runs=721h"}, 2, ""},
		"event log":        {[]string{"--event-log=/nope/x"}, 2, ""},
		"page of nothing":  {[]string{"--page-of="}, 2, ""},
		"page of a name":   {[]string{"--page-of=node0"}, 2, ""},
		"page and data":    {[]string{"--page-of=a:1", "--data-dir=/nope"}, 2, ""},
		"page of the net":  {[]string{"--page-of=a:1", "--listen=:0"}, 2, ""},
		"page of no port":  {[]string{"--page-of=a:1", "--listen=127.0.0.1:99999"}, 1, ""},
		"port taken":       {[]string{"--listen=127.0.0.1:99999"}, 1, ""},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			require.Equal(t, c.code, run(append([]string{"dlrover-master"}, c.args...), &out))
			require.Contains(t, out.String(), c.out)
		})
	}
}

func TestDurationsOfOptions(t *testing.T) {
	require.Equal(t, 2, flagtest.Durations(t, app(io.Discard).Flags))
}
