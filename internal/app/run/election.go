package run

import (
	"context"
	"os/exec"

	"dlrover-run/internal/app/member"
	"dlrover-run/internal/app/run/elector"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/launcher"
	"dlrover-run/launcher/policy"
	"dlrover-run/rendezvous"
)

// electionFeature has this node take part in the election of the one that serves a run that meets in etcd.
func electionFeature() row {
	var program string
	return row{
		name: "election",
		settings: func(o *options, s *settings) (err error) {
			if s.rdzv.backend == etcd {
				program, err = elector.Find("--rdzv-backend=etcd", o.host.lookPath)
			}
			return err
		},
		plan: func(p *plan) {
			if program != "" {
				p.Features["election"] = program
			}
		},
		open: func(j *nodeJob) (*feature.Opened, error) {
			if program == "" {
				return nil, nil
			}
			j.elector = elector.New(elector.Config{
				Program: program, Member: j.s.member(), Log: j.log,
				Start:   func(cmd *exec.Cmd) (func() error, error) { return j.procs.LastCommand(cmd) },
				Observe: func(n rendezvous.Note) { j.observe(j.s.runID, n) },
			})
			return &feature.Opened{}, nil
		},
	}
}

// member is this node in the election.
func (s *settings) member() member.Config {
	patience := s.rdzv.connect
	if s.params.JoinTimeout > 0 {
		patience = min(patience, s.params.JoinTimeout)
	}
	return member.Config{
		Etcd: s.rdzv.etcd, Run: s.runID, Host: s.node.Addr, Token: s.auth.token, TLS: s.auth.tls,
		TokenFile: s.auth.job.Path(), Patience: patience, TopologyFile: s.rdzv.topology, LogFormat: string(s.logs.format),
	}
}

// elect waits until a node was elected.
func (j *nodeJob) elect(ctx context.Context) (err error) {
	if j.elector == nil {
		return nil
	}
	if j.s.rdzv.leader, j.s.auth.token, err = j.elector.Meet(ctx); err != nil {
		return &launcher.ReasonError{Reason: policy.MasterUnreachable, Err: err}
	}
	return nil
}

// followElected turns the client of this node to every node that is elected.
func (j *nodeJob) followElected() {
	if j.elector != nil {
		j.endpoint.elector = j.elector
		j.elector.Follow(j.endpoint.client.Follow)
	}
}

// endProcesses ends the processes of this node. The one that may serve the other nodes is ended by dismiss.
func (j *nodeJob) endProcesses() error {
	if j.elector != nil {
		return j.procs.CloseButLast()
	}
	return j.procs.Close()
}

// lingerElected has this node serve, if it does, until the others know that the run is over here.
func (j *nodeJob) lingerElected() {
	if j.elector != nil {
		j.elector.Linger(lingerBudget, j.signals)
	}
}

// dismiss ends that process as well.
func (j *nodeJob) dismiss() {
	if j.elector == nil {
		return
	}
	j.elector.Close()
	if j.procs != nil {
		j.closing("end processes", j.procs.Close())
	}
}
