// Package streams serves the workers' output to remote followers, and executes commands next to workers.
package streams

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"sync"
	"time"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/text"
	"dlrover-run/launcher"
	"dlrover-run/launcher/streams"
	"dlrover-run/launcher/streams/node"
)

// server serves the workers' output to remote followers. Until one connects, it only reads notices.
type server struct {
	n    feature.Node
	exec *execBeside // nil: nothing is executed

	mu   sync.Mutex
	node *node.Node // made by the first invitation
}

// New is the feature.
func New() feature.Feature {
	var exec bool
	return feature.Feature{
		Name: "streams",
		Settings: func(o feature.Options) (err error) {
			exec, err = readAllowExec(o)
			return err
		},
		Plan: func(p *feature.Plan) {
			if exec {
				p.Features["allow_exec"] = true
			}
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			s := &server{n: n}
			o := feature.OnNotice(s.notice)
			o.End = s.end
			if exec {
				s.exec = &execBeside{n: n}
				o.Observe = s.exec.observe
			}
			return o, nil
		},
	}
}

// readAllowExec reports whether to execute commands from the network. It refuses if strangers could send them.
func readAllowExec(o feature.Options) (bool, error) {
	switch {
	case !o.Bool("allow-exec"):
		return false, nil
	case o.Job().Insecure:
		return false, errors.New("--allow-exec and --insecure contradict each other: use one of them")
	case o.Job().Token == "":
		return false, errors.New("--allow-exec needs a job token: give every node the same DLROVER_TOKEN " +
			"(openssl rand -hex 16), DLROVER_TOKEN_FILE or --token-file")
	}
	return true, nil
}

// notice accepts an invitation.
func (s *server) notice(topic, body string) {
	var i streams.Invitation
	if topic != streams.Topic || json.Unmarshal([]byte(body), &i) != nil || i.ID == "" {
		return
	}
	s.started().Invite(i.ID)
}

func (s *server) started() *node.Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.node == nil {
		s.node = node.New(s.config())
	}
	return s.node
}

func (s *server) config() node.Config {
	cfg := node.Config{Logs: s.n.Logs(), Connect: s.connect, Profile: s.n.Profile(), Log: s.n.Log()}
	if s.exec != nil {
		cfg.Exec, cfg.Worker, cfg.Start = true, s.exec.worker, s.n.Processes().Start
		cfg.Began, cfg.Ended = s.exec.began, s.exec.ended
	}
	return cfg
}

func (s *server) connect(ctx context.Context, id string) (io.ReadWriteCloser, error) {
	e, run, own := s.n.Rendezvous(), s.n.Job().RunID, s.n.Job().Node.ID
	if served := e.Served(); served != nil {
		return served.Streams.Dial(ctx, run, id, own)
	}
	return e.Client().Open(ctx, run, "streams/feed?"+url.Values{"id": {id}, "node": {own}}.Encode(), streams.Protocol)
}

// maxFlush is how long the last output may take to reach the followers.
const maxFlush = time.Second

func (s *server) end(r launcher.EndRequest) {
	s.mu.Lock()
	n := s.node
	s.mu.Unlock()
	if n != nil {
		n.End(min(maxFlush, r.Budget))
	}
}

// execBeside executes commands next to workers, too. It has the environment of their start.
type execBeside struct {
	n feature.Node

	mu      sync.Mutex
	workers []node.Worker // of the newest epoch, by local rank; PID 0: it does not run
	base    int           // the rank of the first
}

// observe notes the start and the end of workers.
func (x *execBeside) observe(e launcher.Event) {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch i := e.(type) {
	case launcher.StartInfo:
		x.workers, x.base = nil, i.Epoch.Place.RankBase
		for local, pid := range i.PIDs {
			x.workers = append(x.workers, node.Worker{LocalRank: local, PID: pid, Env: slices.Clone(i.Env[local])})
		}
	case launcher.ExitInfo:
		if local := i.Worker.LocalRank; local < len(x.workers) && x.workers[local].PID == i.PID {
			x.workers[local].PID = 0
		}
	}
}

func (x *execBeside) worker(rank int) (node.Worker, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	local := rank - x.base
	if local < 0 || local >= len(x.workers) || x.workers[local].PID == 0 {
		return node.Worker{}, fmt.Errorf("rank %d does not run on node %s now", rank, x.n.Job().Node.Name)
	}
	return x.workers[local], nil
}

func (x *execBeside) began(c node.Command) {
	x.n.Log().Info("executing a command beside a worker", "rank", c.Rank, "pid", c.PID, "from", c.From,
		"command", commandLine(c.Args))
	x.n.Events().Exec(c)
}

func (x *execBeside) ended(c node.Command, e streams.Exit) {
	x.n.Log().Info("a command beside a worker has ended", "rank", c.Rank, "pid", c.PID, "exit_code", e.Code,
		"why", e.Error)
	x.n.Events().ExecEnded(c, e)
}

// maxCommandLine bounds the text of a command in a log line, in bytes.
const maxCommandLine = 512

func commandLine(args []string) string {
	text := text.EscapeLine(fmt.Sprintf("%q", args))
	return text[:min(len(text), maxCommandLine)]
}
