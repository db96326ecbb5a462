package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/testkit"
	"dlrover-run/netcheck"
)

// fakeToolEnv makes this program an ib_write_bw that behaves as its value says.
const fakeToolEnv = "PROBE_TEST_FAKE_TOOL"

func fakeTool() {
	mode, args := os.Getenv(fakeToolEnv), os.Args[1:]
	port := args[slices.Index(args, "-p")+1]
	if !slices.Contains(args, "--out_json") {
		fakeServer(mode, port)
		return
	}
	report := os.NewFile(3, "report")
	switch mode {
	case "garbage":
		fmt.Fprint(report, "RDMA_Write BW Test")
		return
	case "flood":
		for range 64 {
			fmt.Fprint(report, strings.Repeat("x", 1<<16))
			fmt.Println(strings.Repeat("y", 1<<16))
		}
		return
	case "crash":
		fmt.Fprintln(os.Stderr, "Couldn't allocate MR")
		os.Exit(1)
	case "hang":
		// A grandchild that holds the pipes, too.
		c := exec.Command("sleep", "1000")
		c.Stdout, c.Stderr, c.ExtraFiles = os.Stdout, os.Stderr, []*os.File{report}
		_ = c.Start()
		_ = os.WriteFile(os.Getenv("PROBE_TEST_PID"), []byte(strconv.Itoa(c.Process.Pid)), 0o600)
		time.Sleep(time.Hour)
	}
	c, err := net.Dial("tcp", net.JoinHostPort(args[len(args)-1], port))
	if err != nil {
		fmt.Fprintln(os.Stderr, "Couldn't connect to", args[len(args)-1])
		os.Exit(1)
	}
	c.Close()
	fmt.Fprint(report, `{"test_info":{"test":"RDMA_Write BW Test"},"results":{"MsgSize":8388608,"bw_avg":361.25}}`)
}

func fakeServer(mode, port string) {
	switch mode {
	case "server-crash":
		fmt.Println("IB device mlx5_0 not found")
		os.Exit(1)
	case "deaf":
		time.Sleep(time.Hour)
	}
	ln, err := net.Listen("tcp", ":"+port)
	for errors.Is(err, syscall.EADDRINUSE) { // another process has it for a moment
		time.Sleep(10 * time.Millisecond)
		ln, err = net.Listen("tcp", ":"+port)
	}
	if err != nil {
		os.Exit(2)
	}
	if c, err := ln.Accept(); err == nil {
		c.Close()
	}
}

// rdmaCouple has a tool that behaves as mode says. A tool that hangs writes the pid of its child to the file pid.
func rdmaCouple(t *testing.T, mode, pid string) *couple {
	self, err := os.Executable()
	require.NoError(t, err)
	tool := filepath.Join(t.TempDir(), "ib_write_bw")
	// Without GORACE the tool takes a second more to end.
	script := fmt.Sprintf("#!/bin/sh\nexec env GORACE=atexit_sleep_ms=0 %s=%s PROBE_TEST_PID='%s' '%s' \"$@\"\n",
		fakeToolEnv, mode, pid, self)
	require.NoError(t, testkit.WriteProgram(tool, script))
	c := newCouple(t)
	for _, p := range []*Prober{c.server, c.dialer} {
		p.cfg.RDMATool = tool
		p.cfg.NICs[0].HCA = "mlx5_0"
	}
	c.serve.Quick, c.dial.Quick = false, false
	return c
}

// skipped is why RDMA was not tested at either end.
func (c *couple) skipped() (text string) {
	for _, f := range append(c.server.Noticed(), c.dialer.Noticed()...) {
		text += f.Text + "\n"
	}
	return text
}

func rdmaFlow(r netcheck.Result) netcheck.Flow {
	i := slices.IndexFunc(r.Flows, func(f netcheck.Flow) bool { return f.Kind == "rdma" })
	if i < 0 {
		return netcheck.Flow{}
	}
	return r.Flows[i]
}

func TestRDMA(t *testing.T) {
	t.Parallel()
	c := rdmaCouple(t, "ok", "")
	c.run()
	for _, r := range []netcheck.Result{c.served, c.dialed} {
		require.Empty(t, r.Class, r.Text)
		require.Empty(t, r.Text)
		require.Equal(t, netcheck.Flow{NIC: "lo", Kind: "rdma", Mbps: 361250}, rdmaFlow(r))
	}
}

// What the tools cannot do is said, and no fault.
func TestRDMAThatDoesNotWork(t *testing.T) {
	t.Parallel()
	for mode, says := range map[string]string{
		"garbage":      "its report is no JSON",
		"flood":        "its report is longer than 65536 bytes",
		"crash":        "Couldn't allocate MR",
		"server-crash": "IB device mlx5_0 not found",
	} {
		t.Run(mode, func(t *testing.T) {
			c := rdmaCouple(t, mode, "")
			c.run()
			for _, r := range []netcheck.Result{c.served, c.dialed} {
				require.Empty(t, r.Class, r.Text)
				require.Empty(t, r.Text)
				require.Zero(t, rdmaFlow(r))
				require.Greater(t, r.Flows[0].Mbps, 0.0, "TCP was measured all the same")
			}
			for _, p := range []*Prober{c.server, c.dialer} { // each runs the client once
				require.Len(t, p.Noticed(), 1)
				f := p.Noticed()[0]
				require.Equal(t, [3]string{RDMASkipped, "mlx5_0", string(netcheck.Warn)}, [3]string{f.Kind, f.Entity,
					string(f.Severity)})
				require.Contains(t, f.Text, "mlx5_0 was not tested by RDMA: ")
				require.Contains(t, f.Text, says)
				require.NotEmpty(t, f.Peer)
			}
		})
	}
}

func TestRDMAToolsThatHangAreKilledWithAllTheyStarted(t *testing.T) {
	t.Parallel()
	pid := filepath.Join(t.TempDir(), "pid")
	c := rdmaCouple(t, "ok", "")
	// A client that hangs, with a child that holds the pipes, too. A shell starts soon on a busy machine.
	c.dialer.cfg.RDMATool = filepath.Join(t.TempDir(), "ib_write_bw")
	const client = "#!/bin/sh\ncase $* in *--out_json*) ;; *) exit 1;; esac\nsleep 1000 &\necho $! >%s\nwait\n"
	script := fmt.Sprintf(client, pid)
	require.NoError(t, testkit.WriteProgram(c.dialer.cfg.RDMATool, script))
	c.dialer.limits.tool = 2 * time.Second
	began := time.Now()
	c.run()
	require.Less(t, time.Since(began), long)
	require.Contains(t, c.skipped(), "was not done in time")
	text, err := os.ReadFile(pid)
	require.NoError(t, err)
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return testkit.Gone(n) }, long, 10*time.Millisecond)
}

func TestAToolThatNeverListens(t *testing.T) {
	t.Parallel()
	c := rdmaCouple(t, "deaf", "")
	c.server.limits.listen, c.dialer.limits.listen = 100*time.Millisecond, 100*time.Millisecond
	c.run()
	require.Empty(t, c.served.Class, c.served.Text)
	require.Contains(t, c.skipped(), "does not listen on port")
}

func TestQuickTestsLeaveRDMAOut(t *testing.T) {
	c := rdmaCouple(t, "ok", "")
	c.serve.Quick, c.dial.Quick = true, true
	c.run()
	require.Empty(t, c.dialed.Class, c.dialed.Text)
	require.Zero(t, rdmaFlow(c.dialed))
}

func TestFindRDMA(t *testing.T) {
	h := newFakeHost(t)
	path, why := h.FindRDMA()
	require.Empty(t, path)
	require.Equal(t, "no RDMA device on this node", why)
	h.port("mlx5_0", "1", "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	path, why = h.FindRDMA()
	require.Empty(t, path)
	require.Equal(t, "ib_write_bw (package perftest) is not installed", why)
	require.NoError(t, os.WriteFile(filepath.Join(bin, "ib_write_bw"), []byte("#!/bin/sh\n"), 0o700))
	path, why = h.FindRDMA()
	require.Equal(t, filepath.Join(bin, "ib_write_bw"), path)
	require.Empty(t, why)
}

func TestParseReport(t *testing.T) {
	for report, want := range map[string]float64{
		`{"results":{"bw_avg":361.25}}`:                                   361250,
		`{"test_info":{"a":1},"results":{"MsgSize":8,"BW_average":98.1}}`: 98100,
		`{"results":{"bw_avg":1}} ` + "\n":                                1000,
	} {
		got, err := parseReport([]byte(report))
		require.NoError(t, err, report)
		require.InDelta(t, want, got, 1e-6)
	}
	for report, says := range map[string]string{
		``:                                 "no JSON",
		`null`:                             "no average rate",
		`{}`:                               "no average rate",
		`{"results":[]}`:                   "no JSON",
		`{"results":{"bw_avg":"9"}}`:       "need a number",
		`{"results":{"bw_avg":0}}`:         "above 0",
		`{"results":{"bw_avg":-3}}`:        "above 0",
		`{"results":{"bw_avg":1e9}}`:       "at most",
		`{"results":{"bw_avg":1e999}}`:     "need a number",
		`{"results":{"bw_avg":NaN}}`:       "no JSON",
		`{"results":{"bw_avg":1}}{"a":1}`:  "more than one",
		`{"results":{"bw_avg":1}} garbage`: "more than one",
	} {
		_, err := parseReport([]byte(report))
		require.ErrorContains(t, err, says, report)
	}
}

func FuzzParseReport(f *testing.F) {
	for _, s := range []string{
		`{"results":{"bw_avg":361.25}}`, `{"results":{"BW_average":1e400}}`, `[]`, `{"results":null}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, report []byte) {
		rate, err := parseReport(report)
		require.Equal(t, err == nil, rate > 0 && rate <= maxMbps)
	})
}

func TestListeners(t *testing.T) {
	table := `  sl  local_address rem_address   st
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1
   1: 0100007F:1F91 0100007F:1F90 01 00000000:00000000 00:00000000 00000000     0        0 1 1
`
	require.True(t, hasListener(strings.NewReader(table), 8080))
	require.False(t, hasListener(strings.NewReader(table), 8081), "established, not listening")
	require.False(t, hasListener(strings.NewReader(""), 1))
}

func TestToolIsKilledWhenTheTestIsCalledOff(t *testing.T) {
	t.Parallel()
	pid := filepath.Join(t.TempDir(), "pid")
	c := rdmaCouple(t, "hang", pid)
	ctx, cancel := context.WithCancel(t.Context())
	c.serveCtx, c.dialCtx = ctx, ctx
	began := make(chan time.Time, 1)
	go func() {
		for ctx.Err() == nil {
			if _, err := os.Stat(pid); err == nil {
				began <- time.Now()
				cancel()
			}
			time.Sleep(time.Millisecond)
		}
	}()
	c.run()
	cancel()
	require.NotEmpty(t, began, "the tool ran: %s", c.skipped())
	require.Less(t, time.Since(<-began), long/2, "the tool would hang for longer")
	require.Equal(t, netcheck.Canceled, c.dialed.Class, c.dialed.Text+c.skipped())
	require.Equal(t, netcheck.Canceled, c.served.Class, c.served.Text+c.skipped())
}
