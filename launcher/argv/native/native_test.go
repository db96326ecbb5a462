package native_test

import (
	"errors"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/argv/native"
)

// node is a System with 8 CPUs, of which two NUMA nodes have four each.
func node(vars, files map[string]string) *native.System {
	lookup := func(name string) (string, bool) { v, ok := vars[name]; return v, ok }
	sysfs := map[string]string{
		"/sys/devices/system/node/has_memory":    "0-1\n",
		"/sys/devices/system/node/has_cpu":       "0-1\n",
		"/sys/devices/system/node/node0/cpulist": "0-3\n",
		"/sys/devices/system/node/node1/cpulist": "4-7\n",
	}
	return &native.System{
		Env: lookup, Host: "host-a", AddrTo: func(string) string { return "10.0.0.5" },
		Abs:  func(path string) string { return "/job/" + path },
		CPUs: func() ([]int, error) { return []int{0, 1, 2, 3, 4, 5, 6, 7}, nil },
		Owns: func(host string) bool { return host == "host-a" }, Devices: func() int { return 0 },
		Installed: func() (int, string) { return 0, "" },
		KeyToken: func(job string) (token, file string) {
			if key := files["key"]; key != "" {
				token, file = key+" for "+job, "/root/.ssh/id_rsa"
			}
			return token, file
		},
		ReadFile: func(path string) ([]byte, error) {
			if text, ok := files[path]; ok {
				return []byte(text), nil
			} else if text, ok := sysfs[path]; ok {
				return []byte(text), nil
			}
			return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
		},
	}
}

func translate(t *testing.T, name string, sys *native.System, words ...string) (native.Command, error) {
	t.Helper()
	l, found := native.Find(name)
	require.True(t, found)
	return l.Translate(words, sys)
}

func TestFind(t *testing.T) {
	for _, l := range native.Launchers() {
		found, ok := native.Find(l.Name)
		require.True(t, ok)
		require.Equal(t, l.Usage, found.Usage)
		require.NotEmpty(t, l.About, l.Name)
	}
	_, ok := native.Find("dlrover-run")
	require.False(t, ok)
}

// Every option of every launcher has a section and a text, and none takes a PET_ variable: these are dlrover-run's.
func TestOptions(t *testing.T) {
	for _, l := range native.Launchers() {
		if l.Options == nil {
			continue
		}
		var names []string
		for _, o := range l.Options() {
			require.NotEmpty(t, o.Category, o.Name)
			require.NotEmpty(t, o.Usage, o.Name)
			require.Empty(t, o.Env, o.Name)
			names = append(names, o.Name)
		}
		require.Subset(t, names, []string{"dry-run", "help", "version"}, l.Name)
		slices.Sort(names)
		require.Equal(t, slices.Compact(slices.Clone(names)), names)

		_, err := l.Translate([]string{"--help"}, node(nil, nil))
		require.ErrorIs(t, err, argv.ErrHelp)
		_, err = l.Translate([]string{"--version"}, node(nil, nil))
		require.ErrorIs(t, err, argv.ErrVersion)
		_, err = l.Translate([]string{"--no-such-option", "s"}, node(nil, nil))
		require.ErrorContains(t, err, "unrecognized arguments: --no-such-option")
		c, err := l.Translate([]string{"--dry-run", "s.py", "--dry-run"}, node(nil, nil))
		require.NoError(t, err)
		i := slices.Index(c.Args, "--")
		require.Contains(t, c.Args[:i], "--dry-run")
		require.Equal(t, []string{"s.py", "--dry-run"}, c.Args[i+1:])
	}
}

func TestXPUTimerLaunch(t *testing.T) {
	c, err := translate(t, native.XPUTimerLaunch, node(nil, nil), "python", "--hang=off")
	require.NoError(t, err)
	require.Equal(t, native.Command{
		Args: []string{"--standalone", "--nnodes=1", "--nproc-per-node=1", "--no-python", "--hang=auto", "--", "python",
			"--hang=off"},
		Alone: true, NoDefaults: true,
	}, c)
	c, err = translate(t, native.XPUTimerLaunch, node(map[string]string{"DLROVER_HANG": "off"}, nil), "python")
	require.NoError(t, err)
	require.NotContains(t, c.Args, "--hang=auto")
}

// FuzzTranslate: whatever the words, what comes out is a command line of dlrover-run, whose script is the words' end.
func FuzzTranslate(f *testing.F) {
	for _, seed := range []string{
		"--worker_num=4\n--local_worker_num=2\n--join=True\n--tail_worker_log=0,3\ntrain.py\n--x",
		"--bind_core\n{\"device0\":[\"0-3\"]}\n--worker_num=1\n--local_worker_num=1\ns", "--sim_level\n1\npytest\na",
		"--bind_numa\nx.json\ns", "--bind_numa=True\n--worker_n\n2\n--local\n2\ns", "--master_addr\n::1\ns", "-h", "--\ns",
		"-H\nx.json\n-i\nhost-a:0\ns", "-e\nlocalhost:0\ns", "--num_g\n2\n--bind_cores_to_rank\n--bind_core_list\n1,3-5\ns",
		"--elastic_training\n--max_elastic_nodes=4\ns", "--autotuning=run\ns\n--x", "--hostfile=x.json\n--num_nodes=1\ns",
		"--hostfile=x.json\n--ssh_port=22\n--launcher_args=-l me -f 3\n--module\ns\n--x", "-H\nx.json\n--rsh=ssh {host}\ns",
	} {
		f.Add(seed, `{"bind_config":{"bind_cpu_mode":"cpu"},"bind_cpu":{"device0":{"main":"0-3"}}}`)
		f.Add(seed, "host-a slots=2\nhost-b:4 # x")
	}
	f.Fuzz(func(t *testing.T, line, file string) {
		words := strings.Split(line, "\n")
		before := slices.Clone(words)
		for _, l := range native.Launchers() {
			if l.Translate == nil {
				continue
			}
			sys := node(map[string]string{"RANK_ID": "1"}, map[string]string{"x.json": file})
			sys.Has = func(program string) bool { return program == "ssh" }
			c, err := l.Translate(words, sys)
			require.Equal(t, before, words, "the words are the caller's")
			if err != nil {
				var usage *argv.UsageError
				var idle *native.IdleError
				known := errors.As(err, &usage) || errors.As(err, &idle) || errors.Is(err, argv.ErrHelp) ||
					errors.Is(err, argv.ErrVersion)
				require.True(t, known, err)
				continue
			}
			args := c.Args
			if c.Remote != nil {
				args = c.Remote.Args
			}
			i := slices.Index(args, "--")
			script := args[i+1:]
			require.Equal(t, words[len(words)-len(script)+1:], script[min(1, len(script)):])
			for _, option := range args[:i] {
				require.Regexp(t, `^--[a-z_-]+(=|$)`, option)
			}
		}
	})
}
