package run

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"dlrover-run/internal/app/run/starter"
	"dlrover-run/internal/app/token"
	"dlrover-run/internal/console"
	"dlrover-run/internal/duration"
	"dlrover-run/internal/secure"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/argv/native"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc/guard"
	"dlrover-run/launcher/proc/inbox"
	"dlrover-run/launcher/remote"
	"dlrover-run/launcher/scheduler"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// start runs a job of several hosts.
func (as *invocation) start(in *inbox.Inbox, link *guard.Link, stdout io.Writer) int {
	if as.command.DryRun {
		return as.printStart(stdout)
	}
	runtime.LockOSThread() // remote shells end with this thread
	defer runtime.UnlockOSThread()
	s, err := as.newStarter(os.LookupEnv, link)
	if err != nil {
		as.usage(err)
		return policy.Usage.Code(policy.TorchrunCodes, policy.Nobody)
	}
	signals := make(chan os.Signal, 16)
	in.Catch(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2)
	console.OutliveReaders()
	return s.Run(signals, as.command.Notes)
}

func (as *invocation) newStarter(env argv.LookupEnv, link *guard.Link) (*starter.Starter, error) {
	value, _ := env("PET_EXIT_CODE_POLICY")
	cfg := starter.Config{Name: as.Name, Level: as.logLevel(), Link: link, Job: as.command.Remote,
		Codes: policy.CodePolicy(value)}
	err := cfg.Codes.Validate()
	if err == nil {
		cfg.Memo, err = memoOf(as.Name, as.command.Remote.Handed, env)
	}
	if err != nil {
		return nil, err
	}
	return starter.New(cfg)
}

// memoOf gathers the settings that every host gets.
func memoOf(name string, handed native.Handed, env argv.LookupEnv) (m remote.Memo, err error) {
	m.Name = name
	if m.Dir, err = os.Getwd(); err != nil {
		return m, fmt.Errorf("working directory: %w", err)
	}
	m.Env = native.Exported(os.Environ(), m.Dir)
	o := options{env: env, host: thisHost(env)}
	if python, err := o.Python(); err == nil { // DeepSpeed's hosts run its own Python, too
		m.Env = append(m.Env, "PYTHON_EXEC="+python)
	}
	if _, set := env(console.FormatVariable); !set && console.IsTerminal(os.Stderr) {
		m.Env = append(m.Env, console.FormatVariable+"="+string(console.Text)) // the hosts have no terminal
	}
	for _, name := range secure.Variables {
		if value, set := env(name); set {
			m.Env = append(m.Env, name+"="+value)
		}
	}
	handed.PID = os.Getppid() // the guard is the process that was started
	if m.Handed, err = json.Marshal(handed); err != nil {
		return m, err
	}
	if m.Token, err = jobToken(env); err != nil {
		return m, err
	}
	m.Grace, m.Drain = endGrace(env), maxDrain
	_, err = m.Encode()
	return m, err
}

// jobToken is the user's, or a new one for the nodes of this job alone.
func jobToken(env argv.LookupEnv) (string, error) {
	lookup := func(name string) string { v, _ := env(name); return v }
	given, err := token.Find(lookup("PET_TOKEN_FILE"), env)
	elsewhere := lookup("DLROVER_MASTER_ADDR") + lookup("PET_RDZV_ENDPOINT")
	if err != nil || given.Token != "" || elsewhere != "" || strings.Trim(lookup("PET_INSECURE"), "0") != "" {
		return given.Token, err
	}
	b := make([]byte, 32)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b), nil
}

// endGrace is how long a launcher may take to end, workers and last checkpoints included.
func endGrace(env argv.LookupEnv) time.Duration {
	shutdown, leave := 30*time.Second, time.Duration(0)
	for _, name := range []string{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "PET_SHUTDOWN_TIMEOUT"} {
		if text, set := env(name); set {
			if d, err := duration.Within(text, 0, maxGrace); err == nil { // otherwise the launchers report the error
				shutdown = d
			}
		}
	}
	if text, set := env("PET_LEAVE_GRACE"); set {
		if d, err := duration.Within(text, 0, maxLeaveGrace); err == nil {
			leave = d
		}
	}
	return max(2*shutdown, leave) + 30*time.Second
}

func (as *invocation) printStart(w io.Writer) int {
	p, r := as.plan(), as.command.Remote
	p.Start = &planStart{Arguments: r.Args}
	for i, host := range r.Hosts {
		h := planHost{Name: host, NodeRank: i}
		if i != r.Here || r.Forced {
			h.Execute = remote.Command(r.Shell, host, i)
		}
		p.Start.Hosts = append(p.Start.Hosts, h)
	}
	for _, kv := range native.Exported(os.Environ(), absolute(".")) {
		name, _, _ := strings.Cut(kv, "=")
		p.Start.Variables = append(p.Start.Variables, name)
	}
	return printJSON(w, as.Name, p)
}

// planStart is the --dry-run output of a starter.
type planStart struct {
	Hosts     []planHost `json:"hosts"`
	Arguments []string   `json:"arguments"` // of every launcher
	Variables []string   `json:"variables"` // names of those that travel
}

type planHost struct {
	Name     string   `json:"name"`
	NodeRank int      `json:"node_rank"`
	Execute  []string `json:"execute,omitempty"` // nothing: this host
}

// started takes the settings that a starter has handed to this launcher.
func (as *invocation) started() {
	as.starter = remote.Received()
	if as.starter == nil {
		return
	}
	var handed native.Handed
	if json.Unmarshal(as.starter.Text, &handed) == nil {
		as.handed = &handed
	}
}

// twice explains the error of a job that was started more than once.
func (as *invocation) twice(err error) error {
	taken := errors.Is(err, rendezvous.ErrTaken) || errors.Is(err, api.ErrUnauthorized) ||
		errors.Is(err, syscall.EADDRINUSE)
	if as.starter == nil || !taken {
		return err
	}
	return fmt.Errorf("%w; this host's place in the job is taken: if %s was started on several hosts, start it on one, "+
		"or give all of them --no_ssh", err, as.Name)
}

// rankedBy is the scheduler that has started this command on every node, "" without one. If an operator's pods have
// ssh keys, it may have started the command in one of them only.
func rankedBy(env argv.LookupEnv, h hostFacts) string {
	name, given := env("PET_SCHEDULER")
	if name == "none" {
		return ""
	}
	f, err := scheduler.Detect(cmp.Or(name, scheduler.Auto),
		scheduler.System{Env: env, ReadFile: h.readFile, Host: h.name})
	switch f.Name {
	case "", "dlrover":
		return ""
	case "mpi", "volcano", "statefulset":
		if !given {
			return ""
		}
	}
	if err != nil || f.Nodes == 1 {
		return ""
	}
	return f.Name
}

// inPath reports whether a program can be executed.
func inPath(program string) bool {
	_, err := exec.LookPath(program)
	return err == nil
}
