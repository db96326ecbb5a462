package native

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/hostfile"
	"dlrover-run/launcher/numa"
)

// The nodes that a command line of deepspeed names, this node among them, and the rendezvous address.

// IdleError is a command line that leaves nothing to do for this node, which is no failure.
type IdleError struct{ Why string }

func (e *IdleError) Error() string { return e.Why }

// deepSpeedNodes are the nodes of a command line, and the devices of this one.
type deepSpeedNodes struct {
	*translation
	hosts   []hostfile.Host // of the file; nil: there is none
	used    []hostfile.Node // those that take part
	place   int             // of this node among them
	devices []string        // that are used here
	chosen  bool            // by options or the file, and not by the variable that makes devices visible
}

// readHosts reads the host file, if there is one.
func (d *deepSpeedNodes) readHosts() error {
	path := d.line.String("hostfile")
	if path == noHostfile {
		return nil
	}
	text, err := d.sys.readHostfile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if d.line.IsSet("hostfile") {
			d.cmd.Note("--hostfile=%s: there is no such file, so this node trains alone, unless a scheduler names others",
				path)
		}
		return nil
	}
	if err != nil {
		return usageErrorf("--hostfile: %v; give a file that can be read, or %s for none", err, noHostfile)
	}
	if d.hosts, err = hostfile.Parse(string(text)); err != nil {
		return usageErrorf("--hostfile=%s: %v", path, err)
	}
	for _, h := range d.hosts {
		if h.Slots == 0 {
			return usageErrorf("--hostfile=%s: line %d: host %s has no number of slots; write %q",
				path, h.Line, h.Name, h.Name+" slots=4")
		}
	}
	return nil
}

// chooseNodes decides which nodes are used, and which slots of theirs.
func (d *deepSpeedNodes) chooseNodes() (err error) {
	if d.hosts != nil {
		d.used, d.chosen = hostfile.Nodes(d.hosts), true
	} else if err := d.thisNodeAlone(); err != nil {
		return err
	}
	if list := d.line.String("include"); list != "" {
		if d.used, err = hostfile.Include(d.used, list); err != nil {
			return usageErrorf("--include=%s: %v", list, err)
		}
	}
	if list := d.line.String("exclude"); list != "" {
		if d.used, err = hostfile.Exclude(d.used, list); err != nil {
			return usageErrorf("--exclude=%s: %v", list, err)
		}
	}
	if n := d.line.Int("num_nodes"); n > len(d.used) {
		d.cmd.Note("--num_nodes=%d: %s has %d hosts, which are all used", n, d.line.String("hostfile"), len(d.used))
	}
	d.used = hostfile.First(d.used, d.line.Int("num_nodes"))
	return d.firstSlots(d.line.Int("num_gpus"))
}

// localhost is the name of this node where there is no host file.
const localhost = "localhost"

// thisNodeAlone is this node with its visible devices. Options that choose among devices take the place of variables.
func (d *deepSpeedNodes) thisNodeAlone() error {
	for name, most := range map[string]int{"num_nodes": 1, "node_rank": 0} {
		if n := d.line.Int(name); n > most {
			return usageErrorf("--%s=%d needs a host file, and there is no %s: write one with a line such as %q for each "+
				"host, and name it by --hostfile", name, n, d.line.String("hostfile"), "worker-0 slots=4")
		}
	}
	d.chosen = d.filtered() || d.line.Int("num_gpus") > 0
	name, list := d.visible()
	n, _ := d.installed()
	switch {
	case list != "" && !d.chosen:
		d.devices = strings.Split(list, ",")
		n = len(d.devices)
	case list != "":
		d.cmd.Note("$%s=%s has no effect: options say which devices are used", name, list)
	}
	if n > hostfile.MaxSlots {
		return usageErrorf("$%s lists %d devices: need at most %d", name, n, hostfile.MaxSlots)
	}
	if n == 0 {
		n = d.numaNodes()
	}
	d.used = hostfile.Nodes([]hostfile.Host{{Name: localhost, Slots: n}})
	return nil
}

// installed is how many accelerators there are that DeepSpeed would use.
func (d *deepSpeedNodes) installed() (n int, kind string) {
	if d.sys.lookup("DS_ACCELERATOR") == "cpu" {
		return 0, ""
	}
	return d.sys.Installed()
}

// visible is the variable that makes devices visible, and its value.
func (d *deepSpeedNodes) visible() (name, value string) {
	name = "CUDA_VISIBLE_DEVICES"
	if _, kind := d.installed(); kind == "ascend" {
		name = "ASCEND_RT_VISIBLE_DEVICES"
	}
	return name, d.sys.lookup(name)
}

// numaNodes is how many workers a node without accelerators has.
func (d *deepSpeedNodes) numaNodes() int {
	text, err := d.sys.ReadFile("/sys/devices/system/node/has_cpu")
	if err != nil {
		return 1
	}
	nodes, _ := numa.ParseCPUs(string(text)) // the same format
	return max(1, len(nodes))
}

// firstSlots keeps the first n slots of each node. Without a host file the node may have that many.
func (d *deepSpeedNodes) firstSlots(n int) error {
	if n > hostfile.MaxSlots {
		return usageErrorf("--num_gpus=%d: need at most %d", n, hostfile.MaxSlots)
	}
	for i := range d.used {
		switch node := &d.used[i]; {
		case n < 1:
		case d.hosts == nil:
			node.Slots = hostfile.Nodes([]hostfile.Host{{Slots: n}})[0].Slots
		case n > len(node.Slots):
			return usageErrorf("--num_gpus=%d: host %s has %d slots in %s; use at most as many, or correct the file",
				n, node.Name, len(node.Slots), d.line.String("hostfile"))
		default:
			node.Slots = node.Slots[:n]
		}
	}
	return nil
}

// findPlace finds this node in the host file.
func (d *deepSpeedNodes) findPlace() error {
	rank := d.line.Int("node_rank")
	switch {
	case d.hosts == nil:
		return nil
	case rank >= len(d.used):
		return usageErrorf("--node_rank=%d: %d hosts are used; need a number from 0 to %d",
			rank, len(d.used), len(d.used)-1)
	case rank >= 0:
		d.place = rank
		return nil
	}
	own := d.ownNames()
	switch len(own) {
	case 0:
		return usageErrorf("%s: run the command on the hosts of the file, where it starts the workers of that host; or give "+
			"--node_rank; or --hostfile=%s, to train on this node alone", d.notInFile(), noHostfile)
	case 1:
	default:
		return usageErrorf("%s of %s are all this node: say by --node_rank which one it is",
			strings.Join(own, ", "), d.line.String("hostfile"))
	}
	d.place = slices.IndexFunc(d.used, func(n hostfile.Node) bool { return n.Name == own[0] })
	if d.place < 0 {
		return &IdleError{fmt.Sprintf("host %s is not among those that are used: nothing to do here", own[0])}
	}
	return nil
}

func (d *deepSpeedNodes) notInFile() string {
	return fmt.Sprintf("this node, %s, is not in %s, which has %s", d.sys.Host, d.line.String("hostfile"),
		hostfile.Names(hostfile.Nodes(d.hosts)))
}

// maxLookups bounds how many names are resolved to find this node.
const maxLookups = 32

// ownNames returns this node's names in the host file: one, unless it is not in the file, or more than once.
func (d *deepSpeedNodes) ownNames() (own []string) {
	names := []string{d.sys.lookup("POD_NAME"), d.sys.Host, d.sys.lookup("POD_IP"), d.sys.lookup("NODE_IP")}
	if i := hostfile.Find(d.hosts, names...); i >= 0 {
		return []string{d.hosts[i].Name}
	}
	for _, h := range d.hosts {
		_, err := netip.ParseAddr(h.Name)
		if (err == nil || len(d.hosts) <= maxLookups) && d.sys.Owns(h.Name) {
			own = append(own, h.Name)
		}
	}
	return own
}

// chooseDevices checks that this node has the devices of its slots, and chooses them.
func (d *deepSpeedNodes) chooseDevices() error {
	if !d.chosen && d.devices != nil {
		return nil
	}
	node := d.used[d.place]
	for _, slot := range node.Slots {
		d.devices = append(d.devices, strconv.Itoa(slot))
	}
	n, kind := d.installed()
	if last := slices.Max(node.Slots); n > 0 && last >= n {
		return usageErrorf("slot %d of %s is to be used, and this node has %d devices (%s): need slots from 0 to %d; "+
			"correct the host file or --num_gpus", last, node.Name, n, kind, n-1)
	}
	return nil
}

// size is how many nodes there are, and how many workers on this one.
func (j *deepSpeedJob) size() error {
	for _, n := range j.nodes.used {
		j.cmd.Hosts = append(j.cmd.Hosts, n.Name)
	}
	j.arg("preset", deepSpeed)
	j.arg("nproc-per-node", len(j.nodes.devices))
	if name, _ := j.nodes.visible(); j.nodes.chosen {
		j.env(name, strings.Join(j.nodes.devices, ","))
	}
	j.lo, j.hi = len(j.nodes.used), len(j.nodes.used)
	text := j.sys.lookup("PET_NNODES")
	switch {
	case j.line.Bool("elastic_training"):
		return j.elastic()
	case j.nodes.hosts == nil && !j.filtered() && j.line.Int("num_nodes") < 1:
		j.lo, j.hi = 0, 0 // a scheduler, or $PET_NNODES, may know of other nodes
		return nil
	case j.nodes.hosts != nil && text != "":
		var err error
		if j.lo, j.hi, err = argv.ParseNNodes(text); err != nil {
			return usageErrorf("$PET_NNODES: %v", err)
		}
		return nil
	}
	j.arg("nnodes", j.lo)
	return nil
}

// elastic training of older versions is the range of --nnodes.
func (j *deepSpeedJob) elastic() error {
	j.lo = 1
	if n := j.line.Int("min_elastic_nodes"); n >= 0 {
		j.lo = n
	}
	if n := j.line.Int("max_elastic_nodes"); n >= 0 {
		j.hi = n
	}
	nodes := fmt.Sprintf("%d:%d", j.lo, j.hi)
	if j.lo < 1 || j.hi < j.lo || j.hi > argv.MaxNodes {
		return usageErrorf("--min_elastic_nodes and --max_elastic_nodes: %s breaks 0 < MIN <= MAX <= %d",
			nodes, argv.MaxNodes)
	}
	j.arg("nnodes", nodes)
	if j.sys.lookup("PET_MAX_RESTARTS") == "" {
		j.arg("max-restarts", deepSpeedRestarts)
	}
	j.cmd.Note("--elastic_training, which DeepSpeed 0.19 does not have any more, is --nnodes=%s here", nodes)
	return nil
}

// meet sets the rendezvous address.
func (j *deepSpeedJob) meet() error {
	if err := j.checkPort(); err != nil {
		return err
	}
	port := j.line.Int("master_port")
	switch {
	case j.hi <= 1:
		j.meetAlone(port)
	case j.sys.lookup("PET_RDZV_BACKEND")+j.sys.lookup("PET_RDZV_ENDPOINT")+j.sys.lookup("DLROVER_MASTER_ADDR") != "":
		j.arg("node-rank", j.nodes.place)
		j.cmd.Note("the nodes meet as PET_RDZV_ variables or DLROVER_MASTER_ADDR say")
	default:
		if err := j.meetAt(port); err != nil {
			return err
		}
	}
	if j.hi > 1 && j.sys.lookup("PET_LIVE_HOSTFILE") == "" {
		j.flag("live-hostfile")
	}
	return nil
}

func (j *deepSpeedJob) checkPort() error {
	if port := j.line.Int("master_port"); port < 1 || port > 65535 {
		return usageErrorf("--master_port=%d: need a port from 1 to 65535", port)
	}
	return nil
}

// meetAlone: on one node workers get the port that was given, or any.
func (j *deepSpeedJob) meetAlone(port int) {
	switch {
	case j.line.IsSet("master_port") && j.hi == 1:
		j.arg("rdzv-backend", "static")
		j.arg("master-port", port)
	case j.line.IsSet("master_port"):
		j.arg("master-port", port)
	case j.hi == 1:
		j.flag("standalone")
	}
}

func (j *deepSpeedJob) meetAt(port int) error {
	addr := j.line.String("master_addr")
	if addr == "" {
		addr = j.nodes.used[0].Name
	}
	if j.lo == j.hi {
		j.arg("rdzv-backend", "static")
		j.arg("master-addr", addr)
		j.arg("master-port", port)
	} else {
		j.arg("rdzv-backend", "c10d")
		j.arg("rdzv-endpoint", netJoin(addr, port))
	}
	j.arg("node-rank", j.nodes.place)
	j.cmd.Note("node %d of %s; the nodes meet at %s", j.nodes.place, j.line.String("hostfile"), netJoin(addr, port))
	return j.secret(addr, port)
}

// secret is the job token. Where DeepSpeed can start workers, all nodes have one private key of ssh.
func (j *deepSpeedJob) secret(addr string, port int) error {
	given := j.sys.lookup("DLROVER_TOKEN") + j.sys.lookup("DLROVER_TOKEN_FILE") +
		strings.Trim(j.sys.lookup("PET_INSECURE"), "0")
	ip, err := netip.ParseAddr(addr)
	if given != "" || addr == localhost || err == nil && ip.IsLoopback() {
		return nil
	}
	job := fmt.Sprintf("deepspeed at port %d, run %s", port, j.sys.lookup("PET_RDZV_ID"))
	if token, file := j.sys.KeyToken(job); token != "" {
		j.cmd.Token = token
		j.cmd.Note("no DLROVER_TOKEN: the job token is derived from %s, which all nodes must share, as for ssh", file)
		return nil
	}
	return usageErrorf("the nodes meet at %s, on a network, which needs a job token: give every node the same "+
		"DLROVER_TOKEN (openssl rand -hex 16), or the same key of ssh in ~/.ssh, which only its owner may read; "+
		"PET_INSECURE=1 does without", addr)
}

// netJoin joins a host and a port; an IPv6 address takes brackets.
func netJoin(host string, port int) string {
	if strings.Contains(host, ":") && !strings.HasPrefix(host, "[") {
		host = "[" + host + "]"
	}
	return fmt.Sprintf("%s:%d", host, port)
}
