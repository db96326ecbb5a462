package serve

import (
	"encoding/base64"
	"encoding/json"
	"strconv"
	"strings"

	"dlrover-run/netcheck"
)

// appendJSON appends an assignment as encoding/json writes it, which takes four times as long. It fails as that does.
func appendJSON(b []byte, a *netcheck.Assignment) ([]byte, error) {
	p := printer{b: b}
	p.object(func() { p.assignment(a) })
	return p.b, p.err
}

// printer appends members of objects; those that may be left out when they are empty.
type printer struct {
	b     []byte
	first bool // in an object or array
	err   error
}

func (p *printer) assignment(a *netcheck.Assignment) {
	p.member("seq")
	p.b = strconv.AppendUint(p.b, a.Seq, 10)
	p.member("duty")
	p.quote(string(a.Duty))
	p.int("round", a.Round)
	p.text("test", a.Test)
	if q := &a.Peer; q.ID != "" || q.Name != "" || q.Addr != "" || q.NICs != nil || q.Addrs != nil {
		p.member("peer")
		p.object(func() { p.peer(q) })
	}
	if len(a.Key) > 0 {
		p.member("key")
		p.b = append(base64.StdEncoding.AppendEncode(append(p.b, '"'), a.Key), '"')
	}
	p.int("left", int(a.Left))
	p.yes("quick", a.Quick)
	p.yes("torch", a.Torch)
	p.int("rank", a.Rank)
	p.int("world", a.World)
	p.texts("allow", a.Allow)
	if a.Verdict != nil {
		p.member("verdict")
		p.any(a.Verdict)
	}
}

func (p *printer) peer(q *netcheck.Peer) {
	p.text("id", q.ID)
	p.text("name", q.Name)
	p.text("addr", q.Addr)
	p.array("nics", len(q.NICs), func(i int) { p.object(func() { p.nic(&q.NICs[i]) }) })
	p.texts("addrs", q.Addrs)
}

func (p *printer) nic(n *netcheck.NIC) {
	p.member("name")
	p.quote(n.Name)
	p.member("addr")
	p.quote(n.Addr)
	p.int("mbps", n.Mbps)
	p.int("mtu", n.MTU)
	p.text("hca", n.HCA)
	p.text("cc", n.CC)
	p.int("loopback", n.Lo)
}

func (p *printer) object(members func()) {
	p.b, p.first = append(p.b, '{'), true
	members()
	p.b, p.first = append(p.b, '}'), false
}

func (p *printer) comma() {
	if !p.first {
		p.b = append(p.b, ',')
	}
	p.first = false
}

func (p *printer) member(name string) {
	p.comma()
	p.b = append(append(append(p.b, '"'), name...), `":`...)
}

func (p *printer) text(name, v string) {
	if v != "" {
		p.member(name)
		p.quote(v)
	}
}

func (p *printer) int(name string, v int) {
	if v != 0 {
		p.member(name)
		p.b = strconv.AppendInt(p.b, int64(v), 10)
	}
}

func (p *printer) yes(name string, v bool) {
	if v {
		p.member(name)
		p.b = append(p.b, "true"...)
	}
}

func (p *printer) texts(name string, v []string) {
	p.array(name, len(v), func(i int) { p.quote(v[i]) })
}

func (p *printer) array(name string, n int, element func(i int)) {
	if n == 0 {
		return
	}
	p.member(name)
	p.b, p.first = append(p.b, '['), true
	for i := range n {
		p.comma()
		element(i)
	}
	p.b, p.first = append(p.b, ']'), false
}

// plain are the bytes that encoding/json writes as they are.
var plain = func() (t [256]bool) {
	for c := ' '; c <= '~'; c++ {
		t[c] = !strings.ContainsRune(`"\<>&`, c)
	}
	return t
}()

// quote leaves what is not plain to encoding/json.
func (p *printer) quote(s string) {
	for i := range len(s) {
		if !plain[s[i]] {
			p.any(s)
			return
		}
	}
	p.b = append(append(append(p.b, '"'), s...), '"')
}

func (p *printer) any(v any) {
	data, err := json.Marshal(v)
	if err != nil {
		p.err = err
	}
	p.b = append(p.b, data...)
}
