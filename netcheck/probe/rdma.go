package probe

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"dlrover-run/netcheck"
)

// RDMA is measured by perftest's ib_write_bw, where both ends have it and the rail's interfaces have an RDMA device:
// first from the dialer to the server, then back. The receiving end runs the tool's server. Its own connection proves
// nothing, so the server exists only while this very test waits for it. A failure of the tools is a finding of their
// node (Prober.Noticed), and no fault: nobody is blamed for a limit on locked memory.
const (
	rdmaTool    = "ib_write_bw"
	rdmaMessage = 8 << 20                // bytes
	rdmaTime    = 500 * time.Millisecond // of one direction at nominal rate
	rdmaSpare   = time.Second            // that must be left of the test after it
	rdmaGbps    = 100                    // for an interface of unknown speed
	maxReport   = 64 << 10
	maxWords    = 4 << 10 // of the tool's output
)

// FindRDMA returns the path of ib_write_bw, or why there are no tests with RDMA, in words.
func (h Host) FindRDMA() (path, why string) {
	if len(names(h.sys("class/infiniband"))) == 0 {
		return "", "no RDMA device on this node"
	}
	path, err := exec.LookPath(rdmaTool)
	if err != nil {
		return "", rdmaTool + " (package perftest) is not installed"
	}
	return path, ""
}

// rdmaEnd is one end's equipment for tests with RDMA.
type rdmaEnd struct {
	start     Start
	tool, hca string
	limits    limits
}

func (e rdmaEnd) usable() bool { return e.tool != "" && e.hca != "" }

// rdmaStep is a message between the ends: from the receiver the address where its tool listens, from the sender its
// measurement. 0 means none.
type rdmaStep struct {
	Port int     `json:"port,omitempty"`
	Mbps float64 `json:"mbps,omitempty"`
}

// testRDMA measures both directions. It returns an error only when the other end is gone.
func (s *session) testRDMA(ctx context.Context) error {
	turns := []role{serverRole, dialerRole} // the receivers
	for i, receives := range turns {
		left := (time.Until(s.limit) - rdmaSpare) / time.Duration(len(turns)-i)
		left = max(min(s.limits.tool, left), time.Millisecond)
		step := s.rdmaSend
		if s.role == receives {
			step = s.rdmaReceive
		}
		if err := step(ctx, left); err != nil {
			return err
		}
	}
	return nil
}

func (s *session) tell(step rdmaStep) error {
	body, _ := json.Marshal(step)
	if err := s.ctl.send(kindRDMA, body); err != nil {
		return asFault(err, "RDMA")
	}
	return nil
}

func (s *session) hear(wait time.Duration) (rdmaStep, error) {
	body, err := s.ctl.want(kindRDMA, wait, "RDMA")
	if err != nil {
		return rdmaStep{}, err
	}
	return parseStep(body)
}

func parseStep(body []byte) (rdmaStep, error) {
	var step rdmaStep
	if json.Unmarshal(body, &step) != nil || step.Port < 0 || step.Port > math.MaxUint16 || step.Mbps < 0 ||
		step.Mbps > maxMbps {
		return rdmaStep{}, faultf(netcheck.Reset, "RDMA: the other end's message cannot be read")
	}
	return step, nil
}

// rdmaReceive runs the tool's server and keeps the sender's measurement.
func (s *session) rdmaReceive(ctx context.Context, left time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	port, err := s.freePort(ctx)
	var tool *child
	if err == nil {
		tool, err = s.rdma.begin(ctx, s.rdmaArgs(port, "")...)
	}
	if err == nil {
		defer tool.end()
		err = tool.listening(ctx, port)
	}
	if err != nil {
		return s.giveUp(err)
	}
	if err := s.tell(rdmaStep{Port: port}); err != nil {
		return err
	}
	step, err := s.hear(left + s.limits.answer)
	if err != nil {
		return err
	}
	if step.Mbps == 0 {
		return nil
	}
	s.more = append(s.more, netcheck.Flow{Rail: s.rail, NIC: s.out.nic.Name, Kind: "rdma", Mbps: step.Mbps})
	return nil
}

// rdmaSend runs the tool's client and reports its measurement.
func (s *session) rdmaSend(ctx context.Context, left time.Duration) error {
	step, err := s.hear(left + s.limits.answer)
	if err != nil {
		return err
	}
	if step.Port == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, left)
	defer cancel()
	rate, err := s.rdma.run(ctx, s.rdmaArgs(step.Port, s.peer.String())...)
	if err != nil {
		return s.giveUp(err)
	}
	return s.tell(rdmaStep{Mbps: rate})
}

// giveUp keeps the reason why this end's tool has measured nothing, and sends an empty step to the other end.
func (s *session) giveUp(err error) error {
	s.notice(RDMASkipped, s.rdma.hca, fmt.Sprintf("%s was not tested by RDMA: %v", s.rdma.hca, err))
	return s.tell(rdmaStep{})
}

// rdmaArgs are the arguments of the tool's server, or with host of its client. Client and server must agree on the
// number of messages: it depends on the slower of the two interfaces.
func (s *session) rdmaArgs(port int, host string) []string {
	speed := s.mbps
	if speed == 0 {
		speed = rdmaGbps * 1000
	}
	n := max(int(float64(speed)*1e6/8*rdmaTime.Seconds())/rdmaMessage, 10)
	args := []string{"-d", s.rdma.hca, "-p", strconv.Itoa(port), "-F", "-s", strconv.Itoa(rdmaMessage),
		"-n", strconv.Itoa(n), "--report_gbits"}
	if host == "" {
		return args
	}
	return append(args, "--out_json", "--out_json_file=/dev/fd/3", host)
}

// freePort is an ephemeral port that was free a moment ago.
func (s *session) freePort(ctx context.Context) (int, error) {
	ln, err := s.out.listen(ctx)
	if err != nil {
		return 0, err
	}
	addr, err := netip.ParseAddrPort(ln.Addr().String())
	return int(addr.Port()), errors.Join(err, ln.Close())
}

// child is a running tool, in a process group of its own, so that none of its children survives.
type child struct {
	cmd    *exec.Cmd
	path   string
	limits limits
	words  tail // of stdout and stderr
	report chan []byte
	done   chan struct{}
	err    error // once done is closed
}

// Start starts a command and returns the function that waits for it.
type Start func(*exec.Cmd) (wait func() error, err error)

func (s Start) command(cmd *exec.Cmd) (wait func() error, err error) {
	if s == nil {
		return cmd.Wait, cmd.Start()
	}
	return s(cmd)
}

// begin starts the tool, whose file descriptor 3 takes its report.
func (e rdmaEnd) begin(ctx context.Context, args ...string) (*child, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	c := &child{path: e.tool, limits: e.limits, report: make(chan []byte, 1), done: make(chan struct{})}
	c.cmd = exec.CommandContext(ctx, e.tool, args...)
	c.cmd.Stdout, c.cmd.Stderr, c.cmd.ExtraFiles = &c.words, &c.words, []*os.File{w}
	c.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.cmd.Cancel = func() error { return syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL) }
	c.cmd.WaitDelay = e.limits.output
	wait, err := e.start.command(c.cmd)
	w.Close()
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("starting %s: %w", e.tool, cause(err))
	}
	go c.collect(r, wait)
	return c, nil
}

// collect reads the report and reaps the tool.
func (c *child) collect(r *os.File, wait func() error) {
	read := make(chan struct{})
	go func() {
		defer close(read)
		b, _ := io.ReadAll(io.LimitReader(r, maxReport+1))
		c.report <- b
		_, _ = io.Copy(io.Discard, r)
	}()
	c.err = wait()
	// All children of the tool end with it, and with them the last writer of the pipe.
	_ = syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL)
	_ = r.SetReadDeadline(time.Now().Add(c.limits.output))
	<-read
	r.Close()
	close(c.done)
}

// end kills the tool and all that it has started, and waits until it is reaped.
func (c *child) end() {
	select {
	case <-c.done: // its number may be another's by now
	default:
		_ = syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL)
	}
	<-c.done
}

// failed describes how the tool ended.
func (c *child) failed(ctx context.Context) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%s was not done in time", c.path)
	}
	return fmt.Errorf("%s ended early: %w: %s", c.path, c.err, c.words.last())
}

// listening waits until the tool's server can be reached.
func (c *child) listening(ctx context.Context, port int) error {
	ctx, cancel := context.WithTimeout(ctx, c.limits.listen)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-c.done:
			return c.failed(ctx)
		case <-ctx.Done():
			return fmt.Errorf("%s does not listen on port %d", c.path, port)
		case <-tick.C:
			if listens(port) {
				return nil
			}
		}
	}
}

// listens looks for a listener on a TCP port, as this process sees the network.
func listens(port int) bool {
	for _, file := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
		f, err := os.Open(file)
		if err != nil {
			continue
		}
		found := hasListener(f, port)
		f.Close()
		if found {
			return true
		}
	}
	return false
}

func hasListener(r io.Reader, port int) bool {
	const stateListen = "0A"
	want := fmt.Sprintf(":%04X", port)
	for lines := bufio.NewScanner(r); lines.Scan(); {
		f := strings.Fields(lines.Text())
		if len(f) > 3 && f[3] == stateListen && strings.HasSuffix(f[1], want) {
			return true
		}
	}
	return false
}

// run runs the tool's client and returns the rate in 10^6 bit/s.
func (e rdmaEnd) run(ctx context.Context, args ...string) (float64, error) {
	c, err := e.begin(ctx, args...)
	if err != nil {
		return 0, err
	}
	defer c.end()
	<-c.done
	if c.err != nil {
		return 0, c.failed(ctx)
	}
	rate, err := parseReport(<-c.report)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", e.tool, err)
	}
	return rate, nil
}

// maxMbps is more than any interface has.
const maxMbps = 1e8

// rateNames are the names of the average rate in versions of perftest.
var rateNames = []string{"bw_avg", "BW_average", "bw_average"}

// parseReport finds the average rate in the tool's report, which is in Gbit/s, and returns 10^6 bit/s.
func parseReport(report []byte) (float64, error) {
	if len(report) > maxReport {
		return 0, fmt.Errorf("its report is longer than %d bytes", maxReport)
	}
	var doc struct {
		Results map[string]json.RawMessage `json:"results"`
	}
	d := json.NewDecoder(bytes.NewReader(report))
	if err := d.Decode(&doc); err != nil {
		return 0, fmt.Errorf("its report is no JSON: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return 0, errors.New("its report is more than one JSON value")
	}
	for _, name := range rateNames {
		raw, ok := doc.Results[name]
		if !ok {
			continue
		}
		var gbps float64
		if err := json.Unmarshal(raw, &gbps); err != nil {
			return 0, fmt.Errorf("its report has %s %q: need a number", name, oneLine(string(raw)))
		}
		if gbps <= 0 || gbps*1000 > maxMbps {
			return 0, fmt.Errorf("its report has %s %g: need Gbit/s above 0, at most %g", name, gbps, maxMbps/1000)
		}
		return gbps * 1000, nil
	}
	return 0, errors.New("its report has no average rate")
}

// tail keeps the end of its input.
type tail struct{ b []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if len(t.b) > maxWords {
		t.b = append([]byte(nil), t.b[len(t.b)-maxWords:]...)
	}
	return len(p), nil
}

// last is the last line that is not empty.
func (t *tail) last() string {
	lines := strings.Split(strings.TrimSpace(string(t.b)), "\n")
	return oneLine(lines[len(lines)-1])
}
