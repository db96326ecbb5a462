package main

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"dlrover-run/cmd/internal/freeports"
	"dlrover-run/launcher"
	"dlrover-run/rendezvous"
)

// ports are free TCP ports of this node for the servers of its workers, which the workers of all nodes are told of.
// They are held, bound and not listened on, from the join to the start of the workers, and again between two epochs.
type ports struct {
	*freeports.Ports
	offer func([]int)
	dir   string // has the world file
	log   *slog.Logger
}

func portsFeature() feature {
	var n int
	return feature{
		name: "ports",
		settings: func(r *resolver) error {
			if n = r.c.Int("ports"); n < 0 || n > rendezvous.MaxPorts {
				return fmt.Errorf("--ports=%d: need 0 to %d ports on this node", n, rendezvous.MaxPorts)
			}
			return nil
		},
		plan: func(p *plan) {
			if n > 0 {
				p.Features["ports"] = n
			}
		},
		open: func(j *job) (launcher.Part, error) {
			if n == 0 {
				return nil, nil
			}
			return openPorts(j, n)
		},
	}
}

func openPorts(j *job, n int) (*ports, error) {
	held, err := freeports.Hold(n)
	if err != nil {
		return nil, unusableOption(fmt.Errorf("--ports=%d: %w; ask for fewer", n, err))
	}
	dir, err := os.MkdirTemp("", "dlrover-world-") // mode 0700
	if err != nil {
		held.Release()
		return nil, unusableOption(fmt.Errorf("--ports: no place for the file that tells workers of all nodes: %w; "+
			"set TMPDIR to a directory that this user may write to", err))
	}
	j.s.node.Ports = held.Numbers()
	return &ports{Ports: held, dir: dir, log: j.log}, nil
}

// Name implements launcher.Part.
func (p *ports) Name() string { return "ports" }

// NeedsWorld implements launcher.WorldNeeder.
func (p *ports) NeedsWorld() bool { return true }

func (p *ports) joined(j *job) { p.offer = j.adapter.session.SetPorts }

// Starting implements launcher.Starter: from now on the ports are the workers'.
func (p *ports) Starting(e launcher.Epoch) {
	if err := p.writeWorld(e.World); err != nil {
		p.log.Error("cannot write the world file: workers that read it fail", "path", p.worldFile(), "err", err)
	}
	p.Release()
}

// Environ implements launcher.Environer.
func (p *ports) Environ(launcher.Epoch, int) []string {
	list := make([]string, len(p.Numbers()))
	for i, n := range p.Numbers() {
		list[i] = strconv.Itoa(n)
	}
	return []string{"DLROVER_PORTS=" + strings.Join(list, ","), "DLROVER_WORLD_FILE=" + p.worldFile()}
}

// Stopped implements launcher.Stopper. Whoever took a port meanwhile, such as a worker's child that is still there, has
// it; the next world is told of another.
func (p *ports) Stopped(why launcher.StopInfo) {
	if why.Early {
		return
	}
	if err := p.HoldAgain(); err != nil {
		p.log.Warn("fewer ports are offered to the next world", "ports", p.Numbers(), "err", err)
	}
	p.offer(p.Numbers())
}

// worldNode is one node in the world file.
type worldNode struct {
	GroupRank int    `json:"group_rank"`
	Node      string `json:"node"`
	Addr      string `json:"addr"`
	RankBase  int    `json:"rank_base"`
	Slots     int    `json:"slots"`
	Role      string `json:"role"`
	Ports     []int  `json:"ports"`
}

func (p *ports) worldFile() string { return filepath.Join(p.dir, "world.json") }

// writeWorld writes the nodes in rank order. A reader sees all of it or what was there before.
func (p *ports) writeWorld(world []launcher.Member) error {
	nodes := make([]worldNode, len(world))
	for i, m := range world {
		nodes[i] = worldNode(m)
		if m.Ports == nil {
			nodes[i].Ports = []int{} // a list to every reader
		}
	}
	data, err := json.Marshal(nodes)
	if err != nil {
		return err
	}
	next := p.worldFile() + ".next"
	if err := os.WriteFile(next, append(data, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(next, p.worldFile())
}

func (p *ports) close() error {
	p.Release()
	return os.RemoveAll(p.dir)
}
