package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"dlrover-run/cmd/internal/console"
	"dlrover-run/launcher"
	"dlrover-run/launcher/preset"
	"dlrover-run/launcher/printable"
)

// plan is what --dry-run prints: all that would be done, as JSON.
type plan struct {
	RunID      string         `json:"run_id"`
	Rendezvous planRendezvous `json:"rendezvous"`
	Node       planNode       `json:"node"`
	Restarts   planRestarts   `json:"restarts"`
	Logs       planLogs       `json:"logs"`
	// Checkpoints is left out when no daemon is wanted.
	Checkpoints *planCheckpoints `json:"checkpoints,omitempty"`
	// Features is what the others add, by name; one that was not asked for adds nothing.
	Features map[string]any `json:"features,omitempty"`
	// Assumed says what only the rendezvous decides.
	Assumed  string       `json:"assumed"`
	Workers  []planWorker `json:"workers"`
	Warnings []string     `json:"warnings,omitempty"`
}

type planRendezvous struct {
	Backend     string `json:"backend"`
	Endpoint    string `json:"endpoint,omitempty"`
	ServedHere  bool   `json:"served_here"`
	Token       bool   `json:"token"`
	Nodes       string `json:"nodes"`
	NodeUnit    int    `json:"node_unit"`
	JoinTimeout string `json:"join_timeout"`
	LastCall    string `json:"last_call"`
	GrowthDelay string `json:"growth_delay"`
}

type planNode struct {
	Name  string `json:"name"`
	Addr  string `json:"addr"`
	Rank  *int   `json:"wished_rank,omitempty"`
	Slots int    `json:"workers"`
	Why   string `json:"workers_from"`
}

type planRestarts struct {
	Max             int    `json:"max"`
	Policy          string `json:"policy"`
	ShutdownTimeout string `json:"shutdown_timeout"`
	RestartGrace    string `json:"restart_grace"`
	Signals         string `json:"signals_to_handle"`
	// Rules decide what a failure leads to: the first that matches.
	Rules []planPolicy `json:"rules"`
}

type planLogs struct {
	Dir        string `json:"dir"`
	RotateSize int64  `json:"rotate_size_bytes,omitempty"`
}

type planWorker struct {
	LocalRank int      `json:"local_rank"`
	Rank      int      `json:"rank"`
	Argv      []string `json:"argv"`
	Env       []string `json:"env"`
	CPUs      []int    `json:"cpus,omitempty"`
	Redirects string   `json:"redirects"`
	Tee       string   `json:"tee"`
}

// fromRendezvous stands for what is decided when the nodes meet.
const fromRendezvous = "<from the rendezvous>"

func printPlan(w io.Writer, s *settings, h hostFacts) int {
	p, err := makePlan(s, h)
	if err != nil {
		return refuse(err, s.codes)
	}
	enc := json.NewEncoder(printable.JSON(w))
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(p); err != nil {
		console.Complain(os.Stderr, "dlrover-run", fmt.Errorf("print the plan: %w", err))
		return 1
	}
	return 0
}

func makePlan(s *settings, h hostFacts) (plan, error) {
	params := s.params.WithDefaults()
	p := plan{
		RunID: s.runID, Warnings: s.warnings, Features: map[string]any{},
		Rendezvous: planRendezvous{
			Backend: string(s.backend), ServedHere: s.serves(h), Token: s.token != "",
			Nodes: fmt.Sprintf("%d:%d", params.Min, params.Max), NodeUnit: params.Unit,
			JoinTimeout: params.JoinTimeout.String(), LastCall: params.LastCall.String(),
			GrowthDelay: params.GrowthDelay.String(),
		},
		Node: planNode{Name: s.node.Name, Addr: s.node.Addr, Slots: s.slots, Why: s.slotsWhy},
		Restarts: planRestarts{
			Max: params.MaxRestarts, Policy: string(s.policy.Restart),
			ShutdownTimeout: s.shutdown.Truncate(time.Second).String(), RestartGrace: s.restart.Grace.String(),
			Signals: s.signalText, Rules: planRules(s.policy),
		},
		Logs: planLogs{Dir: s.logs.dir, RotateSize: s.logs.rotateSize},
	}
	for _, f := range s.features {
		if f.plan != nil {
			f.plan(&p)
		}
	}
	if s.backend != local {
		p.Rendezvous.Endpoint = fmt.Sprintf("%s:%d", s.host, s.port)
	}
	if s.node.Rank >= 0 {
		p.Node.Rank = &s.node.Rank
	}
	return p, p.addWorkers(s, h)
}

func (p *plan) addWorkers(s *settings, h hostFacts) error {
	nodeRank := max(s.node.Rank, 0)
	p.Assumed = fmt.Sprintf("group rank %d of %d nodes with %d workers each, first start", nodeRank, s.params.Max, s.slots)
	cfg := s.agent(h)
	place := launcher.Place{
		GroupRank: nodeRank, GroupWorldSize: s.params.Max, RankBase: nodeRank * s.slots, WorldSize: s.params.Max * s.slots,
		RoleRankBase: nodeRank * s.slots, RoleWorldSize: s.params.Max * s.slots, MasterAddr: fromRendezvous,
	}
	for i := range s.slots {
		env, err := s.preset.Environ(cfg.Vars(place, i, fromRendezvous))
		if err != nil {
			return err
		}
		p.Workers = append(p.Workers, planWorker{
			LocalRank: i, Rank: place.RankBase + i, Argv: cfg.ArgsOf(i), Env: masked(env), CPUs: cpusOf(cfg, i),
			Redirects: stdNames[s.logs.redirects.For(i)&3], Tee: stdNames[s.logs.tee.For(i)&3],
		})
	}
	return nil
}

var stdNames = [4]string{"none", "stdout", "stderr", "both"}

// masked shows that the store's port is not known yet.
func masked(env []string) []string {
	env = preset.MergeEnv(env, []string{"MASTER_PORT=" + fromRendezvous})
	slices.Sort(env)
	return env
}

func cpusOf(cfg launcher.Config, i int) []int {
	if cfg.CPUs == nil {
		return nil
	}
	return cfg.CPUs(i)
}
