package run

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

// streamServer serves the workers' output to remote followers. Until one connects, it only reads notices.
type streamServer struct {
	job  *nodeJob
	exec *execBeside // nil: nothing is executed

	mu   sync.Mutex
	node *node.Node // made by the first invitation
}

func streamsFeature() row {
	var exec bool
	return row{
		name: "streams",
		settings: func(o *options, s *settings) (err error) {
			exec, err = readAllowExec(o, &s.auth)
			return err
		},
		plan: func(p *plan) {
			if exec {
				p.Features["allow_exec"] = true
			}
		},
		open: func(j *nodeJob) (*feature.Opened, error) {
			s := &streamServer{job: j}
			o := onNotice(s.notice)
			o.End = s.end
			if exec {
				s.exec = &execBeside{job: j}
				o.Observe = s.exec.observe
			}
			return o, nil
		},
	}
}

// readAllowExec reports whether to execute commands from the network. It refuses if strangers could send them.
func readAllowExec(o *options, a *auth) (bool, error) {
	switch {
	case !o.Bool("allow-exec"):
		return false, nil
	case a.insecure:
		return false, errors.New("--allow-exec and --insecure contradict each other: use one of them")
	case a.token == "":
		return false, errors.New("--allow-exec needs a job token: give every node the same DLROVER_TOKEN " +
			"(openssl rand -hex 16), DLROVER_TOKEN_FILE or --token-file")
	}
	return true, nil
}

// notice accepts an invitation.
func (s *streamServer) notice(topic, body string) {
	var i streams.Invitation
	if topic != streams.Topic || json.Unmarshal([]byte(body), &i) != nil || i.ID == "" {
		return
	}
	s.server().Invite(i.ID)
}

func (s *streamServer) server() *node.Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.node == nil {
		s.node = node.New(s.config())
	}
	return s.node
}

func (s *streamServer) config() node.Config {
	j := s.job
	cfg := node.Config{Logs: j.logs, Connect: s.connect, Log: j.log}
	if s.exec != nil {
		cfg.Exec, cfg.Worker, cfg.Start = true, s.exec.worker, j.procs.Start
		cfg.Began, cfg.Ended = s.exec.began, s.exec.ended
	}
	return cfg
}

func (s *streamServer) connect(ctx context.Context, id string) (io.ReadWriteCloser, error) {
	e, run, own := s.job.endpoint, s.job.s.runID, s.job.s.node.ID
	if e.served != nil {
		return e.served.Streams.Dial(ctx, run, id, own)
	}
	return e.client.Open(ctx, run, "streams/feed?"+url.Values{"id": {id}, "node": {own}}.Encode(), streams.Protocol)
}

// maxFlush is how long the last output may take to reach the followers.
const maxFlush = time.Second

func (s *streamServer) end(r launcher.EndRequest) {
	s.mu.Lock()
	n := s.node
	s.mu.Unlock()
	if n != nil {
		n.End(min(maxFlush, r.Budget))
	}
}

// execBeside executes commands next to workers, too. It has the environment of their start.
type execBeside struct {
	job *nodeJob

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
		return node.Worker{}, fmt.Errorf("rank %d does not run on node %s now", rank, x.job.s.node.Name)
	}
	return x.workers[local], nil
}

func (x *execBeside) began(c node.Command) {
	x.job.log.Info("executing a command beside a worker", "rank", c.Rank, "pid", c.PID, "from", c.From,
		"command", commandLine(c.Args))
	x.job.events.Exec(c)
}

func (x *execBeside) ended(c node.Command, e streams.Exit) {
	x.job.log.Info("a command beside a worker has ended", "rank", c.Rank, "pid", c.PID, "exit_code", e.Code,
		"why", e.Error)
	x.job.events.ExecEnded(c, e)
}

// maxCommandLine bounds the text of a command in a log line, in bytes.
const maxCommandLine = 512

func commandLine(args []string) string {
	text := text.EscapeLine(fmt.Sprintf("%q", args))
	return text[:min(len(text), maxCommandLine)]
}
