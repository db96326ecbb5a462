package etcd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"

	"dlrover-run/internal/app/leadtest"
	"dlrover-run/rendezvous/lead"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// startCluster starts an etcd of three members.
func startCluster(t *testing.T) (endpoints []string, members []*os.Process) {
	t.Helper()
	var peers, names []string
	for i := range 3 {
		endpoints, peers = append(endpoints, port(t)), append(peers, port(t))
		names = append(names, fmt.Sprintf("m%d=%s", i, peers[i]))
	}
	for i := range 3 {
		members = append(members, start(t, endpoints[i], "--name", fmt.Sprintf("m%d", i),
			"--listen-peer-urls", peers[i], "--initial-advertise-peer-urls", peers[i],
			"--initial-cluster", strings.Join(names, ",")))
	}
	for _, e := range endpoints {
		listens(t, e)
	}
	return endpoints, members
}

func server(t *testing.T) string {
	t.Helper()
	endpoint, _ := startServer(t)
	return endpoint
}

// startServer starts an etcd of one member.
func startServer(t *testing.T) (endpoint string, process *os.Process) {
	t.Helper()
	client, peer := port(t), port(t)
	process = start(t, client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
		"--initial-cluster", "default="+peer)
	listens(t, client)
	return client, process
}

// start starts one member.
func start(t *testing.T, client string, args ...string) *os.Process {
	t.Helper()
	path, err := exec.LookPath("etcd")
	if err != nil {
		t.Skip("there is no etcd in PATH: install Debian's etcd-server")
	}
	log, err := os.Create(filepath.Join(t.TempDir(), "log"))
	require.NoError(t, err)
	defer log.Close()
	cmd := exec.Command(path, append([]string{"--data-dir", filepath.Join(t.TempDir(), "data"), "--log-level=warn",
		"--unsafe-no-fsync", "--listen-client-urls", client, "--advertise-client-urls", client}, args...)...)
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd.Process
}

func listens(t *testing.T, client string) {
	t.Helper()
	require.Eventually(t, func() bool {
		c, err := net.Dial("tcp", client[len("http://"):])
		if err == nil {
			err = c.Close()
		}
		return err == nil
	}, 20*time.Second, 10*time.Millisecond)
}

func port(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	return "http://" + l.Addr().String()
}

func TestStore(t *testing.T) {
	endpoint := server(t)
	var n atomic.Int32
	leadtest.Run(t, func(*testing.T) leadtest.Suite {
		prefix := fmt.Sprintf("/test/%d", n.Add(1))
		return leadtest.Suite{Deposes: true, Open: func(t *testing.T) lead.Store {
			s, err := Open(Config{Endpoints: []string{endpoint}, Prefix: prefix})
			require.NoError(t, err)
			t.Cleanup(func() {
				_ = s.Resign(t.Context())
				require.NoError(t, s.Close())
			})
			return s
		}}
	})
}

// More records than one page has, while others are written.
func TestLoadInPages(t *testing.T) {
	s, err := Open(Config{Endpoints: []string{server(t)}, Prefix: "/p"})
	require.NoError(t, err)
	defer s.Close()
	term, _, err := s.Campaign(t.Context(), "a:1")
	require.NoError(t, err)
	const n = 3*pageSize + 1
	for i := 0; i < n; i += lead.MaxRecords {
		var some []lead.Record
		for j := i; j < min(n, i+lead.MaxRecords); j++ {
			some = append(some, lead.Record{Key: fmt.Sprintf("%05d", j), Value: []byte{}})
		}
		require.NoError(t, s.Append(t.Context(), term, some...))
	}
	all, err := s.Load(t.Context(), term)
	require.NoError(t, err)
	require.Len(t, all, n)
	for i, r := range all {
		require.Equal(t, fmt.Sprintf("%05d", i), r.Key)
	}
}

// A leader whose etcd is frozen loses its leadership when its lease is over, and no sooner does another one lead.
func TestFrozenEtcd(t *testing.T) {
	endpoint, process := startServer(t)
	s, err := Open(Config{Endpoints: []string{endpoint}, Prefix: "/f"})
	require.NoError(t, err)
	defer s.Close()
	term, lost, err := s.Campaign(t.Context(), "a:1")
	require.NoError(t, err)
	require.NoError(t, process.Signal(syscall.SIGSTOP))
	frozen := time.Now()
	select {
	case <-lost:
		require.Less(t, time.Since(frozen), 5*time.Second)
	case <-time.After(20 * time.Second):
		require.Fail(t, "the leadership is not lost")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	require.Error(t, s.Append(ctx, term, lead.Record{Key: "late", Value: []byte{}}))
	require.NoError(t, process.Signal(syscall.SIGCONT))
	require.Eventually(t, func() bool {
		return errors.Is(s.Append(t.Context(), term, lead.Record{Key: "late", Value: []byte{}}), lead.ErrDeposed)
	}, 20*time.Second, 100*time.Millisecond)
}

// A frozen member of three, which takes connections and requests, neither ends a leadership nor keeps the next leader
// from being elected.
func TestFrozenMember(t *testing.T) {
	endpoints, members := startCluster(t)
	open := func() *Store {
		s, err := Open(Config{Endpoints: endpoints, Prefix: "/m"})
		require.NoError(t, err)
		t.Cleanup(func() { _ = s.Close() })
		return s
	}
	a, b := open(), open()
	term, lost := campaign(t, a)
	elected := make(chan lead.Term, 1)
	go func() {
		for t.Context().Err() == nil { // as masters do
			term, _, err := b.Campaign(t.Context(), "b:1")
			if err == nil {
				elected <- term
				return
			}
			t.Log(err)
		}
	}()
	for i := range members { // a member that leads the others costs an election of theirs, so freeze one that follows
		status, err := a.client.Status(t.Context(), endpoints[i])
		require.NoError(t, err)
		if status.Leader != status.Header.MemberId {
			require.NoError(t, members[i].Signal(syscall.SIGSTOP))
			break
		}
	}
	frozen := time.Now()
	require.Eventually(t, func() bool {
		require.NoError(t, lostNot(lost))
		return time.Since(frozen) > 2*ttl*time.Second
	}, time.Minute, 10*time.Millisecond)
	require.Less(t, a.Silence(), ttl*time.Second)
	require.Eventually(t, func() bool { return b.Depose(t.Context(), lead.Leader{Term: term}) == nil }, time.Minute,
		10*time.Millisecond)
	deposed := time.Now()
	select {
	case later := <-elected:
		require.Greater(t, later, term)
		t.Log("elected after", time.Since(deposed))
	case <-time.After(8 * time.Second): // less than the connection to the frozen member lives
		require.Fail(t, "nobody is elected")
	}
}

// campaign tries again, as masters do: an etcd that has just been started on a busy machine may answer late.
func campaign(t *testing.T, s *Store) (term lead.Term, lost <-chan struct{}) {
	t.Helper()
	var err error
	require.Eventually(t, func() bool {
		term, lost, err = s.Campaign(t.Context(), "a:1")
		return err == nil
	}, time.Minute, 10*time.Millisecond)
	return term, lost
}

// A leader goes on while etcd is frozen for as long as all candidates vouch that it has named, and no longer.
func TestFailsafe(t *testing.T) {
	endpoint, process := startServer(t)
	var silent atomic.Bool
	open := func() *Store {
		s, err := Open(Config{Endpoints: []string{endpoint}, Prefix: "/v"})
		require.NoError(t, err)
		t.Cleanup(func() { _ = s.Close() })
		s.Failsafe(func(_ lead.Term, candidates []string) bool {
			return !silent.Load() && slices.Contains(candidates, "b:1")
		})
		return s
	}
	a, b := open(), open()
	term, lost, err := a.Campaign(t.Context(), "a:1")
	require.NoError(t, err)
	a.Serves(term)
	named := func(want ...string) {
		t.Helper()
		require.Eventually(t, func() bool {
			v, err := b.Vouchers(t.Context())
			return err == nil && v.Leader == lead.Leader{Term: term, Addr: "a:1"} && slices.Equal(v.Candidates, want)
		}, 20*time.Second, 10*time.Millisecond)
	}
	named()
	waiting, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	go func() {
		_, _, err := b.Campaign(waiting, "b:1")
		ended <- err
	}()
	named("b:1")
	r, err := b.client.Get(t.Context(), b.vouchers())
	require.NoError(t, err)
	expires, err := b.client.TimeToLive(t.Context(), clientv3.LeaseID(r.Kvs[0].Lease))
	require.NoError(t, err)
	require.Greater(t, time.Duration(expires.TTL)*time.Second, Unanswered, "it outlasts a leader that goes on")
	require.Eventually(t, func() bool { return slices.Equal(a.Candidates(), []string{"b:1"}) }, soon, time.Millisecond)
	require.NoError(t, a.Append(t.Context(), term)) // its write is answered
	require.True(t, a.Holds())
	a.tenure.look(time.Now().Add(2 * pause)) // as after a pause
	require.False(t, a.Holds(), "others may have deposed it")
	require.Eventually(t, a.Holds, soon, time.Millisecond, "a renewal says that they have not")
	require.NoError(t, process.Signal(syscall.SIGSTOP))
	frozen := time.Now()
	require.Eventually(t, func() bool {
		require.NoError(t, lostNot(lost))
		require.True(t, a.Holds())
		return time.Since(frozen) > 2*ttl*time.Second
	}, soon, 10*time.Millisecond)
	silent.Store(true)
	require.Eventually(t, func() bool { return lostNot(lost) != nil }, soon, time.Millisecond)
	require.False(t, a.Holds())
	require.NoError(t, process.Signal(syscall.SIGCONT))
	stop()
	<-ended
}

// What a leader has named, without whom it does not go on, stays until the next one knows that it does not.
func TestVouchersOfTheLeaderBefore(t *testing.T) {
	endpoint := server(t)
	open := func() *Store {
		s, err := Open(Config{Endpoints: []string{endpoint}, Prefix: "/w"})
		require.NoError(t, err)
		t.Cleanup(func() { _ = s.Close() })
		s.Failsafe(func(lead.Term, []string) bool { return true })
		return s
	}
	before, next, reader := open(), open(), open()
	first, _ := campaign(t, before)
	before.Serves(first)
	of := func() lead.Term {
		v, err := reader.Vouchers(t.Context())
		require.NoError(t, err)
		return v.Term
	}
	require.Eventually(t, func() bool { return of() == first }, soon, time.Millisecond)
	require.NoError(t, reader.Depose(t.Context(), lead.Leader{Term: first}))
	for range 2 { // it may leave it to another one
		term, _ := campaign(t, next)
		time.Sleep(2 * reread) // in which a leader that did not wait would write its own
		require.Equal(t, first, of())
		require.NoError(t, next.Resign(t.Context()))
		require.Equal(t, first, of())
		require.Greater(t, term, first)
	}
	term, _ := campaign(t, next)
	next.Serves(term)
	require.Eventually(t, func() bool { return of() == term }, soon, time.Millisecond)
	require.NoError(t, next.Resign(t.Context()))
	require.Zero(t, of())
}

// A leader does not go on if it may have written that nobody vouches for it.
func TestLastCandidateLeaves(t *testing.T) {
	s, err := Open(Config{Endpoints: []string{port(t)}, Prefix: "/x"})
	require.NoError(t, err)
	defer s.Close()
	s.Failsafe(func(lead.Term, []string) bool { return true })
	b := []string{"b:1"}
	leader := &tenure{term: 1, addr: "a:1", lease: &lease{renewed: time.Now().Add(-time.Minute)}, serves: true}
	leader.vouching = vouching{present: b, needed: b, last: b, written: true}
	require.True(t, s.holds(leader))
	var stop context.CancelFunc
	leader.ctx, stop = context.WithCancel(t.Context())
	stop() // etcd does not answer
	s.register(leader, nil)
	require.False(t, s.holds(leader))
}

const soon = 20 * time.Second

func lostNot(lost <-chan struct{}) error {
	select {
	case <-lost:
		return lead.ErrDeposed
	default:
		return nil
	}
}

// late is a client whose transactions sometimes seem to fail, and are carried out later.
type late struct {
	clientv3.KV
	next  int // so many
	carry []func() error
}

type lateTxn struct {
	clientv3.Txn
	of  *late
	on  []clientv3.Cmp
	ops []clientv3.Op
}

func (l *late) Txn(ctx context.Context) clientv3.Txn { return &lateTxn{Txn: l.KV.Txn(ctx), of: l} }

func (x *lateTxn) If(on ...clientv3.Cmp) clientv3.Txn {
	x.on, x.Txn = on, x.Txn.If(on...)
	return x
}

func (x *lateTxn) Then(ops ...clientv3.Op) clientv3.Txn {
	x.ops, x.Txn = ops, x.Txn.Then(ops...)
	return x
}

func (x *lateTxn) Commit() (*clientv3.TxnResponse, error) {
	if x.of.next == 0 {
		return x.Txn.Commit()
	}
	x.of.next--
	x.of.carry = append(x.of.carry, func() error {
		_, err := x.of.KV.Txn(context.Background()).If(x.on...).Then(x.ops...).Commit()
		return err
	})
	return nil, context.DeadlineExceeded
}

// An Append that has failed does not undo a later one when a member of etcd that was frozen carries it out.
func TestLateAppend(t *testing.T) {
	s, err := Open(Config{Endpoints: []string{server(t)}, Prefix: "/late"})
	require.NoError(t, err)
	defer s.Close()
	l := &late{KV: s.client.KV}
	s.client.KV = l
	term, lost := campaign(t, s)
	put := func(value string) error {
		return s.Append(t.Context(), term, lead.Record{Key: "k", Value: []byte(value)})
	}
	require.NoError(t, put("1"))
	for failures := 1; failures <= 3; failures++ { // the later ones are of what fends off the first
		l.next, l.carry = failures, nil
		for range failures {
			require.Error(t, put("old"))
		}
		require.NoError(t, put("new"))
		for _, carry := range l.carry {
			require.NoError(t, carry())
		}
		all, err := s.Load(t.Context(), term)
		require.NoError(t, err)
		require.Equal(t, []lead.Record{{Key: "k", Value: []byte("new")}}, all)
		require.NoError(t, put("newer"))
	}
	l.next, l.carry = 1, nil
	require.Error(t, put("old"))
	before, err := s.Load(t.Context(), term)
	require.NoError(t, err)
	require.NoError(t, l.carry[0]())
	after, err := s.Load(t.Context(), term)
	require.NoError(t, err)
	require.Equal(t, before, after)
	require.NoError(t, lostNot(lost))
	require.NoError(t, s.Resign(t.Context()))
	require.ErrorIs(t, put("late"), lead.ErrDeposed)
}
