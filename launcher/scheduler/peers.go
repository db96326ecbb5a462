package scheduler

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/internal/stable"
)

// maxPeers bounds the nodes that are distinguished by their names.
const maxPeers = 10_000

// Peers are the nodes of a job by the names, or the addresses, under which they are found.
type Peers struct {
	Names []string // none where they are unknown
	From  string   // the source
}

// String names the first and the last of them.
func (p Peers) String() string {
	const few = 4
	if n := len(p.Names); n > few {
		return fmt.Sprintf("%s ... %s (%d hosts)", strings.Join(p.Names[:few-1], ", "), p.Names[n-1], n)
	}
	return strings.Join(p.Names, ", ")
}

// PeersOf finds the nodes of a job of at most nodes with a rendezvous at host. It reads the list of f, from Detect, or
// of another scheduler, or else derives them from the names of pods. A machine of Slurm, or one that is not a pod, is
// none of them but by the lists of SkyPilot and SageMaker: other users may run processes there. So they may where a
// pod has its machine's network, and with that its name.
func PeersOf(f Facts, s System, host string, nodes int) Peers {
	_, pod := s.Env("KUBERNETES_SERVICE_HOST")
	for _, list := range append([]Facts{f}, lists(s)...) {
		ofPods := list.Name == volcanoName || list.Name == mpiName
		if list.lists(host) && (!ofPods || pod && list.lists(s.Host)) {
			return peers(list.hosts, strings.Join(list.From, ", "))
		}
	}
	if !pod {
		return Peers{}
	}
	return peers(podNames(strings.ToLower(host), strings.ToLower(s.Host), nodes), "the names of the pods")
}

// lists reports whether host is one of the listed hosts.
func (f *Facts) lists(host string) bool {
	return slices.ContainsFunc(f.hosts, func(name string) bool { return sameHost(name, host) })
}

// lists are the facts of all schedulers with variables here.
func lists(s System) (all []Facts) {
	for _, c := range sources() {
		if f, found, err := read(c, s, false); err == nil && found {
			all = append(all, f)
		}
	}
	return all
}

// sameHost: a name in its own domain often lacks it.
func sameHost(a, b string) bool {
	if strings.EqualFold(a, b) {
		return true
	}
	short, _, _ := strings.Cut(a, ".")
	other, _, _ := strings.Cut(b, ".")
	_, err := strconv.Atoi(short) // the beginning of an address
	return err != nil && strings.EqualFold(short, other) && (a == short || b == other)
}

// peers refuses texts that are no names of hosts, and too many of them.
func peers(names []string, from string) Peers {
	names = slices.Clone(names)
	slices.Sort(names)
	names = slices.Compact(names)
	if len(names) < 2 || len(names) > maxPeers || slices.ContainsFunc(names, func(n string) bool { return !hostName(n) }) {
		return Peers{}
	}
	stable.Sort(names, func(a, b string) int { return len(a) - len(b) }) // pod-2 before pod-10
	return Peers{names, from}
}

// maxHostName bounds a name of DNS, in bytes.
const maxHostName = 253

// hostName reports whether text may be the name of a host, or an address.
func hostName(text string) bool {
	return text != "" && len(text) <= maxHostName && plain(strings.ReplaceAll(text, ":", "")) == nil
}

// podNames derives names from that of the rendezvous host, NAME-0, and of this one, NAME-I: pods of a StatefulSet, of
// an Indexed Job, or of one kind of an operator's job. The domain is that of the first. In a PyTorchJob, JOB-master-0
// is the rendezvous host of the pods JOB-worker-I.
func podNames(host, own string, nodes int) []string {
	first, domain, dotted := strings.Cut(host, ".")
	if dotted {
		domain = "." + domain
	}
	own, _, _ = strings.Cut(own, ".")
	name, isFirst := strings.CutSuffix(first, "-0")
	ownName, index := numbered(own)
	if !isFirst || name == "" || index < 0 || nodes > maxPeers {
		return nil
	}
	job, hasMaster := strings.CutSuffix(name, "-master")
	hasMaster = hasMaster && job != ""
	worker := job + "-worker"
	switch {
	case hasMaster && (own == first || ownName == worker && index < nodes-1):
		return append([]string{host}, inOrder(worker, domain, nodes-1)...)
	case ownName == name && index < nodes:
		return inOrder(name, domain, nodes)
	}
	return nil
}

// numbered splits NAME-I; the number is -1 where there is none.
func numbered(text string) (name string, index int) {
	i := strings.LastIndexByte(text, '-')
	n, err := digits(text[i+1:])
	if i < 1 || err != nil || strconv.Itoa(n) != text[i+1:] {
		return text, -1
	}
	return text[:i], n
}

func inOrder(name, domain string, n int) (all []string) {
	for i := range max(n, 0) {
		all = append(all, fmt.Sprintf("%s-%d%s", name, i, domain))
	}
	return all
}
