package master

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/kube"
	"dlrover-run/internal/app/kube/kubetest"
	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/app/nodehealth"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// helperVariable makes the test's program a dlrover-master of its arguments.
const helperVariable = "DLROVER_MASTER_TEST"

func TestMain(m *testing.M) {
	if os.Getenv(helperVariable) != "" {
		os.Exit(run(os.Args, os.Stdout))
	}
	os.Exit(m.Run())
}

var (
	eventRights     = []string{"create events"}
	conditionRights = []string{"get nodes", "list nodes", "patch nodes/status", "create events"}
	taintRights     = []string{"get nodes", "list nodes", "patch nodes", "create events"}
)

// soon is ample for what takes a second or two.
const soon = 30 * time.Second

// inPod has this process run in a pod of a cluster with the nodes gpu-00 to gpu-02.
func inPod(t *testing.T, rights ...string) *kubetest.Server {
	t.Helper()
	s := kubetest.Start(t)
	for i := range 3 {
		s.AddNode(t, fmt.Sprintf("gpu-0%d", i))
	}
	setPod(t, s, "master-6d4cf56db6-x7k2p", rights...)
	return s
}

func setPod(t *testing.T, s *kubetest.Server, name string, rights ...string) {
	t.Helper()
	for key, value := range s.Pod(t, "train", name, rights...) {
		t.Setenv(key, value)
	}
}

// join has launchers n0 to n2 on gpu-00 to gpu-02 join run r.
func join(t *testing.T, c *api.Client) {
	t.Helper()
	for _, id := range []string{"n0", "n1", "n2"} {
		joinOn(t, c, id, "gpu-0"+id[1:])
	}
}

func joinOn(t *testing.T, c *api.Client, id, machine string) {
	t.Helper()
	require.NoError(t, c.Join(t.Context(), "r", rendezvous.Join{
		Node: rendezvous.Node{ID: id, Name: id, Machine: machine, Rank: -1, Slots: 1, Addr: "10.0.0.1",
			Can: []rendezvous.Ability{rendezvous.CanGate}},
		Params: rendezvous.Params{Min: 2, Max: 2, Gate: true},
	}))
}

func report(t *testing.T, c *api.Client, e rendezvous.Event) {
	t.Helper()
	require.NoError(t, c.Report(t.Context(), "r", e))
}

func listed(t *testing.T, c *api.Client) (k marks.Known) {
	t.Helper()
	require.NoError(t, c.Global(t.Context(), "nodes", nil, &k))
	return k
}

// record is how far things are with a machine.
func record(t *testing.T, c *api.Client, machine string) marks.ActionRecord {
	t.Helper()
	for _, m := range listed(t, c).Nodes {
		if m.Name == machine && m.Record != nil {
			return *m.Record
		}
	}
	return marks.ActionRecord{}
}

func change(t *testing.T, c *api.Client, node, action string) {
	t.Helper()
	require.NoError(t, c.Global(t.Context(), "nodes/"+node, marks.Change{Action: action, Reason: "smoke"}, nil))
}

func tainted(t *testing.T, s *kubetest.Server, node string, want bool) {
	t.Helper()
	require.Eventually(t, func() bool { _, is := s.Taint(node); return is == want }, soon, 10*time.Millisecond)
}

// eventOf waits for the first event about a node, which is created after all else is done.
func eventOf(t *testing.T, s *kubetest.Server, node, want string) {
	t.Helper()
	require.Eventually(t, func() bool { return len(s.Messages(node)) > 0 }, soon, 10*time.Millisecond)
	require.Contains(t, s.Messages(node)[0], want)
}

// Three nodes, of which one fails its check: it is tainted, the others train, and the taint goes with the mark.
func TestAFaultyNodeIsTaintedUntilItsMarkEnds(t *testing.T) {
	s := inPod(t, append(taintRights, "patch pods")...)
	d, c, _, end := served(t, "--node-action=taint", "--node-mark-time=5s")
	defer end()
	join(t, c)
	report(t, c, rendezvous.Barred{ID: "n1", Reason: "its link is slow", Aspect: "network"})
	tainted(t, s, "gpu-01", true)
	value, _ := s.Taint("gpu-01")
	require.Equal(t, string(nodehealth.CheckFailed), value)
	for _, id := range []string{"n0", "n2"} {
		report(t, c, rendezvous.Cleared{ID: id})
	}
	require.Eventually(t, func() bool {
		st, err := d.service.Hub.Run("r")
		return err == nil && st.Members == 2
	}, soon, 10*time.Millisecond, "the others train")
	require.Eventually(t, func() bool { return record(t, c, "gpu-01").State == marks.Applied }, soon, 10*time.Millisecond)
	require.Equal(t, "taint", listed(t, c).Action)
	require.Eventually(t, func() bool {
		return s.PodAnnotations("train", "master-6d4cf56db6-x7k2p")[kube.AvoidKey] == `["gpu-01"]`
	}, soon, 10*time.Millisecond)
	runs, err := c.Runs(t.Context())
	require.NoError(t, err)
	require.Equal(t, []string{"gpu-01"}, runs[0].Avoid)
	eventOf(t, s, "gpu-01", "its link is slow (marked by dlrover-master/train/master until ")

	tainted(t, s, "gpu-01", false)
	require.Eventually(t, func() bool { return len(s.PodAnnotations("train", "master-6d4cf56db6-x7k2p")) == 0 }, soon,
		10*time.Millisecond)
	require.Empty(t, listed(t, c).Avoid)
	require.Empty(t, record(t, c, "gpu-01"))
	for _, node := range []string{"gpu-00", "gpu-02"} {
		tainted(t, s, node, false)
	}
}

// A spare takes the place of a node whose machine is marked, when the next world is chosen.
func TestASpareIsPreferredToAMarkedNode(t *testing.T) {
	d, c, _, end := served(t, "--data-dir="+t.TempDir())
	defer end()
	change(t, c, "gpu-00", "mark")
	join(t, c)
	for _, id := range []string{"n2", "n1", "n0"} { // nobody is chosen before n0 has answered
		report(t, c, rendezvous.Cleared{ID: id})
	}
	require.Eventually(t, func() bool {
		st, err := d.service.Hub.Run("r")
		return err == nil && st.Members == 2
	}, soon, 10*time.Millisecond)
	st, err := d.service.Hub.Run("r")
	require.NoError(t, err)
	for _, n := range st.Nodes {
		require.Equal(t, n.Name == "n0", n.State == "waiting", "%s is %s", n.Name, n.State)
	}
}

func TestAPassedCheckAndAnOperatorRemoveTheTaint(t *testing.T) {
	s := inPod(t, taintRights...)
	_, c, _, end := served(t, "--node-action=taint")
	defer end()
	join(t, c)
	report(t, c, rendezvous.Barred{ID: "n1", Reason: "its link is slow", Aspect: "network"})
	tainted(t, s, "gpu-01", true)
	report(t, c, rendezvous.Cleared{ID: "n1", Covered: []string{"network"}})
	tainted(t, s, "gpu-01", false)

	change(t, c, "gpu-02", "mark")
	tainted(t, s, "gpu-02", true)
	eventOf(t, s, "gpu-02", "until somebody clears it")
	change(t, c, "gpu-02", "clear")
	tainted(t, s, "gpu-02", false)
}

func TestADryRunTouchesNothing(t *testing.T) {
	s := inPod(t, taintRights...)
	d, c, _, end := served(t, "--node-action=cordon", "--node-action-dry-run")
	defer end()
	require.Nil(t, d.nodes.cluster)
	change(t, c, "gpu-01", "mark")
	require.Equal(t, marks.ActionRecord{Do: nodehealth.Apply, State: marks.DryRun}, record(t, c, "gpu-01"))
	k := listed(t, c)
	require.Equal(t, "cordon", k.Action)
	require.True(t, k.DryRun)
	require.Empty(t, s.Requests())
}

// child is a dlrover-master in a process of its own.
func child(t *testing.T, args ...string) (c *api.Client, kill func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0], append([]string{"--listen=127.0.0.1:0", "--log-format=json"}, args...)...)
	cmd.Env = append(os.Environ(), helperVariable+"=1", "DLROVER_TOKEN="+secret)
	out, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	dead := false
	kill = func() {
		if !dead {
			dead = true
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}
	t.Cleanup(kill)
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var l struct{ Msg, Addr string }
		if json.Unmarshal(lines.Bytes(), &l) == nil && l.Msg == "serving" {
			go func() { _, _ = io.Copy(io.Discard, out) }()
			c = api.NewClient(l.Addr, secret)
			t.Cleanup(c.Close)
			return c, kill
		}
	}
	t.Fatal("dlrover-master does not serve")
	return nil, nil
}

// What a daemon that was killed had not come to, the next one does, in a pod of another name.
func TestADaemonThatIsKilledBetweenMarkAndUnmark(t *testing.T) {
	s := inPod(t, taintRights...)
	dir := filepath.Join(t.TempDir(), "data")
	args := []string{"--data-dir=" + dir, "--node-action=taint"}
	c, kill := child(t, args...)
	change(t, c, "gpu-00", "mark")
	change(t, c, "gpu-01", "mark")
	tainted(t, s, "gpu-00", true)
	tainted(t, s, "gpu-01", true)
	s.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
		http.Error(w, "away", http.StatusServiceUnavailable)
		return true
	})
	change(t, c, "gpu-01", "clear") // is kept, and cannot be carried out
	change(t, c, "gpu-02", "mark")
	kill()
	s.Intercept(nil)
	_, is := s.Taint("gpu-01")
	require.True(t, is)

	setPod(t, s, "master-6d4cf56db6-bbbbb", taintRights...)
	_, kill = child(t, args...)
	tainted(t, s, "gpu-01", false)
	tainted(t, s, "gpu-02", true)
	tainted(t, s, "gpu-00", true)
	kill()

	// Without what was known every mark of this owner is one that was left.
	require.NoError(t, os.RemoveAll(dir))
	_, _ = child(t, args...)
	tainted(t, s, "gpu-00", false)
	tainted(t, s, "gpu-02", false)
}

func TestTwoMastersOfOneCluster(t *testing.T) {
	s := inPod(t, taintRights...)
	_, a, _, endA := served(t, "--node-action=taint")
	defer endA()
	change(t, a, "gpu-01", "mark")
	tainted(t, s, "gpu-01", true)
	setPod(t, s, "other-0", taintRights...)
	_, b, _, endB := served(t, "--node-action=taint")
	defer endB()
	change(t, b, "gpu-01", "mark")
	require.Eventually(t, func() bool { return len(s.Messages("gpu-01")) == 2 }, soon, 10*time.Millisecond)
	change(t, a, "gpu-01", "clear")
	require.Eventually(t, func() bool { return record(t, a, "gpu-01").State == "" }, soon, 10*time.Millisecond)
	_, is := s.Taint("gpu-01")
	require.True(t, is, "the other master's mark is still there")
	change(t, b, "gpu-01", "clear")
	tainted(t, s, "gpu-01", false)
}

// What other masters have left goes an hour after its end, unless it may be renewed yet, or is no master's.
func TestMarksOfMastersThatNeverCameBackAreSwept(t *testing.T) {
	s := kubetest.Start(t)
	a, err := newCluster(t.Context(), kube.Taint, s.Account(t, taintRights...), nil, slog.New(slog.DiscardHandler))
	require.NoError(t, err)
	defer a.close()
	const stranger = ownerPrefix + "train/other"
	now, want := time.Now(), map[string]bool{}
	for node, m := range map[string]struct {
		owner string
		until time.Time
		stays bool
	}{
		"ended-long-ago": {stranger, now.Add(-strangersGrace - time.Minute), false},
		"ended-just-now": {stranger, now.Add(-strangersGrace + time.Minute), true},
		"lasts":          {stranger, now.Add(time.Hour), true},
		"has-no-end":     {stranger, time.Time{}, true},
		"is-no-masters":  {"dlrover-other/train/other", now.Add(-24 * time.Hour), true},
		"own":            {a.owner, now.Add(-24 * time.Hour), true},
		"own-unknown":    {a.owner, now.Add(time.Hour), false},
	} {
		s.AddNode(t, node)
		require.NoError(t, a.client.Apply(t.Context(), kube.Taint, kube.Mark{Node: node, Owner: m.owner, Reason: "x",
			Since: now.Add(-48 * time.Hour), Until: m.until}))
		want[node] = m.stays
	}
	sweeper, ok := a.asked().(marks.Sweeper)
	require.True(t, ok)
	require.NoError(t, sweeper.Sweep(t.Context(), func(machine string) bool { return machine == "own" }))
	got := map[string]bool{}
	for node := range want {
		_, got[node] = s.Taint(node)
	}
	require.Equal(t, want, got)
}

// The daemon and its rendezvous go on while the API server does not answer, and say what is not done.
func TestAnAPIServerThatIsAway(t *testing.T) {
	s := inPod(t, conditionRights...)
	away := func(w http.ResponseWriter, r *http.Request) bool {
		http.Error(w, "away", http.StatusServiceUnavailable)
		return true
	}
	s.Intercept(away)
	_, c, at, end := served(t, "--node-action=condition")
	defer end()
	change(t, c, "gpu-01", "mark")
	require.Eventually(t, func() bool {
		d := record(t, c, "gpu-01")
		return d.State == marks.Pending && strings.Contains(d.Why, "503")
	}, soon, 20*time.Millisecond)
	join(t, c)
	require.Regexp(t, `dlrover_node_action_failures_total [1-9]`, metricsOf(t, at))
	require.Contains(t, metricsOf(t, at), "dlrover_nodes_marked 1")
	require.Contains(t, metricsOf(t, at), "dlrover_node_action_pending 1")
	s.Intercept(nil)
	require.Eventually(t, func() bool { return record(t, c, "gpu-01").State == marks.Applied }, soon, 20*time.Millisecond)
	require.Eventually(t, func() bool {
		return strings.Contains(metricsOf(t, at), "dlrover_node_action_pending 0")
	}, soon, 20*time.Millisecond, "the page may be a second old")
}

func metricsOf(t *testing.T, at string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, at+"/metrics", nil)
	require.NoError(t, err)
	req.Header.Set("Authorization", "Bearer "+secret)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return string(text)
}

// Without NODE_NAME what is known of a launcher is its pod's address.
func TestNodesThatKubernetesDoesNotKnow(t *testing.T) {
	s := inPod(t, taintRights...)
	_, c, _, end := served(t, "--node-action=taint")
	defer end()
	for _, name := range []string{"10.0.0.7", "GPU_07"} {
		change(t, c, name, "mark")
		require.Eventually(t, func() bool { return record(t, c, name).State == marks.GivenUp }, soon, 10*time.Millisecond)
		require.Contains(t, record(t, c, name).Why, "set NODE_NAME from spec.nodeName")
	}
	s.Requests()
	time.Sleep(3 * time.Second) // in which nothing more may be asked
	require.Empty(t, s.Requests(), "they are not tried again")
	change(t, c, "GPU_07", "clear")
	require.Eventually(t, func() bool { return record(t, c, "GPU_07") == marks.ActionRecord{} }, soon, 10*time.Millisecond)
}

func TestTheDefaultLevel(t *testing.T) {
	t.Run("in a pod that may create events", func(t *testing.T) {
		s := inPod(t, eventRights...)
		_, c, _, end := served(t)
		defer end()
		change(t, c, "gpu-01", "mark")
		require.Eventually(t, func() bool { return record(t, c, "gpu-01").State == marks.Applied }, soon, 10*time.Millisecond)
		require.Len(t, s.Messages("gpu-01"), 1)
		change(t, c, "gpu-01", "clear")
		none := func() bool { return record(t, c, "gpu-01") == marks.ActionRecord{} }
		require.Eventually(t, none, soon, 10*time.Millisecond)
		for _, q := range s.Requests() {
			require.Contains(t, q, "POST ", "it does not look at nodes")
		}
	})
	t.Run("in a pod that may not", func(t *testing.T) {
		s := inPod(t)
		d, err := made(t)
		require.NoError(t, err)
		defer d.close(0)
		require.Nil(t, d.marks)
		require.Len(t, s.Requests(), 1)
	})
	t.Run("none", func(t *testing.T) {
		s := inPod(t, eventRights...)
		d, err := made(t, "--node-action=none")
		require.NoError(t, err)
		defer d.close(0)
		require.Nil(t, d.marks)
		require.Empty(t, s.Requests())
	})
}

// keeping has a daemon of these options keep marks, and shows what it logs when it has ended.
func keeping(t *testing.T, out io.Writer, args ...string) *daemon {
	t.Helper()
	d := &daemon{log: slog.New(slog.NewTextHandler(out, nil)), metrics: newMetrics()}
	a := app(io.Discard)
	a.Action = func(c *cli.Context) error { _, err := d.keepMarks(c, nil); return err }
	require.NoError(t, a.Run(append([]string{"dlrover-master"}, args...)))
	return d
}

// A right that nobody could be asked for at the start may be there or not, and each mark shows.
func TestTheDefaultLevelWhileTheAPIServerIsAway(t *testing.T) {
	for want, rights := range map[marks.State][]string{marks.Applied: eventRights, marks.GivenUp: nil} {
		t.Run(string(want), func(t *testing.T) {
			s := inPod(t, rights...)
			s.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
				http.Error(w, "away", http.StatusServiceUnavailable)
				return true
			})
			var out bytes.Buffer
			d := keeping(t, &out)
			require.NotNil(t, d.marks)
			s.Intercept(nil)
			for range 2 {
				s.Requests()
				require.NoError(t, d.marks.Mark(t.Context(), "gpu-01", "me", "smoke"))
				require.Eventually(t, func() bool { return d.marks.Stats().Pending == 0 }, soon, 10*time.Millisecond)
				require.Equal(t, []string{"POST /api/v1/namespaces/default/events"}, s.Requests())
				require.Equal(t, want, d.marks.List().Nodes[0].Record.State)
			}
			d.closeMarks()
			require.Equal(t, 1, strings.Count(out.String(), "level=WARN msg=\"the API server cannot be asked"))
			refused := 0
			if want == marks.GivenUp {
				refused = 1
			}
			require.Equal(t, refused, strings.Count(out.String(), "not carried out"), out.String())
			require.Equal(t, refused, strings.Count(out.String(), "not allowed to create events"))
		})
	}
}

// A level that was asked for goes on, and tries again: the right may come.
func TestALevelThatWasAskedForWaitsForItsRight(t *testing.T) {
	s := inPod(t, eventRights...)
	_, c, _, end := served(t, "--node-action=event")
	defer end()
	s.Intercept(func(w http.ResponseWriter, r *http.Request) bool {
		http.Error(w, "not yet", http.StatusForbidden)
		return true
	})
	change(t, c, "gpu-01", "mark")
	require.Eventually(t, func() bool { return strings.Contains(record(t, c, "gpu-01").Why, "not yet") }, soon,
		10*time.Millisecond)
	require.Equal(t, marks.Pending, record(t, c, "gpu-01").State)
	s.Intercept(nil)
	require.Eventually(t, func() bool { return record(t, c, "gpu-01").State == marks.Applied }, soon, 10*time.Millisecond)
}

func TestAMarkTimeOfNoMarks(t *testing.T) {
	const warning = "--node-mark-time is of no use: no node is marked without --data-dir or a level of --node-action"
	for args, want := range map[string]int{
		"--node-mark-time=1h": 1, "--node-action=none": 0, "--node-mark-time=1h --data-dir=" + t.TempDir(): 0,
		"--node-mark-time=1h --node-action=event --node-action-dry-run": 0,
	} {
		var out bytes.Buffer
		keeping(t, &out, strings.Fields(args)...).closeMarks()
		require.Equal(t, want, strings.Count(out.String(), "level=WARN msg=\""+warning), args)
	}
}

func TestNodeActionsThatCannotBe(t *testing.T) {
	for name, c := range map[string]struct {
		rights []string
		args   []string
		want   []string
	}{
		"unknown level": {taintRights, []string{"--node-action=drain"},
			[]string{`--node-action: unknown node action "drain"`, "want none"}},
		"missing rights": {eventRights, []string{"--node-action=condition"},
			[]string{"--node-action=condition", "get nodes, list nodes, patch nodes/status",
				"docs/kubernetes/rbac-condition.yaml"}},
		"cordon": {conditionRights, []string{"--node-action=cordon"},
			[]string{"not allowed to patch nodes: ", "docs/kubernetes/rbac-taint.yaml"}},
		"nothing to try": {nil, []string{"--node-action=none", "--node-action-dry-run"}, []string{"there is nothing to try"}},
		"short marks":    {nil, []string{"--node-mark-time=1ms"}, []string{"--node-mark-time=1ms: need 1s to 720h"}},
		"long marks":     {nil, []string{"--node-mark-time=1000h"}, []string{"need 1s to 720h"}},
	} {
		t.Run(name, func(t *testing.T) {
			inPod(t, c.rights...)
			_, err := made(t, c.args...)
			require.Error(t, err)
			for _, want := range c.want {
				require.ErrorContains(t, err, want)
			}
		})
	}
	t.Run("no cluster", func(t *testing.T) {
		_, err := made(t, "--node-action=taint")
		require.ErrorContains(t, err, "--node-action=taint: not in a Kubernetes pod with a service account")
		d, err := made(t, "--node-action=taint", "--node-action-dry-run")
		require.NoError(t, err)
		d.close(0)
	})
	t.Run("a token that is not accepted", func(t *testing.T) {
		inPod(t, taintRights...)
		require.NoError(t, os.WriteFile(filepath.Join(os.Getenv(kube.DirVariable), "token"), []byte("nobodys"), 0o600))
		_, err := made(t, "--node-action=taint")
		require.ErrorContains(t, err, "does not accept the service account's token")
	})
}

func TestTheOwnerOutlivesThePod(t *testing.T) {
	for pod, want := range map[string]string{
		"dlrover-master-6d4cf56db6-x7k2p":  "dlrover-master", // of a Deployment
		"train-dlrover-master-0":           "train-dlrover-master-0",
		"elasticjob-train-dlrover-master":  "elasticjob-train-dlrover-master",
		"master-x7k2p":                     "master", // of a Job
		"master":                           "master",
		"x7k2p":                            "x7k2p",
		"big-model-7b-master-abcde":        "big-model-7b-master-abcde",
		"dlrover-master-56bd5d5d9d-zzzzz":  "dlrover-master",
		"dlrover-master-canary-56bd-zzzzz": "dlrover-master-canary-56bd",
	} {
		require.Equal(t, want, workload(pod), pod)
	}
	require.Equal(t, "dlrover-master/train/m", owner(kube.Config{Namespace: "train", Pod: "m-6d4cf56db6-x7k2p"}))
}

// NVSentinel is told of a faulty node until an operator clears it, and the next master clears what it does not know.
func TestAFaultyNodeIsReportedToNVSentinel(t *testing.T) {
	s := inPod(t, "list externalfaults", "create externalfaults", "patch externalfaults", "delete externalfaults",
		"create events")
	_, err := made(t, "--node-action=external-fault")
	require.ErrorContains(t, err, "--node-action=external-fault: the cluster has no kind ExternalFault")
	s.AddFaults(t)
	faults := func(nodes ...string) {
		t.Helper()
		is := func() bool { return slices.Equal(nodes, s.Faults()) }
		require.Eventually(t, is, soon, 10*time.Millisecond, "%v", nodes)
	}
	dir := "--data-dir=" + t.TempDir()
	_, c, _, end := served(t, "--node-action=external-fault", dir)
	join(t, c)
	report(t, c, rendezvous.Barred{ID: "n1", Reason: "its link is slow", Aspect: "network"})
	change(t, c, "gpu-02", "mark")
	faults("gpu-01", "gpu-02")
	eventOf(t, s, "gpu-01", "its link is slow (marked by dlrover-master/train/master until ")
	change(t, c, "gpu-02", "clear")
	faults("gpu-01")
	end()

	_, c, _, end = served(t, "--node-action=external-fault") // which does not know that mark
	faults()
	change(t, c, "gpu-00", "mark")
	faults("gpu-00")
	end()
}
