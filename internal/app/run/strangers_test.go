package run

import (
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// limited starts a launcher with few file descriptors.
func (b *bench) limited(files string, env []string, args ...string) *launched {
	script := filepath.Join(b.dir, "limited"+files+".sh")
	require.NoError(b.t, os.WriteFile(script,
		[]byte("#!/bin/sh\nulimit -n "+files+"\nexec "+filepath.Join(binDir, "dlrover-run")+` "$@"`+"\n"), 0o755))
	return b.startPath(script, env, args...)
}

// flood keeps n connections open to addr, each of which sends first, until stop: one that is closed is opened again. It
// returns when n have been opened.
func flood(t *testing.T, addr string, n int, first string) (stop func()) {
	quit := make(chan struct{})
	var opened atomic.Int64
	defer eventually(t, "flooded", func() bool { return opened.Load() >= int64(n) })
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			for {
				select {
				case <-quit:
					return
				default:
				}
				nc, err := net.DialTimeout("tcp", addr, time.Second)
				if err != nil {
					continue
				}
				opened.Add(1)
				gone := make(chan struct{})
				go func() {
					select {
					case <-quit:
					case <-gone:
					}
					nc.Close()
				}()
				_, _ = nc.Write([]byte(first))
				for buf := make([]byte, 4096); err == nil; {
					_, err = nc.Read(buf)
				}
				close(gone)
			}
		})
	}
	return func() { close(quit); wg.Wait() }
}

// TestStrangersCannotEndAJob has peers without a token hold more connections than the launcher has descriptors, while
// workers are restarted and a second node joins.
func TestStrangersCannotEndAJob(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]string{
		"silent": "", "one byte of HTTP": "G", "TLS": "\x16\x03\x01\x02",
		"without a token": "GET /v1/runs HTTP/1.1\r\nHost: x\r\n\r\n",
		"no body":         "GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t)
			env := []string{"DLROVER_TOKEN=" + testToken}
			script := `if [ $WORLD_SIZE = 2 ] && [ $TORCHELASTIC_RESTART_COUNT = 0 ] && [ $RANK = 0 ]; then : > $DIR/first; ` +
				`while [ ! -e $DIR/fail ]; do sleep 0.02; done; exit 1; fi; ` + hold
			args := b.sh(script, b.c10d("1:2", "--max-restarts=1", "--rdzv-conf=last_call_timeout=0.2,growth_delay=0.1")...)
			l1 := b.limited("200", env, args...)
			eventually(t, "started", b.exists("first"))
			addr := "127.0.0.1:" + strings.TrimPrefix(args[3], "--rdzv-endpoint=localhost:")
			stop := flood(t, addr, 260, first)
			defer stop()
			require.NoError(t, os.WriteFile(filepath.Join(b.dir, "fail"), nil, 0o600))
			eventually(t, "restarted", b.exists("up.2.0"))
			l2 := b.start("dlrover-run", env, args...)
			eventually(t, "grown", func() bool { return b.exists("up.4.0")() && b.exists("up.4.3")() })
			b.release()
			require.Equal(t, 0, l1.wait())
			require.Equal(t, 0, l2.wait())
			require.NotContains(t, l1.err.String(), "too many open files")
		})
	}
}

func TestStrangersAtTheMetrics(t *testing.T) {
	b := newBench(t)
	addr := "127.0.0.1:" + freePort(t)
	l := b.limited("200", nil, b.sh(hold, "--standalone", "--nproc-per-node=2", "--metrics-addr="+addr)...)
	eventually(t, "up", func() bool { return b.exists("up.2.0")() && b.exists("up.2.1")() })
	stop := flood(t, addr, 300, "")
	defer stop()
	eventually(t, "scraped", func() bool {
		resp, err := (&http.Client{
			Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true},
		}).Get("http://" + addr + "/healthz")
		if err == nil {
			resp.Body.Close()
		}
		return err == nil
	})
	b.release()
	require.Equal(t, 0, l.wait())
}

// TestWorkersKeepTheirLimitOnFiles: the launcher raises its own alone.
func TestWorkersKeepTheirLimitOnFiles(t *testing.T) {
	b := newBench(t)
	path := filepath.Join(b.dir, "soft.sh")
	require.NoError(t, os.WriteFile(path,
		[]byte("#!/bin/sh\nulimit -Sn 123\nexec "+filepath.Join(binDir, "dlrover-run")+` "$@"`+"\n"), 0o755))
	l := b.startPath(path, nil, b.sh("ulimit -Sn", "--standalone")...)
	require.Equal(t, 0, l.wait())
	require.Equal(t, "123\n", l.out.String())
}

// TestStrangersOfTheHost has other users, and web pages, ask a launcher that has no token and serves loopback.
func TestStrangersOfTheHost(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED: OTHER USERS OF THE HOST ARE NOT TESTED: only root can become one")
	}
	b := newBench(t)
	args := b.sh(hold, b.c10d("1:2", "--rdzv-conf=last_call_timeout=0.2,growth_delay=0.1")...)
	l1 := b.start("dlrover-run", nil, args...)
	eventually(t, "started", b.exists("up.2.0"))
	addr := "127.0.0.1:" + strings.TrimPrefix(args[3], "--rdzv-endpoint=localhost:")
	const script = `import http.client, json, sys
c = http.client.HTTPConnection(sys.argv[1])
c.request(sys.argv[2], sys.argv[3], sys.argv[4] or None, dict(h.split(": ") for h in sys.argv[5:]))
r = c.getresponse()
print(r.status, r.read().decode())`
	ask := func(uid uint32, request ...string) string {
		cmd := exec.Command("/usr/bin/python3", append([]string{"-c", script, addr}, request...)...)
		cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		return string(out)
	}
	require.Regexp(t, "^401 .*serves its own user alone, uid 0, and this is uid 12345", ask(12345, "GET", "/v1/runs", ""))
	require.Regexp(t, "^401 ", ask(12345, "POST", "/v1/runs/none/orders", `{"kind":"stop"}`))
	require.Regexp(t, "^403 ", ask(0, "POST", "/v1/runs/none/orders", `{"kind":"stop"}`, "Content-Type: text/plain",
		"Origin: http://evil.example"))
	require.Regexp(t, "^415 ", ask(0, "POST", "/v1/runs/none/orders", `{"kind":"stop"}`, "Content-Type: text/plain"))
	require.Regexp(t, "^403 ", ask(0, "GET", "/v1/runs", "", "Host: evil.example:29400"))
	require.Regexp(t, "^200 .*running", ask(0, "GET", "/v1/runs", ""))
	l2 := b.start("dlrover-run", nil, args...)
	eventually(t, "grown", b.exists("up.4.3"))
	b.release()
	require.Equal(t, 0, l1.wait())
	require.Equal(t, 0, l2.wait())
}
