package run

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/freeports"
	"dlrover-run/rendezvous"
)

// hosts are two network namespaces joined by a cable: two machines, as far as the
// network goes. All traffic stays on the cable.
type hosts struct {
	*bench
	names [2]string
	addrs [2]string
}

func newHosts(t *testing.T) *hosts {
	h := &hosts{bench: newBench(t), addrs: [2]string{"10.99.7.1", "10.99.7.2"}}
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root, so jobs across hosts are NOT tested")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("no ip command (package iproute2), so jobs across hosts are NOT tested:", err)
	}
	number := networks.Add(1)
	for i := range h.names {
		h.names[i] = fmt.Sprintf("dlr%d-%d-%d", os.Getpid(), number, i)
		if out, err := exec.Command("ip", "netns", "add", h.names[i]).CombinedOutput(); err != nil {
			t.Skipf("network namespaces are not allowed here, so jobs across hosts are NOT tested: %v %s", err, out)
		}
		t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", h.names[i]).Run() })
	}
	h.ip("link", "add", "veth0", "netns", h.names[0], "type", "veth", "peer", "name", "veth1", "netns", h.names[1])
	for i, name := range h.names {
		dev := fmt.Sprintf("veth%d", i)
		h.ip("-n", name, "addr", "add", h.addrs[i]+"/24", "dev", dev)
		h.ip("-n", name, "link", "set", dev, "up")
		h.ip("-n", name, "link", "set", "lo", "up")
	}
	return h
}

func (h *hosts) ip(args ...string) {
	h.t.Helper()
	out, err := exec.Command("ip", args...).CombinedOutput()
	require.NoError(h.t, err, "ip %v: %s", args, out)
}

// on starts a launcher on one of the hosts.
func (h *hosts) on(i int, env []string, args ...string) *launched {
	h.t.Helper()
	return h.onProgram(i, "dlrover-run", env, args...)
}

// onProgram starts a program on one of the hosts; exec keeps its pid.
func (h *hosts) onProgram(i int, program string, env []string, args ...string) *launched {
	h.t.Helper()
	path := filepath.Join(binDir, program)
	script := filepath.Join(h.dir, fmt.Sprintf("on%d%s.sh", i, program))
	if _, err := os.Stat(script); err != nil { // another launcher may be reading it
		require.NoError(h.t,
			writeProgram(script, []byte("#!/bin/sh\nexec ip netns exec "+h.names[i]+" "+path+` "$@"`+"\n")))
	}
	return h.startPath(script, env, args...)
}

func (h *hosts) job(more ...string) []string {
	return append([]string{"--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=" +
		h.addrs[0] + ":29401", "--rdzv-id=job", "--rdzv-conf=last_call_timeout=20"}, more...)
}

var hasTorch = sync.OnceValue(func() bool {
	return exec.Command("/usr/bin/python3", "-c", "import torch").Run() == nil
})

func TestJobAcrossHosts(t *testing.T) {
	t.Parallel()
	h := newHosts(t)
	env := []string{"DLROVER_TOKEN=" + testToken, "PYTHON_EXEC=/usr/bin/python3"}
	var args []string
	if hasTorch() {
		script, err := filepath.Abs("testdata/allreduce.py")
		require.NoError(t, err)
		args = h.job("--max-restarts=3", script, h.dir)
		h.release()
	} else {
		t.Log("no PyTorch for /usr/bin/python3: the workers' store is NOT tested across hosts")
		args = h.sh(`echo $MASTER_ADDR >> $DIR/seen`, h.job()...)
	}
	// gloo would take the address of the host's name, which both namespaces share.
	l0, l1 := h.on(0, append(env, "GLOO_SOCKET_IFNAME=veth0"), args...), h.on(1,
		append(env, "GLOO_SOCKET_IFNAME=veth1"), args...)
	require.Equal(t, 0, l0.wait())
	require.Equal(t, 0, l1.wait())
}

// named gives the hosts files of their own, in which the first one's name is a loopback address for itself only, as
// Debian and Ubuntu write it.
func (h *hosts) named() (name string) {
	name = "node1"
	for i, own := range []string{"127.0.1.1", h.addrs[0]} {
		dir := filepath.Join("/etc/netns", h.names[i]) // which ip netns exec mounts over /etc
		require.NoError(h.t, os.MkdirAll(dir, 0o755))
		h.t.Cleanup(func() { _ = os.RemoveAll(dir) })
		text := "127.0.0.1 localhost\n" + own + " " + name + "\n"
		require.NoError(h.t, os.WriteFile(filepath.Join(dir, "hosts"), []byte(text), 0o600))
	}
	return name
}

// A host's own name is a loopback address on many hosts, and a daemon may be reached at localhost on its own: the other
// host is told neither.
func TestLoopbackIsNotToldToOtherHosts(t *testing.T) {
	t.Parallel()
	const chosen = "node1 is a loopback address on this host"
	for name, c := range map[string]struct {
		backend, at string // of the first host; the other one uses the name
		said        string
	}{
		"c10d":                        {"c10d", "node1", chosen},
		"a daemon by the host's name": {"dlrover-master", "node1", chosen},
		"a daemon by localhost":       {"dlrover-master", "localhost", "it announces 127.0.0.1, which other hosts"},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHosts(t)
			other := h.named()
			env := []string{"DLROVER_TOKEN=" + testToken, "PYTHON_EXEC=/usr/bin/python3"}
			said := &launched{}
			if c.backend == "dlrover-master" {
				said = h.onProgram(0, "dlrover-master", env, "--listen=0.0.0.0:29401")
				h.served(said)
			}
			job := func(at string, more ...string) []string {
				return append([]string{"--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=" + c.backend,
					"--rdzv-endpoint=" + at + ":29401", "--rdzv-id=job"}, more...)
			}
			script, training := []string{"--no-python", "sh", "-c", "echo $MASTER_ADDR"}, !testing.Short() && hasTorch()
			if training {
				path, err := filepath.Abs("testdata/allreduce.py")
				require.NoError(t, err)
				script = []string{path, h.dir}
				h.release()
			} else {
				t.Log("no PyTorch for /usr/bin/python3, or -short: the workers' store is NOT tested across these hosts")
			}
			// The node that joins first leads.
			l0 := h.on(0, append(env, "GLOO_SOCKET_IFNAME=veth0"), job(c.at, script...)...)
			eventually(t, "waiting", func() bool { return strings.Contains(l0.err.String(), "waiting for the other nodes") })
			l1 := h.on(1, append(env, "GLOO_SOCKET_IFNAME=veth1"), job(other, script...)...)
			require.Equal(t, 0, l0.wait(), l0.err.String())
			require.Equal(t, 0, l1.wait(), l1.err.String())
			all := l0.err.String()
			if said.err != nil {
				all += said.err.String()
				said.signal(syscall.SIGTERM)
				said.wait()
			}
			require.Contains(t, all, c.said)
			require.Contains(t, all, h.addrs[0])
			if !training {
				require.Contains(t, l1.out.String(), h.addrs[0])
			}
		})
	}
}

// Launchers of one host that meet on loopback stay there.
func TestLoopbackOnOneHost(t *testing.T) {
	h := newHosts(t)
	h.named()
	for name, c := range map[string]struct {
		at  string
		env []string
	}{
		"localhost":                        {"localhost", []string{"DLROVER_TOKEN=" + testToken}},
		"the host's name, without a token": {"node1", nil},
	} {
		t.Run(name, func(t *testing.T) {
			args := []string{"--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=" + c.at + ":29401",
				"--rdzv-id=job", "--no-python", "sh", "-c", "echo $MASTER_ADDR"}
			l0, l1 := h.on(0, c.env, args...), h.on(0, c.env, args...)
			require.Equal(t, 0, l0.wait(), l0.err.String())
			require.Equal(t, 0, l1.wait(), l1.err.String())
			require.Contains(t, l0.out.String(), "127.0.0.1")
			require.NotContains(t, l0.err.String()+l1.err.String(), "is a loopback address on this host")
		})
	}
}

func TestNoTokenMeansNoNetwork(t *testing.T) {
	h := newHosts(t)
	args := h.sh("exit 0", h.job("--nnodes=2", "--rdzv-conf=join_timeout=5")...)
	l0 := h.on(0, nil, args...)
	eventually(t, "serving", func() bool { return strings.Contains(l0.err.String(), "serving the rendezvous") })
	require.Contains(t, l0.err.String(), "served on loopback only")
	require.Contains(t, l0.err.String(), `"addr":"127.0.0.1:29401"`)
	l1 := h.on(1, nil, args...)
	require.Equal(t, 2, l1.wait())
	require.Contains(t, l1.err.String(), "needs a job token")
	l0.signal(syscall.SIGTERM)
	l0.wait()
}

// A launcher without a token leaves it to the master whether it needs one.
func TestTheMasterDecidesAboutTheToken(t *testing.T) {
	h := newHosts(t)
	at := h.addrs[0] + ":29401"
	pod := []string{"DLROVER_MASTER_ADDR=" + at, "NODE_ID=0", "NODE_RANK=0", "NODE_TYPE=worker", "JOB_UID=u",
		"NODE_NUM=1"}
	args := h.sh("echo $MASTER_ADDR", "--nnodes=1", "--nproc-per-node=1", "--rdzv-id=job", "--exit-code-policy=reason")
	t.Run("ours wants one", func(t *testing.T) {
		d := h.onProgram(0, "dlrover-master", []string{"DLROVER_TOKEN=" + testToken}, "--listen="+at)
		h.served(d)
		began := time.Now()
		l := h.on(1, pod, args...)
		require.Equal(t, 23, l.wait())
		require.Less(t, time.Since(began), 20*time.Second, "it has tried again and again")
		require.Regexp(t, "^dlrover-run: error: the rendezvous daemon at "+at+" needs a job token, and this node has none: "+
			".*DLROVER_TOKEN .*DLROVER_TOKEN_FILE or --token-file\n$", l.err.String())
		d.signal(syscall.SIGTERM)
		d.wait()
	})
	t.Run("ours serves everybody", func(t *testing.T) {
		d := h.onProgram(0, "dlrover-master", nil, "--listen="+at, "--insecure")
		h.served(d)
		l := h.on(1, pod, args...)
		require.Equal(t, 0, l.wait())
		require.Equal(t, h.addrs[1]+"\n", l.out.String())
		require.Equal(t, 1, strings.Count(l.err.String(), `"level":"WARN"`), l.err.String())
		require.Contains(t, l.err.String(), "asks for no job token")
		args[slices.Index(args, "--rdzv-id=job")] = "--rdzv-id=another"
		l = h.on(1, pod, append([]string{"--insecure"}, args...)...)
		require.Equal(t, 0, l.wait())
		require.NotContains(t, l.err.String(), `"level":"WARN"`, "it was meant")
		d.signal(syscall.SIGTERM)
		d.wait()
	})
}

// The cable is cut: no FIN, no RST. The kernel notices after 3 s of silence. The node is lost then if workers of others
// fail as well, also when they failed before, so that what its kernel does not take is this news. Else it is lost after
// node_timeout or, without one, as soon as its host has answered no new connection either.
func TestSilentHostIsLost(t *testing.T) {
	long(t)
	t.Parallel()
	for name, c := range map[string]struct {
		fail   bool
		conf   []string
		reason string
		within time.Duration // from the cut to the workers of the others
	}{
		"the others work":   {false, nil, "silent for 4.6s", 5 * time.Second},
		"a time of its own": {false, []string{"--rdzv-conf=node_timeout=7"}, "silent for 7s", 8 * time.Second},
		"a worker fails":    {true, []string{"--rdzv-conf=node_timeout=60"}, "silent for 3s", 5 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHosts(t)
			env := []string{"DLROVER_TOKEN=" + testToken}
			script := `[ -e $DIR/fail ] && [ $WORLD_SIZE = 2 ] && exit 1; ` + hold
			script = strings.Replace(script, "do sleep", "do [ -e $DIR/fail -a $WORLD_SIZE = 2 ] && exit 1; sleep", 1)
			l0, l1 := h.on(0, env, h.sh(script, h.job(append(c.conf, "--max-restarts=1", "--event-log=events.json")...)...)...),
				h.on(1, env, h.sh(script, h.job(append(c.conf, "--max-restarts=1")...)...)...)
			eventually(t, "together", func() bool { return h.exists("up.2.0")() && h.exists("up.2.1")() })
			cut := time.Now()
			h.ip("-n", h.names[1], "link", "set", "veth1", "down")
			if c.fail {
				require.NoError(t, os.WriteFile(filepath.Join(h.dir, "fail"), nil, 0o600))
			}
			eventually(t, "alone", h.exists("up.1.0"))
			took := time.Since(cut)
			t.Logf("alone after %v", took)
			require.Less(t, took, c.within)
			h.release()
			require.Equal(t, 0, l0.wait())
			require.Len(t, h.events("rendezvous-suspect"), 1)
			lost := h.events("rendezvous-node-loss")
			require.Len(t, lost, 1)
			require.Equal(t, c.reason, lost[0]["text"])
			l1.signal(syscall.SIGKILL)
		})
	}
}

// A host that is silent for a moment, or for less than node_timeout, keeps its workers. So does one that answers while
// its launcher does not run.
func TestSilentHostComesBack(t *testing.T) {
	long(t)
	t.Parallel()
	cable := func(h *hosts, state string) { h.ip("-n", h.names[1], "link", "set", "veth1", state) }
	for name, c := range map[string]struct {
		conf     []string
		silent   time.Duration
		times    int
		off, on  func(*hosts, *launched)
		suspects int
	}{
		"three seconds": {nil, 3 * time.Second, 4, func(h *hosts, _ *launched) { cable(h, "down") },
			func(h *hosts, _ *launched) { cable(h, "up") }, 4},
		"less than it may be": {[]string{"--rdzv-conf=node_timeout=15"}, 7 * time.Second, 1,
			func(h *hosts, _ *launched) { cable(h, "down") }, func(h *hosts, _ *launched) { cable(h, "up") }, 1},
		"a stopped launcher": {nil, 10 * time.Second, 1, func(_ *hosts, l *launched) { l.freeze() },
			func(_ *hosts, l *launched) { require.NoError(t, syscall.Kill(l.launcher(), syscall.SIGCONT)) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newHosts(t)
			env := []string{"DLROVER_TOKEN=" + testToken}
			l0, l1 := h.on(0, env, h.sh(hold, h.job(append(c.conf, "--event-log=events.json")...)...)...),
				h.on(1, env, h.sh(hold, h.job(c.conf...)...)...)
			eventually(t, "together", func() bool { return h.exists("up.2.0")() && h.exists("up.2.1")() })
			for i := range c.times {
				time.Sleep(time.Duration(i) * 270 * time.Millisecond) // to another moment between two probes
				c.off(h, l1)
				time.Sleep(c.silent)
				c.on(h, l1)
				time.Sleep(rendezvous.UnreachableAfter) // longer than the node would have had
			}
			h.release()
			require.Equal(t, 0, l0.wait())
			require.Equal(t, 0, l1.wait())
			require.Empty(t, h.events("rendezvous-node-loss"))
			require.LessOrEqual(t, len(h.events("rendezvous-suspect")), c.suspects)
			require.Len(t, h.lines("starts"), 2)
		})
	}
}

func TestEndpointsThatCannotBeReached(t *testing.T) {
	b := newBench(t)
	for name, endpoint := range map[string]string{
		"refused":      "127.0.0.1:" + freePort(t),
		"no such name": "no-such-host.invalid:1",
		"IPv6 refused": "[::1]:" + freePort(t),
	} {
		t.Run(name, func(t *testing.T) {
			l := b.start("dlrover-run", []string{"DLROVER_TOKEN=" + testToken},
				b.sh("exit 0", "--rdzv-backend=dlrover-master", "--rdzv-endpoint="+endpoint,
					"--rdzv-conf=read_timeout=0.3", "--exit-code-policy=reason")...)
			require.Equal(t, 22, l.wait())
			require.Contains(t, l.err.String(), "no rendezvous daemon at "+endpoint+" within 300ms")
		})
	}
}

// A port that somebody else has cannot be served, and nobody serves a rendezvous there.
func TestEndpointOfAStranger(t *testing.T) {
	b := newBench(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer silent.Close()
	held, err := freeports.Hold(1)
	require.NoError(t, err)
	defer held.Release()
	for port, by := range map[int]string{
		silent.Addr().(*net.TCPAddr).Port: fmt.Sprintf(" by pid %d ", os.Getpid()),
		held.Numbers()[0]:                 ", ",
	} {
		endpoint := fmt.Sprintf("localhost:%d", port)
		l := b.run(b.sh("exit 0", "--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint="+endpoint,
			"--rdzv-conf=read_timeout=0.3", "--exit-code-policy=reason")...)
		require.Equal(t, 22, l.wait())
		require.Contains(t, l.err.String(), fmt.Sprintf("port %d of this host is taken%s", port, by))
		require.Contains(t, l.err.String(), "no rendezvous is served at "+endpoint+" after 300ms")
	}
}

func TestIPv6Endpoint(t *testing.T) {
	probe, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skip("no IPv6 loopback here, so IPv6 endpoints are NOT tested:", err)
	}
	port := probe.Addr().(*net.TCPAddr).Port
	probe.Close()
	b := newBench(t)
	args := b.sh(`echo $MASTER_ADDR >> $DIR/seen`,
		"--nnodes=2", "--rdzv-backend=c10d", fmt.Sprintf("--rdzv-endpoint=[::1]:%d", port))
	l1, l2 := b.run(args...), b.run(args...)
	require.Equal(t, 0, l1.wait())
	require.Equal(t, 0, l2.wait())
	require.Len(t, b.lines("seen"), 2)
}

// net/http says of a peer that talks out of turn; that is nothing for a user.
func TestLibrariesPrintNothingByThemselves(t *testing.T) {
	b := newBench(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go answerTwice(c)
		}
	}()
	args := b.sh("exit 0", "--rdzv-backend=dlrover-master", "--rdzv-endpoint="+l.Addr().String(),
		"--rdzv-conf=read_timeout=0.5")
	const unsolicited = "Unsolicited response received on idle HTTP channel"
	quiet := b.run(args...)
	require.Equal(t, 1, quiet.wait())
	require.NotContains(t, quiet.err.String(), unsolicited)
	debugging := b.start("dlrover-run", []string{"LOGLEVEL=DEBUG"}, args...)
	require.Equal(t, 1, debugging.wait())
	require.Regexp(t, `"level":"DEBUG","msg":"a library says",.*"text":"`+unsolicited, debugging.err.String())
}

// answerTwice answers one request with two responses, of which the first has the launcher ask again later.
func answerTwice(c net.Conn) {
	defer c.Close()
	if _, err := http.ReadRequest(bufio.NewReader(c)); err != nil {
		return
	}
	body := `{"code":"closed","error":"later"}`
	fmt.Fprintf(c, "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"+
		"HTTP/1.1 400 Bad Request\r\n\r\n", len(body), body)
	_, _ = io.Copy(io.Discard, c) // until the launcher closes it
}

// What answers is neither our daemon nor DLRover's master, and never will be: the launcher does not ask again.
func TestEndpointsOfOtherServers(t *testing.T) {
	b := newBench(t)
	for name, answer := range map[string]string{
		"SSH":  "SSH-2.0-OpenSSH_9.2\r\n",
		"HTTP": "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			addr := serveText(t, answer)
			l := b.start("dlrover-run", []string{"DLROVER_MASTER_ADDR=" + addr},
				b.sh("exit 0", "--rdzv-id=job", "--exit-code-policy=reason", "--rdzv-conf=read_timeout=1000")...)
			require.Equal(t, 21, l.wait())
			require.Regexp(t, `^dlrover-run: error: .*DLRover's master.*\n$`, l.err.String(), "one line")
		})
	}
}

// serveText answers the beginning of whatever it is asked.
func serveText(t *testing.T, answer string) (addr string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = c.Read(make([]byte, 1))
				_, _ = io.WriteString(c, answer)
				_ = c.(*net.TCPConn).CloseWrite()
				_, _ = io.Copy(io.Discard, c)
			}()
		}
	}()
	return l.Addr().String()
}
