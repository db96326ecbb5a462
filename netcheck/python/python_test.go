package python

import (
	"context"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"dlrover-run/internal/testkit"
	"dlrover-run/launcher/torchpython"
	"dlrover-run/netcheck"
	"dlrover-run/rendezvous/tcpstore"
)

func TestMain(m *testing.M) {
	testkit.SideBySide(4) // most of the time they wait for fakes that hang
	goleak.VerifyTestMain(m)
}

// interpreters are those with a real PyTorch.
func interpreters(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{"required": torchpython.Require(t, "THE NODE CHECK'S PYTORCH PROBE IS")}
	if all["required"] != torchpython.System {
		if _, err := os.Stat(torchpython.System); err == nil {
			all["system"] = torchpython.System
		}
	}
	return all
}

// store serves PyTorch's store on the loopback.
func store(t *testing.T) func([]string) (string, func(), error) {
	return func(allow []string) (string, func(), error) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return "", nil, err
		}
		s := tcpstore.New(tcpstore.Config{})
		var served sync.WaitGroup
		served.Go(func() { _ = s.Serve(l) })
		return l.Addr().String(), func() { s.Close(); served.Wait() }, nil
	}
}

func start(t *testing.T, cfg Config) *Runner {
	t.Helper()
	cfg.Store, cfg.Addr = store(t), "127.0.0.1"
	r, err := Start(t.Context(), cfg)
	require.NoError(t, err)
	t.Cleanup(r.Close)
	return r
}

// ready waits for PyTorch.
func ready(t *testing.T, r *Runner) string {
	t.Helper()
	version, err := r.Ready(t.Context())
	require.NoError(t, err)
	return version
}

// group runs one collective of all runners and returns their results.
func group(t *testing.T, test string, rs ...*Runner) []netcheck.Result {
	t.Helper()
	results := make([]netcheck.Result, len(rs))
	var all sync.WaitGroup
	join := func(rank int, peer netcheck.Peer, ready func([]string) error) {
		results[rank] = rs[rank].Join(context.Background(), netcheck.Assignment{
			Duty: netcheck.Join, Test: test, Rank: rank, World: len(rs), Left: 30 * time.Second, Peer: peer,
		}, ready)
	}
	join(0, netcheck.Peer{}, func(addrs []string) error {
		for rank := 1; rank < len(rs); rank++ {
			all.Go(func() { join(rank, netcheck.Peer{Addrs: addrs}, nil) })
		}
		return nil
	})
	all.Wait()
	return results
}

func TestRealPyTorch(t *testing.T) {
	for name, interpreter := range interpreters(t) {
		t.Run(name, func(t *testing.T) {
			begun := time.Now()
			a, b := start(t, Config{Interpreter: interpreter}), start(t, Config{Interpreter: interpreter})
			version := ready(t, a)
			ready(t, b)
			t.Logf("PyTorch %s imported after %v", version, time.Since(begun))
			require.NotEmpty(t, version)
			require.Empty(t, a.Findings())

			res := a.Compute(t.Context(), netcheck.Assignment{Test: "alone"})
			require.Empty(t, res.Text)
			require.Equal(t, "cpu", res.Torch.Device)
			require.Len(t, res.Torch.Matmul, 1)
			require.Positive(t, res.Torch.Matmul[0])
			t.Logf("compute: %+v", res.Torch)

			for _, test := range []string{"first", "second"} { // the group of the first one is gone
				for _, res := range group(t, test, a, b) {
					require.Empty(t, res.Text)
					require.Equal(t, test, res.Test)
					require.Equal(t, "gloo", res.Torch.Backend)
					require.Positive(t, res.Torch.AllReduce)
					require.Positive(t, res.Torch.Latency)
					require.InEpsilon(t, float64(res.Torch.Bytes)/res.Torch.AllReduce/1e3, res.Torch.BusMBps, 1e-9)
					t.Logf("%s: %+v", test, res.Torch)
				}
			}
			t.Logf("all after %v", time.Since(begun))
		})
	}
}
