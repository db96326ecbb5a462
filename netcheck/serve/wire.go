package serve

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strconv"

	words "dlrover-run/internal/text"
	"dlrover-run/netcheck"
)

// Request is a message of a node and a request for its assignment. It has at most one message: that the node begins
// (Arrive), that it listens (Ready), how a test ended (Report), or that it leaves the check (Leave).
type Request struct {
	// ID is that of the launcher, which only it and the service know.
	ID string `json:"id"`
	// Visit is a random text that the node makes for every check that it takes part in, of 1 to maxVisit bytes. A
	// repeated Arrive with the same Visit counts once, and the remains of an earlier visit do not count.
	Visit string `json:"visit"`
	// Seq is the number of the newest assignment that the node has, 0 for none.
	Seq    uint64           `json:"seq,omitempty"`
	Arrive *netcheck.Node   `json:"arrive,omitempty"`
	Ready  *Ready           `json:"ready,omitempty"`
	Report *netcheck.Result `json:"report,omitempty"`
	Leave  bool             `json:"leave,omitempty"`
	// Listens is where the node listens already for its next test, host:port by rail. It comes with Arrive and Report. An
	// older node does not send it, and an older service waits for Ready all the same.
	Listens []string `json:"listens,omitempty"`
	// NoWait: answer at once.
	NoWait bool `json:"no_wait,omitempty"`
}

// Ready reports that the serving end of a test listens at Addrs, host:port by rail.
type Ready struct {
	Test  string   `json:"test"`
	Addrs []string `json:"addrs"`
}

// Introduce is the duty, without a number, of a node whose visit the service does not know: to Arrive. The service may
// be a new one. The node's running assignment is void.
const Introduce netcheck.Duty = "introduce"

// Bounds of a Request. Texts are in bytes.
const (
	maxBody     = 256 << 10
	maxVisit    = 64
	maxRails    = 16
	MaxText     = 512 // of Result.Text, and of the texts of a node
	MaxLine     = 1024
	maxName     = 512 // of an ID, a name, an address: rendezvous.MaxName
	maxWord     = 128 // of everything short
	maxAspects  = 16
	maxFlows    = 4 * maxRails
	maxDevices  = 4096
	maxCPU      = 100 << 16
	maxMbps     = 100_000_000
	maxPartners = 1 << 20
)

// Errors of a Hub.
var (
	// errBadRequest: the request cannot be understood. Trying again is useless.
	errBadRequest = errors.New("the check cannot be spoken to")
	// errNotTold: the rendezvous has not told this launcher to be checked, or not yet.
	errNotTold = errors.New("no check is asked of this launcher")
	// ErrUnknownRun: nothing has been checked in the run.
	ErrUnknownRun = errors.New("no check has been made")
	// errLimit and errBusy: the service has too much to do; the latter passes.
	errLimit = errors.New("the service keeps too many checks")
	errBusy  = errors.New("the service reads too many large requests at once")
	// errClosed: the service is shutting down.
	errClosed = errors.New("the service of checks is shutting down")
)

// wireErrors maps errors to a status and a stable code. Those that the rendezvous has, too, have its codes.
var wireErrors = []struct {
	err    error
	status int
	code   string
}{
	{errBadRequest, http.StatusBadRequest, "bad_request"},
	{errNotTold, http.StatusNotFound, "unknown_node"},
	{ErrUnknownRun, http.StatusNotFound, "unknown_run"},
	{errLimit, http.StatusTooManyRequests, "limit"},
	{errBusy, http.StatusServiceUnavailable, "busy"},
	{errClosed, http.StatusServiceUnavailable, "closed"},
}

func statusOf(err error) (int, string) {
	for _, w := range wireErrors {
		if errors.Is(err, w.err) {
			return w.status, w.code
		}
	}
	return http.StatusInternalServerError, "internal"
}

// decode reads exactly one Request, and checks it. Fields that only newer launchers know are left out.
func decode(data []byte) (req Request, err error) {
	if err := json.Unmarshal(data, &req); err != nil {
		return req, fmt.Errorf("%w: %w", errBadRequest, err)
	}
	return req, req.check()
}

// check reports the first rule that the request breaks.
func (q *Request) check() error {
	b := bounds{}
	b.text("id", q.ID, 1, maxName)
	b.text("visit", q.Visit, 1, maxVisit)
	said := 0
	for _, s := range []bool{q.Arrive != nil, q.Ready != nil, q.Report != nil, q.Leave} {
		if s {
			said++
		}
	}
	b.number("things that a request says", float64(said), 0, 1)
	if q.Arrive != nil {
		b.node(q.Arrive)
		b.that(q.Arrive.ID == "" || q.Arrive.ID == q.ID, "arrive.id: differs from that of the request")
	}
	if q.Ready != nil {
		b.text("ready.test", q.Ready.Test, 1, maxWord)
		b.that(len(q.Ready.Addrs) > 0, "ready.addrs: is empty")
		b.listens("ready.addrs", q.Ready.Addrs)
	}
	b.listens("listens", q.Listens)
	if q.Report != nil {
		b.result(q.Report)
	}
	return b.err
}

// bounds keeps the first rule that was broken.
type bounds struct{ err error }

func (b *bounds) that(ok bool, format string, args ...any) {
	if !ok && b.err == nil {
		b.err = fmt.Errorf("%w: %s", errBadRequest, fmt.Sprintf(format, args...))
	}
}

// text and number are called dozens of times for every request, and format an error only for bad values.

func (b *bounds) text(what, s string, least, most int) {
	if len(s) < least || len(s) > most || !words.Printable(s) {
		b.that(false, "%s %.60q of %d bytes: need %d to %d bytes of UTF-8 in one line, without control characters",
			what, s, len(s), least, most)
	}
}

func (b *bounds) number(what string, v, least, most float64) {
	if !(v >= least && v <= most) { // nor is NaN right
		b.that(false, "%s %v: need %v to %v", what, v, least, most)
	}
}

func (b *bounds) most(what string, n, most int) {
	b.that(n <= most, "%s: %d of them; at most %d are taken", what, n, most)
}

func (b *bounds) node(n *netcheck.Node) {
	b.text("name", n.Name, 1, maxName)
	b.text("addr", n.Addr, 0, maxName)
	b.text("switch", n.Switch, 0, maxName)
	b.text("domain", n.Domain, 0, maxName)
	b.text("no_torch", n.NoTorch, 0, MaxText)
	b.number("gpus", float64(n.GPUs), 0, maxDevices)
	b.number("cpu", float64(n.CPU), 0, maxCPU)
	b.most("nics", len(n.NICs), maxRails)
	b.most("covered", len(n.Covered), maxAspects)
	for _, a := range n.Covered {
		b.text("covered", a, 1, maxWord)
	}
	b.findings(n.Findings)
	for _, nic := range n.NICs {
		b.nic(nic)
	}
}

func (b *bounds) nic(n netcheck.NIC) {
	b.text("name of a NIC", n.Name, 1, maxWord)
	_, err := netip.ParseAddr(n.Addr)
	b.that(err == nil, "address %.60q of NIC %.60q: need an IP address", n.Addr, n.Name)
	b.number("mbps of NIC "+strconv.Quote(n.Name), float64(n.Mbps), 0, maxMbps)
	b.number("mtu of NIC "+strconv.Quote(n.Name), float64(n.MTU), 0, 1<<20)
	b.number("loopback of NIC "+strconv.Quote(n.Name), float64(n.Lo), 0, maxMbps)
	b.text("hca", n.HCA, 0, maxWord)
	b.text("cc", n.CC, 0, maxWord)
}

func (b *bounds) findings(fs []netcheck.Finding) {
	b.most("findings", len(fs), netcheck.MaxFindings)
	for _, f := range fs {
		b.that(f.Severity == netcheck.Info || f.Severity == netcheck.Warn || f.Severity == netcheck.Fatal,
			"severity %.60q of a finding: need info, warn or fatal", f.Severity)
		for _, s := range []string{f.Check, f.Kind, f.Entity, f.Metric, f.Unit, f.Direction} {
			b.text("a word of a finding", s, 0, maxWord)
		}
		b.text("peer of a finding", f.Peer, 0, maxName)
		b.text("text of a finding", f.Text, 0, MaxLine)
		b.number("round of a finding", float64(f.Round), 0, maxPartners)
	}
}

func (b *bounds) listens(what string, addrs []string) {
	b.most(what, len(addrs), maxRails)
	for _, a := range addrs {
		b.text("address", a, 1, maxName)
		_, port, err := net.SplitHostPort(a)
		n, bad := strconv.ParseUint(port, 10, 16)
		b.that(err == nil && bad == nil && n > 0, "address %.60q: need host:port", a)
	}
}

// ends are the classes that a node may report; the others are judgements.
var ends = []netcheck.Class{
	netcheck.OK, netcheck.Refused, netcheck.Unreachable, netcheck.Auth, netcheck.Stalled, netcheck.Reset, netcheck.MTU,
	netcheck.Failed, netcheck.Own, netcheck.Canceled,
}

func (b *bounds) result(r *netcheck.Result) {
	b.text("report.test", r.Test, 1, maxWord)
	b.text("report.text", r.Text, 0, MaxText)
	known := false
	for _, c := range ends {
		known = known || r.Class == c
	}
	b.that(known, "report.class %.60q: need one of %q", r.Class, ends)
	b.most("flows", len(r.Flows), maxFlows)
	for _, f := range r.Flows {
		b.flow(f)
	}
	if t := r.Torch; t != nil {
		b.torch(t)
	}
	b.findings(r.Findings)
}

func (b *bounds) flow(f netcheck.Flow) {
	b.number("rail", float64(f.Rail), 0, maxRails-1)
	b.text("nic", f.NIC, 0, maxWord)
	b.that(f.Kind == "" || f.Kind == "rdma", "kind %.60q of a flow: need \"\" or rdma", f.Kind)
	b.number("rate", f.Mbps, 0, maxMbps)
	for _, x := range f.Bounds() {
		b.number(x.Name, x.Value, 0, x.Most)
	}
}

func (b *bounds) torch(t *netcheck.TorchResult) {
	for _, s := range []string{t.Backend, t.Torch, t.Device, t.Transport} {
		b.text("a word of PyTorch's", s, 0, MaxText)
	}
	b.most("matmul", len(t.Matmul), maxDevices)
	for _, v := range append([]float64{t.AllReduce, t.Latency, t.BusMBps, float64(t.Bytes)}, t.Matmul...) {
		b.number("a figure of PyTorch's", v, 0, 1e15)
	}
}

// Fit cuts texts and lists of q from outside of the node's program, such as the output of a tool, to the limits of the
// service. It changes the values that q refers to.
func (q *Request) Fit() {
	if n := q.Arrive; n != nil {
		fit(maxName, &n.Name, &n.Addr, &n.Switch, &n.Domain)
		fit(MaxText, &n.NoTorch)
		n.NICs = n.NICs[:min(len(n.NICs), maxRails)]
		n.Findings = fitFindings(n.Findings)
	}
	if r := q.Report; r != nil {
		fit(MaxText, &r.Text)
		r.Flows = r.Flows[:min(len(r.Flows), maxFlows)]
		if t := r.Torch; t != nil {
			fit(MaxText, &t.Backend, &t.Torch, &t.Device, &t.Transport)
		}
		r.Findings = fitFindings(r.Findings)
	}
}

// fitFindings keeps the fatal ones first: they decide.
func fitFindings(fs []netcheck.Finding) []netcheck.Finding {
	for _, keep := range []func(netcheck.Severity) bool{
		func(s netcheck.Severity) bool { return s != netcheck.Info },
		func(s netcheck.Severity) bool { return s == netcheck.Fatal },
	} {
		if len(fs) > netcheck.MaxFindings {
			fs = only(fs, keep)
		}
	}
	fs = fs[:min(len(fs), netcheck.MaxFindings)]
	for i := range fs {
		f := &fs[i]
		fit(maxWord, &f.Check, &f.Kind, &f.Entity, &f.Metric, &f.Unit, &f.Direction)
		fit(maxName, &f.Peer)
		fit(MaxLine, &f.Text)
	}
	return fs
}

func only(fs []netcheck.Finding, keep func(netcheck.Severity) bool) (out []netcheck.Finding) {
	for _, f := range fs {
		if keep(f.Severity) {
			out = append(out, f)
		}
	}
	return out
}

func fit(most int, texts ...*string) {
	for _, s := range texts {
		*s = words.Line(*s, most)
	}
}
