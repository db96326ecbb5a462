package run

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/policy"
)

func testHost() hostFacts {
	return hostFacts{
		id: "feedfacecafebeef", root: fstest.MapFS{}, name: "host-a",
		cpus:  func() int { return 6 },
		gpus:  func() (int, string) { return 4, "cuda" },
		owns:  func(host string) bool { return host == "host-a" || host == "localhost" || host == "127.0.0.1" },
		addrs: func() []string { return []string{"10.0.0.1"} },
		route: func(string, int) string { return "10.0.0.1" },
		readFile: func(path string) ([]byte, error) {
			return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
		},
		venvs: func() []string { return nil }, environ: func() []string { return nil },
		lookPath: func(f string) (string, error) {
			if strings.Contains(f, "missing") {
				return "", errors.New("executable file not found in $PATH")
			}
			return "/bin/" + filepath.Base(f), nil
		},
	}
}

// resolved parses a command line as main does, in a directory with a train.py.
func resolved(t *testing.T, line string, env map[string]string) (settings, error) {
	t.Helper()
	return resolvedOn(t, testHost(), line, env)
}

// resolvedOn is resolved on another machine.
func resolvedOn(t *testing.T, h hostFacts, line string, env map[string]string) (settings, error) {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "train.py"), nil, 0o600))
	t.Chdir(dir)
	lookup := func(name string) (string, bool) { v, ok := env[name]; return v, ok }
	c, err := parse(strings.Fields(line), lookup, io.Discard)
	if err != nil {
		return settings{}, err
	}
	return resolve(c, lookup, h)
}

const secret = "0123456789abcdef"

func TestResolve(t *testing.T) {
	for name, c := range map[string]struct {
		line  string
		env   map[string]string
		check func(*testing.T, settings)
	}{
		"one node needs no port": {"train.py", nil, func(t *testing.T, s settings) {
			require.Equal(t, local, s.rdzv.backend)
			require.Equal(t, "127.0.0.1", s.node.Addr)
			require.Equal(t, "feedfacecafebeef", s.runID)
			require.Equal(t, 1, s.size.slots)
			require.Equal(t, 30*time.Second, s.shutdown.timeout)
		}},
		"static": {"--nnodes=2 --node-rank=1 --master-addr=10.0.0.9 --master-port=1234 --rdzv-id=j train.py",
			map[string]string{"DLROVER_TOKEN": secret}, func(t *testing.T, s settings) {
				require.Equal(t, static, s.rdzv.backend)
				require.Equal(t, "10.0.0.9", s.rdzv.host)
				require.Equal(t, 1234, s.rdzv.port)
				require.Equal(t, 1, s.node.Rank)
				require.True(t, s.params.Static)
				require.False(t, s.rdzv.serves(s.node.Rank, testHost()))
				require.Equal(t, "10.0.0.1", s.node.Addr)
			}},
		"only the environment, as operators do": {"train.py", map[string]string{"PET_NNODES": "2", "PET_NPROC_PER_NODE": "3",
			"PET_NODE_RANK": "0", "PET_MASTER_ADDR": "host-a", "PET_MASTER_PORT": "2222", "DLROVER_TOKEN": secret},
			func(t *testing.T, s settings) {
				require.Equal(t, static, s.rdzv.backend)
				require.Equal(t, 3, s.size.slots)
				require.True(t, s.rdzv.serves(s.node.Rank, testHost()))
				require.Equal(t, "host-a", s.node.Addr, "rank 0 is reached where everyone was told")
			}},
		"c10d": {"--nnodes=1:4 --rdzv-backend=c10d --rdzv-endpoint=host-a --max-restarts=3 train.py", nil,
			func(t *testing.T, s settings) {
				require.Equal(t, c10d, s.rdzv.backend)
				require.Equal(t, 29400, s.rdzv.port)
				require.True(t, s.rdzv.serves(s.node.Rank, testHost()))
				require.Contains(t, s.warnings[0], "loopback only")
				require.Equal(t, 3, s.restarts.policy.MaxRestarts)
				require.Equal(t, -1, s.node.Rank)
			}},
		"c10d, one node": {"--nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=host-a train.py", nil,
			func(t *testing.T, s settings) { require.Empty(t, s.warnings) }},
		"c10d is_host": {"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=host-a " +
			"--rdzv-conf=is_host=0,last_call_timeout=1.5,join_timeout=7 train.py", map[string]string{"DLROVER_TOKEN": secret},
			func(t *testing.T, s settings) {
				require.False(t, s.rdzv.serves(s.node.Rank, testHost()))
				require.Equal(t, 1500*time.Millisecond, s.params.LastCall)
				require.Equal(t, 7*time.Second, s.params.JoinTimeout)
			}},
		"a DLRover pod": {"--nnodes=2:4 --nproc-per-node=auto --node_unit=2 train.py",
			map[string]string{"DLROVER_MASTER_ADDR": "master:50001", "ELASTIC_JOB_NAME": "my-job", "POD_NAME": "my-job-worker-3",
				"POD_IP": "10.1.2.3", "NODE_IP": "192.168.0.3", "NODE_RANK": "3", "NODE_ID": "7", "DLROVER_TOKEN": secret},
			func(t *testing.T, s settings) {
				require.Equal(t, master, s.rdzv.backend)
				require.Equal(t, "my-job", s.runID)
				require.Equal(t, "my-job-worker-3", s.node.Name)
				require.Equal(t, "10.1.2.3", s.node.Addr)
				require.Equal(t, "192.168.0.3", s.node.IP)
				require.Equal(t, 3, s.node.Rank)
				require.Equal(t, 8, s.node.Generation)
				require.Equal(t, 4, s.size.slots)
				require.Equal(t, 2, s.params.Unit)
			}},
		"auto_config": {"--auto_config train.py",
			map[string]string{"NODE_NUM": "3", "DLROVER_MASTER_ADDR": "localhost:50001"}, func(t *testing.T, s settings) {
				require.Equal(t, 3, s.params.Max)
				require.Equal(t, 4, s.size.slots)
			}},
		"cpu workers beside GPUs": {"--nproc-per-node=auto --accelerator=cpu train.py", nil,
			func(t *testing.T, s settings) {
				require.Equal(t, 6, s.size.slots)
				require.Contains(t, s.size.why, "CPUs")
			}},
		"auto_config without the GPUs": {"--auto_config --accelerator=cpu train.py",
			map[string]string{"NODE_NUM": "3", "DLROVER_MASTER_ADDR": "localhost:50001"}, func(t *testing.T, s settings) {
				require.Equal(t, 1, s.size.slots)
			}},
		"cpu workers": {"--nproc-per-node=cpu train.py", nil,
			func(t *testing.T, s settings) { require.Equal(t, 6, s.size.slots) }},
		"unknown conf warns": {"--rdzv-conf=colour=red train.py", nil,
			func(t *testing.T, s settings) { require.Contains(t, s.warnings[0], "colour is not known") }},
		"shutdown from torch": {"train.py", map[string]string{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"},
			func(t *testing.T, s settings) { require.Equal(t, 5*time.Second, s.shutdown.timeout) }},
		"signals": {"--signals-to-handle=SIGTERM,SIGUSR2 train.py", nil, func(t *testing.T, s settings) {
			require.True(t, s.shutdown.ends(syscall.SIGUSR2))
			require.False(t, s.shutdown.ends(syscall.SIGINT))
		}},
		"logs specs": {"--logs-specs=default train.py", nil, func(*testing.T, settings) {}},
		"torchrun's other variables": {"train.py",
			map[string]string{"TORCHELASTIC_HEALTH_CHECK_PORT": "8080", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
				"TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT": "9", "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "0",
				"TORCH_ELASTIC_WORKER_IDENTICAL": "1"}, func(t *testing.T, s settings) {
				require.Len(t, s.warnings, 3)
				require.Contains(t, s.warnings[0], `$TORCHELASTIC_HEALTH_CHECK_PORT="8080" has no effect`)
			}},
		"a lonely range": {"--standalone --nnodes=1:4 train.py", nil,
			func(t *testing.T, s settings) { require.Equal(t, 1, s.params.Max) }},
		"misplaced master": {"--standalone --master-addr=h train.py", nil,
			func(t *testing.T, s settings) { require.Contains(t, s.warnings[0], "no effect") }},
		"exit codes": {"--restart-policy=ExitCode --retryable-exit-codes=3,10-12 --max-restarts=1 train.py", nil,
			func(t *testing.T, s settings) {
				require.Equal(t, policy.RestartCharged, s.restarts.policy.Decide(policy.Exit{Code: 11}))
				require.Equal(t, policy.Fail, s.restarts.policy.Decide(policy.Exit{Code: 130}))
			}},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := resolved(t, c.line, c.env)
			require.NoError(t, err)
			c.check(t, s)
		})
	}
}

// Every option that takes a duration takes seconds, too.
func TestDurationsOfOptions(t *testing.T) {
	const line = "--dry-run --deadline=%[1]s --start-deadline=%[1]s --leave-grace=%[1]s " +
		"--restart-grace=%[1]s --shutdown-timeout=%[1]s --monitor-interval=%[1]s --restart-backoff=%[1]s:%[1]s " +
		"--restart-window=job=3/%[1]s --on-failure=hold=%[1]s --network-check --check-ttl=%[1]s --check-timeout=%[1]s " +
		"--before=true --hook-timeout=%[1]s --rdzv-conf=join_timeout=%[1]s,node_timeout=%[1]s train.py"
	for _, o := range argv.Options() {
		if o.Type == argv.Duration || strings.Contains(o.Meta, "DURATION") {
			require.Contains(t, line, "--"+o.Name+"=", "try it above")
		}
	}
	for _, text := range []string{"60", "60s", "1m"} {
		s, err := resolved(t, fmt.Sprintf(line, text), nil)
		require.NoError(t, err, text)
		b := s.params.Budget
		for i, d := range []time.Duration{b.Deadline, b.StartDeadline, s.shutdown.restart.Grace, s.shutdown.timeout,
			b.BackoffMin,
			b.BackoffMax, b.Windows[0].Per, b.HoldFor, s.params.JoinTimeout, s.params.NodeTimeout,
			s.hold.leaveGrace + maxLeaveMargin} {
			require.Equal(t, time.Minute, d, "%s: %d", text, i)
		}
	}
}

// Of two errors always the same one is reported.
func TestFirstErrorIsStable(t *testing.T) {
	for range 20 {
		_, err := resolved(t, "--deadline=-1 --start-deadline=-1 train.py", nil)
		require.ErrorContains(t, err, "--deadline=-1s is out of range")
	}
}

func TestResolveErrors(t *testing.T) {
	for name, c := range map[string]struct {
		line string
		env  map[string]string
		want string
	}{
		"nnodes":     {"--nnodes=3:2 train.py", nil, "nnodes"},
		"nproc":      {"--nproc-per-node=many train.py", nil, "unsupported nproc_per_node value"},
		"nproc zero": {"--nproc-per-node=0 train.py", nil, "1 to 4096"},
		"xpu":        {"--nproc-per-node=xpu train.py", nil, "give their number"},
		"unit":       {"--node_unit=0 train.py", nil, "from 1"},
		"unit without a fit": {"--nnodes=1:3 --node_unit=4 --rdzv-backend=c10d --rdzv-endpoint=localhost train.py", nil,
			"no multiple"},
		"auto_config":       {"--auto_config train.py", nil, "NODE_NUM"},
		"backend":           {"--rdzv-backend=zookeeper train.py", nil, "is unknown"},
		"etcd without addr": {"--rdzv-backend=etcd-v2 train.py", nil, "--rdzv-endpoint=HOST:2379"},
		"etcd's port":       {"--rdzv-backend=etcd --rdzv-endpoint=e:x train.py", nil, "must be an integer"},
		"etcd's second":     {"--rdzv-backend=etcd --rdzv-endpoint=e,:1 train.py", nil, "hostname"},
		"is_host in etcd":   {"--rdzv-backend=etcd --rdzv-endpoint=e --rdzv-conf=is_host=1 train.py", nil, "for c10d"},
		"etcd's protocol": {"--rdzv-backend=etcd --rdzv-endpoint=e --rdzv-conf=protocol=ftp train.py", nil,
			"http or https"},
		"master without addr": {"--rdzv-backend=dlrover-master train.py", nil, "DLROVER_MASTER_ADDR"},
		"endpoint":            {"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=h:99999 train.py", nil, "99999"},
		"endpoint without port": {"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:0 train.py", nil,
			"one fixed port"},
		"no token":            {"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=other-host train.py", nil, "job token"},
		"short token":         {"train.py", map[string]string{"DLROVER_TOKEN": "short"}, "at least 16"},
		"token with a space":  {"train.py", map[string]string{"DLROVER_TOKEN": "0123456789 abcdef"}, "printable"},
		"token file missing":  {"--token-file=/nope train.py", nil, "/nope"},
		"standalone of two":   {"--standalone --nnodes=2 train.py", nil, "needs 2"},
		"node rank":           {"--nnodes=2 --node-rank=2 --master-addr=localhost train.py", nil, "from 0 to 1"},
		"negative node rank":  {"--node-rank=-1 train.py", nil, "from 0"},
		"NODE_RANK":           {"train.py", map[string]string{"NODE_RANK": "x"}, "$NODE_RANK"},
		"conf":                {"--rdzv-conf=join_timeout=-1 train.py", nil, `join_timeout=-1: "-1" is out of range`},
		"conf host":           {"--rdzv-conf=is_host=maybe train.py", nil, "true or false"},
		"conf store":          {"--rdzv-conf=store_type=file train.py", nil, "only tcp"},
		"monitor interval":    {"--monitor-interval=0 train.py", nil, "greater than 0"},
		"restarts":            {"--max-restarts=-1 train.py", nil, "need a number from 0"},
		"retryable":           {"--restart-policy=ExitCode --retryable-exit-codes=999 train.py", nil, "999"},
		"shutdown":            {"--shutdown-timeout=-1 train.py", nil, "--shutdown-timeout=-1s is out of range"},
		"shutdown env":        {"train.py", map[string]string{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, `"soon" is not`},
		"redirects":           {"--redirects=9 train.py", nil, "9"},
		"ranks":               {"--local-ranks-filter=a train.py", nil, "a"},
		"rotate":              {"--log-rotate-size=many train.py", nil, "many"},
		"rotate count":        {"--log-rotate-count=0 train.py", nil, "at least 1"},
		"preset":              {"--preset=nope train.py", nil, "nope"},
		"no-python module":    {"--no-python -m train.py", nil, "--no-python"},
		"missing script":      {"nothere.py", nil, "nothere.py"},
		"missing program":     {"--no-python missing", nil, "cannot execute"},
		"missing interpreter": {"train.py", map[string]string{"PYTHON_EXEC": "missing-python"}, "PYTHON_EXEC"},
		"numa without device": {"--numa-binding=node train.py", nil, "accelerator"},
		"accelerator":         {"--nproc-per-node=auto --accelerator=ascend-npu train.py", nil, "cuda"},
		"no GPUs but GPUs": {"--accelerator=cpu --nproc-per-node=gpu train.py", nil,
			"--nproc-per-node=gpu and --accelerator=cpu contradict each other"},
		"logs specs":  {"--logs-specs=x train.py", nil, "Python entry point"},
		"master port": {"--master-port=70000 train.py", nil, "0 to 65535"},
		"misplaced topology": {"--rdzv-backend=dlrover-master --rdzv-endpoint=localhost:1 --topology-file=x train.py", nil,
			"give it to dlrover-master"},
		"no script": {"--nnodes=1", nil, "training_script"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := resolved(t, c.line, c.env)
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), "\n", "one line")
		})
	}
}

func TestPlanStartsNothingAndTellsAll(t *testing.T) {
	s, err := resolved(t,
		"--dry-run --nnodes=2 --nproc-per-node=2 --node-rank=1 --master-addr=localhost --tee=1:3 train.py ${local_rank}",
		map[string]string{"DLROVER_TOKEN": secret})
	require.NoError(t, err)
	var out bytes.Buffer
	require.Zero(t, printPlan(&out, &s, testHost()))
	var p plan
	require.NoError(t, json.Unmarshal(out.Bytes(), &p))
	require.Equal(t, "localhost:29500", p.Rendezvous.Endpoint)
	require.True(t, p.Rendezvous.Token)
	require.NotContains(t, out.String(), secret)
	require.Len(t, p.Workers, 2)
	w := p.Workers[1]
	require.Equal(t, 3, w.Rank)
	require.Equal(t, []string{"/bin/python3", "-u", "train.py", "1"}, w.Argv)
	require.Equal(t, "both", w.Tee)
	require.Contains(t, w.Env, "RANK=3")
	require.Contains(t, w.Env, "WORLD_SIZE=4")
}

func TestHelpNamesEveryOption(t *testing.T) {
	var out bytes.Buffer
	c, err := parse([]string{"--help"}, func(string) (string, bool) { return "", false }, &out)
	require.NoError(t, err)
	require.Nil(t, c)
	for _, want := range []string{
		"--nnodes N|MIN:MAX", "-r, --redirects", "--network-check", "(default: 1:1)", "--help",
	} {
		require.Contains(t, out.String(), want)
	}
	for _, section := range []string{"\nWorkers:\n", "\nLogs and events:\n"} {
		require.Equal(t, 1, strings.Count(out.String(), section), section)
	}
}

// Where the way to the rendezvous is loopback, other hosts are told another address: that of the default route, or the
// first one.
func TestAddressThatOthersSee(t *testing.T) {
	token := map[string]string{"DLROVER_TOKEN": secret}
	for name, c := range map[string]struct {
		line    string
		env     map[string]string
		own     []string
		far     string // where the default route leads from; "": there is none
		addr    string
		because string
	}{
		"the default route": {"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=host-a:1", token,
			[]string{"10.0.0.1", "192.168.0.1"}, "192.168.0.1", "192.168.0.1", "that of its default route"},
		"no default route": {"--nnodes=1:2 --rdzv-backend=dlrover-master --rdzv-endpoint=host-a:1", token,
			[]string{"10.0.0.1", "192.168.0.1"}, "", "10.0.0.1", "its first one"},
		"a scheduler": {"--nnodes=2", map[string]string{"DLROVER_TOKEN": secret, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
			"SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "host-a,host-b", "SLURM_NTASKS": "2"},
			[]string{"10.0.0.1"}, "10.0.0.1", "10.0.0.1", "that of its default route"},
		"not the first node": {"--nnodes=2 --node-rank=1 --master-addr=host-a",
			token, []string{"10.0.0.1"}, "10.0.0.1", "10.0.0.1", "that of its default route"},
		"no network": {"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=host-a:1",
			token, nil, "", "127.0.0.1", ""},
		"a loopback name": {"--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=localhost:1",
			token, []string{"10.0.0.1"}, "10.0.0.1", "127.0.0.1", ""},
		"one node": {"--nnodes=1 --rdzv-backend=dlrover-master --rdzv-endpoint=host-a:1",
			token, []string{"10.0.0.1"}, "", "127.0.0.1", ""},
		"the user's choice": {"--nnodes=2 --local-addr=127.0.0.1 --rdzv-backend=c10d --rdzv-endpoint=host-a:1",
			token, []string{"10.0.0.1"}, "", "127.0.0.1", ""},
	} {
		t.Run(name, func(t *testing.T) {
			h := testHost()
			h.addrs = func() []string { return c.own }
			h.route = func(host string, _ int) string {
				if host == "192.0.2.1" || host == "2001:db8::1" {
					return c.far
				}
				return "127.0.0.1"
			}
			s, err := resolvedOn(t, h, c.line+" train.py", c.env)
			require.NoError(t, err)
			require.Equal(t, c.addr, s.node.Addr)
			if c.because == "" {
				require.Empty(t, s.rdzv.addrWhy)
				return
			}
			require.Regexp(t, `^host-a is a loopback address on this host \(see /etc/hosts\): other nodes are told `+c.addr+", "+
				c.because, s.rdzv.addrWhy)
		})
	}
}

func resolve(c *argv.Line, env argv.LookupEnv, host hostFacts) (settings, error) {
	return resolveAs(ownName(), c, env, host)
}
