package launcher

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"dlrover-run/internal/openfile"
	"dlrover-run/internal/tempdir"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc"
)

// Program is a Command resolved on this node: see Config.
type Program struct {
	Path string
	Args []string
	Own  int
}

// commandError is the reason why an ordered command cannot be executed.
type commandError struct{ error }

func (e *commandError) Unwrap() error { return e.error }

// answerTo is the action for a worker that cannot be started: a user that ordered a command may order another one.
func answerTo(err error) policy.Action {
	if _, ok := errors.AsType[*commandError](err); ok {
		return policy.Hold
	}
	return policy.Fail
}

// holder does the work of a run that is held.
type holder struct {
	cfg    *Config
	bg     *background
	envDir string // files with the workers' environment; "" before the run is held
}

// close removes the files.
func (h *holder) close() {
	if h.envDir != "" {
		_ = os.RemoveAll(h.envDir)
	}
}

// hold begins an epoch of a run that is held: this node is ready for its workers, and starts the command for the
// meantime.
func (a *Agent) hold(e Epoch) {
	env := a.cfg.startParts(e)
	g := &group{epoch: e, begun: true}
	a.group = g
	a.cfg.Rendezvous.Running(&e.Directive)
	envs, err := a.holder.writeEnvs(e, env)
	if err != nil {
		a.log.Warn("cannot write the environment of the workers", "err", err)
	}
	p := e.Place
	a.log.Info("the run is held: no workers are started until somebody orders it", "order",
		"dlroverctl start "+a.cfg.RunID,
		"node", p.GroupRank, "nodes", p.GroupWorldSize, "ranks", e.ranks(a.cfg.Slots), "master_addr", p.MasterAddr,
		"master_port", p.MasterPort, "env", envs)
	a.holder.meanwhile(g)
}

// ranks returns the ranks of this node's workers as text.
func (e Epoch) ranks(slots int) string {
	if slots == 0 {
		return fmt.Sprintf("none of %d", e.Place.WorldSize)
	}
	return fmt.Sprintf("%d-%d of %d", e.Place.RankBase, e.Place.RankBase+slots-1, e.Place.WorldSize)
}

// meanwhile starts the command that runs in place of the workers. Its end is logged, and changes nothing.
func (h *holder) meanwhile(g *group) {
	if len(h.cfg.Meanwhile) == 0 {
		return
	}
	env := slices.Concat(h.cfg.Env, []string{"DLROVER_ENV_DIR=" + h.envDir})
	p, err := h.cfg.Processes.Start(proc.Spec{Path: h.cfg.Meanwhile[0], Args: h.cfg.Meanwhile, Dir: h.cfg.Dir, Env: env,
		Stdin: h.cfg.Stdin, Stdout: os.Stdout, Stderr: os.Stderr})
	if err != nil {
		h.cfg.Logger.Warn("cannot start the command of --hold; the run stays held", "err", err)
		return
	}
	h.cfg.Logger.Info("the command of --hold runs", "pid", p.PID())
	g.meanwhile = p
	h.bg.Go(func() {
		select {
		case <-p.Done():
		case <-h.bg.over:
			return
		}
		if g.signaledAt.Load() == nil {
			h.cfg.Logger.Warn("the command of --hold has ended; the run stays held", "pid", p.PID(), "exit_code", p.Exit().Code)
		}
	})
}

// writeEnvs writes the environment that each worker would have, for a shell to read, and returns the pattern of the
// files' names. The directory is this launcher's alone, and is removed with it.
func (h *holder) writeEnvs(e Epoch, env [][]string) (pattern string, err error) {
	if h.envDir == "" {
		if h.envDir, err = tempdir.Make("dlrover-env-"); err != nil {
			return "", err
		}
	}
	for i := range h.cfg.Slots {
		id := logs.WorkerID{LocalRank: i, Rank: e.Place.RankBase + i, Node: e.Place.GroupRank, Role: h.cfg.Role}
		spec, err := h.cfg.spec(e, id, "", env[i])
		if err != nil {
			return "", fmt.Errorf("rank %d: %w", id.Rank, err)
		}
		file := filepath.Join(h.envDir, fmt.Sprintf("rank%d.env.sh", i))
		if err := openfile.Replace(file, []byte(shellEnv(spec)), 0o600); err != nil {
			return "", err
		}
	}
	return filepath.Join(h.envDir, "rank<local rank>.env.sh"), nil
}

// shellEnv is a script for a POSIX shell that sets the environment of s and changes to its working directory. It leaves
// out variables of the shell itself, and names that a shell does not allow.
func shellEnv(s proc.Spec) string {
	var b strings.Builder
	b.WriteString("# The environment of one worker, to be read by a shell: . FILE\n# The worker itself executes:\n#")
	for _, arg := range s.Args {
		b.WriteString(" " + strings.ReplaceAll(shellWord(arg), "\n", "\n# "))
	}
	b.WriteString("\n")
	values := map[string]string{}
	for _, kv := range s.Env {
		name, value, _ := strings.Cut(kv, "=")
		values[name] = value // the last of equal names counts, as in exec
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if shellName(name) && !slices.Contains([]string{"_", "PWD", "OLDPWD", "SHLVL", "TERM"}, name) {
			b.WriteString("export " + name + "=" + shellWord(values[name]) + "\n")
		}
	}
	if s.Dir != "" {
		b.WriteString("cd " + shellWord(s.Dir) + "\n")
	}
	return b.String()
}

// shellWord quotes s so that a shell takes it for one word with nothing in it that it would act upon.
func shellWord(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

// shellName reports whether a shell can have a variable of the name.
func shellName(name string) bool {
	for i, c := range []byte(name) {
		letter := c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return name != ""
}
