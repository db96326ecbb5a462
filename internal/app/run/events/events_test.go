package events_test

import (
	"bytes"
	"encoding/json"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/run/events"
	"dlrover-run/internal/app/run/feature/featuretest"
	"dlrover-run/internal/eventlog"
	"dlrover-run/internal/job"
	"dlrover-run/launcher"
	"dlrover-run/launcher/logs"
	logrule "dlrover-run/launcher/logs/rule"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/streams"
	"dlrover-run/launcher/streams/node"
	"dlrover-run/launcher/warm"
	"dlrover-run/rendezvous"
)

// everyEvent has w write every event that there is.
func everyEvent(t *testing.T, w events.Writer) {
	t.Helper()
	src, err := os.ReadFile("../../../../launcher/event.go")
	require.NoError(t, err)
	types := regexp.MustCompile(`(?m)^type (\w+) struct`).FindAllStringSubmatch(string(src), -1)
	require.Len(t, types, len(featuretest.Events))
	for _, m := range types {
		require.NotEmpty(t, featuretest.Events[m[1]], "add %s to the map", m[1])
		for _, e := range featuretest.Events[m[1]] {
			require.Equal(t, m[1], reflect.TypeOf(e).Name())
			w.Observe(e)
		}
	}
	w.Rendezvous(rendezvous.Note{Event: "NAME", Round: 5, Epoch: 6, Node: "a", Text: "t", Nodes: 2})
	w.Exec(node.Command{Rank: 3, LocalRank: 1, PID: 9, From: "10.0.0.1:5", Args: []string{"id", "-u"}})
	w.ExecEnded(node.Command{Rank: 3, PID: 9}, streams.Exit{Code: 124, Error: "it was ended after 1s"})
	w.LogRule(logrule.Finding{Rule: &logrule.Rule{Name: "loss", Action: logrule.Restart}, Rank: 3,
		Text: "nan is not a number"})
	w.WarmPrepared(warm.Preparation{PID: 10, Modules: 900, Failed: []string{"x: no"}, Took: 1500 * time.Millisecond})
	w.WarmStart(warm.Start{Worker: logs.WorkerID{Rank: 3, LocalRank: 1}, PID: 11, How: warm.ByParked,
		Took: 1500 * time.Microsecond})
	w.Ended(launcher.Result{Reason: policy.Success, Verdict: "rank 3 failed first"})
}

// Names, fields and their order are what people's tools read.
func TestEventLogIsStable(t *testing.T) {
	var b bytes.Buffer
	everyEvent(t, events.To(eventlog.New(&b)))
	lines := strings.Split(strings.TrimSpace(regexp.MustCompile(`"time":"[^"]*",`).ReplaceAllString(b.String(), "")), "\n")
	slices.Sort(lines)
	require.Equal(t, []string{
		`{"event":"barred","cause":"slow","cause_kind":"check"}`,
		`{"event":"check","passed":false,"check":"speed","reason":"slow","took":1.5,` +
			`"until":"2030-01-02T03:04:05.000000006Z"}`,
		`{"event":"check","passed":true,"check":"","reason":"","took":1.5}`,
		`{"event":"end","reason":"success","verdict":"rank 3 failed first","class":""}`,
		`{"event":"exec","rank":3,"local_rank":1,"pid":9,"from":"10.0.0.1:5","command":["id","-u"]}`,
		`{"event":"exec-ended","rank":3,"pid":9,"exit_code":124,"why":"it was ended after 1s"}`,
		`{"event":"fault","round":5,"epoch":6,"part":"hang","rank":3,"local_rank":1,"pid":8,` +
			`"why":"no progress (exit code 1)","action":"restart"}`,
		`{"event":"leaving","reason":"received SIGTERM","grace":27.5}`,
		`{"event":"log-rule","rule":"loss","rank":3,"found":"nan is not a number","over":false,"action":"restart"}`,
		`{"event":"policy","round":5,"epoch":6,"rank":3,"local_rank":1,"why":"exit code 138","action":"retry-free",` +
			`"rule":"rule exit 138 -> retry-free (t9k)"}`,
		`{"event":"rendezvous-NAME","round":5,"epoch":6,"who":"a","text":"t","nodes":2}`,
		`{"event":"signal","signal":"SIGTERM"}`,
		`{"event":"signal-again","signal":"SIGINT"}`,
		`{"event":"start","round":5,"epoch":6,"node":1,"nodes":2,"world_size":4,"restart_count":3,"cause":"exit code 1",` +
			`"cause_kind":"worker-failure","pids":[7,8]}`,
		`{"event":"timer-expired","rank":3,"local_rank":1,"pid":9,"scope":"step","timeout":"1m30s","signal":"SIGKILL"}`,
		`{"event":"warm-prepared","pid":10,"modules":900,"failed":1,"took":1.5}`,
		`{"event":"warm-start","rank":3,"local_rank":1,"pid":11,"how":"parked","why":"","took":0.0015}`,
		`{"event":"worker-exit","rank":3,"local_rank":1,"pid":8,"exit_code":-9,"stopped":true}`,
		`{"event":"workers-stopped","round":5,"epoch":6}`,
		`{"event":"workers-succeeded"}`,
	}, lines)
}

// eventDoc is docs/reference/events.md and run-events.md: the type of every field by event, and the names of the
// rendezvous' events.
type eventDoc struct {
	fields     map[string]map[string]string
	rendezvous []string
}

func readEventDoc(t *testing.T) eventDoc {
	t.Helper()
	data, err := os.ReadFile("../../../../docs/reference/events.md")
	require.NoError(t, err)
	more, err := os.ReadFile("../../../../docs/reference/run-events.md")
	require.NoError(t, err)
	doc := eventDoc{fields: map[string]map[string]string{}}
	event, field, name := "", regexp.MustCompile("^\\| `([a-z_]+)` \\| ([a-z]+\\??) \\|"),
		regexp.MustCompile("^\\| `([a-z-]+)` \\| ")
	for line := range strings.Lines(string(append(data, more...))) {
		switch {
		case strings.HasPrefix(line, "# "), strings.HasPrefix(line, "## "):
			event = ""
		case strings.HasPrefix(line, "### `"):
			event = strings.Trim(line, "#` \n")
			doc.fields[event] = map[string]string{}
		case field.MatchString(line) && event != "":
			m := field.FindStringSubmatch(line)
			doc.fields[event][m[1]] = m[2]
		case name.MatchString(line) && !field.MatchString(line):
			doc.rendezvous = append(doc.rendezvous, name.FindStringSubmatch(line)[1])
		}
	}
	return doc
}

// typeOf is how docs/reference/events.md calls the type of a JSON value.
func typeOf(v any) string {
	switch v := v.(type) {
	case bool:
		return "bool"
	case []any:
		if len(v) > 0 {
			if _, text := v[0].(string); text {
				return "strings"
			}
		}
		return "ints"
	case json.Number:
		if strings.Contains(v.String(), ".") {
			return "float"
		}
		return "int"
	}
	return "string"
}

func TestEventsAreDocumented(t *testing.T) {
	doc, seen := readEventDoc(t), map[string]bool{}
	var b bytes.Buffer
	everyEvent(t, events.To(eventlog.New(&b)))
	dec := json.NewDecoder(&b)
	dec.UseNumber()
	for dec.More() {
		var e map[string]any
		require.NoError(t, dec.Decode(&e))
		event := e["event"].(string)
		fields := doc.fields[event]
		require.NotNil(t, fields, "docs/reference/events.md does not list the event %s", event)
		seen[event] = true
		delete(e, "event")
		delete(e, "time")
		for name, v := range e {
			want := strings.TrimSuffix(fields[name], "?")
			if want == "time" {
				_, err := time.Parse(time.RFC3339Nano, v.(string))
				require.NoError(t, err)
				want = "string"
			}
			require.Equal(t, want, typeOf(v), "%s: field %s", event, name)
		}
		for name, typ := range fields {
			require.True(t, strings.HasSuffix(typ, "?") || e[name] != nil, "%s: there is no field %s", event, name)
		}
	}
	for event := range doc.fields {
		require.True(t, seen[event], "nobody writes the event %s", event)
	}
}

// Every event of a run has a row.
func TestEventsOfTheRendezvousAreDocumented(t *testing.T) {
	doc := readEventDoc(t).rendezvous
	src, err := os.ReadFile("../../../../internal/job/event.go")
	require.NoError(t, err)
	names := []string{string(job.EventNodeLoss), string(job.EventNodeLeave), string(job.EventSucceeded),
		string(job.EventFailed)}
	for _, m := range regexp.MustCompile(`Event = "([^"]+)"`).FindAllStringSubmatch(string(src), -1) {
		names = append(names, m[1])
	}
	require.Greater(t, len(names), 40)
	for _, name := range names {
		require.Contains(t, doc, name, "docs/reference/run-events.md does not list it")
	}
}
