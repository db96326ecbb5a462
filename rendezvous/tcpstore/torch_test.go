package tcpstore

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/torchpython"
)

// python is an interpreter with PyTorch, and the generation that its TCPStore speaks.
type python struct {
	name, path string
	gen        generation
}

// pythons are the system's interpreter, for generation A, and the chosen one, for generation B.
func pythons() []python {
	return []python{
		{"system", torchpython.System, genA},
		{"chosen", torchpython.Chosen(), genB},
	}
}

// require skips the test unless p can run it.
func (p python) require(t *testing.T) {
	if p.path == "" {
		t.Skip("SKIPPED: GENERATION B OF THE STORE IS NOT TESTED with PyTorch's own client: TORCH_PYTHON names no Python " +
			"(make e2e-torch2 does)")
	}
	out, err := probe(p.path)
	if err != nil {
		t.Skipf("SKIPPED: GENERATION %s OF THE STORE IS NOT TESTED with PyTorch's own client: %s cannot import torch: %v\n%s",
			p.gen.letter(), p.path, err, out)
	}
	if fields := strings.Fields(out); fields[len(fields)-1] != p.gen.letter() {
		t.Skipf("SKIPPED: GENERATION %s OF THE STORE IS NOT TESTED with PyTorch's own client: %s has PyTorch %s, "+
			"which speaks another", p.gen.letter(), p.path, fields[0])
	}
}

// probe tells the version of a Python's PyTorch and the generation of its store. Each is asked once a process.
func probe(path string) (string, error) {
	ask, _ := probes.LoadOrStore(path, sync.OnceValues(func() (string, error) {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		out, err := exec.CommandContext(ctx, path, "-c", "import torch, torch.distributed as d; "+
			"print(torch.__version__, 'B' if hasattr(d.TCPStore, 'append') else 'A')").CombinedOutput()
		return string(out), err
	}))
	return ask.(func() (string, error))()
}

var probes sync.Map // by path: func() (string, error)

func (g generation) letter() string { return string("?AB"[g]) }

// script runs a file of testdata to its end.
func (p python) script(t *testing.T, env []string, args ...string) string {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, p.path, args...)
	cmd.Env = append(os.Environ(), env...)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return string(out)
}

func hostPort(t *testing.T, addr string) (host, port string) {
	host, port, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	return host, port
}

func TestPyTorchClient(t *testing.T) {
	for _, p := range pythons() {
		t.Run(p.name, func(t *testing.T) {
			p.require(t)
			var log logBuffer
			s, addr := start(t, Config{Logger: log.logger()})
			host, port := hostPort(t, addr)
			out := p.script(t, nil, "testdata/client.py", host, port)
			t.Log(strings.TrimSpace(out))
			require.Contains(t, out, "ran basic waiting")
			require.Equal(t, p.gen == genB, strings.Contains(out, "extended"))
			require.Empty(t, log.String(), "a well-behaved client breaks no limit")
			require.Eventually(t, func() bool { return s.stats().Connections == 0 }, 10*time.Second, time.Millisecond)
		})
	}
}

func TestPyTorchQueue(t *testing.T) {
	p := pythons()[1]
	p.require(t)
	_, addr := start(t, Config{})
	host, port := hostPort(t, addr)
	require.Contains(t, p.script(t, nil, "testdata/pop.py", host, port, "50"), "popped 10000")
}

// TestPyTorchJob runs two rounds of a job of four ranks, all of them clients, with a fresh namespace for the second.
func TestPyTorchJob(t *testing.T) {
	const world = 4
	for _, p := range pythons() {
		t.Run(p.name, func(t *testing.T) {
			p.require(t)
			forks := torchpython.Start(t, p.path)
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			s := New(Config{})
			defer s.Close()
			other := Split(l, s)
			defer other.Close()
			host, port := hostPort(t, l.Addr().String())
			for round := range 2 {
				outs := make(chan string, world)
				for rank := range world {
					go func() {
						out, err := runRank(t.Context(), forks, host, port, rank, world, round)
						outs <- fmt.Sprintf("%v %s", err, out)
					}()
				}
				for range world {
					require.Contains(t, <-outs, fmt.Sprintf("of %d done, restart %d", world, round))
				}
				require.Positive(t, s.stats().Keys)
				s.Reset()
			}
		})
	}
}

func runRank(ctx context.Context, forks *torchpython.Forks, host, port string, rank, world, round int) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	env := append(os.Environ(), "MASTER_ADDR="+host, "MASTER_PORT="+port, "TORCHELASTIC_USE_AGENT_STORE=True",
		"OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo", fmt.Sprint("TORCHELASTIC_RESTART_COUNT=", round),
		fmt.Sprint("RANK=", rank), fmt.Sprint("WORLD_SIZE=", world))
	out, code, err := forks.Run(ctx, env, "testdata/gloo.py")
	if err == nil && code != 0 {
		err = fmt.Errorf("exit code %d", code)
	}
	return out, err
}

// TestConversationsWithPyTorch plays the conversations to PyTorch's server: it shows that the table tells the truth.
func TestConversationsWithPyTorch(t *testing.T) {
	for _, p := range pythons() {
		t.Run(p.name, func(t *testing.T) {
			p.require(t)
			newServer := p.reference(t)
			for _, tc := range conversations() {
				if !tc.ours && tc.steps[0].conn[:1] == p.gen.letter() {
					t.Run(tc.name, func(t *testing.T) { converse(t, newServer(t), tc.steps) })
				}
			}
		})
	}
}

// reference returns a function that starts a fresh server of PyTorch and returns its address.
func (p python) reference(t *testing.T) func(*testing.T) string {
	cmd := exec.Command(p.path, "testdata/server.py")
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		stdin.Close()
		require.NoError(t, cmd.Wait())
	})
	ports := bufio.NewReader(stdout)
	return func(t *testing.T) string {
		_, err := io.WriteString(stdin, "\n")
		require.NoError(t, err)
		port, err := ports.ReadString('\n')
		require.NoError(t, err)
		return net.JoinHostPort("127.0.0.1", strings.TrimSpace(port))
	}
}

// converse plays one conversation. Another process gives no sign that it is idle, so the absence of an answer is only
// seen for a while; the tests of our own server prove it.
func converse(t *testing.T, addr string, steps []step) {
	const silence = 40 * time.Millisecond
	conns := map[string]*net.TCPConn{}
	for i, st := range steps {
		nc := conns[st.conn]
		if nc == nil {
			nc = dialRaw(t, addr)
			conns[st.conn] = nc
			send(t, nc, hello(st.conn))
		}
		send(t, nc, st.send)
		if st.want == closes {
			_, err := io.Copy(io.Discard, nc)
			require.False(t, os.IsTimeout(err), "step %d: still open", i)
			continue
		}
		got := make([]byte, len(st.want))
		_, err := io.ReadFull(nc, got)
		require.NoError(t, err, "step %d", i)
		require.Equal(t, st.want, string(got), "step %d", i)
		require.NoError(t, nc.SetReadDeadline(time.Now().Add(silence)))
		_, err = nc.Read(make([]byte, 1))
		require.True(t, os.IsTimeout(err), "step %d: more than %x: %v", i, st.want, err)
		require.NoError(t, nc.SetReadDeadline(time.Now().Add(10*time.Second)))
	}
}
