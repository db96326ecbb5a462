package argv

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Normalize writes a command line in one way: `--name=value` and `--flag` in canonical spelling, every option once,
// then "--", the script and its arguments.
func Normalize(opts []Option, argv []string, env LookupEnv) ([]string, error) {
	l, err := Parse(opts, argv, env)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, g := range l.given {
		token := "--" + g.opt.Name
		if g.opt.Kind != Flag {
			token += "=" + g.value
		}
		out = append(out, token)
	}
	return append(append(out, "--"), l.args...), nil
}

func TestLine(t *testing.T) {
	env := lookup(map[string]string{"PET_NPROC_PER_NODE": "3", "PET_NNODES": "9"})
	l, err := Parse(Options(), words("--nnodes=1:2 -m --max_restarts 2 --max-restarts=+4 --monitor-interval=5 s --x"), env)
	require.NoError(t, err)
	require.Equal(t, []string{"s", "--x"}, l.Args())
	require.Equal(t, "1:2", l.String("nnodes"), "the command line wins")
	require.Equal(t, "3", l.String("nproc-per-node"))
	require.Equal(t, 4, l.Int("max-restarts"))
	require.Equal(t, 5*time.Second, l.Duration("monitor-interval"))
	require.True(t, l.Bool("module"))
	require.True(t, l.IsSet("nproc-per-node"))

	require.False(t, l.Bool("no-python"))
	require.False(t, l.IsSet("rdzv-id"))
	require.Equal(t, "none", l.String("rdzv-id"), "the default")
	require.Zero(t, l.Int("master-port"), "no default")
	require.PanicsWithValue(t, `argv: no option "nope"`, func() { l.IsSet("nope") })
}
