// Package lighthouse is torchft's lighthouse to the workers of this node.
//
// They reach it at a loopback port of their launcher, which passes their requests on to the rendezvous: that decides
// which replicas train together. So their address holds when another node serves the rendezvous, and a quorum knows at
// once of workers that have ended. The port is for processes of the launcher's user alone.
package lighthouse

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"time"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/retry"
	"dlrover-run/launcher"
	"dlrover-run/launcher/preset"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

// Variable is torchft's, for the URL of the lighthouse.
const Variable = "TORCHFT_LIGHTHOUSE"

// New is the feature. It acts for --preset=torchft with --replica-groups, unless the user has set the variable.
func New() feature.Feature {
	wanted := false
	return feature.Feature{
		Name: "lighthouse",
		Settings: func(o feature.Options) error {
			wanted = o.Int("replica-groups") > 0 && !o.Bool("check-only") && o.Job().Preset.Name == "torchft" &&
				o.Lookup(Variable) == ""
			return nil
		},
		Plan: func(p *feature.Plan) {
			if wanted {
				p.Features["lighthouse"] = "served to the workers at $" + Variable
				p.Env = append(p.Env, Variable+"="+preset.Undecided)
			}
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			if !wanted {
				return nil, nil
			}
			return open(n)
		},
	}
}

func open(n feature.Node) (*feature.Opened, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("a port for $%s: %w", Variable, err)
	}
	k := &keeper{node: n, beats: map[string]time.Time{}}
	s := &http.Server{Handler: k, ReadHeaderTimeout: bodyTime, ErrorLog: log.New(io.Discard, "", 0),
		Protocols: new(http.Protocols)}
	s.Protocols.SetUnencryptedHTTP2(true)
	end := sync.OnceFunc(func() { _ = s.Close() })
	return &feature.Opened{
		Part: launcher.Part{End: func(launcher.EndRequest) { end() }},
		Configure: func(cfg *launcher.Config) {
			cfg.Env = preset.MergeEnv(cfg.Env, []string{Variable + "=http://" + l.Addr().String()})
			go func() { _ = s.Serve(&ownUser{Listener: l, log: n.Log()}) }() // until it is closed
		},
		Close: func() error {
			end()
			_ = l.Close() // that of a server that never began
			return nil
		},
	}, nil
}

// ownUser is a listener on loopback that takes connections of this process's user and of root, and closes all others.
// The first of these is logged.
type ownUser struct {
	net.Listener
	log  *slog.Logger
	told sync.Once
}

func (o *ownUser) Accept() (net.Conn, error) {
	for {
		c, err := o.Listener.Accept()
		if err != nil {
			return nil, err
		}
		uid, err := api.UserOf(addrOf(c.RemoteAddr()), addrOf(c.LocalAddr()))
		if err == nil && api.MayAsk(uid, os.Geteuid()) {
			return c, nil
		}
		_ = c.Close()
		o.told.Do(func() {
			err = cmp.Or(err, fmt.Errorf("it is of uid %d", uid))
			o.log.Warn("the lighthouse serves its own user alone, and has closed a connection", "err", err)
		})
	}
}

func addrOf(a net.Addr) netip.AddrPort { return a.(*net.TCPAddr).AddrPort() }

const (
	// bodyTime bounds the reading of a request.
	bodyTime = 10 * time.Second
	// askTime bounds a request to the rendezvous, which holds it for ten seconds.
	askTime = 15 * time.Second
	// beatEvery is how often a sign of life of a replica is passed on.
	beatEvery = time.Second
)

// keeper serves torchft.LighthouseService of its torchft.proto, by gRPC.
type keeper struct {
	node feature.Node

	mu    sync.Mutex
	beats map[string]time.Time // when the last sign of life was passed on, by replica
}

func (k *keeper) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	var serve func(context.Context, []byte) ([]byte, error)
	switch req.URL.Path {
	case "/torchft.LighthouseService/Heartbeat":
		serve = k.heartbeat
	case "/torchft.LighthouseService/Quorum":
		serve = k.quorum
	default:
		serve = func(context.Context, []byte) ([]byte, error) { return nil, errUnknown }
	}
	in, err := readMessage(w, req)
	var out []byte
	if err == nil {
		out, err = serve(req.Context(), in)
	}
	writeMessage(w, out, err)
}

// heartbeat passes a sign of life on, unless one was just now. It succeeds also while nobody serves the rendezvous.
func (k *keeper) heartbeat(ctx context.Context, in []byte) ([]byte, error) {
	id, err := parseHeartbeat(in)
	if err != nil {
		return nil, err
	}
	k.mu.Lock()
	now := time.Now()
	due := now.Sub(k.beats[id]) >= beatEvery
	if due {
		for old, at := range k.beats { // of workers that have ended
			if now.Sub(at) > time.Minute {
				delete(k.beats, old)
			}
		}
		k.beats[id] = now
	}
	k.mu.Unlock()
	if due {
		if _, err := k.ask(ctx, rendezvous.QuorumAsk{Replica: id}); err != nil {
			k.node.Log().Debug("a replica's sign of life was not passed on", "replica", id, "err", err)
		}
	}
	return nil, nil
}

// quorum asks until there is one, or the worker does not wait any more.
func (k *keeper) quorum(ctx context.Context, in []byte) ([]byte, error) {
	a, err := parseAsk(in)
	if err != nil {
		return nil, err
	}
	a.Number = rand.Text()
	pause := retry.Backoff{First: 50 * time.Millisecond, Most: time.Second, Spread: true}
	for warned := false; ; {
		q, err := k.ask(ctx, a)
		switch {
		case q != nil:
			return marshal(q), nil
		case err == nil:
			pause.Reset()
			continue
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case errors.Is(err, rendezvous.ErrRefused):
			return nil, err
		case !warned:
			warned = true
			k.node.Log().Warn("a replica waits for the rendezvous, which decides about quorums", "replica", a.Replica,
				"err", err)
		}
		if !pause.Wait(ctx) {
			return nil, ctx.Err()
		}
	}
}

// ask asks the rendezvous, in this process or elsewhere.
func (k *keeper) ask(ctx context.Context, a rendezvous.QuorumAsk) (*rendezvous.Quorum, error) {
	j := k.node.Job()
	a.Group = j.Params.Group.Index
	q := service.LighthouseRequest{ID: j.Node.ID, QuorumAsk: a}
	r := k.node.Rendezvous()
	if served := r.Served(); served != nil {
		answer, err := served.Lighthouse(j.Params.Group.Of, q)
		return answer.Quorum, err
	}
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	var answer service.LighthouseAnswer
	err := r.Client().Call(ctx, j.Params.Group.Of, "lighthouse", q, &answer)
	return answer.Quorum, err
}
