package run

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

// liveHostfile is a host file of the nodes of the world, written anew before every start of workers.
type liveHostfile struct {
	path    string
	private string          // the directory to remove with it; "": the user has named the path
	known   []hostfile.Host // the names to list the nodes by
	fixed   bool            // these have the ranks of the nodes
	log     *slog.Logger
}

func liveHostfileFeature() row {
	var path string
	var known []string
	return row{
		name: "live hostfile",
		settings: func(o *options, s *settings) error {
			path, known = o.String("live-hostfile"), s.called.command.Hosts
			return nil
		},
		plan: func(p *plan) {
			if path != "" {
				p.Features["live_hostfile"] = path
			}
		},
		open: func(j *nodeJob) (*feature.Opened, error) {
			if path == "" {
				return nil, nil
			}
			h, err := openLiveHostfile(path, j.log)
			if err != nil {
				return nil, feature.Unusable(fmt.Errorf("--live-hostfile=%s: %w; give a path that this user may write to", path, err))
			}
			h.fixed = j.s.params.Static
			for _, name := range known {
				h.known = append(h.known, hostfile.Host{Name: name})
			}
			return &feature.Opened{Part: launcher.Part{Start: h.start}, Configure: needsWorld, Close: h.close}, nil
		},
	}
}

// openLiveHostfile checks that the file can be written, but does not change it until the nodes are known.
func openLiveHostfile(path string, log *slog.Logger) (*liveHostfile, error) {
	h := &liveHostfile{log: log}
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

// needsWorld is the configure of features that read the nodes of the world.
func needsWorld(cfg *launcher.Config) { cfg.NeedsWorld = true }

func (h *liveHostfile) start(r *launcher.StartRequest) {
	if err := openfile.Replace(h.path, []byte(h.text(r.World)), 0o644); err != nil {
		h.log.Error("cannot write the live hostfile: it has the nodes of an earlier world", "path", h.path, "err", err)
	}
	r.Setenv("DLROVER_HOSTFILE=" + h.path)
}

// text lists the nodes in rank order, by the names that the job's own host file has for them; others by their address.
func (h *liveHostfile) text(world []job.Member) string {
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

func (h *liveHostfile) close() error {
	if h.private == "" {
		return nil
	}
	return os.RemoveAll(h.private)
}
