package trainingport

import (
	"fmt"
	"log/slog"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/app/run/feature/featuretest"
	"dlrover-run/internal/freeports"
	"dlrover-run/internal/job"
	"dlrover-run/launcher"
)

func TestTrainingPortOption(t *testing.T) {
	const ascend = "--accelerator=ascend-npu "
	for _, c := range []struct {
		line  string
		env   map[string]string
		start int
		warn  string
		err   string
	}{
		{line: "", start: 0},
		{line: "--training-port=0", start: 0},
		{line: ascend, start: 60000},
		{line: ascend + "--training-port=0", start: 0},
		{line: ascend + "--training_port=50000", start: 50000},
		{line: ascend, env: map[string]string{"HCCL_IF_BASE_PORT": "40000"}, start: 40000},
		{line: "", env: map[string]string{"HCCL_IF_BASE_PORT": "soon"}, start: 0},
		{line: "--training-port=50000", warn: "--training-port has no effect"},
		{line: ascend, env: map[string]string{"HCCL_IF_BASE_PORT": "soon"}, err: `$HCCL_IF_BASE_PORT="soon": need a number`},
		{line: ascend, env: map[string]string{"HCCL_IF_BASE_PORT": "80"}, err: `$HCCL_IF_BASE_PORT=80: need a port from`},
		{line: "--training-port=65521", err: "--training-port=65521: need a port from 1024 to 65520"},
		{line: ascend + "--training-port=-1", err: "need a port from 1024 to 65520"},
	} {
		o := featuretest.Read(t, c.line+" train.py", c.env)
		start, err := read(o)
		if c.err != "" {
			require.ErrorContains(t, err, c.err, c.line)
			continue
		}
		require.NoError(t, err, c.line)
		require.Equal(t, c.start, start, c.line)
		require.Equal(t, c.warn != "", strings.Contains(strings.Join(o.Warnings, "\n"), "effect"), c.line)
	}
}

func TestCommonBase(t *testing.T) {
	node := func(bases ...int) job.Member { return job.Member{Bases: bases} }
	for want, world := range map[int][]job.Member{
		0:     {node(60000), node(60016)},
		60000: {node(60000, 60016), node(60016, 60000)},
		60032: {node(60000, 60032, 60048), node(60048, 60032), node(60016, 60032)},
	} {
		require.Equal(t, want, commonBase(world))
	}
	require.Zero(t, commonBase(nil))
	require.Zero(t, commonBase([]job.Member{node(60000), node()}), "a launcher of another version")
}

func TestFreeBases(t *testing.T) {
	start := featuretest.FreeStretch(t, 16*hcclPorts)
	taken, err := net.Listen("tcp", fmt.Sprintf(":%d", start+hcclPorts-1))
	require.NoError(t, err)
	defer taken.Close()
	bases := freeBases(start, freeports.Range{})
	require.Len(t, bases, offeredBases)
	require.Equal(t, start+hcclPorts, bases[0])
	var offered []int
	p := &trainingPort{bases: func() []int { return freeBases(start, freeports.Range{}) },
		log: slog.New(slog.DiscardHandler), offer: func(b []int) { offered = b }}
	env := func(bases []int) [][]string {
		r := &launcher.StartRequest{Epoch: launcher.Epoch{World: []job.Member{{Bases: bases}}}, Env: make([][]string, 2)}
		p.start(r)
		return r.Env
	}
	want := []string{fmt.Sprintf("HCCL_IF_BASE_PORT=%d", start+hcclPorts)}
	require.Equal(t, [][]string{want, want}, env(bases))
	p.stop(launcher.StopRequest{Early: true})
	require.Nil(t, offered)
	p.stop(launcher.StopRequest{})
	require.Equal(t, bases, offered)
	require.Equal(t, make([][]string, 2), env(nil))
	require.Empty(t, freeBases(hcclHighest+1, freeports.Range{}))
}

// What no connection takes by chance is offered first.
func TestFreeBasesBesideOutgoingPorts(t *testing.T) {
	start := featuretest.FreeStretch(t, 16*hcclPorts)
	bases := freeBases(start, freeports.Range{First: start, Last: start + 2*hcclPorts})
	require.Equal(t, []int{start, start + 3*hcclPorts}, bases[:2])
	require.NotContains(t, bases, start+hcclPorts)
	bases = freeBases(start, freeports.Range{First: 1024, Last: 65535})
	require.Len(t, bases, offeredBases)
	require.Equal(t, []int{start, start + hcclPorts}, bases[:2])
}
