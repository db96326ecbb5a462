package native_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/argv/native"
)

func TestMSRun(t *testing.T) {
	for name, c := range map[string]struct {
		line      string
		vars      map[string]string
		args, env string
		logs      native.RankLogs
		notes     int
	}{
		"one node": {
			line: "--worker_num=2 --local_worker_num=2 --join=True train.py --lr 3",
			args: "--preset=mindspore --nnodes=1 --nproc-per-node=2 --success-rule=all -- train.py --lr 3",
			env:  "MS_TOPO_TIMEOUT=600",
			logs: native.RankLogs{Name: "worker_{rank}.log", Console: []int{0, 1}},
		},
		"no size": {
			line: "--join True --tail_worker_log=7,0,9 train.py",
			args: "--preset=mindspore --nnodes=1 --nproc-per-node=8 --success-rule=all -- train.py",
			env:  "MS_TOPO_TIMEOUT=600",
			logs: native.RankLogs{Name: "worker_{rank}.log", Console: []int{7, 0}},
		},
		"two nodes with ranks": {
			line: "--worker_num=4 --local_worker_num=2 --master_addr=10.0.0.9 --master_port=9000 --node_rank=1 " +
				"--log_dir=out --join=True --tail_worker_log=0,3 --cluster_time_out=60 --worker_log_name={ip}_{hostname} train.py",
			args: "--preset=mindspore --nnodes=2 --nproc-per-node=2 --ms-port=9000 --rdzv-backend=c10d " +
				"--rdzv-endpoint=10.0.0.9:9001 --rdzv-conf=join_timeout=60 --node-rank=1 --success-rule=all -- train.py",
			env:  "MS_TOPO_TIMEOUT=60",
			logs: native.RankLogs{Dir: "out", Name: "10.0.0.5_host-a_{rank}.log", Console: []int{1}},
		},
		"two nodes without ranks": {
			line: "--worker_num=16 --master_addr=fd00::1 --master_port=65535 --cluster_time_out=-1 train.py",
			args: "--preset=mindspore --nnodes=2 --nproc-per-node=8 --ms-port=65535 --rdzv-backend=c10d " +
				"--rdzv-endpoint=[fd00::1]:65534 --rdzv-conf=join_timeout=31536000 --success-rule=all -- train.py",
			env:   "MS_TOPO_TIMEOUT=-1",
			logs:  native.RankLogs{Name: "worker_{local_rank}.log"},
			notes: 1, // --join=False
		},
		"options that need another": {
			line: "--worker_num=1 --local_worker_num=1 --sim_rank_id=3 --tail_worker_log=0 train.py",
			args: "--preset=mindspore --nnodes=1 --nproc-per-node=1 --success-rule=all -- train.py",
			env:  "MS_TOPO_TIMEOUT=600", logs: native.RankLogs{Name: "worker_{rank}.log"},
			notes: 3,
		},
		"a rank that does not matter, and a rank table": {
			line: "--worker_num=1 --local_worker_num=1 --node_rank=3 --rank_table_file=t.json --master_port=8118 " +
				"pytest -sv x.py",
			args: "--preset=mindspore --nnodes=1 --nproc-per-node=1 --ms-port=8118 --success-rule=all --no-python -- " +
				"pytest -sv x.py",
			env:   "MS_TOPO_TIMEOUT=600 RANK_TABLE_FILE=t.json",
			logs:  native.RankLogs{Name: "worker_{rank}.log"},
			notes: 2,
		},
		"simulated": {
			line: "--worker_num=1024 --local_worker_num=2 --sim_level=1 --join=True train.py",
			args: "--preset=mindspore --nnodes=1 --nproc-per-node=2 --success-rule=all -- train.py",
			env:  "MS_SIMULATION_LEVEL=1 RANK_SIZE=1024 MS_WORKER_NUM=1024",
			logs: native.RankLogs{Name: "worker_{rank}.log", Console: []int{0, 1}},
		},
		"one simulated rank": {
			line: "--worker_num=1024 --local_worker_num=8 --sim_level=0 --sim_rank_id=77 --join=True train.py",
			args: "--preset=mindspore --nnodes=1 --nproc-per-node=1 --success-rule=all -- train.py",
			env:  "MS_SIMULATION_LEVEL=0 RANK_ID=77 RANK_SIZE=1024 MS_WORKER_NUM=1024",
			logs: native.RankLogs{Name: "worker_{rank}.log", Console: []int{0}},
		},
		"simulated by variables": {
			line: "--worker_num=256 --local_worker_num=256 --join=True train.py",
			vars: map[string]string{"MS_SIMULATION_LEVEL": "2", "RANK_SIZE": "512"},
			args: "--preset=mindspore --nnodes=1 --nproc-per-node=1 --success-rule=all -- train.py",
			env:  "RANK_ID=0 RANK_SIZE=512 MS_WORKER_NUM=256",
			logs: native.RankLogs{Name: "worker_{rank}.log", Console: []int{0}}, notes: 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := translate(t, "msrun", node(c.vars, nil), strings.Fields(c.line)...)
			require.NoError(t, err)
			require.Equal(t, c.args, strings.Join(got.Args, " "))
			require.Equal(t, c.env, strings.Join(got.Env, " "))
			require.Equal(t, &c.logs, got.RankLogs)
			require.Len(t, got.Notes, c.notes, got.Notes)
			require.Nil(t, got.CPUs)
		})
	}
}

func TestMSRunRefuses(t *testing.T) {
	for _, c := range [][2]string{
		{"--worker_num=0 s", "need the number of workers of the job, from 1"},
		{"--worker_num=8 --local_worker_num=0 s", "leave this command out"},
		{"--worker_num=4 s", "--local_worker_num=8: need 1 to --worker_num=4"},
		{"--worker_num=12 s", "--worker_num=12 is not a multiple of --local_worker_num=8"},
		{"--worker_num=16 --node_rank=2 s", "--node_rank=2: need 0 to 1, or -1"},
		{"--worker_num=16 --cluster_time_out=0 s", "--cluster_time_out=0: need seconds from 1"},
		{"--master_port=80 s", "--master_port=80: need a port from 1024 to 65535"},
		{"--join=yes s", "invalid choice: 'yes'"},
		{"--join=1 --tail_worker_log=x s", "--tail_worker_log=x: need ranks"},
		{"--join=1 --tail_worker_log=0,-1 s", "--tail_worker_log=0,-1: need ranks"},
		{"--sim_level=4 s", "invalid choice: 4"},
		{"--worker_nums=4 s", "did you mean --worker_num?"},
		{"--bind_core=maybe s", "--bind_core=maybe: need True, False or JSON"},
		{"--bind_core=null s", "--bind_core=null: need True, False or JSON"},
		{`--bind_core={"npu0":["1"]} s`, `"npu0": need device and a number`},
		{`--bind_core={"device0":["1-x"]} s`, "is not a number or an ascending range"},
		{`--bind_core={"device0":["8"]} s`, "CPU 8 is none that this process may use, which are 0-7"},
		{`--bind_core={"device0":[true]} s`, "need numbers and ranges as texts"},
		{`--bind_numa={"device0":["5"]} s`, "NUMA node 5: open"},
		{"--bind_numa=none.json s", "open none.json: file does not exist"},
		{`--bind_numa={"bind_config":{"bind_cpu_mode":"x"}} s`, `bind_cpu_mode "x": need cpu, numa or none`},
		{`--bind_numa={"bind_config":{"bind_memory_mode":"cpu"}} s`, `bind_memory_mode "cpu": need numa or none`},
		{`--bind_numa={"bind_config":{"bind_cpu_mode":3}} s`, "cannot unmarshal number"},
		{"--worker_num=2", "required: training_script"},
		{"--worker_num=2 --local_worker_num=2 --cluster_time_out=2s ", "invalid int value: '2s'"},
	} {
		_, err := translate(t, "msrun", node(nil, nil), strings.Fields(c[0])...)
		require.ErrorContains(t, err, c[1], c[0])
		require.NotContains(t, err.Error(), "\n")
	}
}

func TestMSRunBinds(t *testing.T) {
	file := `{"bind_config":{"bind_cpu_mode":"cpu","bind_memory_mode":"numa"},` +
		`"bind_cpu":{"device0":{"main":"0-1,4","runtime":"7"},"device_1":{},"device2":{"main":6}}}`
	low, high := []int{0, 1, 2, 3}, []int{4, 5, 6, 7}
	for name, c := range map[string]struct {
		options string
		vars    map[string]string
		want    [][]int
		notes   int
	}{
		"off": {"--bind_core=FALSE", nil, nil, 0},
		"a share each": {"--worker_num=3 --local_worker_num=3 --bind_core=True", nil,
			[][]int{{0, 1}, {2, 3}, {4, 5, 6, 7}}, 0},
		"too few to share": {"--worker_num=9 --local_worker_num=9 --bind_core=True", nil, nil, 1},
		"by device": {`--bind_core={"scheduler":["7"],"device1":["0-1","3"],"device7":["5"]}`, nil,
			[][]int{nil, {0, 1, 3}}, 0},
		"of chosen devices": {`--bind_core={"device5":["0"],"device4":["1"]}`,
			map[string]string{"ASCEND_RT_VISIBLE_DEVICES": "5,4"}, [][]int{{1}, {0}}, 0},
		"a node each":     {"--bind_numa=true", nil, [][]int{low, high}, 0},
		"too few nodes":   {"--worker_num=3 --local_worker_num=3 --bind_numa=true", nil, nil, 1},
		"nodes by device": {`--bind_numa={"device0":["1"],"device1":["0-1"]}`, nil, [][]int{high, append(low, high...)}, 0},
		"cores win":       {`--bind_numa=True --bind_core={"device0":["2"]}`, nil, [][]int{{2}, high}, 0},
		"a file": {"--worker_num=3 --local_worker_num=3 --bind_numa=f.json", nil, [][]int{{0, 1, 4}, nil, {6}},
			0},
		"modes": {`--bind_numa={"bind_config":{"bind_cpu_mode":"NUMA"},"bind_cpu":{"device1":1}}`, nil,
			[][]int{nil, high}, 0},
		"no mode": {`--bind_numa={"bind_config":{}}`, nil, nil, 0},
	} {
		t.Run(name, func(t *testing.T) {
			words := append([]string{"--worker_num=2", "--local_worker_num=2", "--join=True"}, strings.Fields(c.options)...)
			got, err := translate(t, "msrun", node(c.vars, map[string]string{"f.json": file}), append(words, "s")...)
			require.NoError(t, err)
			require.Equal(t, c.want, got.CPUs)
			require.Len(t, got.Notes, c.notes)
			if name == "a file" {
				require.Contains(t, got.Env, "MSRUN_BIND_FILE=/job/f.json")
			}
		})
	}
}
