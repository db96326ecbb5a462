package serve

import (
	"bytes"
	"strconv"

	"dlrover-run/netcheck"
)

// scan reads a Request as encoding/json writes one: without spaces, escapes and nulls, fields in their order. It is for
// what nearly all requests are, in a sixth of the time; false says that encoding/json has to look, which then decides.
// Texts that are likely need not be made anew.
func scan(data []byte, likely ...string) (q Request, ok bool) {
	s := scanner{in: data, ok: true, likely: likely}
	s.request(&q)
	return q, s.ok && len(s.in) == 0
}

// scanner has what is still to be read. When ok is false, nothing of what was read counts.
type scanner struct {
	in     []byte
	ok     bool
	likely []string
}

// field is a member of an object: its name, and a pointer to its value or a function that reads it.
type field struct {
	name string
	to   any
}

func (s *scanner) request(q *Request) {
	s.object(
		field{"id", &q.ID},
		field{"visit", &q.Visit},
		field{"seq", &q.Seq},
		field{"arrive", func() {
			q.Arrive = &netcheck.Node{}
			s.node(q.Arrive)
		}},
		field{"ready", func() {
			q.Ready = &Ready{}
			s.object(field{"test", &q.Ready.Test}, field{"addrs", &q.Ready.Addrs})
		}},
		field{"report", func() {
			q.Report = &netcheck.Result{}
			s.result(q.Report)
		}},
		field{"leave", &q.Leave},
		field{"no_wait", &q.NoWait})
}

// node reads no findings: most nodes have none, or many words in them.
func (s *scanner) node(n *netcheck.Node) {
	s.object(
		field{"id", &n.ID},
		field{"name", &n.Name},
		field{"addr", &n.Addr},
		field{"nics", func() {
			n.NICs = []netcheck.NIC{}
			s.array(func() {
				n.NICs = append(n.NICs, netcheck.NIC{})
				s.nic(&n.NICs[len(n.NICs)-1])
			})
		}},
		field{"switch", &n.Switch},
		field{"domain", &n.Domain},
		field{"gpus", &n.GPUs},
		field{"wants", &n.Wants},
		field{"bare", &n.Bare},
		field{"cpu", &n.CPU},
		field{"torch", &n.Torch},
		field{"no_torch", &n.NoTorch},
		field{"rdma", &n.RDMA},
		field{"covered", &n.Covered})
}

func (s *scanner) nic(n *netcheck.NIC) {
	s.object(
		field{"name", &n.Name},
		field{"addr", &n.Addr},
		field{"mbps", &n.Mbps},
		field{"mtu", &n.MTU},
		field{"hca", &n.HCA},
		field{"cc", &n.CC},
		field{"loopback", &n.Lo})
}

// result reads nothing of PyTorch, whose tests are few, and no findings.
func (s *scanner) result(r *netcheck.Result) {
	s.object(
		field{"test", &r.Test},
		field{"class", (*string)(&r.Class)},
		field{"text", &r.Text},
		field{"flows", func() {
			r.Flows = []netcheck.Flow{}
			s.array(func() {
				r.Flows = append(r.Flows, netcheck.Flow{})
				s.flow(&r.Flows[len(r.Flows)-1])
			})
		}})
}

func (s *scanner) flow(f *netcheck.Flow) {
	s.object(
		field{"rail", &f.Rail},
		field{"nic", &f.NIC},
		field{"kind", &f.Kind},
		field{"mbps", &f.Mbps},
		field{"low", &f.Low},
		field{"mid", &f.Mid},
		field{"stalls", &f.Stalls},
		field{"streams", &f.Streams},
		field{"retrans", &f.Retrans},
		field{"segments", &f.Segments},
		field{"rwnd_lim", &f.RwndLim},
		field{"cpu_bound", &f.CPUBound},
		field{"cc", &f.CC},
		field{"p50", &f.P50},
		field{"p99", &f.P99},
		field{"p999", &f.P999},
		field{"mtu", &f.MTU})
}

// object reads members, each at most once, in the order of fields.
func (s *scanner) object(fields ...field) {
	s.take('{')
	if s.next('}') {
		return
	}
	for s.ok {
		name := s.quoted()
		s.take(':')
		for len(fields) > 0 && fields[0].name != string(name) {
			fields = fields[1:]
		}
		if len(fields) == 0 {
			s.ok = false
			return
		}
		s.value(fields[0].to)
		fields = fields[1:]
		if !s.next(',') {
			s.take('}')
			return
		}
	}
}

// array calls element for each.
func (s *scanner) array(element func()) {
	s.take('[')
	if s.next(']') {
		return
	}
	for s.ok {
		element()
		if !s.next(',') {
			s.take(']')
			return
		}
	}
}

func (s *scanner) value(to any) {
	switch to := to.(type) {
	case func():
		to()
	case *string:
		*to = s.text()
	case *bool:
		*to = s.boolean()
	case *float64:
		*to = s.float()
	case *int:
		n, err := strconv.Atoi(string(s.number()))
		*to, s.ok = n, s.ok && err == nil
	case *uint64:
		n, err := strconv.ParseUint(string(s.number()), 10, 64)
		*to, s.ok = n, s.ok && err == nil
	case *[]string:
		*to = []string{}
		s.array(func() { *to = append(*to, string(s.quoted())) })
	case *[]float64:
		*to = make([]float64, 0, 4)
		s.array(func() { *to = append(*to, s.float()) })
	}
}

// next takes c if it comes next.
func (s *scanner) next(c byte) bool {
	if !s.ok || len(s.in) == 0 || s.in[0] != c {
		return false
	}
	s.in = s.in[1:]
	return true
}

func (s *scanner) take(c byte) { s.ok = s.next(c) }

func (s *scanner) text() string {
	text := s.quoted()
	for _, t := range s.likely {
		if t == string(text) {
			return t
		}
	}
	return string(text)
}

// quoted is a string of ASCII without escapes.
func (s *scanner) quoted() []byte {
	s.take('"')
	end := bytes.IndexByte(s.in, '"')
	if !s.ok || end < 0 {
		s.ok = false
		return nil
	}
	text := s.in[:end]
	for _, c := range text {
		if c < ' ' || c > '~' || c == '\\' {
			s.ok = false
			return nil
		}
	}
	s.in = s.in[end+1:]
	return text
}

func (s *scanner) boolean() bool {
	for _, word := range []string{"true", "false"} {
		if rest, ok := bytes.CutPrefix(s.in, []byte(word)); ok {
			s.in = rest
			return word == "true"
		}
	}
	s.ok = false
	return false
}

func (s *scanner) float() float64 {
	v, err := strconv.ParseFloat(string(s.number()), 64)
	s.ok = s.ok && err == nil
	return v
}

// number is one as JSON has them: [-] digits, without a 0 in front of others, [. digits] [e [+-] digits].
func (s *scanner) number() []byte {
	all := s.in
	s.next('-')
	if !s.next('0') {
		s.digits()
	}
	if s.next('.') {
		s.digits()
	}
	if s.next('e') || s.next('E') {
		_ = s.next('+') || s.next('-')
		s.digits()
	}
	return all[:len(all)-len(s.in)]
}

// digits takes one or more.
func (s *scanner) digits() {
	n := 0
	for n < len(s.in) && s.in[n] >= '0' && s.in[n] <= '9' {
		n++
	}
	s.in, s.ok = s.in[n:], s.ok && n > 0
}
