package run

import (
	"cmp"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/app/member"
	"dlrover-run/internal/app/run/elector"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/app/token"
	"dlrover-run/internal/duration"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/scheduler"
	"dlrover-run/rendezvous"
)

// backend is how the nodes of this job meet.
type backend string

const (
	local  backend = "local"          // one node; the rendezvous stays inside this process
	static backend = "static"         // node rank 0 serves it at the master's address and port
	c10d   backend = "c10d"           // the node that owns the endpoint's host serves it
	master backend = "dlrover-master" // dlrover-master serves it
	etcd   backend = "etcd"           // the nodes elect in etcd who serves it
)

// Default ports, torchrun's.
const (
	defaultMasterPort = 29500
	defaultC10dPort   = 29400
)

// rdzvSettings is how and where the nodes meet.
type rdzvSettings struct {
	backend     backend
	host        string
	port        int
	others      []string // HOST:PORT of the other masters of an election, or of the other members of etcd
	etcd        member.Etcd
	leader      string // HOST:PORT of the node that the others have elected in etcd, when this one joins
	isHost      *bool  // rdzv-conf is_host
	alone       bool   // rdzv-conf alone
	byScheduler bool   // the scheduler's variables decide
	connect     time.Duration
	topology    string
	page        http.Handler // for browsers that come to a rendezvous in this process; nil: there is none
	addrWhy     string       // why this node's address is not the one from which it reaches the rendezvous; "": it is
}

// where is the address at which the nodes meet, or those of several masters with commas between.
func (s *rdzvSettings) where() string {
	return strings.Join(append([]string{net.JoinHostPort(s.host, strconv.Itoa(s.port))}, s.others...), ",")
}

// visitors makes the service's handler for browsers; nil: there is none.
func (s *rdzvSettings) visitors() func(*service.Service) http.Handler {
	if s.page == nil {
		return nil
	}
	return func(*service.Service) http.Handler { return s.page }
}

// serves reports whether this node is the one to serve the rendezvous.
func (s *rdzvSettings) serves(nodeRank int, h hostFacts) bool {
	switch {
	case s.backend == local:
		return true
	case s.backend == static:
		return nodeRank == 0
	case s.backend == master || s.backend == etcd:
		return false
	case s.isHost != nil:
		return *s.isHost
	}
	return h.owns(s.host)
}

// meet decides how and where the nodes meet.
func (s *settings) meet(o *options) error {
	conf, err := argv.ParseConf(o.String("rdzv-conf"))
	if err != nil {
		return err
	}
	r, p, n := &s.rdzv, &s.params, &s.node
	if err := r.pick(o, &s.scheduler, p.Max); err != nil {
		return err
	}
	s.runID = r.runID(o, s.scheduler.RunID)
	if r.backend == etcd {
		if r.etcd, err = elector.Read(conf, strings.Split(r.where(), ","), o.Lookup); err != nil {
			return err
		}
	}
	if err := r.applyConf(o, conf, p); err != nil {
		return err
	}
	if err := r.checkOptions(o); err != nil {
		return err
	}
	if r.backend == local && p.Min == 1 {
		p.Max = 1 // no other node can join
	}
	if p.Static = r.backend == static; p.Static {
		n.Rank = max(n.Rank, 0)
	}
	if p.LastCall == 0 && p.Min < p.Max {
		p.Quiet, p.Promised = quietCall, promised(o, s.scheduler, p.Max)
	}
	if r.backend == static && n.Rank >= p.Max {
		return fmt.Errorf("--node-rank=%d: with --nnodes=%d it must be from 0 to %d", n.Rank, p.Max, p.Max-1)
	}
	if r.backend == local && p.Min > 1 {
		return fmt.Errorf("--standalone runs one node, but --nnodes=%s needs %d; leave out one of the two",
			o.String("nnodes"), p.Min)
	}
	n.Addr = r.address(o, s.scheduler.NodeRank, n.Rank, p.Max)
	if r.backend != local {
		n.Addrs = o.host.addrs()
	}
	n.IP = cmp.Or(n.IP, n.Addr)
	return nil
}

// quietCall is how long a first world of MIN:MAX nodes waits after the newest node, by default. It waits for the
// nodes that a scheduler promises, and else only while nodes keep joining.
const quietCall = 2 * time.Second

// promised is the number of nodes in a scheduler's variables; 0 without any. The source of the rendezvous's address
// does not matter here.
func promised(o *options, f scheduler.Facts, most int) int {
	if o.String("scheduler") == "none" {
		return 0
	}
	if f.Name == "" {
		f, _ = scheduler.Detect(scheduler.Auto, o.system(most)) // contradictory variables promise nothing
	}
	n, _ := strconv.Atoi(o.Lookup("NODE_NUM"))
	if f.Nodes > 0 {
		n = f.Nodes
	}
	return min(max(n, 0), rendezvous.MaxNodes)
}

// checkOptions warns of options that have no effect with the chosen backend.
func (s *rdzvSettings) checkOptions(o *options) error {
	if s.backend == master && o.IsSet("topology-file") {
		return fmt.Errorf("--topology-file is read by whoever serves the rendezvous: give it to dlrover-master")
	}
	for _, name := range []string{"master-addr", "master-port"} {
		if o.IsSet(name) && s.backend != static {
			o.Warn("--%s has no effect with the %s rendezvous", name, s.backend)
		}
	}
	return nil
}

// pick decides the backend and its endpoint; nodes is their number.
func (s *rdzvSettings) pick(o *options, f *scheduler.Facts, nodes int) error {
	name, endpoint := o.String("rdzv-backend"), o.String("rdzv-endpoint")
	daemon := o.Lookup("DLROVER_MASTER_ADDR")
	s.byScheduler = scheduled(f) && nodes > 1 && !o.namesRendezvous() && daemon == ""
	switch {
	case o.Bool("standalone"):
		s.backend, s.host = local, "127.0.0.1"
		return nil
	case s.byScheduler:
		return s.pickScheduled(o, f)
	case daemon != "" && !o.IsSet("rdzv-backend") && endpoint == "":
		return s.endpoint(master, daemon, 0, nodes)
	case name == "dlrover-master":
		return s.endpoint(master, cmp.Or(endpoint, daemon), 0, nodes)
	case name == "c10d":
		return s.endpoint(c10d, endpoint, defaultC10dPort, nodes)
	case name == "static" && endpoint != "":
		return s.endpoint(static, endpoint, defaultMasterPort, nodes)
	case name == "static":
		return s.pickStatic(o, nodes)
	case name == "etcd" || name == "etcd-v2":
		return s.endpoint(etcd, endpoint, elector.Port, nodes)
	}
	return fmt.Errorf("--rdzv-backend=%s is unknown; use static, c10d, etcd or dlrover-master", name)
}

// pickScheduled has node 0 serve the rendezvous. Ranks are the scheduler's as long as all its nodes are there, and
// nodes may be replaced.
func (s *rdzvSettings) pickScheduled(o *options, f *scheduler.Facts) error {
	host := strings.Trim(f.MasterAddr, "[]")
	if host == "" {
		return fmt.Errorf("%s does not say where node 0 is, as mpirun runs on another host: give all nodes --scheduler=%s "+
			"--master-addr=HOST, where HOST is that of node 0", f.Name, f.Name)
	}
	if f.NodeRank == 0 && host == "localhost" { // node 0's name for itself
		host = o.host.name
	}
	isHost := f.NodeRank == 0
	s.backend, s.host, s.port, s.isHost = c10d, host, f.MasterPort, &isHost
	switch name := o.String("rdzv-backend"); {
	case name == string(static) && o.IsSet("rdzv-backend"):
		s.backend = static
	case name != string(static) && name != string(c10d):
		return fmt.Errorf("--rdzv-backend=%s: where a scheduler says how nodes meet (%s) it is c10d or static", name, f.Name)
	}
	return nil
}

// pickStatic takes the master's address. One node without an address of its own needs no port. As in torchrun 2.14,
// two jobs on one machine then do not meet on 29500.
func (s *rdzvSettings) pickStatic(o *options, nodes int) error {
	port := defaultMasterPort
	if o.IsSet("master-port") {
		port = o.Int("master-port")
	} else if nodes == 1 {
		s.backend, s.host = local, "127.0.0.1"
		return nil
	}
	if port < 0 || port > 65535 {
		return fmt.Errorf("--master-port=%d: need a port from 0 to 65535", port)
	}
	s.backend, s.host, s.port = static, strings.Trim(o.String("master-addr"), "[]"), port
	if port == 0 && nodes > 1 {
		return fmt.Errorf("--master-port=0: several nodes need a fixed port")
	}
	return nil
}

func (s *rdzvSettings) endpoint(b backend, text string, port, nodes int) error {
	if text == "" && b == master {
		return fmt.Errorf("--rdzv-backend=dlrover-master needs the daemon's address: set DLROVER_MASTER_ADDR or " +
			"--rdzv-endpoint to host:port")
	}
	if text == "" && b == etcd {
		return fmt.Errorf("--rdzv-backend=etcd needs etcd's address: give --rdzv-endpoint=HOST:2379, or several with " +
			"commas between")
	}
	text, others, several := strings.Cut(text, ",")
	if several {
		if err := s.electedAmong(b, others, port); err != nil {
			return err
		}
	}
	host, port, err := argv.ParseEndpoint(text, port)
	if err != nil {
		return err
	}
	if port == 0 && (b == master || b == etcd || nodes > 1) {
		return fmt.Errorf("rendezvous endpoint %q: the nodes need one fixed port, such as %s",
			text, net.JoinHostPort(host, strconv.Itoa(defaultC10dPort)))
	}
	s.backend, s.host, s.port = b, host, port
	return nil
}

// electedAmong reads the addresses of further masters, or of further members of etcd.
func (s *rdzvSettings) electedAmong(b backend, addrs string, usual int) error {
	if b != master && b != etcd {
		return fmt.Errorf("rendezvous endpoint: several addresses are for --rdzv-backend=dlrover-master or etcd; %s has "+
			"one, not %q, too", b, addrs)
	}
	for _, text := range strings.Split(addrs, ",") {
		host, port, err := argv.ParseEndpoint(text, usual)
		if err != nil {
			return err
		}
		if strings.TrimSpace(text) == "" || port == 0 {
			return fmt.Errorf("rendezvous endpoint: %q among several needs a host and a port, such as master-1:50001", text)
		}
		s.others = append(s.others, net.JoinHostPort(host, strconv.Itoa(port)))
	}
	return nil
}

// runID names the run; scheduled is the scheduler's name for it.
func (s *rdzvSettings) runID(o *options, scheduled string) string {
	id := o.String("rdzv-id")
	if job := o.Lookup("ELASTIC_JOB_NAME"); job != "" && !o.IsSet("rdzv-id") {
		id = job
	}
	if id == "none" && !o.IsSet("rdzv-id") && s.byScheduler && scheduled != "" {
		id = scheduled
	}
	if s.backend == local && (o.Bool("standalone") || id == "none") {
		id = o.host.id
	}
	if id == "none" && (s.backend == master || s.backend == etcd) {
		o.Warn("no --rdzv-id: all jobs without one share the run \"none\" of this %s", whose(s.backend))
	}
	if id == "." || id == ".." {
		id = "run" + id // these two cannot be part of a URL
	}
	if id == "" {
		id = o.host.id
		o.Warn("--rdzv-id is empty: this node uses the random id %s; nodes meet only under the same id", id)
	}
	return id
}

func whose(b backend) string {
	if b == etcd {
		return "etcd"
	}
	return "daemon"
}

// conf keys that have an effect in torchrun, but none here.
func inert() []string {
	return []string{"close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt", "use_libuv",
		"protocol", "rank", "pend_timeout"}
}

func (s *rdzvSettings) applyConf(o *options, conf map[string]string, p *rendezvous.Params) error {
	if s.connect = time.Minute; s.byScheduler {
		s.connect = startPatience
	}
	for key, text := range conf {
		if err := s.applyKey(o, key, text, p); err != nil {
			return fmt.Errorf("--rdzv-conf %s=%s: %w", key, text, err)
		}
	}
	return nil
}

func (s *rdzvSettings) applyKey(o *options, key, text string, p *rendezvous.Params) (err error) {
	if s.backend == etcd && slices.Contains([]string{"is_host", "store_type", "alone"}, key) {
		return fmt.Errorf("it is for c10d; in etcd the nodes elect their server: leave it out")
	}
	switch key {
	case "join_timeout":
		p.JoinTimeout, err = seconds(text)
	case "timeout":
		if p.JoinTimeout == 0 {
			p.JoinTimeout, err = seconds(text)
		}
	case "last_call_timeout", "lastcall_timeout":
		p.LastCall, err = seconds(text)
	case "growth_delay":
		p.GrowthDelay, err = seconds(text)
	case "node_timeout":
		p.NodeTimeout, err = seconds(text)
	case "read_timeout":
		s.connect, err = seconds(text)
	case "node_unit":
		if !o.IsSet("node-unit") {
			if p.Unit, err = strconv.Atoi(text); err != nil || p.Unit < 1 {
				err = fmt.Errorf("need a number from 1")
			}
		}
	case "is_host":
		var b bool
		b, err = truth(text)
		s.isHost = &b
	case "alone":
		if s.alone, err = truth(text); s.backend == master {
			o.Warn("--rdzv-conf alone has no effect here: no node of the job serves the rendezvous")
		}
	case "store_type":
		if text != "tcp" {
			err = fmt.Errorf("only tcp can work here")
		}
	default:
		if slices.Contains(inert(), key) {
			o.Warn("--rdzv-conf %s has no effect here", key)
		} else {
			o.Warn("--rdzv-conf %s is not known and has no effect", key)
		}
	}
	return err
}

func seconds(text string) (time.Duration, error) {
	return duration.Within(text, time.Millisecond, feature.MaxDeadline)
}

func truth(text string) (bool, error) {
	switch strings.ToLower(text) {
	case "1", "true", "t", "yes", "y":
		return true, nil
	case "0", "false", "f", "no", "n":
		return false, nil
	}
	return false, fmt.Errorf("need true or false")
}

// address is the address at which other nodes reach this one: the user's, the pod's, or the address from which this
// host reaches the rendezvous. The host's name is not used, because it often does not resolve elsewhere.
func (s *rdzvSettings) address(o *options, scheduledRank, rank, nodes int) string {
	if a := o.String("local-addr"); a != "" {
		return a
	}
	if s.host == "::1" {
		return s.host
	}
	if s.backend == local || token.Loopback(s.host) {
		return "127.0.0.1"
	}
	if ip := o.Lookup("POD_IP"); ip != "" {
		return ip
	}
	if s.byScheduler {
		return s.seenElsewhere(o.host, s.scheduledAddress(o.host, scheduledRank), nodes)
	}
	if s.backend == static && rank == 0 {
		return s.host
	}
	return s.seenElsewhere(o.host, o.host.route(s.host, s.port), nodes)
}

// scheduledAddress is where the other nodes reach this one.
func (s *rdzvSettings) scheduledAddress(h hostFacts, rank int) string {
	if rank == 0 && s.host != h.name {
		return s.host
	}
	if a := h.route(s.host, s.port); rank != 0 && a != h.name {
		return a
	}
	if own := h.addrs(); len(own) > 0 { // node 0's name is not known yet, or is this host's
		return own[0]
	}
	return h.name
}

// seenElsewhere replaces a loopback address by one that other hosts can reach. /etc/hosts may give this host's own
// name a loopback address. The replacement is the address of the default route, or else this host's first.
func (s *rdzvSettings) seenElsewhere(h hostFacts, addr string, nodes int) string {
	own := h.addrs()
	if !token.Loopback(addr) || nodes == 1 || len(own) == 0 {
		return addr
	}
	best, why := own[0], "its first one"
	// addresses for documentation (RFC 5737, RFC 3849), so the default route leads there
	for _, far := range []string{"192.0.2.1", "2001:db8::1"} {
		if a := h.route(far, 1); slices.Contains(own, a) {
			best, why = a, "that of its default route"
			break
		}
	}
	s.addrWhy = fmt.Sprintf("%s is a loopback address on this host (see /etc/hosts): other nodes are told %s, %s; "+
		"give --local-addr for another one", s.host, best, why)
	return best
}
