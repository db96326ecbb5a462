// Package hostfile writes a host file of the nodes of the world, anew before every start of workers.
package hostfile

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/job"
	"dlrover-run/internal/openfile"
	"dlrover-run/internal/tempdir"
	"dlrover-run/launcher"
	"dlrover-run/launcher/hostfile"
)

// file is a host file of the nodes of the world, written anew before every start of workers.
type file struct {
	path    string
	private string          // the directory to remove with it; "": the user has named the path
	known   []hostfile.Host // the names to list the nodes by
	fixed   bool            // these have the ranks of the nodes
	log     *slog.Logger
}

// New is the feature.
func New() feature.Feature {
	var path string
	var known []string
	return feature.Feature{
		Name: "live hostfile",
		Settings: func(o feature.Options) error {
			path, known = o.String("live-hostfile"), o.Job().Command.Hosts
			return nil
		},
		Plan: func(p *feature.Plan) {
			if path != "" {
				p.Features["live_hostfile"] = path
			}
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			if path == "" {
				return nil, nil
			}
			h, err := open(path, n.Log())
			if err != nil {
				return nil, feature.Unusable(fmt.Errorf("--live-hostfile=%s: %w; give a path that this user may write to", path,
					err))
			}
			h.fixed = n.Job().Params.Static
			for _, name := range known {
				h.known = append(h.known, hostfile.Host{Name: name})
			}
			return &feature.Opened{Part: launcher.Part{Start: h.start}, Configure: feature.NeedsWorld, Close: h.close}, nil
		},
	}
}

// open checks that the file can be written, but does not change it until the nodes are known.
func open(path string, log *slog.Logger) (*file, error) {
	h := &file{log: log}
	if path == "auto" {
		dir, err := tempdir.Make("dlrover-hosts-") // mode 0700
		h.path, h.private = filepath.Join(dir, "hostfile"), dir
		return h, err
	}
	path, err := filepath.Abs(path) // workers may have another directory
	if err != nil {
		return nil, err
	}
	trial, err := os.CreateTemp(filepath.Dir(path), ".hostfile.*")
	if err != nil {
		return nil, err
	}
	_ = trial.Close()
	h.path = path
	return h, os.Remove(trial.Name())
}

func (h *file) start(r *launcher.StartRequest) {
	if err := openfile.Replace(h.path, []byte(h.text(r.World)), 0o644); err != nil {
		h.log.Error("cannot write the live hostfile: it has the nodes of an earlier world", "path", h.path, "err", err)
	}
	r.Setenv("DLROVER_HOSTFILE=" + h.path)
}

// text lists the nodes in rank order, by the names that the job's own host file has for them; others by their address.
func (h *file) text(world []job.Member) string {
	var hosts []hostfile.Host
	for i, m := range world {
		if m.Slots == 0 {
			continue // it has no workers
		}
		host := hostfile.Host{Name: m.Addr, Slots: m.Slots}
		known := hostfile.Find(h.known, m.Node, m.Addr)
		if h.fixed && len(h.known) == len(world) {
			known = i
		}
		if known >= 0 {
			host.Name = h.known[known].Name
		}
		hosts = append(hosts, host)
	}
	return hostfile.Format(hosts)
}

func (h *file) close() error {
	if h.private == "" {
		return nil
	}
	return os.RemoveAll(h.private)
}
