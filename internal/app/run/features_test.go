package run

import (
	"bytes"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/pypath"
	"dlrover-run/launcher"
	"dlrover-run/launcher/argv"
)

// emptyFeature is all that a new feature needs: this function in a file of its own, and a row of the table.
func emptyFeature(steps *[]string) feature.Feature {
	did := func(step string) { *steps = append(*steps, step) }
	return feature.Feature{
		Name:     "empty",
		Settings: func(feature.Options) error { did("settings"); return nil },
		Plan:     func(p *feature.Plan) { p.Features["empty"] = true },
		Open:     func(feature.Node) (*feature.Opened, error) { did("open"); return emptyOpened(did), nil },
	}
}

func emptyOpened(did func(step string)) *feature.Opened {
	return &feature.Opened{
		Part:      launcher.Part{End: func(launcher.EndRequest) { did("end") }},
		Joined:    func() { did("joined") },
		Configure: func(*launcher.Config) { did("configure") },
		Release:   func() { did("release") },
		Close:     func() error { did("close"); return nil },
	}
}

// withEmpty is a job of a command line, with one more row in the table.
func withEmpty(t *testing.T, line string, steps *[]string) (*nodeJob, hostFacts) {
	t.Helper()
	t.Chdir(t.TempDir())
	require.NoError(t, os.WriteFile("train.py", nil, 0o600))
	env := func(string) (string, bool) { return "", false }
	c, err := parse(strings.Fields(line), env, io.Discard)
	require.NoError(t, err)
	s, err := resolveWith(append(features(), of(emptyFeature(steps))), c, env, testHost())
	require.NoError(t, err)
	log := slog.New(slog.DiscardHandler)
	python := pypath.New(s.shmDir, log)
	return &nodeJob{s: &s, log: log, level: new(slog.LevelVar), python: python}, testHost()
}

func TestAnEmptyFeatureIsARow(t *testing.T) {
	var steps []string
	j, host := withEmpty(t, "--standalone --ckpt-daemon=off --ckpt-shm-dir="+t.TempDir()+" train.py", &steps)
	require.NoError(t, j.openFeatures())
	j.joinedFeatures()
	j.configureFeatures(&launcher.Config{})
	launcher.EndParts(j.parts(), launcher.EndRequest{})
	j.releaseFeatures()
	j.closeFeatures()
	j.python.Close()
	require.Equal(t, []string{"settings", "open", "joined", "configure", "end", "release", "close"}, steps)

	var out bytes.Buffer
	require.Zero(t, printPlan(&out, j.s, host))
	var p plan
	require.NoError(t, json.Unmarshal(out.Bytes(), &p))
	require.Equal(t, map[string]any{"empty": true}, p.Features)
}

func TestFeaturesEndInTheReverseOrder(t *testing.T) {
	var order []string
	named := func(name string) *feature.Opened {
		return emptyOpened(func(step string) { order = append(order, name+" "+step) })
	}
	j := &nodeJob{log: slog.New(slog.DiscardHandler), opened: []*feature.Opened{named("a"), named("b")}}
	launcher.EndParts(j.parts(), launcher.EndRequest{})
	j.releaseFeatures()
	j.closeFeatures()
	require.Equal(t, []string{"b end", "a end", "b release", "a release", "b close", "a close"}, order)
}

// A feature is named in its own package, or file, and in the table, and nowhere else.
func TestAFeatureTouchesOneFileAndOneRow(t *testing.T) {
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	rows, uses, packages := map[string]bool{}, map[string]map[string]int{}, map[string]bool{}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		require.NoError(t, err)
		ast.Inspect(parsed, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok && file == "features.go" && s.Sel.Name == "New" {
				packages[s.X.(*ast.Ident).Name] = true
			}
			id, ok := n.(*ast.Ident)
			if !ok || !strings.HasSuffix(id.Name, "Feature") || id.Name == "Feature" {
				return true
			}
			if uses[id.Name] == nil {
				uses[id.Name] = map[string]int{}
			}
			uses[id.Name][file]++
			rows[id.Name] = rows[id.Name] || file == "features.go"
			return true
		})
	}
	require.Equal(t, len(features()), len(rows)+len(packages))
	homes := map[string]string{}
	for name, in := range uses {
		require.True(t, rows[name], "%s has no row", name)
		require.Len(t, in, 2, "%s: its own file and the table: %v", name, in)
		for file, times := range in {
			require.Equal(t, 1, times, "%s in %s", name, file)
			if file != "features.go" {
				require.Empty(t, homes[file], "%s has two features", file)
				homes[file] = name
			}
		}
	}
}

func TestFeaturesHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for _, f := range features() {
		require.NotEmpty(t, f.name)
		require.False(t, seen[f.name], f.name)
		seen[f.name] = true
	}
	t.Setenv("TMPDIR", t.TempDir())
	var steps []string
	j, _ := withEmpty(t,
		"--standalone --ports=1 --metrics-addr=127.0.0.1:0 --event-log=events --log-rule=x:y --health-check=true "+
			"--ckpt-daemon=off --warm --start-deadline=1h --leave-on=/nowhere "+
			"--ckpt-shm-dir="+t.TempDir()+" train.py", &steps)
	require.NoError(t, j.openFeatures())
	defer j.python.Close()
	defer j.closeFeatures()
	absent := maps.Clone(seen)
	for _, p := range j.parts() {
		require.True(t, seen[p.Name] || p.Name == "empty", p.Name)
		delete(absent, p.Name)
	}
	require.Equal(t, []string{"budget", "election", "file timer", "hooks", "lighthouse", "live hostfile", "pid files",
		"preflight", "progress of the TrainJob", "rank logs", "sides", "tensorboard", "training-port", "ui",
	}, slices.Sorted(maps.Keys(absent)), "features that were not asked for here")
}

// What nobody asked for has no part: no listener, goroutine or file.
func TestFeaturesThatAreOffHaveNoPart(t *testing.T) {
	var steps []string
	j, _ := withEmpty(t, "--standalone --hang=off --ckpt-daemon=off --ckpt-shm-dir="+t.TempDir()+" train.py", &steps)
	require.NoError(t, j.openFeatures())
	defer j.python.Close()
	var names []string
	for _, p := range j.parts() {
		names = append(names, p.Name)
	}
	require.Equal(t, []string{"log level", "streams", "checkpoints", "empty"}, names,
		"the first two wait for notices, the third names epochs")
}

func resolveWith(table []row, c *argv.Line, env argv.LookupEnv, host hostFacts) (settings, error) {
	return settings{features: table, called: ownName()}.resolve(&options{Line: c, env: env, host: host})
}
