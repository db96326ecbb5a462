package ctl

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"

	"dlrover-run/launcher/streams"
	"dlrover-run/rendezvous"
	"dlrover-run/tools/flagtest"
)

// leaves are all commands that do something, by the words that name them.
func leaves() map[string]*cli.Command {
	all := map[string]*cli.Command{}
	var add func(above string, commands []*cli.Command)
	add = func(above string, commands []*cli.Command) {
		for _, c := range commands {
			if c.Subcommands == nil {
				all[above+c.Name] = c
			}
			add(above+c.Name+" ", c.Subcommands)
		}
	}
	add("", (&program{}).app().Commands)
	return all
}

// printingDaemon answers a request for logs with a line of each stream.
func printingDaemon(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		nc, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer nc.Close()
		b := []byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: " + streams.Protocol + "\r\n\r\n")
		b = streams.Frame{Kind: streams.KindNode, Node: 1, Data: []byte("gpu-01")}.Append(b)
		b = streams.Frame{Kind: streams.KindOutput, Node: 1, Rank: 3, Std: 1, Data: []byte("one\x1b[2J\n")}.Append(b)
		b = streams.Frame{Kind: streams.KindOutput, Node: 1, Rank: 3, Std: 2, Data: []byte("two\n")}.Append(b)
		_, _ = nc.Write(streams.Frame{Kind: streams.KindEnd}.Append(b))
	}))
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

// values decodes what a command has printed: JSON values, and nothing else.
func values(t *testing.T, out string) (all []any) {
	t.Helper()
	for in := json.NewDecoder(strings.NewReader(out)); ; {
		var v any
		err := in.Decode(&v)
		if errors.Is(err, io.EOF) {
			return all
		}
		require.NoError(t, err, out)
		all = append(all, v)
	}
}

// besideThisProgram puts there what names are linked to.
func besideThisProgram(t *testing.T) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	for _, name := range []string{"dlrover-run", "dlroverctl"} {
		path := filepath.Join(filepath.Dir(self), name)
		require.NoError(t, os.WriteFile(path, nil, 0o755))
		t.Cleanup(func() { require.NoError(t, os.Remove(path)) })
	}
}

// Scripts read what commands print. Two have no such option: exec prints the output of another program, and
// top a picture of what status and others print. Those that need workers of PyTorch are run by
// internal/app/run.TestTorchProfileAndFlight.
func TestEveryCommandPrintsJSON(t *testing.T) {
	d, _ := servedWithMarks(t)
	d.suspected("job", "gpu-01")
	d.checked("checked", "n0")
	d.join("over", "n5", 2)
	d.ok("stop", "over")
	_, err := d.hub.Leave(t.Context(), "over", rendezvous.Leave{ID: "n5"})
	require.NoError(t, err)
	besideThisProgram(t)
	saved := committed(t, "ddp")
	untried := leaves()
	delete(untried, "exec")
	for _, name := range []string{"top", "flight", "profile"} {
		require.Contains(t, untried, name)
	}
	delete(untried, "top")
	for name := range untried {
		require.Contains(t, names(untried[name].Flags), "json", name)
	}
	delete(untried, "flight")
	delete(untried, "profile")
	for _, line := range []string{
		"runs", "open job", "status job", "cost job", "nodes job", "nodes", "events job", "hang job", "check checked",
		"log-level job debug",
		"bar job n9", "unbar job n9", "restart job", "pause job", "resume job", "pause job", "start job",
		"drain job gpu-01", "stop job", "verdict job", "bundle job --path=" + t.TempDir(), "forget over",
		"stacks --path=" + dumped(t), "node mark n1 --reason=x", "node clear n1", "logs job --master=" + printingDaemon(t),
		"checkpoints ls " + saved, "checkpoints verify " + saved, "checkpoints rm " + saved + " 10",
		"install-names " + t.TempDir(),
	} {
		r := d.ctl(append(strings.Fields(line), "--json")...)
		require.Zero(t, r.code, "%s: %s", line, r.err)
		require.NotEmpty(t, values(t, r.out), line)
		for name := range untried {
			if line == name || strings.HasPrefix(line, name+" ") {
				delete(untried, name)
			}
		}
	}
	require.Empty(t, untried, "add a line that uses them above")
}

func names(flags []cli.Flag) (all []string) {
	for _, f := range flags {
		all = append(all, f.Names()...)
	}
	return all
}

func TestWhatCommandsPrintAsJSON(t *testing.T) {
	d := newServed(t)
	d.join("job", "n0", 2)
	require.Equal(t, []any{map[string]any{"command": "bar", "run": "job", "node": "n0",
		"text": "run job: node n0 gets no workers any more; to end it: dlroverctl unbar job n0"}},
		values(t, d.ok("bar", "job", "n0", "--json")))
	require.Equal(t, []any{
		map[string]any{"node": "gpu-01", "rank": 3.0, "fd": 1.0, "line": "one\x1b[2J"},
		map[string]any{"node": "gpu-01", "rank": 3.0, "fd": 2.0, "line": "two"},
	}, values(t, d.ok("logs", "job", "--json", "--master", printingDaemon(t))))
	require.Equal(t, "gpu-01/3: one\x1b[2J\ngpu-01/3: two\n", d.ctl("logs", "job", "--master="+printingDaemon(t)).out)

	dir := committed(t, "ddp")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "10/rank_0.pt"), []byte("weight?"), 0o600))
	r := d.ctl("checkpoints", "verify", dir, "--json")
	require.Equal(t, 1, r.code)
	rows := values(t, r.out)
	require.Len(t, rows, 2)
	for _, row := range rows {
		row := row.(map[string]any)
		require.Equal(t, row["step"] == 20.0, row["tracked"])
		require.Equal(t, row["step"] == 10.0, row["damage"] != nil, row)
		require.InDelta(t, 7, row["bytes"], 0)
	}
}

func TestEveryCommandHasItsOwnHelp(t *testing.T) {
	overview := ctlOut(t, "--help")
	require.Equal(t, overview, ctlOut(t))
	for name, c := range leaves() {
		out := ctlOut(t, append(strings.Fields(name), "job", "--help")...)
		head := strings.TrimRight("usage: dlroverctl "+name+" "+c.ArgsUsage, " ")
		require.Contains(t, out, "dlroverctl "+name+" - "+c.Usage+"\n\n"+head+"\n")
		require.Equal(t, out, ctlOut(t, append([]string{"help"}, strings.Fields(name)...)...))
		for _, other := range []string{"--rank R", "--charge", "--conditions", "--timeout DURATION", "--matrix", "--force"} {
			if strings.Contains(out, other) {
				require.Contains(t, names(c.Flags), strings.Fields(strings.TrimLeft(other, "-"))[0])
			}
		}
		require.Regexp(t, `(?m)^  `+name+` .*  `+c.Usage[:10], overview)
		require.NotEmpty(t, c.Usage)
	}
	require.Contains(t, ctlOut(t, "node", "-h"), "  clear NODE  ")
}

func ctlOut(t *testing.T, args ...string) string {
	t.Helper()
	var out strings.Builder
	require.Zero(t, ctl(&out, args...), args)
	return out.String()
}

func TestDurationsOfOptions(t *testing.T) {
	found := 0
	for _, c := range leaves() {
		found += flagtest.Durations(t, c.Flags)
	}
	require.Positive(t, found)
}
