package run

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/app/token"
	"dlrover-run/internal/duration"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/scheduler"
	"dlrover-run/rendezvous"
)

// rendezvous decides how and where the nodes meet.
func (r *resolver) rendezvous() error {
	conf, err := argv.ParseConf(r.c.String("rdzv-conf"))
	if err != nil {
		return err
	}
	if err := r.pickBackend(); err != nil {
		return err
	}
	r.pickRunID()
	if err := r.applyConf(conf); err != nil {
		return err
	}
	if err := r.misplaced(); err != nil {
		return err
	}
	if r.s.backend == local && r.s.params.Min == 1 {
		r.s.params.Max = 1 // no other node can join
	}
	r.s.params.Static = r.s.backend == static
	r.lastCall()
	if r.s.backend == static && r.s.node.Rank < 0 {
		r.s.node.Rank = 0
	}
	if r.s.backend == static && r.s.node.Rank >= r.s.params.Max {
		return fmt.Errorf("--node-rank=%d: with --nnodes=%d it must be from 0 to %d",
			r.s.node.Rank, r.s.params.Max, r.s.params.Max-1)
	}
	if r.s.backend == local && r.s.params.Min > 1 {
		return fmt.Errorf("--standalone runs one node, but --nnodes=%s needs %d; leave out one of the two",
			r.c.String("nnodes"), r.s.params.Min)
	}
	r.s.node.Addr = r.address()
	if r.s.backend != local {
		r.s.node.Addrs = r.host.addrs()
	}
	if r.s.node.IP == "" {
		r.s.node.IP = r.s.node.Addr
	}
	return nil
}

// quietCall is how long a first world of MIN:MAX nodes waits after the newest node, by default.
const quietCall = 2 * time.Second

// lastCall decides how long a first world of MIN nodes waits for more. It waits for the nodes that a scheduler
// promises, and else only while nodes keep joining.
func (r *resolver) lastCall() {
	if p := &r.s.params; p.LastCall == 0 && p.Min < p.Max {
		p.Quiet, p.Promised = quietCall, r.promised()
	}
}

// promised is the number of nodes in a scheduler's variables; 0 without any. The source of the rendezvous's address
// does not matter here.
func (r *resolver) promised() int {
	f := r.s.scheduler
	if r.c.String("scheduler") == "none" {
		return 0
	}
	if f.Name == "" {
		f, _ = scheduler.Detect(scheduler.Auto, r.system(r.s.params.Max)) // contradictory variables promise nothing
	}
	n, _ := strconv.Atoi(r.lookup("NODE_NUM"))
	if f.Nodes > 0 {
		n = f.Nodes
	}
	return min(max(n, 0), rendezvous.MaxNodes)
}

// misplaced warns of options that have no effect with the chosen backend.
func (r *resolver) misplaced() error {
	if r.s.backend == master && r.c.IsSet("topology-file") {
		return fmt.Errorf("--topology-file is read by whoever serves the rendezvous: give it to dlrover-master")
	}
	for _, name := range []string{"master-addr", "master-port"} {
		if r.c.IsSet(name) && r.s.backend != static {
			r.warn("--%s has no effect with the %s rendezvous", name, r.s.backend)
		}
	}
	return nil
}

func (r *resolver) pickBackend() error {
	name, endpoint := r.c.String("rdzv-backend"), r.c.String("rdzv-endpoint")
	daemon := r.lookup("DLROVER_MASTER_ADDR")
	switch {
	case r.c.Bool("standalone"):
		r.s.backend, r.s.host = local, "127.0.0.1"
		return nil
	case r.meetsByScheduler():
		return r.meetByScheduler()
	case daemon != "" && !r.c.IsSet("rdzv-backend") && endpoint == "":
		return r.endpoint(master, daemon, 0)
	case name == "dlrover-master":
		if endpoint == "" {
			endpoint = daemon
		}
		return r.endpoint(master, endpoint, 0)
	case name == "c10d":
		return r.endpoint(c10d, endpoint, defaultC10dPort)
	case name == "static":
		return r.pickStatic(endpoint)
	case name == "etcd" || name == "etcd-v2":
		return fmt.Errorf("--rdzv-backend=%s is not available yet in this version; use c10d, static or dlrover-master", name)
	}
	return fmt.Errorf("--rdzv-backend=%s is unknown; use static, c10d or dlrover-master", name)
}

// pickStatic reads the endpoint of the static backend. One node without an address of its own needs no port. As in
// torchrun 2.14, two jobs on one machine then do not meet on 29500.
func (r *resolver) pickStatic(endpoint string) error {
	if endpoint != "" {
		return r.endpoint(static, endpoint, defaultMasterPort)
	}
	port := defaultMasterPort
	if r.c.IsSet("master-port") {
		port = r.c.Int("master-port")
	} else if r.s.params.Max == 1 {
		r.s.backend, r.s.host = local, "127.0.0.1"
		return nil
	}
	if port < 0 || port > 65535 {
		return fmt.Errorf("--master-port=%d: need a port from 0 to 65535", port)
	}
	host := strings.Trim(r.c.String("master-addr"), "[]")
	r.s.backend, r.s.host, r.s.port = static, host, port
	if port == 0 && r.s.params.Max > 1 {
		return fmt.Errorf("--master-port=0: several nodes need a fixed port")
	}
	return nil
}

func (r *resolver) endpoint(b backend, text string, port int) error {
	if text == "" && b == master {
		return fmt.Errorf("--rdzv-backend=dlrover-master needs the daemon's address: set DLROVER_MASTER_ADDR or " +
			"--rdzv-endpoint to host:port")
	}
	host, port, err := argv.ParseEndpoint(text, port)
	if err != nil {
		return err
	}
	if port == 0 && (b == master || r.s.params.Max > 1) {
		return fmt.Errorf("rendezvous endpoint %q: the nodes need one fixed port, such as %s",
			text, net.JoinHostPort(host, strconv.Itoa(defaultC10dPort)))
	}
	r.s.backend, r.s.host, r.s.port = b, host, port
	return nil
}

func (r *resolver) pickRunID() {
	r.s.runID = r.c.String("rdzv-id")
	if job := r.lookup("ELASTIC_JOB_NAME"); job != "" && !r.c.IsSet("rdzv-id") {
		r.s.runID = job
	}
	if r.s.runID == "none" && !r.c.IsSet("rdzv-id") && r.meetsByScheduler() && r.s.scheduler.RunID != "" {
		r.s.runID = r.s.scheduler.RunID
	}
	if r.s.backend == local && (r.c.Bool("standalone") || r.s.runID == "none") {
		r.s.runID = r.host.id
	}
	if r.s.runID == "none" && r.s.backend == master {
		r.warn("no --rdzv-id: all jobs without one share the run \"none\" of this daemon")
	}
	if r.s.runID == "." || r.s.runID == ".." {
		r.s.runID = "run" + r.s.runID // these two cannot be part of a URL
	}
	if r.s.runID == "" {
		r.s.runID = r.host.id
		r.warn("--rdzv-id is empty: this node uses the random id %s; nodes meet only under the same id", r.s.runID)
	}
}

// conf keys that have an effect in torchrun, but none here.
func inert() []string {
	return []string{"close_timeout", "heartbeat_timeout", "keep_alive_interval", "keep_alive_max_attempt", "use_libuv",
		"protocol", "rank", "pend_timeout"}
}

func (r *resolver) applyConf(conf map[string]string) error {
	if r.s.connect = time.Minute; r.meetsByScheduler() {
		r.s.connect = startPatience
	}
	for key, text := range conf {
		if err := r.applyKey(key, text); err != nil {
			return fmt.Errorf("--rdzv-conf %s=%s: %w", key, text, err)
		}
	}
	return nil
}

func (r *resolver) applyKey(key, text string) (err error) {
	p := &r.s.params
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
		r.s.connect, err = seconds(text)
	case "node_unit":
		if !r.c.IsSet("node-unit") {
			if p.Unit, err = strconv.Atoi(text); err != nil || p.Unit < 1 {
				err = fmt.Errorf("need a number from 1")
			}
		}
	case "is_host":
		var b bool
		b, err = truth(text)
		r.s.isHost = &b
	case "store_type":
		if text != "tcp" {
			err = fmt.Errorf("only tcp can work here")
		}
	default:
		if slices.Contains(inert(), key) {
			r.warn("--rdzv-conf %s has no effect here", key)
		} else {
			r.warn("--rdzv-conf %s is not known and has no effect", key)
		}
	}
	return err
}

func seconds(text string) (time.Duration, error) {
	return duration.Within(text, time.Millisecond, maxDeadline)
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
func (r *resolver) address() string {
	if a := r.c.String("local-addr"); a != "" {
		return a
	}
	if r.s.host == "::1" {
		return r.s.host
	}
	if r.s.backend == local || token.Loopback(r.s.host) {
		return "127.0.0.1"
	}
	if ip := r.lookup("POD_IP"); ip != "" {
		return ip
	}
	if r.meetsByScheduler() {
		return r.seenElsewhere(r.scheduledAddress())
	}
	if r.s.backend == static && r.s.node.Rank == 0 {
		return r.s.host
	}
	return r.seenElsewhere(r.host.route(r.s.host, r.s.port))
}

// seenElsewhere replaces a loopback address by one that other hosts can reach. /etc/hosts may give this host's own
// name a loopback address. The replacement is the address of the default route, or else this host's first.
func (r *resolver) seenElsewhere(addr string) string {
	own := r.host.addrs()
	if !token.Loopback(addr) || r.s.params.Max == 1 || len(own) == 0 {
		return addr
	}
	best, why := own[0], "its first one"
	// addresses for documentation (RFC 5737, RFC 3849), so the default route leads there
	for _, far := range []string{"192.0.2.1", "2001:db8::1"} {
		if a := r.host.route(far, 1); slices.Contains(own, a) {
			best, why = a, "that of its default route"
			break
		}
	}
	r.s.addrWhy = fmt.Sprintf("%s is a loopback address on this host (see /etc/hosts): other nodes are told %s, %s; "+
		"give --local-addr for another one", r.s.host, best, why)
	return best
}
