package native

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/launcher/argv"
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

// translation turns a command line of deepspeed into a command.
type translation struct {
	line *argv.Line
	sys  *System
	cmd  Command
}

// deepSpeedJob is the rendezvous of a command line of deepspeed.
type deepSpeedJob struct {
	*translation
	nodes  *deepSpeedNodes
	lo, hi int // bounds of the number of nodes; 0: others may know them
}

func translateDeepSpeed(args []string, sys *System) (Command, error) {
	line, err := argv.Parse(deepSpeedOptions(), args, nil)
	if err != nil {
		return Command{}, err
	}
	t := &translation{line: line, sys: sys}
	nodes := &deepSpeedNodes{translation: t}
	j, tuner := &deepSpeedJob{translation: t, nodes: nodes}, &tuner{t, nodes}
	if err := inOrder(t.contradictions, nodes.readHosts, nodes.chooseNodes, j.startHosts); err != nil {
		return Command{}, err
	}
	switch {
	case line.IsSet("autotuning") && t.cmd.Remote != nil:
		err = tuner.hosts()
	case line.IsSet("autotuning"):
		err = inOrder(nodes.findPlace, nodes.chooseDevices, tuner.here)
	case t.cmd.Remote != nil:
		err = inOrder(j.remote, t.replaced)
	default:
		err = inOrder(nodes.findPlace, nodes.chooseDevices, j.size, j.meet, t.script, t.output, j.workers, j.vars,
			t.replaced)
	}
	if err != nil {
		return Command{}, err
	}
	if t.cmd.Remote == nil {
		t.alone()
	}
	return t.cmd, nil
}

// workers sets the cores and the interpreter of the workers.
func (j *deepSpeedJob) workers() error {
	if err := (&coreBinding{j.translation}).share(len(j.nodes.devices)); err != nil {
		return err
	}
	return (&workerVars{j.translation}).interpreter()
}

// vars reads the variables of the workers from files.
func (j *deepSpeedJob) vars() error { return (&workerVars{j.translation}).envFiles(j.hi) }

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
func (t *translation) alone() {
	if t.line.Bool("dry-run") {
		t.flag("dry-run")
	}
	t.cmd.Args = withScript(t.cmd.Args, t.line.Args())
}

// option is --name=value.
func option(name string, value any) string { return fmt.Sprintf("--%s=%v", name, value) }

func (t *translation) arg(name string, value any) {
	t.cmd.Args = append(t.cmd.Args, option(name, value))
}

func (t *translation) flag(name string) { t.cmd.Args = append(t.cmd.Args, "--"+name) }

// env gives the workers a variable.
func (t *translation) env(name, value string) { t.cmd.Env = append(t.cmd.Env, name+"="+value) }

// filtered reports whether options name the hosts that are used.
func (t *translation) filtered() bool {
	return t.line.String("include") != "" || t.line.String("exclude") != ""
}

// contradictions refuses combinations of exclusive options, and launchers that DeepSpeed does not know.
func (t *translation) contradictions() error {
	counted := t.line.Int("num_nodes") >= 0 || t.line.Int("num_gpus") >= 0
	switch known := launchersOfDeepSpeed(); {
	case t.line.String("include") != "" && t.line.String("exclude") != "":
		return usageErrorf("--include and --exclude contradict each other: use one of them")
	case t.filtered() && counted:
		return usageErrorf("--num_nodes and --num_gpus contradict --include and --exclude: use either")
	case t.line.Bool("module") && t.line.Bool("no_python"):
		return usageErrorf("--module and --no_python contradict each other: use one of them")
	case !slices.Contains(known, strings.ToLower(t.line.String("launcher"))):
		return usageErrorf("--launcher=%s is unknown: there are %s, which all mean ssh here; leave the option out",
			t.line.String("launcher"), strings.Join(known, ", "))
	case t.line.Bool("no_ssh") && t.line.IsSet("rsh"):
		return usageErrorf("--no_ssh and --rsh contradict each other: use one of them")
	}
	return nil
}

func launchersOfDeepSpeed() []string {
	return []string{"pdsh", "ssh", "openmpi", "mpich", "impi", "mvapich", "slurm"}
}

// script sets the program of the workers.
func (t *translation) script() error {
	for _, f := range [][2]string{{"module", "module"}, {"no_python", "no-python"}, {"no_local_rank", "no-local-rank"}} {
		if t.line.Bool(f[0]) {
			t.flag(f[1])
		}
	}
	return nil
}

// output sets the destinations of the workers' output and of the launcher's own messages.
func (t *translation) output() error {
	if dir := t.line.String("enable_each_rank_log"); dir != "None" && dir != "" {
		t.cmd.RankLogs = &RankLogs{Dir: dir, Name: "{time}_rank{rank}.log"}
	}
	if t.line.Bool("save_pid") {
		pid := "{pid}"
		if t.sys.Handed != nil {
			pid = strconv.Itoa(t.sys.Handed.PID)
		}
		t.cmd.PIDFiles = []string{"/tmp/" + pid + ".deepspeed", "/tmp/" + pid + ".ds"}
	}
	if t.line.IsSet("log_level") {
		t.cmd.LogLevel = t.line.String("log_level")
	}
	if t.line.Bool("quiet") {
		t.cmd.LogLevel = "error"
	}
	return nil
}

// replaced notes the options that act in another way, or not at all.
func (t *translation) replaced() error {
	launcher := strings.ToLower(t.line.String("launcher"))
	given := t.given(replacedSection)
	switch remote := t.cmd.Remote; {
	case remote == nil:
		given = append(given, t.given(remoteSection)...)
	case !remote.SSH:
		given = append(given, slices.DeleteFunc(t.given(remoteSection), func(o string) bool {
			return strings.HasPrefix(o, "--rsh") || o == "--force_multi"
		})...)
	case launcher != "pdsh" && launcher != "ssh":
		t.cmd.Note("--launcher=%s: replaced, hosts are started over ssh", t.line.String("launcher"))
	}
	given = slices.DeleteFunc(given, func(o string) bool { return o == "--no_ssh" })
	if len(given) > 0 && t.sys.Handed == nil {
		t.cmd.Note("without effect here: %s", strings.Join(given, " "))
	}
	for _, name := range []string{"min_elastic_nodes", "max_elastic_nodes"} {
		if t.line.IsSet(name) && !t.line.Bool("elastic_training") {
			t.cmd.Note("--%s has no effect without --elastic_training", name)
		}
	}
	return nil
}

// given are the options of a section that the line has.
func (t *translation) given(section string) (given []string) {
	for _, o := range deepSpeedOptions() {
		if o.Category == section && t.line.IsSet(o.Name) {
			given = append(given, strings.TrimSuffix(option(o.Name, t.line.String(o.Name)), "="))
		}
	}
	return given
}

// tuner leaves --autotuning to DeepSpeed's own launcher.
type tuner struct {
	*translation
	nodes *deepSpeedNodes
}

// here leaves the node to DeepSpeed's own launcher, as its tuner starts every trial by the name deepspeed.
func (u *tuner) here() error {
	if n := len(u.nodes.used); n > 1 {
		return usageErrorf("--autotuning=%s with %d nodes needs to start its trials on them from here: run it without "+
			"--no_ssh and --node_rank, where there is ssh, or --rsh is given; or tune on one node, with --hostfile=%s or "+
			"--include=%s, and train with what was found", u.line.String("autotuning"), n, noHostfile, u.nodes.used[0].Name)
	}
	runner := u.runner(noHostfile, "include", "exclude")
	if u.filtered() || u.nodes.hosts != nil && u.line.Int("num_gpus") < 1 {
		runner = append(runner, option("include", localhost+":"+strings.Join(u.nodes.devices, ",")))
	}
	u.cmd.Note("--autotuning=%s: DeepSpeed's own launcher runs on this node, and starts its trials",
		u.line.String("autotuning"))
	u.become(runner)
	return nil
}

// hosts does so for several nodes. It would ask the first one for its address over ssh, and try ssh before.
func (u *tuner) hosts() error {
	runner := append(u.runner(u.sys.Abs(u.line.String("hostfile"))), "--no_ssh_check")
	if !u.line.IsSet("master_addr") {
		runner = append(runner, option("master_addr", u.nodes.used[0].Name))
	}
	if u.line.IsSet("rsh") {
		u.env("PET_RSH", u.line.String("rsh"))
	} else if u.line.IsSet("ssh_port") {
		u.env("PDSH_SSH_ARGS_APPEND", strings.TrimSpace(u.sys.lookup("PDSH_SSH_ARGS_APPEND")+" -p "+
			strconv.Itoa(u.line.Int("ssh_port"))))
	}
	u.cmd.Note("--autotuning=%s: DeepSpeed's own launcher runs on this node, and starts its trials on %d hosts",
		u.line.String("autotuning"), len(u.nodes.used))
	u.cmd.Remote = nil
	u.become(runner)
	return nil
}

// runner is DeepSpeed's own launcher with the options of this line, but for some.
func (u *tuner) runner(hosts string, but ...string) []string {
	runner := []string{"-u", "-m", "deepspeed.launcher.runner", option("hostfile", hosts),
		option("autotuning", u.line.String("autotuning"))}
	for _, o := range deepSpeedOptions() {
		switch {
		case !u.line.IsSet(o.Name) || slices.Contains(but, o.Name):
		case slices.Contains([]string{"hostfile", "autotuning", "dry-run"}, o.Name):
		case o.Category == oldSection || o.Category == replacedSection || o.Category == remoteSection:
		case o.Kind == argv.Flag:
			runner = append(runner, "--"+o.Name)
		default:
			runner = append(runner, option(o.Name, u.line.String(o.Name)))
		}
	}
	return runner
}

func (u *tuner) become(runner []string) {
	u.cmd.DryRun = u.line.Bool("dry-run")
	u.cmd.Become = append(runner, u.line.Args()...)
}
