package scheduler

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"dlrover-run/launcher/preset"
)

const (
	msOperatorName = "ms-operator"
	msPort         = 2222 // of ms-operator's Services, unless an MSJob names another one
)

// msRoles are the roles of ms-operator's pods by $MS_ROLE: how a pod of one is called, JOB-NAME-N, and the variable
// that counts them.
var msRoles = map[string]struct{ name, count string }{
	"MS_SCHED": {name: "scheduler"}, "MS_PSERVER": {"ps", "MS_SERVER_NUM"}, "MS_WORKER": {"worker", "MS_WORKER_NUM"},
}

// msOperator is the operator of MindSpore's MSJob. Every process has a pod of its own: the scheduler, which is node 0,
// then the parameter servers, then the workers.
//
// $MS_SCHED_HOST is the scheduler's own address for itself, and for others that of a Service, which has the port
// $MS_SCHED_PORT and no other. So the nodes meet there.
func msOperator(r *reader) (f Facts, found bool, err error) {
	if !r.all("MS_ROLE", "MS_SCHED_HOST", "MS_WORKER_NUM") || r.worker() {
		return f, false, nil
	}
	role, _ := r.lookup("MS_ROLE")
	host, _ := r.lookup("MS_SCHED_HOST")
	f.MasterAddr, f.Preset = host.value, "mindspore"
	port, _, err := r.number(1, 65535, "MS_SCHED_PORT")
	if err != nil {
		return f, false, err
	}
	f.MasterPort = cmp.Or(port, msPort)
	workers, count, err := r.number(1, maxNodes/2, "MS_WORKER_NUM")
	if err != nil {
		return f, false, err
	}
	if f.Servers, _, err = r.number(0, maxServers, "MS_SERVER_NUM"); err != nil {
		return f, false, err
	}
	f.Nodes, f.nodesFrom = 1+f.Servers+workers, count.String()
	return f, true, r.msPlace(&f, role, workers)
}

// maxServers bounds the parameter servers of a job.
const maxServers = 256

// msPlace finds out which of the nodes this one is. Workers may come in any order.
func (r *reader) msPlace(f *Facts, role variable, workers int) error {
	of, known := msRoles[role.value]
	if !known {
		return fmt.Errorf("%v: need MS_SCHED, MS_PSERVER or MS_WORKER", role)
	}
	index, from := r.msIndex(f, of.name)
	if role.value == "MS_SCHED" {
		f.Share = "scheduler"
		return nil
	}
	limit := workers
	if role.value == "MS_PSERVER" {
		limit = f.Servers
	}
	switch {
	case limit == 0:
		return fmt.Errorf("%v, but $%s is not set, or 0: it counts the pods of this role", role, of.count)
	case index >= limit:
		return fmt.Errorf("%s does not fit $%s=%d: need a number from 0 to %d, or a name that ends with -%s-NUMBER", from,
			of.count, limit, limit-1, of.name)
	}
	f.NodeRank = index
	if role.value == "MS_PSERVER" {
		f.Share = "pserver-" + strconv.Itoa(max(index, 0))
		if index >= 0 {
			f.NodeRank++
		}
		return nil
	}
	if f.Share = preset.Workers; index >= 0 {
		f.NodeRank += 1 + f.Servers
	}
	return nil
}

// msIndex is a pod's number within its role, -1 where it has none: the value of $MS_NODE_ID or else the number at the
// end of it or of the host name, if a pod of that role is called so. Such a name also holds the job's.
func (r *reader) msIndex(f *Facts, role string) (index int, from string) {
	id, set := r.lookup("MS_NODE_ID")
	if n, err := digits(id.value); err == nil {
		return n, id.String()
	}
	for _, name := range []string{id.value, r.Host} {
		if from = fmt.Sprintf("host name %.100q", name); set && name == id.value {
			from = id.String()
		}
		i := strings.LastIndexByte(name, '-')
		job, is := strings.CutSuffix(name[:max(i, 0)], "-"+role)
		if n, err := digits(name[i+1:]); is && err == nil {
			f.RunID = job
			return n, from
		}
	}
	return -1, from
}
