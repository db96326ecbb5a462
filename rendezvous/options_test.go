package rendezvous

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestEveryFieldOfParamsIsNamed changes each field once: two nodes that differ in it are told so.
func TestEveryFieldOfParamsIsNamed(t *testing.T) {
	run := Params{Min: 2, Max: 2}.WithDefaults()
	shared := []string{"Min", "Max", "Unit", "Static", "Check", "CheckOnly", "Group"}
	for i := range reflect.TypeFor[Params]().NumField() {
		name := reflect.TypeFor[Params]().Field(i).Name
		if name == "Budget" {
			continue // TestEveryFieldOfABudgetIsNamed
		}
		t.Run(name, func(t *testing.T) {
			p := run
			switch f := reflect.ValueOf(&p).Elem().Field(i); f.Kind() {
			case reflect.Bool:
				f.SetBool(!f.Bool())
			case reflect.String:
				f.SetString("level=host")
			case reflect.Struct:
				p.Group = Group{Of: "job", Count: 2, Min: 1}
			default:
				f.SetInt(f.Int() + 1_000_000_000)
			}
			require.NotEqual(t, run.String(), p.String())
			own, theirs := p.Differences(run)
			require.NotEmpty(t, own)
			require.NotEqual(t, own, theirs)
			require.Contains(t, p.String(), own)
			require.Contains(t, run.String(), theirs)
			err := p.conflict(run)
			require.Equal(t, err != nil, slices.Contains(shared, name))
			if err != nil {
				require.ErrorContains(t, err, own+", but the run was opened with "+theirs+"; use the same ")
			}
		})
	}
}

func TestParamsAreWrittenAsTheyAreTyped(t *testing.T) {
	p := Params{Min: 1, Max: 4, MaxRestarts: 3, Gate: true}
	require.Equal(t, "--nnodes=1:4 --node-unit=1 the dynamic rendezvous --max-restarts=3 --restart-policy=Always: false "+
		"join_timeout=600 last_call_timeout=30 growth_delay=1 no node_timeout gate=true gate_timeout=300 no checks of nodes "+
		"no hang detection not held no replica groups --backoff-limit=100 --restart-backoff=10ms:30s --restart-window= "+
		"--same-failures=5 --no-progress=0 --deadline=0s --start-deadline=0s --success-rule=all --clean-up=unfinished "+
		"--on-failure=exit "+
		"--on-rank-exit=restart-all", p.String())
	own, theirs := p.Differences(p.WithDefaults())
	require.Empty(t, own+theirs, "a default is no difference")
	p.Gate = false
	require.Zero(t, p.WithDefaults().GateTimeout, "without a gate it has no time, and nothing of it is on the wire")
}

func TestParamsValidate(t *testing.T) {
	good := Params{Min: 2, Max: 4, Check: strings.Repeat("x", maxCheck), Hang: strings.Repeat("x", maxHang)}
	for want, change := range map[string]func(*Params){
		"node timeout 2s: need at least 3s": func(p *Params) { p.NodeTimeout = 2 * time.Second },
		"nnodes 0:4":                        func(p *Params) { p.Min = 0 },
		"nnodes 2:1":                        func(p *Params) { p.Max = 1 },
		"nnodes 2:100001":                   func(p *Params) { p.Max = MaxNodes + 1 },
		"node unit 5: no multiple":          func(p *Params) { p.Unit = 5 },
		"max restarts -1: must not":         func(p *Params) { p.MaxRestarts = -1 },
		"last call -1ns":                    func(p *Params) { p.LastCall = -1 },
		"join timeout -1ns":                 func(p *Params) { p.JoinTimeout = -1 },
		"growth delay -1ns":                 func(p *Params) { p.GrowthDelay = -1 },
		"gate timeout -1ns":                 func(p *Params) { p.GateTimeout = -1 },
		`node checks "\x1b[2J": need UTF-8`: func(p *Params) { p.Check = "\x1b[2J" },
		"at most 1024 bytes":                func(p *Params) { p.Check += "x" },
		"hang detection \"xx":               func(p *Params) { p.Hang += "x" },
		"hang detection \"\\x00\"":          func(p *Params) { p.Hang = "\x00" },
		"nnodes 2:4: the static rendezvous": func(p *Params) { p.Static = true },
	} {
		p := good
		change(&p)
		require.ErrorContains(t, p.Validate(), want)
	}
	for _, p := range []Params{good, {Min: 1, Max: MaxNodes}, {Min: 4, Max: 4, Unit: 4, Static: true},
		{Min: 4, Max: 5, Unit: 4}} {
		require.NoError(t, p.Validate(), p.String())
	}
}

// TestUnlimitedRestartsGiveWay: nodes that count by themselves leave the run's budget to the first that has one.
func TestUnlimitedRestartsGiveWay(t *testing.T) {
	join := func(r *Round, id string, restarts int) {
		p := Params{Min: 4, Max: 4, MaxRestarts: restarts}
		_, err := r.Step(time.Unix(1, 0), Join{Node: Node{ID: id, Name: id, Rank: -1, Slots: 1}, Params: p})
		require.NoError(t, err)
	}
	r := New(Config{})
	join(r, "agent", Unlimited)
	require.Equal(t, Unlimited, r.Status().Params.MaxRestarts)
	require.Contains(t, r.Status().Params.String(), "restarts that every node counts by itself")
	join(r, "another", Unlimited)
	join(r, "launcher", 3)
	require.Equal(t, 3, r.Status().Params.MaxRestarts)
	join(r, "late", 5)
	require.Equal(t, 3, r.Status().Params.MaxRestarts, "the first decides")

	r = New(Config{})
	join(r, "launcher", 0)
	join(r, "agent", Unlimited)
	require.Zero(t, r.Status().Params.MaxRestarts, "none is a number, too")
	require.NoError(t, Params{Min: 1, Max: 1, MaxRestarts: Unlimited}.Validate())
}
