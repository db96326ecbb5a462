package marks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"dlrover-run/internal/app/nodehealth"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous/lead"
	"dlrover-run/rendezvous/lead/journal"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func open(t *testing.T, cfg Config) *Manager {
	t.Helper()
	if cfg.Log == nil {
		cfg.Log = quiet()
	}
	k, err := Open(cfg)
	require.NoError(t, err)
	return k
}

// leaders are the newest of each directory.
var leaders = map[string]*journal.Journal{}

// in is the store in a directory, which the leader before has to leave.
func in(t *testing.T, dir string) Config {
	t.Helper()
	if before := leaders[dir]; before != nil {
		require.NoError(t, before.Resign(t.Context()))
	}
	j, err := journal.Open(dir, quiet())
	require.NoError(t, err)
	leaders[dir] = j
	t.Cleanup(func() { require.NoError(t, j.Resign(t.Context())) })
	term, err := j.TryCampaign()
	require.NoError(t, err)
	return Config{Store: j, Term: term}
}

func broken(node string) nodehealth.Finding {
	return nodehealth.Finding{Node: node, Run: "r", Kind: nodehealth.CheckFailed, Text: "its link is slow"}
}

// names are those of the machines that are marked.
func names(k *Manager) []string { return k.List().Avoid }

func TestWhatIsKnownOutlivesTheDaemon(t *testing.T) {
	dir := t.TempDir()
	k := open(t, in(t, dir))
	k.Size("r", []string{"n0", "n1", "n2"})
	k.Find(broken("n1"))
	require.NoError(t, k.Mark(t.Context(), "n2", "me", "smoke"))
	want := k.List()
	require.NoError(t, k.Close())

	k = open(t, in(t, dir))
	got := k.List()
	require.Equal(t, []string{"n1", "n2"}, got.Avoid)
	require.Equal(t, want.Nodes[0].Mark, got.Nodes[0].Mark)
	require.Equal(t, want.Nodes[1].Mark, got.Nodes[1].Mark)
	known, err := k.Clear(t.Context(), "n2", "me", "no smoke")
	require.NoError(t, err)
	require.True(t, known)
	known, err = k.Clear(t.Context(), "n2", "me", "no smoke")
	require.NoError(t, err)
	require.False(t, known)
	require.NoError(t, k.Close())
	k = open(t, in(t, dir))
	require.Equal(t, []string{"n1"}, names(k))
	require.NoError(t, k.Close())
}

// The file of an older program is taken over once, in place of what is in the store.
func TestTheFileOfAnOlderProgram(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, oldFile)
	write := func(node string) {
		data := strings.ReplaceAll(`{"version":1,"nodes":[{"name":"NODE","seen":"2026-03-01T12:00:00Z","mark":`+
			`{"node":"NODE","kind":"operator","reason":"smoke","since":"2026-03-01T12:00:00Z","by":"me"}}]}`, "NODE", node)
		require.NoError(t, os.WriteFile(path, []byte(data), 0o600))
	}
	known := func() []string {
		cfg := in(t, dir)
		require.NoError(t, Import(t.Context(), dir, cfg.Store, cfg.Term, quiet()))
		require.NoFileExists(t, path)
		k := open(t, cfg)
		defer func() { require.NoError(t, k.Close()) }()
		return names(k)
	}
	require.Empty(t, known())
	write("n1")
	require.Equal(t, []string{"n1"}, known())
	require.FileExists(t, path+imported)
	require.Equal(t, []string{"n1"}, known())
	write("n2") // somebody went back to the older program for a while
	require.Equal(t, []string{"n2"}, known())
	require.Equal(t, []string{"n2"}, known())
}

func TestOldFilesThatCannotBeUsed(t *testing.T) {
	for name, c := range map[string]struct {
		make func(t *testing.T, dir string)
		want string
	}{
		"corrupt": {func(t *testing.T, dir string) {
			require.NoError(t, os.WriteFile(filepath.Join(dir, oldFile), []byte(`{"version":1,`), 0o600))
		}, "move the file away"},
		"a link": {func(t *testing.T, dir string) {
			other := filepath.Join(t.TempDir(), "other")
			require.NoError(t, os.WriteFile(other, []byte(`{"version":1}`), 0o600))
			require.NoError(t, os.Symlink(other, filepath.Join(dir, oldFile)))
		}, oldFile},
		"a pipe": {func(t *testing.T, dir string) {
			require.NoError(t, exec.Command("mkfifo", filepath.Join(dir, oldFile)).Run())
		}, "not a regular file"},
		"huge": {func(t *testing.T, dir string) {
			require.NoError(t, os.WriteFile(filepath.Join(dir, oldFile), nil, 0o600))
			require.NoError(t, os.Truncate(filepath.Join(dir, oldFile), nodehealth.MaxSnapshot+1))
		}, "at most"},
		"in use": {func(t *testing.T, dir string) {
			f, err := os.Create(filepath.Join(dir, oldLock))
			require.NoError(t, err)
			require.NoError(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
			t.Cleanup(func() { _ = f.Close() })
		}, "another dlrover-master, of an older version, uses it"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			c.make(t, dir)
			cfg := in(t, dir)
			require.ErrorContains(t, Import(t.Context(), dir, cfg.Store, cfg.Term, quiet()), c.want)
			all, err := cfg.Store.Load(t.Context(), cfg.Term)
			require.NoError(t, err)
			require.Empty(t, all)
		})
	}
}

// Many changes are written in Appends as large as a store takes.
func TestChangesFitIntoAppends(t *testing.T) {
	var all []lead.Record
	for i := range 200 {
		all = append(all, lead.Record{Key: fmt.Sprint("k", i), Value: make([]byte, i*500%lead.MaxValue)})
	}
	appends := 0
	for rest := all; len(rest) > 0; appends++ {
		n := fitting(rest)
		require.NotZero(t, n)
		require.NoError(t, lead.Validate(rest[:n]))
		rest = rest[n:]
	}
	require.Less(t, appends, 40)
}

// told collects what a Manager says and has done.
type told struct {
	mu    sync.Mutex
	lines []string
	fail  int // so many calls fail
}

func (o *told) add(format string, args ...any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lines = append(o.lines, fmt.Sprintf(format, args...))
}

func (o *told) take() []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	lines := o.lines
	o.lines = nil
	return lines
}

func (o *told) annotate(run string, event job.Event, node, _ string) {
	o.add("%s: %s %s", run, event, node)
}

func (o *told) act(what string, m nodehealth.Mark) error {
	o.mu.Lock()
	fail := o.fail > 0
	o.fail--
	o.mu.Unlock()
	if fail {
		o.add("failed to %s %s", what, m.Node)
		return errors.New("the cluster is away")
	}
	o.add("%s %s", what, m.Node)
	return nil
}

func (o *told) Apply(_ context.Context, m nodehealth.Mark) error  { return o.act("apply", m) }
func (o *told) Remove(_ context.Context, m nodehealth.Mark) error { return o.act("remove", m) }

func TestMarksAreToldCarriedOutAndExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var notes, acts told
		cfg := in(t, t.TempDir())
		cfg.Actor, cfg.Annotate = &acts, notes.annotate
		k := open(t, cfg)
		k.Size("r", []string{"n0", "n1", "n2"})
		k.Size("other", []string{"n1"})
		k.Find(broken("n1"))
		synctest.Wait()
		require.Equal(t, []string{"other: node-marked n1", "r: node-marked n1"}, notes.take())
		require.Equal(t, []string{"apply n1"}, acts.take())
		time.Sleep(4*time.Hour + time.Second)
		synctest.Wait()
		require.Equal(t, []string{"other: node-unmarked n1", "r: node-unmarked n1"}, notes.take())
		require.Equal(t, []string{"remove n1"}, acts.take())
		require.Empty(t, names(k))
		k.Find(broken("n0"), broken("n1"), broken("n2"))
		synctest.Wait()
		require.Contains(t, notes.take(), "r: node-mark-held n2")
		require.Empty(t, acts.take(), "a mark that was held back is not carried out")
		require.NoError(t, k.Close())
	})
}

// A clock that was a year ahead, and is set back while the daemon runs, leaves no mark for a year.
func TestAClockThatIsSetBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := nodehealth.New(nodehealth.Config{})
		b.Find(time.Now().Add(365*24*time.Hour), broken("n1"))
		k := open(t, Config{})
		k.mu.Lock()
		k.registry = b
		k.mu.Unlock()
		signal(k.dirty)
		time.Sleep(4*time.Hour - time.Second)
		require.Equal(t, []string{"n1"}, names(k))
		time.Sleep(gather + 2*time.Second)
		synctest.Wait()
		require.Empty(t, names(k))
		require.NoError(t, k.Close())
	})
}

// The timer of a mark that lasts is not all that a turn waits for.
func TestATurnComesEveryHour(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		const data = `{"version":1,"nodes":[{"name":"n0","seen":%[1]q,"mark":{"node":"n0","kind":"ecc","since":%[1]q,` +
			`"until":%[2]q,"by":"policy"}}]}`
		now, end := time.Now().UTC(), time.Now().UTC().Add(4*time.Hour)
		text := fmt.Sprintf(data, now.Format(time.RFC3339), end.Format(time.RFC3339))
		require.NoError(t, os.WriteFile(filepath.Join(dir, oldFile), []byte(text), 0o600))
		cfg := in(t, dir)
		require.NoError(t, Import(t.Context(), dir, cfg.Store, cfg.Term, quiet()))
		k := open(t, cfg)
		time.Sleep(2 * gather) // what the start has changed is written
		synctest.Wait()
		b := nodehealth.New(nodehealth.Config{})
		b.Find(now.Add(365*24*time.Hour), broken("n1"))
		k.mu.Lock()
		k.registry = b // and nothing else wakes the Manager
		k.mu.Unlock()
		time.Sleep(longestTurn + 4*time.Hour + time.Second)
		synctest.Wait()
		require.Empty(t, names(k))
		require.NoError(t, k.Close())
	})
}

func TestActsAreTriedAgainAndTheNewestCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		acts := told{fail: 2}
		k := open(t, Config{Actor: &acts})
		k.Find(broken("n1"))
		synctest.Wait()
		require.Equal(t, []string{"failed to apply n1"}, acts.take())
		time.Sleep(4 * time.Second)
		synctest.Wait()
		require.Equal(t, []string{"failed to apply n1", "apply n1"}, acts.take())
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Empty(t, acts.take())

		acts.mu.Lock()
		acts.fail = 1
		acts.mu.Unlock()
		_, err := k.Clear(t.Context(), "n1", "me", "")
		require.NoError(t, err)
		synctest.Wait()
		k.Find(broken("n1"))
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, []string{"failed to remove n1", "apply n1"}, acts.take())
		require.NoError(t, k.Close())
	})
}

// A daemon that was killed may not have come to it.
func TestMarksAreCarriedOutAgainAfterAStart(t *testing.T) {
	dir := t.TempDir()
	k := open(t, in(t, dir))
	require.NoError(t, k.Mark(t.Context(), "n1", "me", "smoke"))
	require.NoError(t, k.Close())
	synctest.Test(t, func(t *testing.T) {
		var acts told
		cfg := in(t, dir)
		cfg.Actor = &acts
		k := open(t, cfg)
		synctest.Wait()
		require.Equal(t, []string{"apply n1"}, acts.take())
		require.NoError(t, k.Close())
	})
}

func TestADryRunSaysWhatItWouldDo(t *testing.T) {
	var out bytes.Buffer
	var acts told
	k := open(t, Config{Actor: &acts, DryRun: true, Log: slog.New(slog.NewTextHandler(&out, nil))})
	require.NoError(t, k.Mark(t.Context(), "n1", "me", "smoke"))
	require.NoError(t, k.Close())
	require.Contains(t, out.String(), `msg="dry run: this would be done" action=mark node=n1`)
	require.Empty(t, acts.take())
}

func TestReadiness(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := open(t, Config{})
		require.NoError(t, k.Ready())
		require.NoError(t, k.Close())

		dir := filepath.Join(t.TempDir(), "data")
		k = open(t, in(t, dir))
		ask := func() (int, string) {
			w := httptest.NewRecorder()
			Ready(k.Ready)(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
			return w.Code, w.Body.String()
		}
		status, _ := ask()
		require.Equal(t, 200, status)
		require.NoError(t, os.Rename(dir, dir+"2"))
		require.Error(t, k.Mark(t.Context(), "n1", "me", "smoke"), "who asks is told that it may be lost")
		status, body := ask()
		require.Equal(t, 503, status)
		require.Contains(t, body, "not ready")
		require.NoError(t, os.Rename(dir+"2", dir))
		time.Sleep(retry)
		synctest.Wait()
		status, _ = ask()
		require.Equal(t, 200, status, "it was written meanwhile")
		require.NoError(t, k.Close())
		k = open(t, in(t, dir))
		require.Equal(t, []string{"n1"}, names(k))
		require.NoError(t, k.Close())
	})
}

func TestTheAPI(t *testing.T) {
	k := open(t, Config{})
	defer func() { require.NoError(t, k.Close()) }()
	for _, c := range []struct {
		method, path, body string
		status             int
		want               string
	}{
		{"GET", "/v1/nodes", "", 200, `{"nodes":[],"avoid":[]}`},
		{"POST", "/v1/nodes/n1", `{"action":"mark","reason":"smoke","by":"me"}`, 200, `{"known":true}`},
		{"POST", "/v1/nodes/a%2Fb", `{"action":"mark","reason":"smoke"}`, 200, `{"known":true}`},
		{"GET", "/v1/nodes", "", 200, `"avoid":["a/b","n1"]`},
		{"GET", "/v1/nodes", "", 200, `"reason":"smoke"`},
		{"POST", "/v1/nodes/n1", `{"action":"clear"}`, 200, `{"known":true}`},
		{"POST", "/v1/nodes/n1", `{"action":"clear"}`, 200, `{"known":false}`},
		{"POST", "/v1/nodes/n1", `{"action":"mark"}`, 400, "needs a reason"},
		{"POST", "/v1/nodes/n1", `{"action":"burn","reason":"x"}`, 400, "need mark or clear"},
		{"POST", "/v1/nodes/n1", `{"action":"mark","reason":"\u001b"}`, 400, "control characters"},
		{"POST", "/v1/nodes/n1", `{"action":"mark","reason":"` + strings.Repeat("x", 600) + `"}`, 400, "at most 512 bytes"},
		{"POST", "/v1/nodes/" + strings.Repeat("x", 600), `{"action":"mark","reason":"x"}`, 400, "need a name"},
		{"POST", "/v1/nodes/n%0A", `{"action":"clear"}`, 400, "need a name"},
		{"POST", "/v1/nodes/n1", `{`, 400, "no change of a node"},
		{"POST", "/v1/nodes/n1", `{"action":"` + strings.Repeat("x", maxBody) + `"}`, 400, "no change of a node"},
		{"DELETE", "/v1/nodes/n1", "", 405, "need POST"},
		{"POST", "/v1/nodes", "", 405, "need GET"},
		{"GET", "/v1/nodes/n1/x", "", 404, "not_found"},
	} {
		w := httptest.NewRecorder()
		k.Handler().ServeHTTP(w, httptest.NewRequest(c.method, c.path, strings.NewReader(c.body)))
		require.Equal(t, c.status, w.Code, "%s %s: %s", c.method, c.path, w.Body)
		require.Contains(t, w.Body.String(), c.want)
	}
}

func TestEventsAreDocumented(t *testing.T) {
	doc, err := os.ReadFile("../../../docs/reference/run-events.md")
	require.NoError(t, err)
	for _, event := range events {
		require.Contains(t, string(doc), "| `"+event+"` |")
	}
}
