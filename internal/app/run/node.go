package run

import (
	"log/slog"
	"os"

	"dlrover-run/internal/app/run/events"
	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/pypath"
	"dlrover-run/internal/exposition"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/proc"
)

// featureNode is the node's job as features see it; it implements feature.Node.
type featureNode struct{ j *nodeJob }

func (n featureNode) Job() *feature.Job { return n.j.s.job() }

func (n featureNode) Log() *slog.Logger { return n.j.log }

func (n featureNode) Events() events.Writer { return n.j.events }

func (n featureNode) Finding(rule string, rank int, text string) { n.j.findings.Add(rule, rank, text) }

func (n featureNode) Scrape(tell func(*exposition.Scrape)) bool {
	if n.j.metrics == nil {
		return false
	}
	n.j.metrics.Add(tell)
	return true
}

func (n featureNode) Python() *pypath.Path { return n.j.python }

func (n featureNode) Environ() []string { return n.j.s.workerEnv() }

func (n featureNode) Profile() feature.Profile {
	for _, o := range n.j.opened {
		if o.Profile != nil {
			return o.Profile
		}
	}
	return nil
}

func (n featureNode) PID() int {
	if n.j.guard != nil {
		return os.Getppid()
	}
	return os.Getpid()
}

func (n featureNode) Logs() *logs.Logs { return n.j.logs }

func (n featureNode) Processes() *proc.Supervisor { return n.j.procs }

func (n featureNode) Rendezvous() feature.Rendezvous {
	if n.j.endpoint == nil {
		return nil
	}
	return n.j.endpoint
}

func (n featureNode) SetPorts(ports []int) { n.j.adapter.session.SetPorts(ports) }

func (n featureNode) SetBases(bases []int) { n.j.adapter.session.SetBases(bases) }
