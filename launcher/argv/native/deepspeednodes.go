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

// readHosts reads the host file, if there is one.
func (j *deepSpeedJob) readHosts() error {
	path := j.line.String("hostfile")
	if path == noHostfile {
		return nil
	}
	text, err := j.sys.readHostfile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if j.line.IsSet("hostfile") {
			j.cmd.Note("--hostfile=%s: there is no such file, so this node trains alone, unless a scheduler names others",
				path)
		}
		return nil
	}
	if err != nil {
		return usageErrorf("--hostfile: %v; give a file that can be read, or %s for none", err, noHostfile)
	}
	if j.hosts, err = hostfile.Parse(string(text)); err != nil {
		return usageErrorf("--hostfile=%s: %v", path, err)
	}
	for _, h := range j.hosts {
		if h.Slots == 0 {
			return usageErrorf("--hostfile=%s: line %d: host %s has no number of slots; write %q",
				path, h.Line, h.Name, h.Name+" slots=4")
		}
	}
	return nil
}

// chooseNodes decides which nodes are used, and which slots of theirs.
func (j *deepSpeedJob) chooseNodes() (err error) {
	if j.hosts != nil {
		j.nodes, j.chosen = hostfile.Nodes(j.hosts), true
	} else if err := j.thisNodeAlone(); err != nil {
		return err
	}
	if list := j.line.String("include"); list != "" {
		if j.nodes, err = hostfile.Include(j.nodes, list); err != nil {
			return usageErrorf("--include=%s: %v", list, err)
		}
	}
	if list := j.line.String("exclude"); list != "" {
		if j.nodes, err = hostfile.Exclude(j.nodes, list); err != nil {
			return usageErrorf("--exclude=%s: %v", list, err)
		}
	}
	if n := j.line.Int("num_nodes"); n > len(j.nodes) {
		j.cmd.Note("--num_nodes=%d: %s has %d hosts, which are all used", n, j.line.String("hostfile"), len(j.nodes))
	}
	j.nodes = hostfile.First(j.nodes, j.line.Int("num_nodes"))
	return j.firstSlots(j.line.Int("num_gpus"))
}

// localhost is the name of this node where there is no host file.
const localhost = "localhost"

// thisNodeAlone is this node with its visible devices. Options that choose among devices take the place of variables.
func (j *deepSpeedJob) thisNodeAlone() error {
	for name, most := range map[string]int{"num_nodes": 1, "node_rank": 0} {
		if n := j.line.Int(name); n > most {
			return usageErrorf("--%s=%d needs a host file, and there is no %s: write one with a line such as %q for each "+
				"host, and name it by --hostfile", name, n, j.line.String("hostfile"), "worker-0 slots=4")
		}
	}
	j.chosen = j.filtered() || j.line.Int("num_gpus") > 0
	name, list := j.visible()
	n, _ := j.installed()
	switch {
	case list != "" && !j.chosen:
		j.devices = strings.Split(list, ",")
		n = len(j.devices)
	case list != "":
		j.cmd.Note("$%s=%s has no effect: options say which devices are used", name, list)
	}
	if n > hostfile.MaxSlots {
		return usageErrorf("$%s lists %d devices: need at most %d", name, n, hostfile.MaxSlots)
	}
	if n == 0 {
		n = j.numaNodes()
	}
	j.nodes = hostfile.Nodes([]hostfile.Host{{Name: localhost, Slots: n}})
	return nil
}

// installed is how many accelerators there are that DeepSpeed would use.
func (j *deepSpeedJob) installed() (n int, kind string) {
	if j.sys.lookup("DS_ACCELERATOR") == "cpu" {
		return 0, ""
	}
	return j.sys.Installed()
}

// visible is the variable that makes devices visible, and its value.
func (j *deepSpeedJob) visible() (name, value string) {
	name = "CUDA_VISIBLE_DEVICES"
	if _, kind := j.installed(); kind == "ascend" {
		name = "ASCEND_RT_VISIBLE_DEVICES"
	}
	return name, j.sys.lookup(name)
}

// numaNodes is how many workers a node without accelerators has.
func (j *deepSpeedJob) numaNodes() int {
	text, err := j.sys.ReadFile("/sys/devices/system/node/has_cpu")
	if err != nil {
		return 1
	}
	nodes, _ := numa.ParseCPUs(string(text)) // the same format
	return max(1, len(nodes))
}

// firstSlots keeps the first n slots of each node. Without a host file the node may have that many.
func (j *deepSpeedJob) firstSlots(n int) error {
	if n > hostfile.MaxSlots {
		return usageErrorf("--num_gpus=%d: need at most %d", n, hostfile.MaxSlots)
	}
	for i := range j.nodes {
		switch node := &j.nodes[i]; {
		case n < 1:
		case j.hosts == nil:
			node.Slots = hostfile.Nodes([]hostfile.Host{{Slots: n}})[0].Slots
		case n > len(node.Slots):
			return usageErrorf("--num_gpus=%d: host %s has %d slots in %s; use at most as many, or correct the file",
				n, node.Name, len(node.Slots), j.line.String("hostfile"))
		default:
			node.Slots = node.Slots[:n]
		}
	}
	return nil
}

// findPlace finds this node in the host file.
func (j *deepSpeedJob) findPlace() error {
	rank := j.line.Int("node_rank")
	switch {
	case j.hosts == nil:
		return nil
	case rank >= len(j.nodes):
		return usageErrorf("--node_rank=%d: %d hosts are used; need a number from 0 to %d",
			rank, len(j.nodes), len(j.nodes)-1)
	case rank >= 0:
		j.place = rank
		return nil
	}
	own := j.ownNames()
	switch len(own) {
	case 0:
		return usageErrorf("%s: run the command on the hosts of the file, where it starts the workers of that host; or give "+
			"--node_rank; or --hostfile=%s, to train on this node alone", j.notInFile(), noHostfile)
	case 1:
	default:
		return usageErrorf("%s of %s are all this node: say by --node_rank which one it is",
			strings.Join(own, ", "), j.line.String("hostfile"))
	}
	j.place = slices.IndexFunc(j.nodes, func(n hostfile.Node) bool { return n.Name == own[0] })
	if j.place < 0 {
		return &IdleError{fmt.Sprintf("host %s is not among those that are used: nothing to do here", own[0])}
	}
	return nil
}

func (j *deepSpeedJob) notInFile() string {
	return fmt.Sprintf("this node, %s, is not in %s, which has %s", j.sys.Host, j.line.String("hostfile"),
		hostfile.Names(hostfile.Nodes(j.hosts)))
}

// maxLookups bounds how many names are resolved to find this node.
const maxLookups = 32

// ownNames returns this node's names in the host file: one, unless it is not in the file, or more than once.
func (j *deepSpeedJob) ownNames() (own []string) {
	names := []string{j.sys.lookup("POD_NAME"), j.sys.Host, j.sys.lookup("POD_IP"), j.sys.lookup("NODE_IP")}
	if i := hostfile.Find(j.hosts, names...); i >= 0 {
		return []string{j.hosts[i].Name}
	}
	for _, h := range j.hosts {
		_, err := netip.ParseAddr(h.Name)
		if (err == nil || len(j.hosts) <= maxLookups) && j.sys.Owns(h.Name) {
			own = append(own, h.Name)
		}
	}
	return own
}

// chooseDevices checks that this node has the devices of its slots, and chooses them.
func (j *deepSpeedJob) chooseDevices() error {
	if !j.chosen && j.devices != nil {
		return nil
	}
	node := j.nodes[j.place]
	for _, slot := range node.Slots {
		j.devices = append(j.devices, strconv.Itoa(slot))
	}
	n, kind := j.installed()
	if last := slices.Max(node.Slots); n > 0 && last >= n {
		return usageErrorf("slot %d of %s is to be used, and this node has %d devices (%s): need slots from 0 to %d; "+
			"correct the host file or --num_gpus", last, node.Name, n, kind, n-1)
	}
	return nil
}

// size is how many nodes there are, and how many workers on this one.
func (j *deepSpeedJob) size() error {
	for _, n := range j.nodes {
		j.cmd.Hosts = append(j.cmd.Hosts, n.Name)
	}
	j.arg("preset", deepSpeed)
	j.arg("nproc-per-node", len(j.devices))
	if name, _ := j.visible(); j.chosen {
		j.env(name, strings.Join(j.devices, ","))
	}
	j.lo, j.hi = len(j.nodes), len(j.nodes)
	text := j.sys.lookup("PET_NNODES")
	switch {
	case j.line.Bool("elastic_training"):
		return j.elastic()
	case j.hosts == nil && !j.filtered() && j.line.Int("num_nodes") < 1:
		j.lo, j.hi = 0, 0 // a scheduler, or $PET_NNODES, may know of other nodes
		return nil
	case j.hosts != nil && text != "":
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
		j.arg("node-rank", j.place)
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
		addr = j.nodes[0].Name
	}
	if j.lo == j.hi {
		j.arg("rdzv-backend", "static")
		j.arg("master-addr", addr)
		j.arg("master-port", port)
	} else {
		j.arg("rdzv-backend", "c10d")
		j.arg("rdzv-endpoint", netJoin(addr, port))
	}
	j.arg("node-rank", j.place)
	j.cmd.Note("node %d of %s; the nodes meet at %s", j.place, j.line.String("hostfile"), netJoin(addr, port))
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
