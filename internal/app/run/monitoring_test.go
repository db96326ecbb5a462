package run

import (
	"encoding/json"
	stdflag "flag"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var updateRecording = stdflag.Bool("update", false, "write docs/monitoring/recording_test.yaml")

const (
	monitoring = "../../../docs/monitoring/"
	alertsFile = monitoring + "alerts.yaml"
	boardFile  = monitoring + "dlrover-run.json"
)

// promtool runs Prometheus' tool on input.
func promtool(t *testing.T, input string, args ...string) (string, error) {
	t.Helper()
	path, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("SKIPPED: no promtool (Debian's package prometheus), so ALERTS AND BOARD ARE NOT TESTED:", err)
	}
	cmd := exec.Command(path, args...)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// query is an expression of the alerts or of the board, with the text that shows its labels.
type query struct{ expr, told string }

// queries are all of them, by where they are.
func queries(t *testing.T) map[string]query {
	t.Helper()
	all := map[string]query{}
	text := string(read(t, alertsFile))
	rule := regexp.MustCompile(`(?m)^      - (?:alert|record): (\S+)\n        expr: (?:\|\n((?:          .*\n)+)|(.*)\n)` +
		`((?:        .*\n)*)`)
	for _, m := range rule.FindAllStringSubmatch(text, -1) {
		all[m[1]] = query{m[2] + m[3], m[4]}
	}
	require.Len(t, all, strings.Count(text, "expr:"), "this test reads all rules")
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr, LegendFormat string }
		}
	}
	require.NoError(t, json.Unmarshal(read(t, boardFile), &board))
	for _, p := range board.Panels {
		for i, target := range p.Targets {
			expr := strings.NewReplacer("$job", ".+", "$__rate_interval", "5m").Replace(target.Expr)
			all[fmt.Sprintf("panel %s, %d", p.Title, i)] = query{expr, target.LegendFormat}
		}
	}
	return all
}

// selector is a metric in a query, with the text of its matchers.
type selector struct{ name, matchers string }

var (
	names    = regexp.MustCompile(`([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?(\s*\()?`)
	ignored  = regexp.MustCompile(`(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)|\[[^\]]*\]`)
	keywords = regexp.MustCompile(`^(and|or|unless|bool|offset|inf|nan)$`)
	matcher  = regexp.MustCompile(`(\w+)(=~|!~|!=|=)"([^"]*)"`)
)

// labelsOf are the labels by which the query groups, and which its text shows.
func labelsOf(q query) (labels []string) {
	for _, m := range regexp.MustCompile(`(?:by|without|on)\s*\(([^)]*)\)`).FindAllStringSubmatch(q.expr, -1) {
		labels = append(labels, strings.Split(m[1], ", ")...)
	}
	for _, m := range regexp.MustCompile(`\{\{\s*(?:\$labels\.)?(\w+)`).FindAllStringSubmatch(q.told, -1) {
		labels = append(labels, m[1])
	}
	return labels
}

func selectors(query string) (found []selector) {
	for _, m := range names.FindAllStringSubmatch(ignored.ReplaceAllString(query, " "), -1) {
		if m[3] == "" && !keywords.MatchString(m[1]) {
			found = append(found, selector{m[1], m[2]})
		}
	}
	return found
}

func TestSelectorsOfAQuery(t *testing.T) {
	require.Equal(t, []string{"job", "instance", "kind", "rank"}, labelsOf(query{
		"sum by (job, instance) (max without (kind) (x))", "{{ $labels.rank }}, {{ $value }}"}))
	require.Equal(t, []selector{{"a", `{b=~"c d"}`}, {"x:y", ""}, {"z", ""}}, selectors(
		`sum by (job) (rate(a{b=~"c d"}[5m])) / 3 and on (job, instance) x:y >= 0 or max without (q) (z)`))
}

// matches are the series that the selector may mean.
func (s selector) matches(series string) bool {
	name, labels, _ := strings.Cut(series, "{")
	if name != s.name {
		return false
	}
	has := map[string]string{}
	for _, m := range matcher.FindAllStringSubmatch(labels, -1) {
		has[m[1]] = m[3]
	}
	for _, m := range matcher.FindAllStringSubmatch(s.matchers, -1) {
		value, there := has[m[1]]
		if !there || m[2] == "=" && value != m[3] ||
			m[2] == "=~" && !regexp.MustCompile("^(?:"+m[3]+")$").MatchString(value) {
			return false
		}
	}
	return true
}

// The files are right by themselves, and name only metrics that the reference has.
func TestMonitoringFiles(t *testing.T) {
	t.Parallel()
	out, err := promtool(t, "", "test", "rules", monitoring+"alerts_test.yaml", monitoring+"recording_test.yaml")
	require.NoError(t, err, out)
	all := queries(t)
	rules := "groups:\n- name: board\n  rules:\n"
	reference := string(read(t, monitoring+"../reference/reference.md"))
	for _, where := range slices.Sorted(maps.Keys(all)) {
		rules += fmt.Sprintf("  - {record: x, labels: {where: %q}, expr: %q}\n", where, all[where].expr)
		for _, s := range selectors(all[where].expr) {
			_, recorded := all[s.name]
			require.True(t, recorded || s.name == "up" || strings.Contains(reference, "| `"+s.name+"` |"),
				"%s: there is no metric %s", where, s.name)
		}
	}
	path := filepath.Join(t.TempDir(), "board.yaml")
	require.NoError(t, os.WriteFile(path, []byte(rules), 0o600))
	out, err = promtool(t, "", "check", "rules", alertsFile, path)
	require.NoError(t, err, out)
}

// Every alert says how bad it is, what it means, and which command is next; the page explains it.
func TestAlertsAreExplained(t *testing.T) {
	page := string(read(t, monitoring+"../tasks/monitoring.md"))
	for _, alert := range strings.Split(string(read(t, alertsFile)), "- alert: ")[1:] {
		name, text, _ := strings.Cut(alert, "\n")
		require.Regexp(t, `labels: \{severity: (critical|warning|info)\}`, text, name)
		require.Regexp(t, `(?s)summary: .*description: .*`+"`(dlroverctl|etcdctl) ", text, name)
		require.Contains(t, page, "| `"+name+"` |")
	}
}

// recorder scrapes as Prometheus does: each second is two minutes of the recording, in times and in what counts them.
type recorder struct {
	stop, stopped chan struct{}

	mu      sync.Mutex
	targets map[string]string   // URLs by labels
	pages   map[string]string   // the newest of each
	series  map[string][]string // values, "" for none
	taken   int
}

const (
	recordEvery = 1100 * time.Millisecond // the master makes a page a second
	recordedAs  = 2 * time.Minute
)

func newRecorder(t *testing.T) *recorder {
	r := &recorder{stop: make(chan struct{}), stopped: make(chan struct{}), targets: map[string]string{},
		pages: map[string]string{}, series: map[string][]string{}}
	go func() {
		defer close(r.stopped)
		tick := time.NewTicker(recordEvery)
		defer tick.Stop()
		for {
			select {
			case <-r.stop:
				return
			case <-tick.C:
				r.take()
			}
		}
	}()
	t.Cleanup(func() { close(r.stop); <-r.stopped })
	return r
}

func (r *recorder) scrapes(job, instance, addr string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.targets[fmt.Sprintf("instance=%q,job=%q", instance, job)] = "http://" + addr + "/metrics"
}

func (r *recorder) take() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for labels, url := range r.targets {
		page, err := scraped(url)
		if err != nil {
			r.add("up{"+labels+"}", "0")
			continue
		}
		r.add("up{"+labels+"}", "1")
		r.pages[labels] = page
		for series, value := range samples(page, labels) {
			r.add(series, value)
		}
	}
	r.taken++
}

func (r *recorder) add(series, value string) {
	r.series[series] = append(r.series[series], make([]string, r.taken-len(r.series[series]))...)
	r.series[series] = append(r.series[series], value)
}

// samples are the values of a page, by series with the labels of its target.
func samples(page, labels string) map[string]string {
	all := map[string]string{}
	for line := range strings.Lines(page) {
		at := strings.LastIndexByte(line, ' ')
		if strings.HasPrefix(line, "#") || at < 0 {
			continue
		}
		name, own, _ := strings.Cut(line[:at], "{")
		if own = strings.TrimSuffix(own, "}"); own != "" {
			own = "," + own
		}
		value, _ := strconv.ParseFloat(strings.TrimSpace(line[at:]), 64)
		if strings.HasSuffix(name, "_seconds") {
			value = math.Round(value * recordedAs.Seconds() / recordEvery.Seconds())
		}
		all[name+"{"+labels+own+"}"] = strconv.FormatFloat(value, 'f', -1, 64)
	}
	return all
}

func scraped(url string) (string, error) {
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	req.Header.Set("Authorization", "Bearer "+testToken)
	defer http.DefaultClient.CloseIdleConnections()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, resp.Status)
	}
	return string(page), err
}

// until waits for a line that begins so in a page.
func (r *recorder) until(t *testing.T, pattern string) {
	t.Helper()
	wanted := regexp.MustCompile(`(?m)^` + pattern)
	eventually(t, pattern, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return slices.ContainsFunc(slices.Collect(maps.Values(r.pages)), wanted.MatchString)
	})
}

// pass waits for so many scrapes more, and returns how many there are.
func (r *recorder) pass(t *testing.T, n int) (taken int) {
	t.Helper()
	r.mu.Lock()
	want := r.taken + n
	r.mu.Unlock()
	eventually(t, "scrapes", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		taken = r.taken
		return taken >= want
	})
	return taken
}

// moment is one of the recording.
type moment struct {
	what    string
	taken   int      // scrapes before it
	firing  []string // alerts
	between []string // alerts that may or may not fire, by the speed of the machine
}

// asTest is the recording of the metrics that alerts are about, as a test of promtool.
func (r *recorder) asTest(rules string, about []selector, moments []moment) string {
	var b strings.Builder
	b.WriteString("# A recording of a master and its jobs, which fail, hang and recover: what fires when.\n" +
		"# TestAlertsOfRealJobs has made it, and -update makes another one. A second of the jobs is two minutes here.\n")
	fmt.Fprintf(&b, "rule_files: [%s]\nevaluation_interval: 1m\ntests:\n- interval: 2m\n  input_series:\n", rules)
	for _, series := range slices.Sorted(maps.Keys(r.series)) {
		if slices.ContainsFunc(about, func(s selector) bool { return s.matches(series) }) {
			fmt.Fprintf(&b, "  - series: '%s'\n    values: '%s'\n", series, inShort(r.series[series], r.taken))
		}
	}
	b.WriteString("  promql_expr_test:\n")
	for _, m := range moments {
		slices.Sort(m.firing)
		fmt.Fprintf(&b, "  # %s\n  - expr: >-\n      group by (alertname) (ALERTS{alertstate=\"firing\"", m.what)
		if len(m.between) > 0 {
			fmt.Fprintf(&b, ",\n      alertname!~%q", strings.Join(m.between, "|"))
		}
		fmt.Fprintf(&b, "})\n    eval_time: %dm\n", 2*(m.taken-1))
		b.WriteString("    exp_samples:\n")
		for _, alert := range m.firing {
			fmt.Fprintf(&b, "    - {labels: '{alertname=%q}', value: 1}\n", alert)
		}
	}
	return b.String()
}

// inShort writes values as promtool reads them. A series that a scrape lacks is stale.
func inShort(values []string, n int) string {
	values = append(slices.Clone(values), make([]string, n-len(values))...)
	var parts []string
	for i := 0; i < n; {
		j := i + 1
		for j < n && values[j] == values[i] {
			j++
		}
		switch {
		case values[i] == "" && i == 0:
			parts = append(parts, fmt.Sprintf("_x%d", j))
		case values[i] == "":
			parts = append(parts, "stale")
			if j > i+1 {
				parts = append(parts, fmt.Sprintf("_x%d", j-i-1))
			}
		default:
			parts = append(parts, fmt.Sprintf("%s+0x%d", values[i], j-i-1))
		}
		i = j
	}
	text, width := "", 0
	for _, part := range parts { // a line break in quotes is a space
		if width += len(part) + 1; width > 100 {
			text, width = text+"\n     ", len(part)
		}
		text += " " + part
	}
	return text[1:]
}

// A master and five jobs: two wait for a node, one fails again and again, one hangs, one cannot save. They recover;
// then the master's disk goes away, and at last the master. Alerts fire, and end, when they should, and every metric
// and label of alerts and board is there.
func TestAlertsOfRealJobs(t *testing.T) {
	besideOthers(t)
	_, err := promtool(t, "", "--version")
	require.NoError(t, err)
	r := newRecorder(t)
	p := &plight{training: newTraining(t, 1000000), r: r}
	other := newElectorate(p.bench, 1) // those of an election
	all := queries(t)
	moments := p.play()
	r.mu.Lock()
	defer r.mu.Unlock()
	for labels, page := range r.pages {
		out, err := promtool(t, page, "check", "metrics")
		out = strings.ReplaceAll(out, restartCount, "") // a name that users have
		require.Empty(t, strings.TrimSpace(out), "%s: %v", labels, err)
	}
	elected, err := scraped("http://" + other.addrs[other.leader()] + "/metrics")
	require.NoError(t, err)
	existing := slices.Concat(slices.Collect(maps.Keys(r.series)),
		slices.Collect(maps.Keys(samples(elected, `instance="elected",job="dlrover-master"`))))
	for where, q := range all {
		requireExported(t, where, q, all, existing)
	}
	rules, err := filepath.Abs(alertsFile)
	require.NoError(t, err)
	var ofAlerts []selector
	for name, q := range all {
		if !strings.HasPrefix(name, "panel ") {
			ofAlerts = append(ofAlerts, selectors(q.expr)...)
		}
	}
	path := filepath.Join(p.dir, "recording.yaml")
	require.NoError(t, os.WriteFile(path, []byte(r.asTest(rules, ofAlerts, moments)), 0o600))
	out, err := promtool(t, "", "test", "rules", path)
	require.NoError(t, err, "%s\n%s", out, read(t, path))
	if *updateRecording {
		require.NoError(t, os.WriteFile(monitoring+"recording_test.yaml",
			[]byte(r.asTest("alerts.yaml", ofAlerts, moments)), 0o644))
	}
}

// requireExported checks that there are series of each metric with each label of a query.
func requireExported(t *testing.T, where string, q query, all map[string]query, existing []string) {
	t.Helper()
	sources := selectors(q.expr)
	for i := 0; i < len(sources); i++ {
		s := sources[i]
		if rule, recorded := all[s.name]; recorded {
			sources = append(sources, selectors(rule.expr)...)
			continue
		}
		require.True(t, slices.ContainsFunc(existing, s.matches), "%s: nobody exports %s%s", where, s.name, s.matchers)
	}
	for _, label := range labelsOf(q) {
		require.True(t, slices.ContainsFunc(existing, func(series string) bool {
			return regexp.MustCompile(`[{,]`+label+`="`).MatchString(series) &&
				slices.ContainsFunc(sources, func(s selector) bool { return s.matches(series) })
		}), "%s: no label %s", where, label)
	}
}

const restartCount = `dlrover_restart_count non-histogram and non-summary metrics should not have "_count" suffix`

// plight is the jobs.
type plight struct {
	*training
	r    *recorder
	addr string // of the master
}

func (p *plight) ctl(args ...string) int { return p.start("dlroverctl", nil, args...).wait() }

// job starts a launcher whose metrics are recorded.
func (p *plight) job(run, node string, args ...string) *launched {
	addr := "127.0.0.1:" + freePort(p.t)
	p.r.scrapes("training", node, addr)
	return p.start("dlrover-run", []string{"POD_NAME=" + node}, slices.Concat([]string{"--rdzv-id=" + run,
		"--nproc-per-node=1", "--metrics-addr=" + addr, "--shutdown-timeout=2"}, args)...)
}

const failing = `echo "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus." >&2
if [ $TORCHELASTIC_RESTART_COUNT = 4 ]; then : > $DIR/spent; while [ ! -e $DIR/end ]; do sleep 0.05; done; fi; exit 1`

func (p *plight) play() []moment {
	data := filepath.Join(p.dir, "data")
	master := p.start("dlrover-master", nil, "--listen=127.0.0.1:0", "--data-dir="+data)
	p.addr = p.served(master)
	p.env = append(p.env, "DLROVER_MASTER_ADDR="+p.addr, "XPU_TIMER_HANG_TIMEOUT=4", "PYTHONWARNINGS=ignore")
	p.r.scrapes("dlrover-master", "master", p.addr)
	p.r.until(p.t, "dlrover_rendezvous_runs 0")
	quiet := moment{"nothing has happened", p.r.pass(p.t, 2), nil, nil}

	script, err := filepath.Abs("testdata/hang.py")
	require.NoError(p.t, err)
	hangs := []string{"--nnodes=2", "--hang-action=report", "--max-restarts=3", script, "data", "1"}
	p.job("hangs", "gpu-0", hangs...)
	p.job("hangs", "gpu-1", hangs...)
	p.job("saves", "gpu-2", p.args([]string{"--nnodes=1"}, 5)...)
	p.job("fails", "gpu-3", p.sh(failing, "--nnodes=1", "--max-restarts=4")...)
	waits := p.sh(hold, "--nnodes=2")
	p.job("waits", "gpu-4", waits...)
	p.job("waits-too", "gpu-5", waits...)
	eventually(p.t, "a committed step", func() bool { return p.latest() >= 10 })
	mount := p.unmount()
	eventually(p.t, "the budget is spent", p.exists("spent"))
	p.r.until(p.t, `dlrover_hang_state\{.*\} 3`)
	trouble := moment{"the jobs wait, hang, fail and cannot save", p.r.pass(p.t, 3), []string{"DlroverRunWaitsForNodes",
		"DlroverWorkersHang", "DlroverRunStandsStill", "DlroverRestartsBurnBudget", "DlroverNodeMarked",
		"DlroverCheckpointsNotWritten", "DlroverTrainedShareLow"}, []string{"DlroverCheckpointOld"}}

	mount()
	require.Zero(p.t, p.ctl("restart", "hangs", "--charge", "--reason=hang"))
	p.job("waits", "gpu-6", waits...)
	p.job("waits-too", "gpu-7", waits...)
	require.NoError(p.t, os.WriteFile(filepath.Join(p.dir, "end"), nil, 0o600))
	p.r.until(p.t, `dlrover_rendezvous_events_total\{event="failed"\} 1`)
	failed := moment{"one run has failed, the others recover", p.r.pass(p.t, 2), []string{"DlroverRunFailed",
		"DlroverNodeMarked", "DlroverTrainedShareLow"}, []string{"DlroverWorkersHang", "DlroverCheckpointsNotWritten",
		"DlroverCheckpointOld"}}
	require.Zero(p.t, p.ctl("node", "clear", "gpu-3"))
	p.r.until(p.t, `dlrover_runs\{class="training"\} 4`)
	p.r.until(p.t, `dlrover_checkpoint_storage_trouble 0`)
	well := moment{"all is well again", p.r.pass(p.t, 8), []string{"DlroverTrainedShareLow"}, nil}

	require.NoError(p.t, os.Rename(data, data+"2"))
	require.NotZero(p.t, p.ctl("node", "mark", "gpu-9", "--reason=smoke"), "it is not kept")
	away := moment{"the master's disk is away", p.r.pass(p.t, 4), []string{"DlroverDecisionsNotKept", "DlroverNodeMarked",
		"DlroverTrainedShareLow"}, nil}
	require.NoError(p.t, os.Rename(data+"2", data))
	master.signal(syscall.SIGKILL)
	lost := moment{"the master is lost", p.r.pass(p.t, 3), []string{"DlroverNoMaster", "DlroverTrainedShareLow"}, nil}
	return []moment{quiet, trouble, failed, well, away, lost}
}
