package run

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/guarded"
	"dlrover-run/internal/job"
	"dlrover-run/launcher/policy"
	"dlrover-run/netcheck"
)

// twoNodes are options of a job in which nodes can be tested against each other.
const twoNodes = "--nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=localhost "

// spec is what the nodes of a run have to agree on.
func spec(t *testing.T, s settings) netcheck.Spec {
	t.Helper()
	require.True(t, s.params.Gate)
	spec, err := netcheck.ParseSpec(s.params.Check)
	require.NoError(t, err)
	return spec
}

func TestCheckOptions(t *testing.T) {
	const minute, ten = time.Minute, 10 * time.Minute
	full := netcheck.Spec{Level: netcheck.LevelFull, TTL: ten, Timeout: minute}
	host := netcheck.Spec{Level: netcheck.LevelHost, TTL: ten, Timeout: minute}
	local := netcheck.Spec{Level: netcheck.LevelLocal, TTL: ten, Timeout: minute}
	with := func(s netcheck.Spec, change func(*netcheck.Spec)) netcheck.Spec { change(&s); return s }
	comm := with(full, func(s *netcheck.Spec) { s.Comm = true })
	for _, c := range []struct {
		line string
		want netcheck.Spec
	}{
		{"--network-check", full},
		{"--network-check --precheck=0", full},
		{"--precheck 1", full},
		{"--precheck 2", comm},
		{"--precheck 1 --comm-perf-test", comm},
		{"--network-check --comm-perf-test", comm},
		{"--network-check --check-level=host", host},
		{"--precheck=1 --check-level=host", host},
		{"--check-only --check-level=host", host},
		{"--check-only", full},
		{"--health-check=true", local},
		{"--health-check=unix:/run/health.sock", local},
		{"--switchbox-check", local},
		{"--switchbox-check --box-pairs=0:1,2:3 --min-channels=2", local},
		{"--switchbox-check --box-pairs=ring --min-channels=8", local},
		{"--switchbox-check --network-check --min-bandwidth=0", full},
		{"--check-only --health-check=true", local},
		{"--check-only --switchbox-check", local},
		{"--network-check --exclude-straggler", with(full, func(s *netcheck.Spec) { s.ExcludeStraggler = true })},
		{"--network-check --check-action=report", with(full, func(s *netcheck.Spec) { s.ReportOnly = true })},
		{"--health-check=true --check-ttl=run", with(local, func(s *netcheck.Spec) { s.TTL = 0 })},
		{"--network-check --check-ttl=90", with(full, func(s *netcheck.Spec) { s.TTL = 90 * time.Second })},
		{"--network-check --check-ttl=168h --check-timeout=1h", with(full, func(s *netcheck.Spec) {
			s.TTL, s.Timeout = netcheck.MaxTTL, netcheck.MaxTimeout
		})},
		{"--switchbox-check --check-timeout=12.5s", with(local, func(s *netcheck.Spec) { s.Timeout = 12.5 * 1e9 })},
	} {
		s, err := resolved(t, twoNodes+c.line+" train.py", nil)
		require.NoError(t, err, c.line)
		require.Equal(t, c.want, spec(t, s), c.line)
		wait := 2*c.want.Timeout + 60*time.Second
		if c.want.Level == netcheck.LevelFull {
			wait += netcheck.ImportTimeout
		}
		require.Equal(t, wait, s.params.GateTimeout, c.line)
	}
}

// Operators give options as variables.
func TestCheckOptionsFromVariables(t *testing.T) {
	s, err := resolved(t, twoNodes+"train.py", map[string]string{
		"PET_PRECHECK": "2", "PET_EXCLUDE_STRAGGLER": "1", "PET_CHECK_TTL": "30s", "PET_CHECK_TIMEOUT": "20",
	})
	require.NoError(t, err)
	require.Equal(t, netcheck.Spec{
		Level: netcheck.LevelFull, Comm: true, ExcludeStraggler: true, TTL: 30 * time.Second, Timeout: 20 * time.Second,
	}, spec(t, s))
	for name, value := range map[string]string{
		"PET_NETWORK_CHECK": "1", "PET_HEALTH_CHECK": "true", "PET_SWITCHBOX_CHECK": "1", "PET_CHECK_ONLY": "1",
	} {
		s, err = resolved(t, twoNodes+"train.py", map[string]string{name: value})
		require.NoError(t, err, name)
		require.True(t, s.params.Gate, name)
	}
	for name, value := range map[string]string{
		"PET_NETWORK_CHECK": "0", "PET_EXCLUDE_STRAGGLER": "0", "PET_CHECK_ONLY": "0", "PET_PRECHECK": "0",
		"PET_HEALTH_CHECK": "",
	} {
		s, err = resolved(t, twoNodes+"train.py", map[string]string{name: value})
		require.NoError(t, err, name)
		require.False(t, s.params.Gate, name)
		require.Empty(t, s.params.Check, name)
	}
}

func TestCheckOptionErrors(t *testing.T) {
	const acts = "acts only with --network-check"
	for _, c := range [][2]string{
		{"--exclude-straggler", acts},
		{"--comm-perf-test", acts},
		{"--check-level=host", acts},
		{"--health-check=true --exclude-straggler", "--exclude-straggler " + acts},
		{"--switchbox-check --check-level=full", "--check-level " + acts},
		{"--precheck=0 --comm-perf-test", "--comm-perf-test " + acts},
		{"--check-ttl=10m", "--check-ttl acts only with"},
		{"--check-timeout=60s", "--check-timeout acts only with"},
		{"--check-action=report", "--check-action acts only with"},
		{"--box-pairs=0:1", "--box-pairs acts only with --switchbox-check"},
		{"--network-check --min-bandwidth=9", "--min-bandwidth acts only with --switchbox-check"},
		{"--health-check=true --min-channels=1", "--min-channels acts only with --switchbox-check"},
		{"--precheck=3", "--precheck"},
		{"--network-check --check-level=local", "--check-level"},
		{"--network-check --check-action=warn", "--check-action"},
		{"--switchbox-check --min-channels=5", "--min-channels=5 is more than the 4 pairs"},
		{"--switchbox-check --min-channels=-1", "--min-channels=-1: need a number"},
		{"--switchbox-check --min-bandwidth=-1", "--min-bandwidth=-1: need a number"},
		{"--switchbox-check --box-pairs=0:1,1:0 --min-channels=1", "1:0 is there twice"},
		{"--switchbox-check --box-pairs=0:1,0:1 --min-channels=1", "0:1 is there twice"},
		{"--switchbox-check --box-pairs=2:2 --min-channels=1", "--box-pairs: '2:2' does not name two different devices"},
		{"--switchbox-check --box-pairs=a:b", "invalid pair list: 'a:b'"},
		{"--switchbox-check --box-pairs=ring --box-pairs=0:1", "'ring,0:1' is not a list of device pairs"},
		{"--network-check --check-ttl=soon", `--check-ttl: "soon" is not a duration`},
		{"--network-check --check-ttl=0", "or run for as long as the node stays"},
		{"--network-check --check-ttl=-1s", `--check-ttl: "-1s" is out of range`},
		{"--network-check --check-ttl=NaN", `--check-ttl: "NaN" is not a duration`},
		{"--network-check --check-ttl=169h", "want 1ms to 168h, or run for as long as the node stays"},
		{"--network-check --check-timeout=run", "invalid duration: 'run'"},
		{"--network-check --check-timeout=2h", "--check-timeout=7200s is out of range: want 10s to 1h"},
		{"--network-check --check-timeout=9s", "--check-timeout=9s is out of range: want 10s to 1h"},
		{"--precheck=2 --check-level=host", "--precheck=2 measure with PyTorch"},
		{"--network-check --comm-perf-test --check-level=host", "--comm-perf-test and"},
		{"--network-check --exclude-straggler --check-action=report", "contradict each other"},
		{"--health-check=unix:relative", "--health-check=unix:relative: need the absolute path"},
		{"--health-check=unix:", "need the absolute path of a socket"},
		{"--network-check --accelerator=cpu --nproc-per-node=gpu", "contradict each other"},
		{"--network-check --nproc-per-node=auto --accelerator=ascend-npu", "the devices of this node are cuda"},
		{"--check-only --switchbox-check --box-pairs=0:1 --min-bandwidth=1", "--min-channels=2 is more than the 1 pairs"},
	} {
		_, err := resolved(t, twoNodes+c[0]+" train.py", nil)
		require.ErrorContains(t, err, c[1], c[0])
		require.NotContains(t, err.Error(), "\n", c[0])
	}
}

func TestNoCheckIsAskedFor(t *testing.T) {
	s, err := resolved(t, twoNodes+"train.py", nil)
	require.NoError(t, err)
	require.False(t, s.params.Gate)
	require.Empty(t, s.params.Check)
	require.Zero(t, s.params.GateTimeout)
	for _, f := range s.features {
		if f.name == "node check" {
			part, err := f.open(&nodeJob{})
			require.NoError(t, err)
			require.Nil(t, part)
		}
	}
}

// The job itself has not begun after --check-only: its run, its workers and its restarts are not this one's.
func TestCheckOnlyNeedsNoScript(t *testing.T) {
	s, err := resolved(t, twoNodes+"--check-only --rdzv-id=job --nproc-per-node=4 --restart-policy=Always", nil)
	require.NoError(t, err)
	require.Equal(t, "job-check", s.runID)
	require.Equal(t, 1, s.size.slots)
	require.Equal(t, 1, s.node.Slots)
	require.Equal(t, "--check-only", s.size.why)
	require.Equal(t, []string{guarded.Nothing}, s.program.args)
	require.Equal(t, policy.Never, s.restarts.policy.Restart)
	require.False(t, s.params.Always)
	// The command of the job, with one option more.
	s, err = resolved(t, twoNodes+"--check-only --rdzv-id=job nothere.py --epochs=3", nil)
	require.NoError(t, err)
	require.Equal(t, []string{guarded.Nothing}, s.program.args)
	_, err = s.program.resolve(job.Command{Program: []string{"train.py"}})
	require.NoError(t, err, "a command that an operator orders")
}

func TestSwitchboxAloneTestsNoNetwork(t *testing.T) {
	s, err := resolved(t, twoNodes+"--switchbox-check train.py", nil)
	require.NoError(t, err)
	require.Contains(t, s.warnings[len(s.warnings)-1], "--switchbox-check without --network-check")
	s, err = resolved(t, twoNodes+"--switchbox-check --network-check train.py", nil)
	require.NoError(t, err)
	for _, w := range s.warnings {
		require.NotContains(t, w, "--switchbox-check")
	}
}

// Nodes with other checks cannot be in one run, and those with the same ones can, however these were given.
func TestChecksAreComparable(t *testing.T) {
	check := func(line string) string {
		s, err := resolved(t, twoNodes+line+" train.py", nil)
		require.NoError(t, err)
		return s.params.Check
	}
	require.Equal(t, check("--network-check --comm-perf-test --check-ttl=60"), check("--precheck=2 --check-ttl=1m"))
	require.NotEqual(t, check("--precheck=1"), check("--precheck=2"))
	require.Equal(t, check("--health-check=/a"), check("--health-check=/b"), "a node may have its own path")
}

func TestPlanShowsTheChecks(t *testing.T) {
	s, err := resolved(t, "--dry-run --switchbox-check --precheck=2 --check-ttl=run --check-action=report "+
		"--box-pairs=0:1,2:3 --min-bandwidth=9000 --health-check=/opt/check train.py", nil)
	require.NoError(t, err)
	require.JSONEq(t, `{
		"level": "full", "action": "report", "comm_perf_test": true, "exclude_straggler": false, "ttl": "run",
		"timeout": "1m0s", "health_check": "/opt/check",
		"switchbox": {"box_pairs": ["0:1", "2:3"], "min_bandwidth_mbps": 9000, "min_channels": 2}
	}`, planned(t, &s))
	s, err = resolved(t, "--dry-run --check-only --switchbox-check --box-pairs=ring --min-channels=8", nil)
	require.NoError(t, err)
	require.JSONEq(t, `{
		"level": "local", "action": "exclude", "comm_perf_test": false, "exclude_straggler": false, "ttl": "10m0s",
		"timeout": "1m0s", "check_only": true,
		"switchbox": {"ring": true, "min_bandwidth_mbps": 10000, "min_channels": 8}
	}`, planned(t, &s))
	s, err = resolved(t, "--dry-run --check-only --check-level=host --exclude-straggler --check-timeout=30", nil)
	require.NoError(t, err)
	require.JSONEq(t, `{
		"level": "host", "action": "exclude", "comm_perf_test": false, "exclude_straggler": true, "ttl": "10m0s",
		"timeout": "30s", "check_only": true
	}`, planned(t, &s))
	s, err = resolved(t, "--dry-run train.py", nil)
	require.NoError(t, err)
	require.Equal(t, "null", planned(t, &s))
}

// planned is what --dry-run says of the checks.
func planned(t *testing.T, s *settings) string {
	t.Helper()
	var out bytes.Buffer
	require.Zero(t, printPlan(&out, s, testHost()))
	var p struct {
		Features map[string]json.RawMessage `json:"features"`
	}
	require.NoError(t, json.Unmarshal(out.Bytes(), &p), out.String())
	if p.Features["node_checks"] == nil {
		return "null"
	}
	return string(p.Features["node_checks"])
}
