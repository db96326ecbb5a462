package native

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/launcher/argv"
)

// Sections of msrun's help.
const (
	msSize  = "Size of the job"
	msNet   = "Scheduler and network"
	msRun   = "Workers"
	msLogs  = "Logs"
	msBound = "Binding"
)

func msrun() Launcher {
	return Launcher{
		Name: "msrun", Usage: "[options] task_script [script arguments]",
		About: "Starts a MindSpore job as msrun of MindSpore 2.10 does, with dlrover-run\n" +
			"--preset=mindspore: the scheduler runs beside the workers of the first node.",
		Options: msOptions, Translate: translateMS,
	}
}

func msOptions() []argv.Option {
	return withDefaults(append([]argv.Option{
		{Name: "worker_num", Type: argv.Int, Default: "8", Meta: "N", Category: msSize,
			Usage: "workers of the job; --nnodes becomes this number divided by --local_worker_num"},
		{Name: "local_worker_num", Type: argv.Int, Default: "8", Meta: "N", Category: msSize,
			Usage: "workers of this node, the same number on all nodes; becomes --nproc-per-node"},
		{Name: "node_rank", Type: argv.Int, Default: "-1", Meta: "N", Category: msSize,
			Usage: "rank of this node; -1: in the order in which the nodes meet; ignored with one node"},
		{Name: "master_addr", Default: "127.0.0.1", Meta: "HOST", Category: msNet,
			Usage: "host at which the nodes meet; its launcher serves the rendezvous"},
		{Name: "master_port", Type: argv.Int, Default: "8118", Meta: "PORT", Category: msNet,
			Usage: "port of the scheduler, 1024-65535; several nodes meet at the next port. One node uses any free port " +
				"unless this is given"},
		{Name: "cluster_time_out", Type: argv.Int, Default: "600", Meta: "SECONDS", Category: msNet,
			Usage: "time for nodes to wait for each other; becomes join_timeout of --rdzv-conf and $MS_TOPO_TIMEOUT; " +
				"negative: no limit"},
		{Name: "rank_table_file", Meta: "PATH", Category: msNet, Usage: "becomes $RANK_TABLE_FILE of the workers"},
		{Name: "join", Default: "False", Choices: []string{"True", "False", "1", "0"}, Meta: "True|False", Category: msRun,
			Usage: "True shows the workers' output; False only writes it to their files. The launcher stays until the " +
				"workers end, also with False, where msrun leaves them behind"},
		{Name: "sim_level", Type: argv.Int, Choices: []string{"0", "1", "2", "3"}, Meta: "0-3", Category: msRun,
			Usage: "simulate without a scheduler: becomes $MS_SIMULATION_LEVEL"},
		{Name: "sim_rank_id", Type: argv.Int, Default: "-1", Meta: "N", Category: msRun,
			Usage: "simulate only this rank, in one process"},
		{Name: "log_dir", Meta: "DIR", Category: msLogs, Usage: "directory of the workers' log files (default: the working " +
			"directory)"},
		{Name: "worker_log_name", Meta: "NAME", Category: msLogs,
			Usage: "name of the workers' log files, before _RANK.log; {ip} and {hostname} stand for those of this node " +
				"(default: worker)"},
		{Name: "tail_worker_log", Default: "-1", Meta: "RANK,...", Category: msLogs,
			Usage: "ranks whose output --join=True shows; -1: all"},
		{Name: "bind_core", Default: "False", Meta: "True|False|JSON", Category: msBound,
			Usage: `bind workers to CPUs: True shares out those of this node, {"device0":["0-3"],...} names them`},
		{Name: "bind_numa", Default: "False", Meta: "True|False|JSON|PATH", Category: msBound,
			Usage: "bind workers to the CPUs of NUMA nodes: True gives each worker one, JSON or a .json file names them. " +
				"Memory is not bound: it comes from the node where its worker runs"},
	}, own()...))
}

// msJob is a command line of msrun that is being translated.
type msJob struct {
	*argv.Line
	sys          *System
	cmd          Command
	total, local int // workers of the job and of this node
	nodes, rank  int
	simulated    bool
}

func translateMS(args []string, sys *System) (Command, error) {
	line, err := argv.Parse(msOptions(), args, nil)
	if err != nil {
		return Command{}, err
	}
	j := &msJob{Line: line, sys: sys, total: line.Int("worker_num"), local: line.Int("local_worker_num"),
		rank: line.Int("node_rank")}
	j.option("preset", "mindspore")
	for _, step := range []func() error{j.size, j.network, j.logs, j.binding} {
		if err := step(); err != nil {
			return Command{}, err
		}
	}
	j.option("success-rule", "all")
	j.script()
	return j.cmd, nil
}

func (j *msJob) option(name string, value any) {
	j.cmd.Args = append(j.cmd.Args, fmt.Sprintf("--%s=%v", name, value))
}

func (j *msJob) env(name string, value any) {
	j.cmd.Env = append(j.cmd.Env, fmt.Sprintf("%s=%v", name, value))
}

func (j *msJob) size() error {
	if err := j.checkSize(); err != nil {
		return err
	}
	level := j.String("sim_level")
	if level != "" {
		j.env("MS_SIMULATION_LEVEL", level)
	} else {
		level = j.sys.lookup("MS_SIMULATION_LEVEL")
	}
	if j.nodes = j.total / j.local; level != "" {
		j.simulate()
	} else if j.String("sim_rank_id") != "-1" {
		j.cmd.Note("--sim_rank_id has no effect without --sim_level")
	}
	j.option("nnodes", j.nodes)
	j.option("nproc-per-node", j.local)
	return nil
}

func (j *msJob) checkSize() error {
	switch {
	case j.total < 1:
		return usageErrorf("--worker_num=%d: need the number of workers of the job, from 1", j.total)
	case j.local == 0:
		return usageErrorf("--local_worker_num=0: the scheduler needs no command of its own here: it runs beside the " +
			"workers of the first node; leave this command out")
	case j.local < 1 || j.local > j.total:
		return usageErrorf("--local_worker_num=%d: need 1 to --worker_num=%d workers (each is 8 where it is not given)",
			j.local, j.total)
	case j.total%j.local != 0:
		return usageErrorf("--worker_num=%d is not a multiple of --local_worker_num=%d: for nodes of different sizes start "+
			"dlrover-run --preset=mindspore --nnodes=NODES --nproc-per-node=%d, each node with its own number of workers",
			j.total, j.local, j.local)
	case j.rank < -1 || j.rank >= j.total/j.local && j.total != j.local:
		return usageErrorf("--node_rank=%d: need 0 to %d, or -1 for any", j.rank, j.total/j.local-1)
	}
	return nil
}

// maxSimulated is how many workers msrun starts on a node to simulate as many: of more it starts one.
const maxSimulated = 128

// simulate makes a job of one node: simulating workers have no peers.
func (j *msJob) simulate() {
	id := j.String("sim_rank_id")
	if id == "-1" {
		id = j.sys.lookup("RANK_ID")
	}
	switch {
	case id != "" && id != "-1":
		j.local = 1
	case j.local > maxSimulated:
		id, j.local = "0", 1
		j.cmd.Note("--local_worker_num: more than %d simulated workers are one, of rank 0", maxSimulated)
	case j.rank > 0 && j.nodes > 1:
		id = ""
		j.cmd.Note("--node_rank=%d has no effect on workers that simulate: their ranks begin at 0", j.rank)
	default:
		id = ""
	}
	if id != "" {
		j.env("RANK_ID", id)
	}
	size := j.sys.lookup("RANK_SIZE")
	if size == "" || j.IsSet("sim_level") {
		size = strconv.Itoa(j.total)
	}
	j.env("RANK_SIZE", size)
	j.env("MS_WORKER_NUM", j.total)
	j.simulated, j.nodes = true, 1
}

// patience is how many seconds a job waits for its nodes that is to wait without a limit: a year.
const patience = 365 * 24 * 3600

// network: the scheduler has msrun's port, and the rendezvous of several nodes the next one.
func (j *msJob) network() error {
	port, wait := j.Int("master_port"), j.Int("cluster_time_out")
	if port < 1024 || port > 65535 {
		return usageErrorf("--master_port=%d: need a port from 1024 to 65535", port)
	}
	if !j.simulated {
		if j.IsSet("master_port") || j.nodes > 1 {
			j.option("ms-port", port)
		}
		j.env("MS_TOPO_TIMEOUT", wait)
	}
	if table := j.String("rank_table_file"); table != "" {
		j.env("RANK_TABLE_FILE", table)
	}
	if j.nodes == 1 {
		if j.rank > 0 && !j.simulated {
			j.cmd.Note("--node_rank=%d has no effect: all workers are on this node", j.rank)
		}
		return nil
	}
	if wait == 0 {
		return usageErrorf("--cluster_time_out=0: need seconds from 1, or a negative number for no limit")
	} else if wait < 0 {
		wait = patience
	}
	meet := port + 1
	if port == 65535 {
		meet = port - 1
	}
	j.option("rdzv-backend", "c10d")
	j.option("rdzv-endpoint", endpoint(j.String("master_addr"), meet))
	j.option("rdzv-conf", fmt.Sprintf("join_timeout=%d", wait))
	if j.rank >= 0 {
		j.option("node-rank", j.rank)
	}
	return nil
}

// endpoint joins a host, which may be an IPv6 address with or without brackets, with a port.
func endpoint(host string, port int) string {
	host = strings.TrimSpace(host)
	if strings.Contains(host, ":") && !strings.HasPrefix(host, "[") {
		host = "[" + host + "]"
	}
	return fmt.Sprintf("%s:%d", host, port)
}

// logs: each worker has a file with both streams; --join=True shows them, too.
func (j *msJob) logs() error {
	name := j.String("worker_log_name")
	if name == "" {
		name = "worker"
	}
	if strings.Contains(name, "{ip}") {
		name = strings.ReplaceAll(name, "{ip}", j.sys.AddrTo(j.String("master_addr")))
	}
	name = strings.ReplaceAll(name, "{hostname}", j.sys.Host)
	rank := "{rank}"
	if j.nodes > 1 && j.rank < 0 {
		rank = "{local_rank}" // as in msrun while ranks are unknown
	}
	files := &RankLogs{Dir: j.String("log_dir"), Name: name + "_" + rank + ".log"}
	j.cmd.RankLogs = files
	if join := j.String("join"); join == "True" || join == "1" {
		shown, err := j.shown()
		files.Console = shown
		return err
	}
	if j.IsSet("tail_worker_log") {
		j.cmd.Note("--tail_worker_log has no effect without --join=True")
	}
	j.cmd.Note("--join=False: this command stays until the workers have ended, and what they print is only in %s",
		files.Path(0, 0))
	return nil
}

// shown are the local ranks of --tail_worker_log, which names ranks of the job.
func (j *msJob) shown() (ranks []int, err error) {
	text := j.String("tail_worker_log")
	for word := range strings.SplitSeq(text, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(word))
		if err != nil || n < 0 && text != "-1" {
			return nil, usageErrorf("--tail_worker_log=%s: need ranks from 0, separated by commas, or -1 for all", text)
		}
		if n -= max(j.rank, 0) * j.local; 0 <= n && n < j.local {
			ranks = append(ranks, n)
		}
	}
	if text == "-1" {
		for n := range j.local {
			ranks = append(ranks, n)
		}
	}
	return ranks, nil
}

// script: msrun executes these three themselves, and Python for everything else.
func (j *msJob) script() {
	args := j.Args()
	if len(args) > 0 && slices.Contains([]string{"python", "python3", "pytest"}, args[0]) {
		j.cmd.Args = append(j.cmd.Args, "--no-python")
	}
	if j.Bool("dry-run") {
		j.cmd.Args = append(j.cmd.Args, "--dry-run")
	}
	j.cmd.Args = withScript(j.cmd.Args, args)
}
