package scheduler

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"strings"
)

// openMPIRank marks a process that Open MPI's mpirun has started.
const openMPIRank = "OMPI_COMM_WORLD_RANK"

// openMPI is a process of Open MPI's mpirun, 4 or 5, one on each node. Nothing says where rank 0 is. The host of mpirun
// is known, and rank 0 can tell whether that is its own.
func (r *reader) openMPI() (f Facts, found bool, err error) {
	nodes, rank := variable{}, variable{}
	if f.Nodes, nodes, err = r.number(1, maxNodes, "OMPI_COMM_WORLD_SIZE"); err != nil {
		return f, false, err
	}
	if f.NodeRank, rank, err = r.number(0, maxNodes, openMPIRank); err != nil {
		return f, false, err
	}
	onNode, local, err := r.number(1, 1<<24, "OMPI_COMM_WORLD_LOCAL_SIZE")
	switch {
	case err != nil:
		return f, false, err
	case f.Nodes == 1 && !r.named || f.Nodes == 0:
		return f, false, nil
	case f.NodeRank >= f.Nodes:
		return f, false, fmt.Errorf("%v does not fit %v: need a number from 0 to %d", rank, nodes, f.Nodes-1)
	case onNode > 1:
		return f, false, fmt.Errorf("%v: one launcher on each node starts the workers; give mpirun --map-by ppr:1:node "+
			"--bind-to none", local)
	}
	job, _ := r.lookup("PMIX_NAMESPACE")
	f.nodesFrom, f.RunID, f.MasterAddr = nodes.String(), job.value, r.mpirunHost(job.value, f.NodeRank)
	if f.MasterPort, err = r.port(); err == nil && f.MasterPort == 0 {
		sum := fnv.New32a()
		_, _ = sum.Write([]byte(job.value))
		f.MasterPort = firstJobPort + int(sum.Sum32()%jobPorts)
	}
	return f, true, err
}

// mpirunHost is the host of mpirun; "" if it is not known, or if rank 0 is elsewhere, which rank 0 alone knows.
func (r *reader) mpirunHost(job string, rank int) string {
	if uri, set := r.lookup("OMPI_MCA_orte_hnp_uri"); set { // Open MPI 4
		if own, _ := r.peek("OMPI_MCA_orte_local_daemon_uri"); rank == 0 && own.value != uri.value {
			return ""
		}
		return addressIn(uri.value)
	}
	own, _ := r.peek("PMIX_SERVER_URI41", "PMIX_SERVER_URI4", "PMIX_SERVER_URI3") // of PRRTE's daemon on this node
	daemon, _, _ := strings.Cut(own.value, ";")
	if rank == 0 && !strings.HasSuffix(daemon, "@0.0") {
		return ""
	}
	name, _, prrte := strings.Cut(job, "@") // prterun-HOST-PID@1
	_, name, _ = strings.Cut(name, "-")
	if i := strings.LastIndexByte(name, '-'); prrte && i > 0 {
		return name[:i]
	}
	return ""
}

// addressIn is the first address that other hosts may reach in 1.0;tcp://ADDRESS,...:PORT;tcp6://[ADDRESS,...]:PORT.
func addressIn(uri string) string {
	for part := range strings.SplitSeq(uri, ";") {
		_, list, found := strings.Cut(part, "://")
		i := strings.LastIndexByte(list, ':')
		if !found || i < 0 {
			continue
		}
		for text := range strings.SplitSeq(strings.Trim(list[:i], "[]"), ",") {
			if ip, err := netip.ParseAddr(strings.Trim(text, "[]")); err == nil && !ip.IsLoopback() {
				return ip.String()
			}
		}
	}
	return ""
}
