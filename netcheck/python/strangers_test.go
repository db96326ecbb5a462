package python

import (
	"bytes"
	"encoding/binary"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/torchpython"
	"dlrover-run/netcheck"
)

// listening are the TCP addresses at which processes of a group listen.
func listening(pgid int) (addrs []string) {
	open := map[string]bool{}
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		stat, _ := os.ReadFile(path)
		fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
		if len(fields) < 3 || string(fields[2]) != strconv.Itoa(pgid) {
			continue
		}
		links, _ := filepath.Glob(filepath.Dir(path) + "/fd/*")
		for _, link := range links {
			to, _ := os.Readlink(link)
			open[to] = true
		}
	}
	table, _ := os.ReadFile("/proc/net/tcp")
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line)
		if len(f) > 9 && f[3] == "0A" && open["socket:["+f[9]+"]"] {
			_, hex, _ := strings.Cut(f[1], ":")
			port, _ := strconv.ParseUint(hex, 16, 16)
			addrs = append(addrs, net.JoinHostPort("127.0.0.1", strconv.FormatUint(port, 10)))
		}
	}
	return addrs
}

// Gloo gives the place of a partner to whoever connects first. That costs this collective, and none after it.
func TestStrangersAtACollective(t *testing.T) {
	interpreter := torchpython.Require(t, "WHO MAY CONNECT DURING A COLLECTIVE OF THE NODE CHECK IS")
	a, b := start(t, Config{Interpreter: interpreter}), start(t, Config{Interpreter: interpreter})
	ready(t, a)
	ready(t, b)
	var stranger sync.WaitGroup
	var met net.Conn
	res := a.Join(t.Context(), netcheck.Assignment{
		Duty: netcheck.Join, Test: "strangers", World: 2, Left: 6 * time.Second,
	}, func(addrs []string) error {
		stranger.Go(func() {
			partner, err := net.Dial("tcp", addrs[0]) // of which only a word comes: that it has no devices
			if !assert.NoError(t, err) {
				return
			}
			defer partner.Close()
			text := func(s string) []byte { return append(binary.NativeEndian.AppendUint64(nil, uint64(len(s))), s...) }
			_, _ = partner.Write(slices.Concat([]byte{0}, text("/strangers/devices/1"), text("0")))
			for until := time.Now().Add(6 * time.Second); met == nil && time.Now().Before(until); {
				if at := listening(a.pid); len(at) > 0 {
					met, _ = net.Dial("tcp", at[0])
				}
			}
		})
		return nil
	})
	stranger.Wait()
	require.NotNil(t, met, "a stranger is let in")
	defer met.Close()
	require.NotEmpty(t, res.Text)
	require.Nil(t, res.Torch)
	for _, res := range group(t, "after it", a, b) {
		require.Empty(t, res.Text)
	}
}
