package run

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/console"
	"dlrover-run/internal/job"
	"dlrover-run/internal/secure"
	"dlrover-run/internal/text"
	"dlrover-run/launcher"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/preset"
	"dlrover-run/launcher/proc"
)

// plan is the --dry-run output: all that would be done, as JSON.
type plan struct {
	// Called is left out under dlrover-run's own name.
	Called *planCalled `json:"called,omitempty"`
	// Scheduler is left out if no scheduler supplies anything.
	Scheduler  *planScheduler `json:"scheduler,omitempty"`
	RunID      string         `json:"run_id"`
	Rendezvous planRendezvous `json:"rendezvous"`
	Node       planNode       `json:"node"`
	Restarts   planRestarts   `json:"restarts"`
	Logs       planLogs       `json:"logs"`
	feature.Plan
	// Assumed names the values that only the rendezvous decides.
	Assumed string `json:"assumed"`
	// Preset is left out if it is torch's by default.
	Preset  *planPreset  `json:"preset,omitempty"`
	Workers []planWorker `json:"workers"`
	// Beside are the side processes of the preset on the first node.
	Beside   []planSide `json:"beside_the_workers,omitempty"`
	Warnings []string   `json:"warnings,omitempty"`
}

// planCalled is the meaning of another launcher's command line.
type planCalled struct {
	Name    string   `json:"name"`
	Options []string `json:"options,omitempty"`
	Env     []string `json:"env,omitempty"`
	Notes   []string `json:"notes,omitempty"`
	Execute []string `json:"execute,omitempty"` // in place of workers
	// Start describes the start of launchers on other hosts in place of a job here.
	Start *planStart `json:"start,omitempty"`
}

type planPreset struct {
	Name string `json:"name"`
	Why  string `json:"chosen_by,omitempty"`
}

type planRendezvous struct {
	Backend    string `json:"backend"`
	Endpoint   string `json:"endpoint,omitempty"`
	ServedHere bool   `json:"served_here"`
	Token      bool   `json:"token"`
	// TLS has modes and paths; left out without TLS.
	TLS secure.Choice `json:"tls,omitzero"`
	// Hosts are those that are served without a token.
	Hosts       string `json:"hosts,omitempty"`
	Nodes       string `json:"nodes"`
	NodeUnit    int    `json:"node_unit"`
	JoinTimeout string `json:"join_timeout"`
	LastCall    string `json:"last_call"`
	Quiet       string `json:"last_call_quiet,omitempty"`
	Promised    int    `json:"promised_nodes,omitempty"`
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
	// ExitCodes is the policy of the launcher's own exit status; left out if it is torchrun's.
	ExitCodes string `json:"exit_code_policy,omitempty"`
	// Rules decide the action on a failure: the first match wins.
	Rules []planPolicy `json:"rules"`
}

type planLogs struct {
	Dir        string `json:"dir"`
	RotateSize int64  `json:"rotate_size_bytes,omitempty"`
	Ranks      string `json:"rank_files,omitempty"` // that of rank 0
}

type planWorker struct {
	LocalRank int      `json:"local_rank"`
	Rank      int      `json:"rank"`
	Argv      []string `json:"argv"`
	Env       []string `json:"env"`
	CPUs      []int    `json:"cpus,omitempty"`
	Memory    string   `json:"memory,omitempty"` // policy and NUMA node, as in /proc/PID/numa_maps
	Redirects string   `json:"redirects"`
	Tee       string   `json:"tee"`
}

// fromRendezvous stands for a value that is decided when the nodes meet.
const fromRendezvous = preset.Undecided

func printPlan(w io.Writer, s *settings, h hostFacts) int {
	p, err := makePlan(s, h)
	if err != nil {
		return refuse(err, s)
	}
	return printJSON(w, "dlrover-run", p)
}

// printJSON prints the plan of the program name, and returns its exit status.
func printJSON(w io.Writer, name string, plan any) int {
	enc := json.NewEncoder(text.JSON(w))
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(plan); err != nil {
		console.Complain(os.Stderr, name, fmt.Errorf("print the plan: %w", err))
		return 1
	}
	return 0
}

func makePlan(s *settings, h hostFacts) (plan, error) {
	params := s.params.WithDefaults()
	p := plan{
		Called: s.called.plan(), Scheduler: s.planScheduler(), RunID: s.runID,
		Warnings: s.warnings, Plan: feature.Plan{Features: map[string]any{}},
		Rendezvous: planRendezvous{
			Backend: string(s.rdzv.backend), ServedHere: s.rdzv.serves(s.node.Rank, h), Token: s.auth.token != "",
			TLS: s.auth.chosen(s.rdzv.backend), Hosts: s.auth.peers.String(),
			Nodes: fmt.Sprintf("%d:%d", params.Min, params.Max), NodeUnit: params.Unit,
			JoinTimeout: params.JoinTimeout.String(), LastCall: params.LastCall.String(),
			GrowthDelay: params.GrowthDelay.String(), Promised: params.Promised,
		},
		Node: planNode{Name: s.node.Name, Addr: s.node.Addr, Slots: s.size.slots, Why: s.size.why},
		Restarts: planRestarts{
			Max: params.MaxRestarts, Policy: string(s.restarts.policy.Restart),
			ShutdownTimeout: s.shutdown.timeout.Truncate(time.Second).String(), RestartGrace: s.shutdown.restart.Grace.String(),
			Signals: s.shutdown.text, ExitCodes: planCodes(s.restarts.codes), Rules: planRules(s.restarts.policy),
		},
		Logs: planLogs{Dir: s.logs.dir, RotateSize: s.logs.rotateSize, Ranks: s.logs.rankFile},
	}
	if params.Quiet > 0 {
		p.Rendezvous.Quiet = params.Quiet.String()
	}
	for _, f := range s.features {
		if f.plan != nil {
			f.plan(&p)
		}
	}
	if s.rdzv.backend != local {
		first := fmt.Sprintf("%s:%d", s.rdzv.host, s.rdzv.port)
		p.Rendezvous.Endpoint = strings.Join(append([]string{first}, s.rdzv.others...), ",")
	}
	if s.framework.preset.Name != "torch" || s.framework.why != "" {
		p.Preset = &planPreset{s.framework.preset.Name, s.framework.why}
	}
	if s.node.Rank >= 0 {
		p.Node.Rank = &s.node.Rank
	}
	return p, p.addWorkers(s, h)
}

func planCodes(p policy.CodePolicy) string {
	if p == policy.TorchrunCodes {
		return ""
	}
	return string(p)
}

func (p *plan) addWorkers(s *settings, h hostFacts) (err error) {
	if r := s.replicas; r.count > 0 {
		own, index := *s, fromRendezvous
		if r.wish >= 0 {
			index = strconv.Itoa(r.wish)
		}
		own.enter(max(r.wish, 0))
		s, p.Env = &own, append(p.Env, r.env(index)...)
	}
	nodeRank := max(s.node.Rank, 0)
	world, all := s.assumedWorld()
	base := world[min(nodeRank, len(world)-1)].RankBase
	p.Assumed = fmt.Sprintf("group rank %d of %d nodes with %d workers each, first start", nodeRank, s.params.Max,
		s.size.slots)
	if s.size.share != "" {
		p.Assumed = fmt.Sprintf("group rank %d of %d nodes with %d workers in all, first start", nodeRank, s.params.Max, all)
	}
	cfg := s.agent(h)
	place := job.Place{
		GroupRank: nodeRank, GroupWorldSize: s.params.Max, RankBase: base, WorldSize: all,
		RoleRankBase: base, RoleWorldSize: all, MasterAddr: fromRendezvous,
	}
	for i := range s.size.slots {
		v := cfg.Vars(place, i, fromRendezvous)
		v.World = world
		env, err := s.framework.preset.Environ(v)
		if err != nil {
			return err
		}
		env = append(env, p.Env...)
		slices.Sort(env)
		p.Workers = append(p.Workers, planWorker{
			LocalRank: i, Rank: place.RankBase + i, Argv: cfg.ArgsOf(v), Env: masked(env), CPUs: cpusOf(cfg, i),
			Memory: memoryOf(cfg, i), Redirects: stdNames[s.logs.redirects.For(i)&3], Tee: stdNames[s.logs.tee.For(i)&3],
		})
	}
	v := cfg.Vars(place, 0, "")
	v.World = world
	p.Beside, err = planSides(s, cfg, v)
	return err
}

var stdNames = [4]string{"none", "stdout", "stderr", "both"}

// masked shows that the store's port is not known yet.
func masked(env []string) []string {
	for i, entry := range env {
		if strings.HasPrefix(entry, "MASTER_PORT=") {
			env[i] = "MASTER_PORT=" + fromRendezvous
		}
	}
	return env
}

// assumedWorld is one of nodes like this one, but for those that have no workers, and the number of its workers.
func (s *settings) assumedWorld() (nodes []preset.Node, workers int) {
	for i := range s.params.Max {
		slots := s.size.slots
		if s.size.share != "" {
			slots = max(slots, 1)
		}
		if s.size.share != "" && i <= s.framework.servers {
			slots = 0
		}
		nodes = append(nodes, preset.Node{GroupRank: i, Addr: fromRendezvous, RankBase: workers, Slots: slots,
			Ports: make([]int, s.framework.preset.PortsOf(slots))})
		workers += slots
	}
	return nodes, workers
}

func cpusOf(cfg launcher.Config, i int) []int {
	if cfg.CPUs == nil {
		return nil
	}
	return cfg.CPUs(i)
}

func memoryOf(cfg launcher.Config, i int) string {
	if cfg.MemoryPolicy == nil || cfg.MemoryPolicy(i) == nil {
		return ""
	}
	p := cfg.MemoryPolicy(i)
	if p.Mode == proc.BindNode {
		return fmt.Sprintf("bind:%d", p.Node)
	}
	return fmt.Sprintf("prefer:%d", p.Node)
}
