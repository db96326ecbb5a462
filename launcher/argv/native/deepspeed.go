package native

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/hostfile"
)

// DeepSpeed's launcher starts the workers of all nodes over ssh from the one node on which it is called. Here that
// starts a launcher of ours on each; or every node runs the same command line and finds its own line of the host file.

const (
	deepSpeed         = "deepspeed"
	jobHostfile       = "/job/hostfile"
	noHostfile        = "/dev/null"
	deepSpeedPort     = 29500
	deepSpeedRestarts = 100 // as in its elastic training
)

func deepSpeedLauncher() Launcher {
	return Launcher{
		Name: deepSpeed, Usage: "[options] user_script [script arguments]",
		About: "DeepSpeed's launcher, version 0.19. Run on one host, it starts all hosts of the host\n" +
			"file over ssh; with --no_ssh every host runs the command itself.",
		Options: deepSpeedOptions, Translate: translateDeepSpeed,
	}
}

// The sections of deepspeed's help.
const (
	nodesSection    = "Nodes and devices"
	scriptSection   = "Workers"
	remoteSection   = "Start of the hosts"
	replacedSection = "Accepted and replaced"
	oldSection      = "Of older versions"
)

func deepSpeedOptions() []argv.Option {
	return slices.Concat([]argv.Option{
		{Name: "hostfile", Short: 'H', Default: jobHostfile, Meta: "PATH", Category: nodesSection,
			Usage: "hosts of the job, one per line, as in: worker-0 slots=4 (default: " + jobHostfile +
				"; without it, this node alone)"},
		{Name: "include", Short: 'i', Meta: "HOST[:SLOT,...][@...]", Category: nodesSection,
			Usage: "hosts to use, or some of their slots"},
		{Name: "exclude", Short: 'e', Meta: "HOST[:SLOT,...][@...]", Category: nodesSection,
			Usage: "hosts not to use, or some of their slots"},
		{Name: "num_nodes", Type: argv.Int, Default: "-1", Meta: "N", Category: nodesSection,
			Usage: "use the first N hosts"},
		{Name: "num_gpus", Aliases: []string{"num_accelerators"}, Type: argv.Int, Default: "-1", Meta: "N",
			Category: nodesSection, Usage: "use the first N devices of each node"},
		{Name: "node_rank", Type: argv.Int, Default: "-1", Meta: "RANK", Category: nodesSection,
			Usage: "number of this node in the host file, from 0; every node then runs the command itself"},
		{Name: "master_addr", Meta: "HOST", Category: nodesSection, Usage: "host at which the nodes meet (default: the " +
			"first host)"},
		{Name: "master_port", Type: argv.Int, Default: strconv.Itoa(deepSpeedPort), Meta: "PORT", Category: nodesSection,
			Usage: "port at --master_addr (default: 29500; on one node, any free one)"},
		{Name: "module", Kind: argv.Flag, Category: scriptSection, Usage: "run the script as a module, as python -m does"},
		{Name: "no_python", Kind: argv.Flag, Category: scriptSection, Usage: "execute the script itself, without Python"},
		{Name: "no_local_rank", Kind: argv.Flag, Category: scriptSection,
			Usage: "do not give the script the argument --local_rank=N"},
		{Name: "enable_each_rank_log", Default: "None", Meta: "DIR", Category: scriptSection,
			Usage: "write the output of each rank to DIR/<YYYYmmddHHMMSS>_rank<N>.log only"},
		{Name: "save_pid", Kind: argv.Flag, Category: scriptSection,
			Usage: "write the launcher's process id to /tmp/<pid>.deepspeed and /tmp/<pid>.ds; <pid> is that of the command"},
		{Name: "bind_cores_to_rank", Kind: argv.Flag, Category: scriptSection,
			Usage: "give each rank cores of its own, and set OMP_NUM_THREADS to their number; needs no numactl"},
		{Name: "bind_core_list", Meta: "LIST", Category: scriptSection,
			Usage: "cores for --bind_cores_to_rank, as in 1,3-5 (default: all physical cores)"},
		{Name: "autotuning", Choices: []string{"tune", "run"}, Meta: "tune|run", Category: scriptSection,
			Usage: "tune with DeepSpeed's own launcher, on this node"},
		{Name: "venv_script", Meta: "PATH", Category: scriptSection,
			Usage: "bin/activate of a virtual environment; its Python runs the script"},
		{Name: "log_level", Default: "info", Choices: []string{"debug", "info", "warning", "error", "critical"},
			Meta: "LEVEL", Category: scriptSection, Usage: "lowest level of the launcher's own lines (default: info)"},
		{Name: "quiet", Short: 'q', Kind: argv.Flag, Category: scriptSection, Usage: "the same as --log_level=error"},

		{Name: "launcher", Default: "pdsh", Meta: "NAME", Category: remoteSection,
			Usage: "pdsh, ssh, openmpi, mpich, impi, mvapich or slurm: all mean ssh, one connection a host (default: pdsh)"},
		{Name: "launcher_args", Meta: "TEXT", Category: remoteSection,
			Usage: "arguments of ssh with --launcher=ssh; else of pdsh: -l USER, -t SECONDS, -f N, -R ssh"},
		{Name: "ssh_port", Type: argv.Int, Meta: "PORT", Category: remoteSection, Usage: "port of sshd (default: ssh's own)"},
		{Name: "rsh", Meta: "TEXT", Extra: true, Category: remoteSection,
			Usage: "remote shell in place of ssh; {host} stands for the host, as in 'kubectl exec -i {host} --' (default: " +
				"$PET_RSH, else ssh)"},
		{Name: "no_ssh", Kind: argv.Flag, Category: remoteSection,
			Usage: "start nothing on other hosts: every host runs this command"},
		{Name: "force_multi", Kind: argv.Flag, Category: remoteSection,
			Usage: "use ssh even if this is the only host"},
		{Name: "no_ssh_check", Kind: argv.Flag, Category: replacedSection,
			Usage: "accepted: no check runs beforehand, and a host that cannot be reached fails at once"},
	}, elasticOptions(), own())
}

func elasticOptions() []argv.Option {
	return []argv.Option{
		{Name: "elastic_training", Kind: argv.Flag, Category: oldSection,
			Usage: "let nodes come and go, as dlrover-run --nnodes=MIN:MAX does"},
		{Name: "min_elastic_nodes", Type: argv.Int, Default: "-1", Meta: "N", Category: oldSection,
			Usage: "fewest nodes, MIN (default: 1)"},
		{Name: "max_elastic_nodes", Type: argv.Int, Default: "-1", Meta: "N", Category: oldSection,
			Usage: "most nodes, MAX (default: all hosts)"},
	}
}

// deepSpeedJob is the result of a command line of deepspeed, built step by step.
type deepSpeedJob struct {
	line *argv.Line
	sys  *System
	cmd  Command

	hosts   []hostfile.Host // of the file; nil: there is none
	nodes   []hostfile.Node // that are used
	place   int             // of this node among them
	devices []string        // that are used here
	chosen  bool            // by options or the file, and not by the variable that makes devices visible
	lo, hi  int             // bounds of the number of nodes; 0: others may know them
	fanOut  int             // of pdsh; 0: not given
}

func translateDeepSpeed(args []string, sys *System) (Command, error) {
	line, err := argv.Parse(deepSpeedOptions(), args, nil)
	if err != nil {
		return Command{}, err
	}
	j := &deepSpeedJob{line: line, sys: sys}
	if err := inOrder(j.contradictions, j.readHosts, j.chooseNodes, j.startHosts); err != nil {
		return Command{}, err
	}
	switch {
	case line.IsSet("autotuning") && j.cmd.Remote != nil:
		err = j.tuneHosts()
	case line.IsSet("autotuning"):
		err = inOrder(j.findPlace, j.chooseDevices, j.tune)
	case j.cmd.Remote != nil:
		err = inOrder(j.remote, j.replaced)
	default:
		err = inOrder(j.findPlace, j.chooseDevices, j.size, j.meet, j.script, j.output, j.bindCores, j.interpreter,
			j.envFiles, j.replaced)
	}
	if err != nil {
		return Command{}, err
	}
	if j.cmd.Remote == nil {
		j.alone()
	}
	return j.cmd, nil
}

// inOrder ends with the first error.
func inOrder(steps ...func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// alone ends the translation of a command line for this node.
func (j *deepSpeedJob) alone() {
	if j.line.Bool("dry-run") {
		j.flag("dry-run")
	}
	j.cmd.Args = withScript(j.cmd.Args, j.line.Args())
}

// option is --name=value.
func option(name string, value any) string { return fmt.Sprintf("--%s=%v", name, value) }

func (j *deepSpeedJob) arg(name string, value any) {
	j.cmd.Args = append(j.cmd.Args, option(name, value))
}

func (j *deepSpeedJob) flag(name string) { j.cmd.Args = append(j.cmd.Args, "--"+name) }

// env gives the workers a variable.
func (j *deepSpeedJob) env(name, value string) { j.cmd.Env = append(j.cmd.Env, name+"="+value) }

// filtered reports whether options name the hosts that are used.
func (j *deepSpeedJob) filtered() bool {
	return j.line.String("include") != "" || j.line.String("exclude") != ""
}

// contradictions refuses combinations of exclusive options, and launchers that DeepSpeed does not know.
func (j *deepSpeedJob) contradictions() error {
	counted := j.line.Int("num_nodes") >= 0 || j.line.Int("num_gpus") >= 0
	switch known := launchersOfDeepSpeed(); {
	case j.line.String("include") != "" && j.line.String("exclude") != "":
		return usageErrorf("--include and --exclude contradict each other: use one of them")
	case j.filtered() && counted:
		return usageErrorf("--num_nodes and --num_gpus contradict --include and --exclude: use either")
	case j.line.Bool("module") && j.line.Bool("no_python"):
		return usageErrorf("--module and --no_python contradict each other: use one of them")
	case !slices.Contains(known, strings.ToLower(j.line.String("launcher"))):
		return usageErrorf("--launcher=%s is unknown: there are %s, which all mean ssh here; leave the option out",
			j.line.String("launcher"), strings.Join(known, ", "))
	case j.line.Bool("no_ssh") && j.line.IsSet("rsh"):
		return usageErrorf("--no_ssh and --rsh contradict each other: use one of them")
	}
	return nil
}

func launchersOfDeepSpeed() []string {
	return []string{"pdsh", "ssh", "openmpi", "mpich", "impi", "mvapich", "slurm"}
}

// script sets the program of the workers.
func (j *deepSpeedJob) script() error {
	for _, f := range [][2]string{{"module", "module"}, {"no_python", "no-python"}, {"no_local_rank", "no-local-rank"}} {
		if j.line.Bool(f[0]) {
			j.flag(f[1])
		}
	}
	return nil
}

// output sets the destinations of the workers' output and of the launcher's own messages.
func (j *deepSpeedJob) output() error {
	if dir := j.line.String("enable_each_rank_log"); dir != "None" && dir != "" {
		j.cmd.RankLogs = &RankLogs{Dir: dir, Name: "{time}_rank{rank}.log"}
	}
	if j.line.Bool("save_pid") {
		pid := "{pid}"
		if j.sys.Handed != nil {
			pid = strconv.Itoa(j.sys.Handed.PID)
		}
		j.cmd.PIDFiles = []string{"/tmp/" + pid + ".deepspeed", "/tmp/" + pid + ".ds"}
	}
	if j.line.IsSet("log_level") {
		j.cmd.LogLevel = j.line.String("log_level")
	}
	if j.line.Bool("quiet") {
		j.cmd.LogLevel = "error"
	}
	return nil
}

// replaced notes the options that act in another way, or not at all.
func (j *deepSpeedJob) replaced() error {
	launcher := strings.ToLower(j.line.String("launcher"))
	given := j.given(replacedSection)
	switch remote := j.cmd.Remote; {
	case remote == nil:
		given = append(given, j.given(remoteSection)...)
	case !remote.SSH:
		given = append(given, slices.DeleteFunc(j.given(remoteSection), func(o string) bool {
			return strings.HasPrefix(o, "--rsh") || o == "--force_multi"
		})...)
	case launcher != "pdsh" && launcher != "ssh":
		j.cmd.Note("--launcher=%s: replaced, hosts are started over ssh", j.line.String("launcher"))
	}
	given = slices.DeleteFunc(given, func(o string) bool { return o == "--no_ssh" })
	if len(given) > 0 && j.sys.Handed == nil {
		j.cmd.Note("without effect here: %s", strings.Join(given, " "))
	}
	for _, name := range []string{"min_elastic_nodes", "max_elastic_nodes"} {
		if j.line.IsSet(name) && !j.line.Bool("elastic_training") {
			j.cmd.Note("--%s has no effect without --elastic_training", name)
		}
	}
	return nil
}

// given are the options of a section that the line has.
func (j *deepSpeedJob) given(section string) (given []string) {
	for _, o := range deepSpeedOptions() {
		if o.Category == section && j.line.IsSet(o.Name) {
			given = append(given, strings.TrimSuffix(option(o.Name, j.line.String(o.Name)), "="))
		}
	}
	return given
}

// tune leaves the node to DeepSpeed's own launcher, as its tuner starts every trial by the name deepspeed.
func (j *deepSpeedJob) tune() error {
	if n := len(j.nodes); n > 1 {
		return usageErrorf("--autotuning=%s with %d nodes needs to start its trials on them from here: run it without "+
			"--no_ssh and --node_rank, where there is ssh, or --rsh is given; or tune on one node, with --hostfile=%s or "+
			"--include=%s, and train with what was found", j.line.String("autotuning"), n, noHostfile, j.nodes[0].Name)
	}
	runner := j.tuner(noHostfile, "include", "exclude")
	if j.filtered() || j.hosts != nil && j.line.Int("num_gpus") < 1 {
		runner = append(runner, option("include", localhost+":"+strings.Join(j.devices, ",")))
	}
	j.cmd.Note("--autotuning=%s: DeepSpeed's own launcher runs on this node, and starts its trials",
		j.line.String("autotuning"))
	j.become(runner)
	return nil
}

// tuneHosts does so for several nodes. It would ask the first one for its address over ssh, and try ssh before.
func (j *deepSpeedJob) tuneHosts() error {
	runner := append(j.tuner(j.sys.Abs(j.line.String("hostfile"))), "--no_ssh_check")
	if !j.line.IsSet("master_addr") {
		runner = append(runner, option("master_addr", j.nodes[0].Name))
	}
	if j.line.IsSet("rsh") {
		j.env("PET_RSH", j.line.String("rsh"))
	} else if j.line.IsSet("ssh_port") {
		j.env("PDSH_SSH_ARGS_APPEND", strings.TrimSpace(j.sys.lookup("PDSH_SSH_ARGS_APPEND")+" -p "+
			strconv.Itoa(j.line.Int("ssh_port"))))
	}
	j.cmd.Note("--autotuning=%s: DeepSpeed's own launcher runs on this node, and starts its trials on %d hosts",
		j.line.String("autotuning"), len(j.nodes))
	j.cmd.Remote = nil
	j.become(runner)
	return nil
}

// tuner is DeepSpeed's own launcher with the options of this line, but for some.
func (j *deepSpeedJob) tuner(hosts string, but ...string) []string {
	runner := []string{"-u", "-m", "deepspeed.launcher.runner", option("hostfile", hosts),
		option("autotuning", j.line.String("autotuning"))}
	for _, o := range deepSpeedOptions() {
		switch {
		case !j.line.IsSet(o.Name) || slices.Contains(but, o.Name):
		case slices.Contains([]string{"hostfile", "autotuning", "dry-run"}, o.Name):
		case o.Category == oldSection || o.Category == replacedSection || o.Category == remoteSection:
		case o.Kind == argv.Flag:
			runner = append(runner, "--"+o.Name)
		default:
			runner = append(runner, option(o.Name, j.line.String(o.Name)))
		}
	}
	return runner
}

func (j *deepSpeedJob) become(runner []string) {
	j.cmd.DryRun = j.line.Bool("dry-run")
	j.cmd.Become = append(runner, j.line.Args()...)
}
