package native

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/hostfile"
)

// How a command line of deepspeed starts the launchers of all hosts from one of them.

// Remote is a job with launchers that one process starts over a remote shell.
type Remote struct {
	// Hosts are their names, by node rank.
	Hosts []string
	// Here is the rank of this node, as its launcher needs no remote shell; -1: it has none.
	Here int
	// Forced: this node's launcher is started over the remote shell, too.
	Forced bool
	// Shell is the words of the remote shell; {host} and {rank} stand for a host's. The command follows them.
	Shell []string
	// SSH: the shell is ssh.
	SSH bool
	// Args is the command line of every launcher, to which its rank is added.
	Args []string
	// FanOut is how many connections are made at a time; 0: as many as usual.
	FanOut int
	// Least is how many nodes the job needs to go on.
	Least int
	// Handed is the input of the launchers that they do not read themselves.
	Handed Handed
}

// Handed is passed to a launcher by the process that started it.
type Handed struct {
	// Hostfile is the content of the host file.
	Hostfile string
	// EnvFiles are the contents of files with variables of the workers, each with its path.
	EnvFiles []envFile
	// PID is of the command that a user has started.
	PID int
}

// envFile is a file with variables of the workers.
type envFile struct{ Path, Text string }

// startHosts decides whether this process is to start the launchers of all hosts.
func (j *deepSpeedJob) startHosts() (err error) {
	if j.nodes.hosts == nil || j.sys.Handed != nil || j.line.Int("node_rank") >= 0 || j.line.Bool("no_ssh") {
		return nil
	}
	own := j.nodes.ownNames()
	here := -1
	if len(own) == 1 {
		here = slices.IndexFunc(j.nodes.used, func(n hostfile.Node) bool { return n.Name == own[0] })
	}
	if here >= 0 && len(j.nodes.used) == 1 && !j.line.Bool("force_multi") {
		return nil
	}
	if by := j.rankedBy(); by != "" {
		j.cmd.Note("%s says which node this is: every node is expected to run this command", by)
		return nil
	}
	remote := remoteShell{translation: j.translation}
	shell, ssh, err := remote.find()
	switch {
	case err != nil:
		return err
	case shell != nil:
		j.cmd.Remote = &Remote{Here: here, Shell: shell, SSH: ssh, FanOut: remote.fanOut,
			Forced: j.line.Bool("force_multi")}
	case len(own) == 0:
		return usageErrorf("%s: to start the job there from here needs ssh, which is not in PATH: install it (package "+
			"openssh-client), or give another remote shell by --rsh; or run the command on every host of the file, with "+
			"--no_ssh", j.nodes.notInFile())
	default:
		j.cmd.Note("there is no ssh in PATH to start other hosts: every node is expected to run this command, as with " +
			"--no_ssh")
	}
	return nil
}

// rankedBy names the source of this node's rank, as where a scheduler starts the command on every node.
func (j *deepSpeedJob) rankedBy() string {
	for _, name := range []string{"PET_NODE_RANK", "NODE_RANK", "WORKER_RANK"} {
		if j.sys.lookup(name) != "" {
			return "$" + name
		}
	}
	if j.sys.RankedBy == nil {
		return ""
	}
	return j.sys.RankedBy()
}

// remote ends the translation of a command line that starts hosts. The launchers find out about their nodes.
func (j *deepSpeedJob) remote() error {
	r := j.cmd.Remote
	for _, step := range []func() error{j.size, j.checkPort, j.vars, j.output} {
		if err := step(); err != nil {
			return err
		}
	}
	r.Hosts, r.Least = j.cmd.Hosts, min(max(j.lo, 1), len(j.nodes.used))
	for _, host := range r.Hosts {
		if strings.HasPrefix(host, "-") {
			return usageErrorf("host %s of %s: a name does not begin with -; correct the file", host, j.line.String("hostfile"))
		}
	}
	r.Args = slices.Concat([]string{"--no_ssh"}, withScript(j.forwarded(), j.line.Args()))
	r.Handed.Hostfile = hostfile.Format(j.nodes.hosts)
	j.cmd.Args, j.cmd.Env = nil, nil // they are the launchers' to find
	j.cmd.DryRun = j.line.Bool("dry-run")
	j.cmd.Note("starting %d hosts over %s: %s", len(r.Hosts), r.Shell[0], hostfile.Names(j.nodes.used))
	return nil
}

// forwarded are the options of the line that mean something to the launchers of nodes.
func (j *deepSpeedJob) forwarded() (args []string) {
	for _, o := range deepSpeedOptions() {
		switch {
		case !j.line.IsSet(o.Name) || o.Category == remoteSection || o.Name == "dry-run":
		case o.Kind == argv.Flag:
			args = append(args, "--"+o.Name)
		default:
			args = append(args, option(o.Name, j.line.String(o.Name)))
		}
	}
	return args
}

// remoteShell is how hosts are reached.
type remoteShell struct {
	*translation
	fanOut int // of pdsh; 0: not given
}

// find returns the words of the remote shell, nil without one.
func (r *remoteShell) find() (words []string, ssh bool, err error) {
	if text := cmp.Or(r.line.String("rsh"), r.sys.lookup("PET_RSH")); text != "" {
		words, err = r.template(text)
		return words, false, err
	}
	if kind := cmp.Or(r.sys.lookup("PDSH_RCMD_TYPE"), "ssh"); kind != "ssh" {
		return nil, false, r.noRcmd("$PDSH_RCMD_TYPE=" + kind)
	}
	if !r.sys.has("ssh") {
		return nil, true, nil
	}
	words, err = r.ssh()
	return words, true, err
}

func (r *remoteShell) noRcmd(what string) error {
	return usageErrorf("%s: hosts are started over ssh; give another remote shell by --rsh, as in --rsh='rsh {host}'",
		what)
}

// template is the value of --rsh.
func (r *remoteShell) template(text string) ([]string, error) {
	words, err := argv.Words(text)
	switch {
	case err != nil:
		return nil, usageErrorf("--rsh=%s: %v; write it as a shell would read it", text, err)
	case !strings.Contains(text, "{host}") || len(words) == 0:
		return nil, usageErrorf("--rsh=%s: nothing says to which host: write {host} in its place, as in "+
			"--rsh='kubectl exec -i {host} --'", text)
	case !r.sys.has(words[0]):
		return nil, usageErrorf("--rsh=%s: there is no program %s that can be executed; install it, or give its path",
			text, words[0])
	}
	return words, nil
}

// ssh is its words. Of an option that is given twice the first counts: the user's come before ours.
func (r *remoteShell) ssh() ([]string, error) {
	words := []string{"ssh"}
	more, err := r.words("PDSH_SSH_ARGS_APPEND", r.sys.lookup("PDSH_SSH_ARGS_APPEND"))
	if err != nil {
		return nil, err
	}
	words = append(words, more...)
	if more, err = r.launcherArgs(); err != nil {
		return nil, err
	}
	words = append(words, more...)
	if r.line.IsSet("ssh_port") {
		port := r.line.Int("ssh_port")
		if port < 1 || port > 65535 {
			return nil, usageErrorf("--ssh_port=%d: need a port from 1 to 65535", port)
		}
		words = append(words, "-p", strconv.Itoa(port))
	}
	if more, err = r.words("PDSH_SSH_ARGS", cmp.Or(r.sys.lookup("PDSH_SSH_ARGS"), "-a -x")); err != nil {
		return nil, err
	}
	fill := strings.NewReplacer("%h", "{host}", "%u", r.sys.lookup("USER"), "%n", "{rank}")
	for _, w := range more {
		if w != "%h" && w != "-2" { // the host is the last word; the protocol is the only one
			words = append(words, fill.Replace(w))
		}
	}
	return append(words, "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15",
		"-o", "ServerAliveCountMax=6", "{host}"), nil
}

func (r *remoteShell) words(name, text string) ([]string, error) {
	words, err := argv.Words(text)
	if err != nil {
		return nil, usageErrorf("%s=%s: %v; write it as a shell would read it", name, text, err)
	}
	return words, nil
}

// launcherArgs are --launcher_args as arguments of ssh. It drops those of other launchers.
func (r *remoteShell) launcherArgs() (ssh []string, err error) {
	text := r.line.String("launcher_args")
	words, err := r.words("--launcher_args", text)
	if err != nil {
		return nil, err
	}
	switch launcher := strings.ToLower(r.line.String("launcher")); launcher {
	case "ssh":
		return words, nil
	case "pdsh":
		return r.pdshArgs(words)
	default:
		if text != "" {
			r.cmd.Note("--launcher_args=%s has no effect: they are %s's, and hosts are started over ssh", text, launcher)
		}
	}
	return nil, nil
}

// pdshArgs translates arguments of pdsh to those of ssh.
func (r *remoteShell) pdshArgs(words []string) (ssh []string, err error) {
	for len(words) > 0 {
		name, value := words[0], ""
		words = words[1:]
		if name == "-S" || name == "-N" || name == "-b" || name == "-B" {
			continue // as it is here, or about pdsh's own lines and keys
		}
		if len(name) > 2 && name[0] == '-' && name[1] != '-' {
			name, value = name[:2], name[2:]
		} else if len(words) > 0 {
			value, words = words[0], words[1:]
		}
		number, bad := strconv.Atoi(value)
		switch {
		case name == "-R" && value == "ssh":
		case name == "-R":
			return nil, r.noRcmd("--launcher_args=-R " + value)
		case name == "-l" && value != "":
			ssh = append(ssh, "-l", value)
		case name == "-t" && bad == nil && number > 0:
			ssh = append(ssh, "-o", "ConnectTimeout="+value)
		case name == "-f" && bad == nil && number > 0:
			r.fanOut = number
		default:
			return nil, usageErrorf("--launcher_args: pdsh's %q is not understood; there are -l USER, -t SECONDS, -f N and "+
				"-R ssh, and --launcher=ssh takes the arguments of ssh", strings.TrimSpace(name+" "+value))
		}
	}
	return ssh, nil
}

// Exported returns the variables that the starting process passes to the launchers of its hosts: those that DeepSpeed
// exports, and those of this program's options. All other variables of a host are its own.
func Exported(environ []string, dir string) (env []string) {
	amulet := slices.ContainsFunc(environ, func(kv string) bool { return strings.HasPrefix(kv, "AISC_JOB_NAME=") })
	path := dir
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		switch {
		case slices.Contains(kept, name) || amulet && (name == "NCCL_IB_HCA" || name == "UCX_NET_DEVICES"):
		case name == "PYTHONPATH":
			path += ":" + value
		case slices.ContainsFunc(exported, func(prefix string) bool { return strings.HasPrefix(name, prefix) }):
			env = append(env, kv)
		}
	}
	return append(env, "PYTHONPATH="+path)
}

// exported begin the names of variables that travel.
var exported = []string{
	// DeepSpeed's, for every accelerator
	"MLFLOW", "PYTHON", "MV2", "UCX", "NCCL", "LD_LIBRARY", "PATH", "ASCEND", "HCCL", "NEUWARE_HOME", "CNCL", "BCCL",
	"BIREN", "SUPA", "DLTS_JOB_ID", "DLTS_NUM_WORKER", "NEBULA_", "AML_RUN_ID", "AZUREML_", "FC_TASKROLE_NAME",
	"FC_TASK_INDEX", "MASTER_HOST", "LOCAL_HOST",
	// ours
	"PET_", "DLROVER_MASTER_", "DS_ACCELERATOR", "LOGLEVEL", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
}

// kept are variables of one node.
var kept = []string{"PET_RSH", "PET_NODE_RANK", "PET_LOCAL_ADDR", "PET_TOKEN_FILE", "PET_DRY_RUN"}
