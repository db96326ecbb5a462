package run

import (
	"cmp"
	"fmt"
	"log/slog"

	"dlrover-run/internal/app/token"
	"dlrover-run/internal/secure"
	"dlrover-run/launcher/scheduler"
	"dlrover-run/rendezvous/api"
)

// auth is the proof that a node belongs to the job.
type auth struct {
	token    string
	job      token.Job // token, if it is from a file or a variable
	from     string    // the private key of ssh that the token is derived from, if it is
	insecure bool
	tls      secure.Choice
	peers    scheduler.Peers // that are served without a token; none where there is one
}

// networked reports whether a rendezvous of this job is served to other hosts. Without a token it is on loopback,
// unless the hosts of the job are known.
func (a *auth) networked() bool { return a.token != "" || a.insecure || len(a.peers.Names) > 0 }

// read finds the job token; given is another launcher's.
func (a *auth) read(o *options, given string) (err error) {
	a.insecure = o.Bool("insecure")
	a.job, err = token.Find(o.String("token-file"), o.env)
	a.token = cmp.Or(a.job.Token, given)
	if err == nil {
		a.tls, err = secure.Chosen(o.String, o.env)
	}
	return err
}

// client is one of the rendezvous at HOST:PORT.
func (a *auth) client(addr string) *api.Client { return a.renewing(api.NewClient(addr, a.token)) }

// renewing has c send what stands in the token file.
func (a *auth) renewing(c *api.Client) *api.Client {
	if a.job.Path() != "" {
		c.TokenFrom(a.job.Accepted)
	}
	return c
}

// shared is the token with what its file says now.
func (a *auth) shared() token.Job {
	if a.job.Token == a.token {
		return a.job
	}
	return token.Job{Token: a.token} // another launcher's, or derived
}

// accepted is nil if the token stays.
func (a *auth) accepted() func() []string {
	if a.job.Path() == "" {
		return nil
	}
	return a.job.Accepted
}

// layer is the TLS of the rendezvous; nil: none.
func (a *auth) layer(b backend, log *slog.Logger) (*secure.Layer, error) {
	side := secure.Asks | secure.Serves
	if b == master {
		side = secure.Asks
	}
	return a.chosen(b).Layer(a.shared().Accepted, side, log)
}

// chosen is what counts of the user's choice: a rendezvous that stays inside this process does without TLS where there
// is no token or no certificate.
func (a *auth) chosen(b backend) secure.Choice {
	if b == local && (a.token == "" || !a.tls.Auto && a.tls.Cert == "") {
		return secure.Choice{}
	}
	return a.tls
}

// deriveToken derives the job token from a secret that all nodes have. The MPI operator and Volcano give all pods of
// a job one ssh key, and a cluster with Slurm has one home directory.
func (a *auth) deriveToken(o *options, scheduler, runID string) bool {
	switch scheduler {
	case "slurm", "mpi", "volcano":
		a.token, a.from = token.OfKey(o.host.root, o.Lookup("HOME"), runID)
	}
	return a.token != ""
}

// secure finds the job token, and refuses to cross a network without one. A master reports by itself whether it
// needs one; DLRover's needs none. Nodes that meet in etcd agree on one there.
func (s *settings) secure(o *options) error {
	a, r, nodes := &s.auth, &s.rdzv, s.params.Max
	r.topology = o.String("topology-file")
	if err := a.read(o, s.called.command.Token); err != nil {
		return err
	}
	if r.backend == local || r.backend == master || r.backend == etcd {
		return nil
	}
	if a.token != "" || a.insecure || token.Loopback(r.host) {
		return nil
	}
	if r.byScheduler && a.deriveToken(o, s.scheduler.Name, s.runID) {
		return nil
	}
	if nodes > 1 {
		a.peers = scheduler.PeersOf(s.scheduler, o.system(nodes), r.host, nodes)
	}
	return s.withoutToken(o)
}

// checkTLS reads the files of TLS, or the token, to report early that they cannot be used. The token of nodes that meet
// in etcd is not known yet.
func (s *settings) checkTLS() error {
	if s.auth.tls.Auto && s.auth.token == "" && s.rdzv.backend == etcd {
		return nil
	}
	_, err := s.auth.layer(s.rdzv.backend, nil)
	return err
}

// withoutToken refuses to start nodes that could not meet.
func (s *settings) withoutToken(o *options) error {
	peers, serves := s.auth.peers, s.rdzv.serves(s.node.Rank, o.host)
	switch {
	case len(peers.Names) > 0 && serves:
		o.Warn("no job token: the rendezvous at %s serves launchers on %s alone (by %s), and whoever runs a process there "+
			"can end the job; to close that, and for dlroverctl from elsewhere, give every node the same %s",
			s.rdzv.where(), peers, peers.From, token.Sources)
		return nil
	case len(peers.Names) > 0:
		return nil
	case s.rdzv.byScheduler:
		return fmt.Errorf("%s says that the nodes meet at %s, on a network, which needs a job token: %s; --insecure, or "+
			"PET_INSECURE=1, does without", s.scheduler.Name, s.rdzv.where(), tokenHint(s.scheduler.Name))
	case serves && s.params.Max == 1:
		return nil // there are no nodes to miss
	case serves:
		o.Warn("no job token: the rendezvous is served on loopback only, so nodes on other hosts cannot join; " +
			"give every node the same " + token.Sources)
		return nil
	}
	return fmt.Errorf("the rendezvous at %s:%d is on another host and needs a job token: give every node the same %s; "+
		"--insecure joins without", s.rdzv.host, s.rdzv.port, token.Sources)
}

// podsToken gives the job token to the pods of a template, as YAML.
const podsToken = "env: [{name: DLROVER_TOKEN, valueFrom: {secretKeyRef: {name: job-token, key: token}}}]"

// tokenHint says how the nodes of a scheduler get a job token.
func tokenHint(scheduler string) string {
	switch scheduler {
	case "slurm":
		return "before srun, do: export DLROVER_TOKEN=$(openssl rand -hex 16); or have the same key of ssh in ~/.ssh, " +
			"which only its owner may read"
	case "kubeflow", "ms-operator", "jobset", "statefulset":
		return "give the container in the template of every role of pods this line: " + podsToken + "; its Secret is made " +
			"by: kubectl create secret generic job-token --from-literal=token=$(openssl rand -hex 16)"
	}
	return "give every node the same DLROVER_TOKEN (openssl rand -hex 16)"
}
