package master

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/urfave/cli/v2"

	"dlrover-run/internal/app/kube"
	"dlrover-run/internal/app/marks"
	"dlrover-run/internal/app/nodehealth"
	"dlrover-run/internal/duration"
)

// Bounds of --node-mark-time.
const (
	leastMarkTime = time.Second
	mostMarkTime  = 30 * 24 * time.Hour
)

// nodeFlags are the options about marks of nodes.
func nodeFlags() []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "node-action", Category: "Options",
			Usage: "`" + strings.Join(kube.Levels(), "|") + "`: action in Kubernetes on a faulty node (default: event, in a " +
				"pod that may create events; else none)"},
		&cli.BoolFlag{Name: "node-action-dry-run", Category: "Options",
			Usage: "log the actions on nodes, but take none; Kubernetes is not needed"},
		&cli.GenericFlag{Name: "node-mark-time", Category: "Options", Value: new(duration.Value(4 * time.Hour)),
			Usage: "`DURATION`: how long a faulty node stays marked after the newest finding, 1s to 720h (default: 4h)"},
	}
}

// keepMarks keeps the record of nodes, and acts on it, if the options ask for that. Without a tenure it returns that of
// --data-dir: nothing is made before all options are known to be right.
func (d *daemon) keepMarks(c *cli.Context, t *tenure) (*tenure, error) {
	expiry := time.Duration(*c.Generic("node-mark-time").(*duration.Value))
	if expiry < leastMarkTime || expiry > mostMarkTime {
		return nil, fmt.Errorf("--node-mark-time=%v: need %v to %v", expiry, leastMarkTime, mostMarkTime)
	}
	var err error
	if t != nil && t.nodes != nil { // a take-over waits for no API server
		d.nodes = *t.nodes
	} else {
		d.nodes.level, d.nodes.cluster, err = d.nodeAction(c)
	}
	if err == nil && t == nil {
		t, err = d.alone(c)
	}
	if err == nil {
		err = d.openMarks(c, t, expiry)
	}
	if err != nil {
		d.nodes.cluster.close()
		d.leaveData()
	}
	return t, err
}

func (d *daemon) openMarks(c *cli.Context, t *tenure, expiry time.Duration) error {
	dry, level, actor := c.Bool("node-action-dry-run"), d.nodes.level, d.nodes.cluster
	waits := t == nil && elects(c)
	if t == nil && level == kube.None {
		if c.IsSet("node-mark-time") && !waits {
			d.log.Warn("--node-mark-time is of no use: no node is marked without --data-dir or a level of --node-action")
		}
		return nil
	}
	cfg := marks.Config{
		DryRun: dry, Log: d.log, Annotate: d.annotate, Policy: nodehealth.Config{Expiry: expiry},
	}
	if level != kube.None {
		cfg.Action = string(level)
		d.log.Info("nodes that are found faulty are marked", "level", string(level), "dry_run", dry, "for", expiry.String())
	}
	if actor != nil {
		cfg.Devices = devices(actor.client.Find, d.log)
	}
	if actor != nil && !waits { // a master that waits would remove marks of the one that leads
		cfg.Actor = actor.asked()
	}
	switch {
	case waits:
	case t == nil:
		d.log.Info("what is known of nodes ends with this process; --data-dir keeps it")
	default:
		d.track(c.Context, t)
		cfg.Store, cfg.Term = t.decisions, t.term
	}
	var err error
	d.marks, err = marks.Open(cfg)
	return err
}

// action is what marks do to nodes of Kubernetes.
type action struct {
	level   kube.Level
	cluster *cluster // nil: nothing
}

// nodeAction returns the level and the cluster that acts on it: nil at level none, and in a dry run.
func (d *daemon) nodeAction(c *cli.Context) (kube.Level, *cluster, error) {
	name, dry := c.String("node-action"), c.Bool("node-action-dry-run")
	if name == "" && !dry {
		return d.defaultAction(c.Context)
	}
	level, err := kube.ParseLevel(orEvent(name))
	switch {
	case err != nil:
		return "", nil, fmt.Errorf("--node-action: %w", err)
	case dry && level == kube.None:
		return "", nil, errors.New("--node-action-dry-run with --node-action=none: there is nothing to try; name the level " +
			"that is meant, such as --node-action=taint")
	case dry || level == kube.None:
		return level, nil, nil
	}
	a, err := d.act(c.Context, level)
	return level, a, err
}

func orEvent(name string) string {
	if name == "" {
		return string(kube.Event)
	}
	return name
}

// How long the start waits for the API server to report the permissions: with a level given, and without.
const (
	askedLimit = 10 * time.Second
	silentWait = 2 * time.Second
)

// defaultAction is level event where that is allowed, or turns out to be: the API server may not answer yet.
func (d *daemon) defaultAction(ctx context.Context) (kube.Level, *cluster, error) {
	cfg, err := kube.InCluster()
	if errors.Is(err, kube.ErrNotInCluster) {
		return kube.None, nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, silentWait)
	defer cancel()
	a, err := newCluster(ctx, kube.Event, cfg, err, d.log)
	if d.away(err) {
		a.guessed = true
		return kube.Event, a, nil
	}
	if err != nil {
		d.log.Info("faulty nodes will not be marked; set --node-action=none to silence this", "why", err)
		return kube.None, nil, nil
	}
	return kube.Event, a, nil
}

// act returns the cluster for a level that was given. An API server that does not answer is no error: it may later.
func (d *daemon) act(ctx context.Context, level kube.Level) (*cluster, error) {
	ctx, cancel := context.WithTimeout(ctx, askedLimit)
	defer cancel()
	cfg, err := kube.InCluster()
	a, err := newCluster(ctx, level, cfg, err, d.log)
	if d.away(err) {
		return a, nil
	}
	if err != nil {
		return nil, fmt.Errorf("--node-action=%s: %w", level, err)
	}
	return a, nil
}

// away reports whether an error is an awayError, and logs it if so.
func (d *daemon) away(err error) bool {
	away, ok := errors.AsType[*awayError](err)
	if ok {
		d.log.Warn("the API server cannot be asked what this daemon may do to nodes; it goes on", "err", away.error)
	}
	return ok
}

// awayError means that the API server has not confirmed the level's permissions.
type awayError struct{ error }

func (e *awayError) Unwrap() error { return e.error }

// cluster carries out marks in Kubernetes.
type cluster struct {
	client  *kube.Client
	level   kube.Level
	owner   string
	log     *slog.Logger
	guessed bool // the level was neither given nor confirmed
}

// newCluster returns a cluster with the configuration, if there was no error. It is usable with an awayError, too.
func newCluster(ctx context.Context, l kube.Level, cfg kube.Config, err error, log *slog.Logger) (*cluster, error) {
	if err != nil {
		return nil, err
	}
	cfg.Log = log
	client, err := kube.New(cfg)
	if err != nil {
		return nil, err
	}
	a := &cluster{client: client, level: l, owner: owner(cfg), log: log}
	missing, err := client.Allowed(ctx, l)
	switch {
	case errors.Is(err, kube.ErrNoFaults):
	case errors.Is(err, kube.ErrUnauthorized):
		err = fmt.Errorf("%w: %w", kube.ErrUnauthorized, err)
	case err != nil:
		return a, &awayError{err}
	case len(missing) > 0:
		err = fmt.Errorf("the service account is not allowed to %s: apply docs/kubernetes/%s, or choose a lower level",
			strings.Join(missing, ", "), l.Manifest())
	default:
		return a, nil
	}
	client.Close()
	return nil, err
}

// owner is the name under which nodes are marked. It stays the same after a restart, even in a pod of another name.
func owner(cfg kube.Config) string {
	pod := cfg.Pod
	if pod == "" {
		pod, _ = os.Hostname() // the pod's name, unless its spec sets another
	}
	return ownerPrefix + cfg.Namespace + "/" + workload(pod)
}

const ownerPrefix = "dlrover-master/"

// workload is the name of the pod's controller: Deployments and Jobs append random words from an alphabet without
// vowels. The pods of StatefulSets have stable names.
func workload(pod string) string {
	const letter = "[bcdfghjklmnpqrstvwxz2456789]"
	return regexp.MustCompile("^(.+?)(-"+letter+"{6,10})?-"+letter+"{5}$").ReplaceAllString(pod, "$1")
}

func (a *cluster) close() {
	if a != nil {
		a.client.Close()
	}
}

// asked is the Actor of the Manager at this level.
func (a *cluster) asked() marks.Actor {
	if a.level.Undoable() {
		return &cleanup{cluster: a}
	}
	return a
}

// Apply marks a node.
func (a *cluster) Apply(ctx context.Context, m nodehealth.Mark) error {
	err := a.client.Apply(ctx, a.level, kube.Mark{
		Node: m.Node, Owner: a.owner, Reason: string(m.Kind), Evidence: evidence(m), Since: m.Since, Until: m.Until,
	})
	if errors.Is(err, kube.ErrNotFound) {
		return fmt.Errorf("Kubernetes has no node %q: set NODE_NAME from spec.nodeName in the training pods, as "+
			"docs/kubernetes/training-pod.yaml does (%w): %w", m.Node, err, marks.ErrFinal)
	}
	if a.guessed && errors.Is(err, kube.ErrForbidden) {
		return fmt.Errorf("%w (--node-action=none silences this): %w", err, marks.ErrFinal)
	}
	return err
}

// evidence is a mark for people.
func evidence(m nodehealth.Mark) string {
	if m.Evidence == "" {
		return m.Reason
	}
	return m.Reason + ": " + m.Evidence
}

// Remove has nothing to do at level event.
func (a *cluster) Remove(context.Context, nodehealth.Mark) error { return nil }

// cleanup acts at the levels that leave something to undo.
type cleanup struct {
	*cluster
	avoiding avoiding
}

// Remove removes this owner's mark, whenever it ends: only this daemon renews it.
func (a *cleanup) Remove(ctx context.Context, m nodehealth.Mark) error {
	err := a.remove(ctx, kube.Mark{Node: m.Node, Owner: a.owner})
	if errors.Is(err, kube.ErrNotFound) { // no node can have such a name
		return nil
	}
	return err
}

func (a *cleanup) remove(ctx context.Context, m kube.Mark) error {
	if a.level == kube.ExternalFault {
		return a.client.Withdraw(ctx, m)
	}
	return a.client.Remove(ctx, m)
}

func (a *cleanup) marks(ctx context.Context) ([]kube.Mark, []error) {
	if a.level == kube.ExternalFault {
		return a.client.Reported(ctx)
	}
	return a.client.Marks(ctx)
}

// strangersGrace is the time after its end at which another master's mark counts as abandoned.
const strangersGrace = time.Hour

// Sweep removes this owner's marks of unknown machines, and those of masters that never came back.
func (a *cleanup) Sweep(ctx context.Context, known func(machine string) bool) error {
	all, errs := a.marks(ctx)
	for _, m := range all {
		switch own := m.Owner == a.owner; {
		case own && !known(m.Node):
			m.Until = time.Time{}
		case !own && strings.HasPrefix(m.Owner, ownerPrefix) && !m.Until.IsZero() && time.Since(m.Until) > strangersGrace:
		default:
			continue
		}
		if err := a.remove(ctx, m); err != nil {
			errs = append(errs, err)
			continue
		}
		a.log.Info("removed a mark that was left", "node", m.Node, "owner", m.Owner)
	}
	return errors.Join(errs...)
}

// avoiding is the knowledge whether the own pod may be annotated.
type avoiding int

const (
	notAsked avoiding = iota
	granted
	denied
)

// Avoid names the nodes in the annotation of the own pod, if that is allowed.
func (a *cleanup) Avoid(ctx context.Context, machines []string) error {
	if a.avoiding == notAsked {
		ok, err := a.client.MayAnnotate(ctx)
		if err != nil && !errors.Is(err, kube.ErrNoPod) {
			return err
		}
		if a.avoiding = denied; ok {
			a.avoiding = granted
		} else {
			a.log.Info("nodes to avoid are told in the status of runs only: docs/kubernetes/rbac-avoid.yaml and POD_NAME " +
				"allow the annotation " + kube.AvoidKey)
		}
	}
	if a.avoiding == denied {
		return nil
	}
	err := a.client.Avoid(ctx, machines)
	if errors.Is(err, kube.ErrNotFound) {
		return fmt.Errorf("%w: %w", err, marks.ErrFinal)
	}
	return err
}

// watchMarks adds the numbers of marks. Nodes are no labels.
func (m *metrics) watchMarks(k *marks.Manager) {
	gauge := func(name, help string, value func(marks.Stats) int) {
		m.reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help},
			func() float64 { return float64(value(k.Stats())) }))
	}
	gauge("dlrover_nodes_marked", "Nodes that are marked as faulty, with --data-dir or --node-action.",
		func(s marks.Stats) int { return s.Marked })
	gauge("dlrover_nodes_held_back", "Nodes that the breaker has kept from being marked.",
		func(s marks.Stats) int { return s.Held })
	gauge("dlrover_node_action_pending", "Nodes whose mark is yet to be set, or removed, in Kubernetes.",
		func(s marks.Stats) int { return s.Pending })
	m.reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "dlrover_node_action_failures_total", Help: "Attempts to set or remove marks in Kubernetes that have failed.",
	}, func() float64 { return float64(k.Stats().Failures) }))
}
