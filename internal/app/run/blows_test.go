package run

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// site is three members of an etcd, three masters and two nodes of a PyTorch job, each on a machine of its own.
type site struct {
	*cluster
	etcds, masters [3]*launched
	seen           *answers
}

const (
	firstMaster = 3 // number of its machine
	firstNode   = 6
)

func newSite(t *testing.T) *site {
	if os.Getenv("DLROVER_LONG_TESTS") == "" {
		t.Skipf("SKIPPED: %s IS NOT RUN without DLROVER_LONG_TESTS=1 (make e2e-etcd sets it)", t.Name())
	}
	if _, err := exec.LookPath("etcd"); err != nil {
		t.Skip("SKIPPED: there is no etcd in PATH: install Debian's etcd-server")
	}
	s := &site{cluster: &cluster{newBench(t), newNetwork(t, 8)}}
	for i := range s.etcds {
		s.startEtcd(i)
	}
	for i := range s.masters {
		s.startMaster(i)
	}
	s.tool("ip", "-n", s.hub, "addr", "add", "10.98.7.100/24", "dev", "switch0")
	s.seen = s.watch()
	return s
}

func (s *site) startEtcd(i int) {
	var members []string
	for j := range s.etcds {
		members = append(members, fmt.Sprintf("m%d=http://%s:2380", j, s.addrs[j]))
	}
	client, peer := "http://"+s.addrs[i]+":2379", "http://"+s.addrs[i]+":2380"
	command := s.within(i, "etcd", "--name", fmt.Sprint("m", i), "--data-dir", filepath.Join(s.dir, fmt.Sprint("etcd", i)),
		"--log-level=error", "--unsafe-no-fsync", "--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", strings.Join(members, ","))
	s.etcds[i] = s.startPath(command[0], nil, command[1:]...)
}

func (s *site) startMaster(i int) {
	var etcd []string
	for j := range s.etcds {
		etcd = append(etcd, s.addrs[j]+":2379")
	}
	s.masters[i] = s.on(firstMaster+i, "dlrover-master", nil, "--listen="+s.addr(i), "--etcd="+strings.Join(etcd, ","))
}

func (s *site) addr(master int) string { return s.addrs[firstMaster+master] + ":50001" }

func (s *site) list() string { return strings.Join([]string{s.addr(0), s.addr(1), s.addr(2)}, ",") }

// apart cuts two machines from each other, and heals joins all of them again.
func (s *site) apart(i, j int) { s.cut(i, j); s.cut(j, i) }

func (s *site) heal() {
	for i := range s.names {
		for j := range s.names {
			_ = exec.Command("ip", "-n", s.names[i], "neigh", "del", s.addrs[j], "dev", "eth0").Run()
		}
	}
}

// fromEtcd cuts a master from all of etcd.
func (s *site) fromEtcd(master int) {
	for i := range s.etcds {
		s.apart(firstMaster+master, i)
	}
}

// answers are what the masters have answered: which one in which term.
type answers struct {
	mu     sync.Mutex
	of     map[uint64]int // master, by term
	newest uint64
	at     [3]time.Time // of each master's last answer
	broken []string     // rules
}

// watch asks all masters who leads, many times a second, until the end of the test.
func (s *site) watch() *answers {
	a := &answers{of: map[uint64]int{}}
	hub, err := os.Open(filepath.Join("/run/netns", s.hub))
	require.NoError(s.t, err)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range s.masters {
		wg.Go(func() {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
			if err := unix.Setns(int(hub.Fd()), unix.CLONE_NEWNET); err != nil {
				a.breaks(err.Error())
				return
			}
			for {
				select {
				case <-stop:
					return
				case <-time.After(10 * time.Millisecond):
				}
				asked := a.last()
				if term := termOf(s.addr(i)); term > 0 {
					a.hear(i, asked, term)
				}
			}
		})
	}
	s.t.Cleanup(func() { close(stop); wg.Wait(); _ = hub.Close() })
	return a
}

// termOf asks a master; 0 is no answer.
func termOf(addr string) uint64 {
	c, err := net.DialTimeout("tcp", addr, 300*time.Millisecond)
	if err != nil {
		return 0
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(300 * time.Millisecond))
	fmt.Fprintf(c, "GET /v1/standby HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n\r\n", addr, testToken)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	var p struct{ Term uint64 }
	_ = json.NewDecoder(resp.Body).Decode(&p)
	return p.Term
}

func (a *answers) breaks(rule string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.broken = append(a.broken, rule)
}

func (a *answers) last() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.newest
}

// hear notes an answer to a question that was asked when a term was the newest.
func (a *answers) hear(master int, asked, term uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if other, known := a.of[term]; known && other != master {
		a.broken = append(a.broken, fmt.Sprintf("masters %d and %d answer in term %d", master, other, term))
	}
	if term < asked {
		a.broken = append(a.broken, fmt.Sprintf("master %d answers in term %d after term %d", master, term, asked))
	}
	a.of[term], a.at[master], a.newest = master, time.Now(), max(a.newest, term)
}

// leader is the master of the newest term, and when it has answered last.
func (a *answers) leader() (master int, at time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	master, known := a.of[a.newest]
	if !known {
		return -1, time.Time{}
	}
	return master, a.at[master]
}

// next waits for another master than this one, and says how long that took.
func (s *site) next(what string, not int) (master int) {
	s.t.Helper()
	began := time.Now()
	eventually(s.t, what, func() bool { master, _ = s.seen.leader(); return master >= 0 && master != not })
	s.t.Logf("%-40s master %d serves after %s", what, master, time.Since(began).Round(time.Millisecond))
	return master
}

// stays holds that a master goes on to answer.
func (s *site) stays(what string, leader int, d time.Duration) {
	s.t.Helper()
	longest := time.Duration(0)
	for began := time.Now(); time.Since(began) < d; time.Sleep(10 * time.Millisecond) {
		now, at := s.seen.leader()
		require.Equal(s.t, leader, now, what)
		longest = max(longest, time.Since(at))
	}
	require.Less(s.t, longest, d/2, what)
	s.t.Logf("%-40s master %d goes on; longest pause %s", what, leader, longest.Round(time.Millisecond))
}

// healthy waits until a master serves, which all others follow and which has named them.
func (s *site) healthy() (leader int) {
	s.t.Helper()
	eventually(s.t, "one serves, and all others follow it", func() bool {
		leader, _ = s.seen.leader()
		if leader < 0 || s.metric(leader, "dlrover_election_candidates") != "2" {
			return false
		}
		for i, m := range s.masters {
			text := m.err.String()
			at := strings.LastIndex(text, `"msg":"following the master that serves"`)
			if i != leader && (at < 0 || !strings.Contains(text[at:], s.addr(leader))) {
				return false
			}
		}
		return true
	})
	return leader
}

// metric is a metric of a master, "" if it has none.
func (s *site) metric(master int, name string) string {
	command := s.within(firstMaster+master, "/usr/bin/python3", "-c", "import sys, urllib.request as u; "+
		"print(u.urlopen(u.Request(sys.argv[1], headers={'Authorization': 'Bearer "+testToken+"'}), "+
		"timeout=5).read().decode())", "http://"+s.addr(master)+"/metrics")
	out, _ := exec.Command(command[0], command[1:]...).Output()
	_, value, _ := strings.Cut(string(out), "\n"+name+" ")
	value, _, _ = strings.Cut(value, "\n")
	return value
}

// etcdctl executes an order at a member of etcd.
func (s *site) etcdctl(member int, args ...string) string {
	s.t.Helper()
	command := s.within(member, append([]string{"etcdctl", "--endpoints=" + s.addrs[member] + ":2379"}, args...)...)
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(os.Environ(), "ETCDCTL_API=3")
	out, err := cmd.CombinedOutput()
	require.NoError(s.t, err, string(out))
	return string(out)
}

// etcdLeader is the member that leads the others.
func (s *site) etcdLeader() (member int) {
	s.t.Helper()
	eventually(s.t, "etcd has a leader", func() bool {
		for member = range s.etcds {
			var status []struct {
				Status struct {
					Leader uint64
					Header struct {
						MemberID uint64 `json:"member_id"`
					}
				}
			}
			err := json.Unmarshal([]byte(s.etcdctl(member, "endpoint", "status", "-w", "json")), &status)
			if err == nil && len(status) > 0 && status[0].Status.Leader == status[0].Status.Header.MemberID {
				return true
			}
		}
		return false
	})
	return member
}

// A site is struck by one failure after the other while a job trains. No worker is restarted by that, no two masters
// answer in the same term, and no master answers after one of a later term has.
func TestBlows(t *testing.T) {
	s := newSite(t)
	script, err := filepath.Abs("testdata/allreduce.py")
	require.NoError(t, err)
	var nodes []*launched
	for i := range 2 {
		env := []string{"DLROVER_MASTER_ADDR=" + s.list(), "PYTHON_EXEC=/usr/bin/python3", "GLOO_SOCKET_IFNAME=eth0"}
		if i == 1 {
			env[0] = "DLROVER_MASTER_ADDR=" + s.addrs[0] + ":50001," + s.list() // an old list: nothing listens there
		}
		nodes = append(nodes, s.on(firstNode+i, "dlrover-run", env, "--nnodes=2", "--nproc-per-node=2", "--rdzv-id=job",
			"--max-restarts=3", script, s.dir))
	}
	eventually(t, "the job trains", s.exists("trained.4"))
	for _, blow := range []struct {
		what   string
		strike func(s *site, what string, leader int)
	}{
		{"kill -9 of the leader", (*site).killLeader},
		{"SIGSTOP of the leader", (*site).freezeLeader},
		{"host of the leader silent", (*site).silenceHost},
		{"leader cut from etcd", (*site).cutFromEtcd},
		{"masters cut from each other", (*site).cutFromMasters},
		{"leader cut from the nodes", (*site).cutFromNodes},
		{"etcd's leader killed", (*site).killEtcdLeader},
		{"etcd's leader frozen", (*site).freezeEtcdLeader},
		{"all of etcd frozen", (*site).freezeEtcd},
		{"compaction while a master is cut off", (*site).compact},
		{"a master that the leader does not know", (*site).stranger},
		{"a write at a master that waits", (*site).writeAtFollower},
	} {
		blow.strike(s, blow.what, s.healthy())
		s.heal()
	}
	s.healthy()
	s.release()
	for _, n := range nodes {
		require.Equal(t, 0, n.wait())
	}
	require.NoFileExists(t, filepath.Join(s.dir, "trained.4.again"), "workers were restarted")
	s.seen.mu.Lock()
	defer s.seen.mu.Unlock()
	require.Empty(t, s.seen.broken)
}

func (s *site) killLeader(what string, leader int) {
	s.masters[leader].signal(syscall.SIGKILL)
	s.next(what, leader)
	s.masters[leader].wait()
	s.startMaster(leader)
}

func (s *site) freezeLeader(what string, leader int) {
	s.masters[leader].signal(syscall.SIGSTOP)
	next := s.next(what, leader)
	s.masters[leader].signal(syscall.SIGCONT) // while its lease would not be over yet
	s.stays(what, next, 3*time.Second)
}

func (s *site) silenceHost(what string, leader int) {
	s.fromEtcd(leader)
	for i := range s.masters {
		if i != leader {
			s.apart(firstMaster+leader, firstMaster+i)
		}
	}
	s.apart(firstMaster+leader, firstNode)
	s.apart(firstMaster+leader, firstNode+1)
	s.next(what, leader)
}

func (s *site) cutFromEtcd(what string, leader int) {
	s.fromEtcd(leader)
	s.next(what, leader)
}

// Only the lease can tell that the leader is gone, and it lives.
func (s *site) cutFromMasters(what string, leader int) {
	for i := range s.masters {
		for j := range i {
			s.apart(firstMaster+i, firstMaster+j)
		}
	}
	s.stays(what, leader, 4*time.Second)
}

func (s *site) cutFromNodes(what string, leader int) {
	s.apart(firstMaster+leader, firstNode)
	s.apart(firstMaster+leader, firstNode+1)
	s.stays(what, leader, 4*time.Second)
}

func (s *site) killEtcdLeader(what string, leader int) {
	lost := s.etcdLeader()
	s.etcds[lost].signal(syscall.SIGKILL)
	s.stays(what, leader, 6*time.Second)
	s.etcds[lost].wait()
	s.startEtcd(lost)
	s.etcdLeader()
}

func (s *site) freezeEtcdLeader(what string, leader int) {
	lost := s.etcdLeader()
	s.etcds[lost].signal(syscall.SIGSTOP)
	s.stays(what, leader, 6*time.Second)
	s.masters[leader].signal(syscall.SIGKILL)
	s.next("then kill -9 of the leader", leader)
	s.masters[leader].wait()
	s.etcds[lost].signal(syscall.SIGCONT)
	s.startMaster(leader)
}

func (s *site) freezeEtcd(what string, leader int) {
	for _, m := range s.etcds {
		m.signal(syscall.SIGSTOP)
	}
	s.stays(what, leader, 6*time.Second)
	for _, m := range s.etcds {
		m.signal(syscall.SIGCONT)
	}
	s.etcdLeader()
}

func (s *site) compact(what string, leader int) {
	behind := (leader + 1) % 3
	s.fromEtcd(behind)
	member := s.etcdLeader()
	s.etcdctl(member, "put", "/x", "1")
	revision := s.etcdctl(member, "get", "/x", "-w", "json")
	_, revision, _ = strings.Cut(revision, `"revision":`)
	revision, _, _ = strings.Cut(revision, ",")
	s.etcdctl(member, "compact", revision)
	s.heal()
	s.masters[leader].signal(syscall.SIGKILL)
	s.next(what, leader)
	s.masters[leader].wait()
	s.startMaster(leader)
}

// The leader and the other master that it knows are cut from etcd together, and follow each other. A third one, which
// comes then, is elected and does not serve.
func (s *site) stranger(what string, leader int) {
	third, term := (leader+1)%3, s.seen.last()
	s.masters[third].signal(syscall.SIGKILL)
	s.masters[third].wait()
	eventually(s.t, "the leader knows one", func() bool {
		return s.metric(leader, "dlrover_election_candidates") == "1"
	})
	s.fromEtcd(leader)
	s.fromEtcd((leader + 2) % 3)
	s.apart(firstMaster+leader, firstMaster+third)
	s.startMaster(third)
	eventually(s.t, "the third one is elected", func() bool {
		return strings.Contains(s.masters[third].err.String(), "elected, but not serving yet")
	})
	s.stays(what, leader, 3*time.Second)
	s.heal() // then etcd deposes the leader, and the third one leaves it to either of those that were known
	eventually(s.t, "the leader is deposed", func() bool {
		s.seen.mu.Lock()
		defer s.seen.mu.Unlock()
		return s.seen.newest > term
	})
}

func (s *site) writeAtFollower(string, int) {
	follower := (s.healthy() + 1) % 3
	l := s.on(firstNode, "dlroverctl", []string{"DLROVER_MASTER_ADDR=" + s.addr(follower)}, "node", "mark", "gpu-07",
		"--reason=x")
	require.NotZero(s.t, l.wait())
	require.Contains(s.t, l.err.String(), "connection refused")
}
