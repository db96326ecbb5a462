package hang

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/hang/rankset"
)

const (
	site    = "/usr/lib/python3/dist-packages/torch/"
	c10dPy  = site + "distributed/distributed_c10d.py"
	defSeq  = 246
	defID   = 1
	evenAge = 12 * time.Second // since the last progress, when the first sample is taken
	now0    = 1000 * time.Second
)

// Stacks as PyTorch's really are, the innermost function first.
func py(frames ...Frame) *Stacks {
	return &Stacks{Interpreter: "CPython 3.11.2", Threads: []Thread{{TID: 1, Main: true, Python: frames}}}
}

func inAllReduce() *Stacks {
	return py(Frame{"all_reduce", c10dPy, 1541}, Frame{"<module>", "/job/train.py", 19})
}

func inBackward() *Stacks {
	return py(Frame{"backward", site + "autograd/__init__.py", 197}, Frame{"backward", site + "_tensor.py", 488},
		Frame{"train", "/job/train.py", 18})
}

func inAllGather() *Stacks {
	return py(Frame{"all_gather", c10dPy, 4000}, Frame{"wrapper", site + "distributed/c10d_logger.py", 83},
		Frame{"sync", "/job/train.py", 33})
}

func inRecv() *Stacks {
	return py(Frame{"recv", c10dPy, 1202}, Frame{"forward", "/job/pipe.py", 7})
}

func inInit() *Stacks {
	return py(Frame{"_new_process_group_helper", c10dPy, 862}, Frame{"init_process_group", c10dPy, 761},
		Frame{"<module>", "/job/train.py", 7})
}

func inLoader() *Stacks {
	return py(Frame{"load_batch", "/job/data.py", 12}, Frame{"__getitem__", "/job/data.py", 5},
		Frame{"fetch", site + "utils/data/_utils/fetch.py", 51},
		Frame{"__next__", site + "utils/data/dataloader.py", 628}, Frame{"train", "/job/train.py", 15})
}

func inUser(fn string) *Stacks {
	return py(Frame{fn, "/job/train.py", 30}, Frame{"<module>", "/job/train.py", 60})
}

// scene is a job in which something has happened.
type scene struct {
	world World
	ev    []Evidence
	store []StoreWait
}

// newScene is a job of so many nodes with two ranks each, all of them waiting in the default group's all_reduce.
func newScene(nodes int) *scene {
	s := &scene{}
	for n := range nodes {
		s.world.Nodes = append(s.world.Nodes, WorldNode{Name: fmt.Sprintf("gpu-%02d", n), RankBase: 2 * n, Slots: 2})
	}
	for r := range 2 * nodes {
		s.ev = append(s.ev, s.waiter(r, nodes))
	}
	return s
}

func (s *scene) waiter(r, nodes int) Evidence {
	w := Worker{Rank: r, Local: r % 2, PID: 100 + r, Start: 5000}
	e := Evidence{Worker: w, Node: s.world.Nodes[r/2].Name, GroupRank: r / 2, Stacks: inAllReduce()}
	e.Groups = []Group{{ID: defID, Name: "0", Desc: "default_pg", Backend: "gloo", Ranks: fmt.Sprintf("0-%d", 2*nodes-1)}}
	for i := range 3 {
		at := now0 + evenAge + time.Duration(2*i)*time.Second
		page := &Page{
			PID: w.PID, Start: w.Start, Rank: r, Created: now0 - 900*time.Second, Heartbeat: at, Steps: 200,
			LastStep: now0 - 100*time.Millisecond, Phase: PhaseTrain,
			Groups:    []GroupState{{ID: defID, Seq: defSeq, Since: now0}},
			StepTimes: []time.Duration{now0 - 200*time.Millisecond, now0 - 150*time.Millisecond, now0 - 100*time.Millisecond},
		}
		e.Samples = append(e.Samples, Sample{Worker: w, At: at, Page: page,
			Proc: Proc{State: 'S', CPU: time.Minute, WChan: "futex_wait_queue", Threads: 9}})
	}
	return e
}

// edit changes the samples of a rank.
func (s *scene) edit(rank int, f func(i int, x *Sample)) *scene {
	for i := range s.ev[rank].Samples {
		f(i, &s.ev[rank].Samples[i])
	}
	return s
}

// behind: the rank has not entered the newest collective, and is somewhere else.
func (s *scene) behind(rank int, st *Stacks) *scene {
	s.ev[rank].Stacks = st
	return s.edit(rank, func(_ int, x *Sample) { x.Page.Groups[0].Seq--; x.Proc.WChan = "hrtimer_nanosleep" })
}

func (s *scene) state(rank int, state byte) *scene {
	return s.edit(rank, func(_ int, x *Sample) { x.Proc.State = state; x.Proc.WChan = "" })
}

// works: so its node has seen it.
func (s *scene) works(rank int, w Work) *scene {
	s.ev[rank].Work = w
	return s
}

// spins: the rank computes with one thread.
func (s *scene) spins(rank int) *scene {
	return s.edit(rank, func(i int, x *Sample) {
		x.Proc.State, x.Proc.WChan = 'R', ""
		x.Proc.CPU += time.Duration(i) * 2 * time.Second
		x.Proc.MainCPU += time.Duration(i) * 2 * time.Second
		x.Proc.Switches += uint64(10 * i)
	})
}

// writes: the rank does I/O.
func (s *scene) writes(rank int) *scene {
	return s.edit(rank, func(i int, x *Sample) { x.Proc.IO += uint64(i) * 300 << 20; x.Proc.Switches += uint64(i * 200) })
}

// unhearted: the shim's thread does not run.
func (s *scene) unhearted(rank int) *scene {
	return s.edit(rank, func(_ int, x *Sample) { x.Page.Heartbeat = now0; x.Page.Groups[0].Seq = 171 })
}

func (s *scene) phase(rank int, p Phase) *scene {
	return s.edit(rank, func(_ int, x *Sample) { x.Page.Phase = p })
}

// outside: there is no shim, and the processes are old.
func (s *scene) outside() *scene {
	for r := range s.ev {
		s.ev[r].Groups = nil
		s.edit(r, func(_ int, x *Sample) { x.Page = nil })
	}
	return s
}

// all changes every rank.
func (s *scene) all(f func(rank int)) *scene {
	for r := range s.ev {
		f(r)
	}
	return s
}

func (s *scene) judge() Verdict { return Judge(s.world, slices.Values(s.ev), s.store) }

func suspects(v Verdict) string {
	var ranks []int
	for _, s := range v.Suspects {
		ranks = append(ranks, s.Rank)
	}
	return rankset.Of(ranks...).String()
}

type ruling struct {
	name     string
	scene    *scene
	kind     Kind
	suspects string
	sure     Confidence
	tell     time.Duration
	deadline time.Duration
	line     string // a part of it
}

func check(t *testing.T, cases []ruling) {
	t.Helper()
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			v := c.scene.judge()
			require.Equal(t, c.kind, v.Kind, v.Line)
			require.Equal(t, c.suspects, suspects(v), v.Line)
			require.Equal(t, c.sure, v.Confidence, "%s", v.Line)
			require.Equal(t, c.tell, v.Tell, v.Line)
			require.Equal(t, c.deadline, v.Deadline, v.Line)
			require.Contains(t, v.Line, c.line)
			require.LessOrEqual(t, v.Tell, v.Deadline)
			require.Equal(t, v.Confidence == Low, v.Doubt != "")
		})
	}
}

const (
	soon = 20 * time.Second
	spin = 300 * time.Second
	long = 600 * time.Second
)

// Whoever has not entered the collective that the others wait in is named, whatever it does.
func TestWhoIsBehindIsNamed(t *testing.T) {
	check(t, []ruling{
		{"waits for workers of the data loader", newScene(2).behind(2, py(
			Frame{"select", "/usr/lib/python3.14/selectors.py", 435}, Frame{"__next__", site + "utils/data/dataloader.py", 628},
			Frame{"wrapper", "/dev/shm/dlrover-0/.python-hang-shim-1/_dlrover_hang/hooks.py", 53},
			Frame{"train", "/job/train.py", 15})), KindBehind, "2", High, soon, soon, "asleep in train at train.py:15"},
		{"asleep in the data loader", newScene(2).behind(2, inLoader()), KindBehind, "2", High, soon, soon,
			"rank 2 (node 1 gpu-01) hung for 16 s: asleep in load_batch at data.py:12; ranks 0-1,3 wait in all_reduce #246"},
		{"stopped", newScene(2).behind(2, inUser("step")).state(2, 'T'), KindStopped, "2", High, soon, soon,
			"hung for 16 s: stopped in step at train.py:30; ranks 0-1,3 wait"},
		{"stopped in the collective", newScene(2).state(2, 'T'), KindStopped, "2", High, soon, soon,
			"stopped in <module> at train.py:19; ranks 0-1,3 wait"},
		{"traced", newScene(2).state(2, 't'), KindStopped, "2", High, soon, debugMax, "stopped"},
		{"in a debugger", newScene(2).behind(2, py(Frame{"cmdloop", "/usr/lib/python3.11/cmd.py", 126},
			Frame{"interaction", "/usr/lib/python3.11/pdb.py", 358}, Frame{"trace_dispatch", "/usr/lib/python3.11/bdb.py", 90},
			Frame{"step", "/job/train.py", 30})), KindBehind, "2", High, soon, debugMax, "asleep in step at train.py:30"},
		{"dead loop", newScene(2).behind(2, inUser("spin")).spins(2), KindBusy, "2", Low, soon, spin,
			"rank 2 (node 1 gpu-01) busy for 16 s: computing in spin at train.py:30; ranks 0-1,3 wait"},
		{"dead loop that holds the lock", newScene(2).behind(2, inUser("spin")).spins(2).unhearted(2), KindBusy, "2", Low,
			soon, spin, "computing with the interpreter locked in spin"},
		{"dead loop that gets no CPU", newScene(2).behind(2, inUser("spin")).state(2, 'R'), KindBusy, "2", Low, soon, spin,
			"computing in spin"},
		{"asleep with the lock", newScene(2).behind(2, inUser("pause")).unhearted(2), KindBehind, "2", High, soon, soon,
			"asleep with the interpreter locked in pause"},
		{"a lock of its own", newScene(2).behind(2, inUser("lock")).edit(2, func(_ int, x *Sample) {
			x.Proc.WChan = "futex_wait_queue"
		}), KindBehind, "2", High, soon, soon, "asleep in lock"},
		{"in the kernel", newScene(2).behind(2, inUser("fork")).state(2, 'D'), KindBlocked, "2", High, soon, soon,
			"blocked in the kernel in fork"},
		{"retries", newScene(2).behind(2, inUser("poll")).edit(2, func(i int, x *Sample) {
			x.Proc.Switches += uint64(41 * i)
			x.Proc.CPU += time.Duration(i) * 20 * time.Millisecond
		}), KindBehind, "2", Low, soon, long, "polling in poll"},
		{"was seen to look for something", newScene(2).behind(2, inUser("poll")).works(2, workWakes), KindBehind, "2", Low,
			soon, long, "polling in poll"},
		{"rank 0", newScene(2).behind(0, inUser("hold")), KindBehind, "0", High, soon, soon, "rank 0 (node 0 gpu-00)"},
		{"the newest progress counts", newScene(2).behind(2, inLoader()).edit(3, func(_ int, x *Sample) {
			x.Page.Groups[0].Since += 5 * time.Second
		}), KindBehind, "2", High, soon, soon, "hung for 11 s"},
		{"two", newScene(2).behind(1, inLoader()).behind(2, inUser("hold")), KindBehind, "1-2", High, soon, soon,
			"ranks 1-2 hung for 16 s: rank 1 asleep in load_batch at data.py:12, rank 2 asleep in hold at train.py:30; ranks " +
				"0,3"},
		{"one asleep, one in a loop", newScene(2).behind(1, inLoader()).behind(2, inUser("spin")).spins(2), KindBehind, "1-2",
			High, soon, spin, "rank 2 computing in spin"},
		{"one in a loop, one asleep", newScene(2).behind(1, inUser("spin")).spins(1).behind(2, inLoader()), KindBehind, "1-2",
			High, soon, spin, "rank 1 computing in spin"},
		{"one asleep, one saves", newScene(2).behind(1, inLoader()).behind(0, inUser("save_checkpoint")).writes(0),
			KindBehind, "1", High, soon, soon, "rank 1"},
		{"one asleep, one may wait for it", newScene(2).behind(2, inLoader()).behind(1, inUser("step")).edit(1,
			func(_ int, x *Sample) { x.Proc.WChan = "futex_wait_queue" }), KindBehind, "2", High, soon, soon, "rank 2"},
		{"another process has its place", newScene(2).behind(2, inLoader()).edit(2, func(i int, x *Sample) {
			if i > 0 {
				x.PID, x.Proc.CPU = 999, time.Hour
			}
		}), KindBehind, "2", High, soon, soon, "asleep in load_batch"},
		{"ended", newScene(2).edit(2, func(i int, x *Sample) {
			if i > 0 {
				x.Proc = Proc{}
			}
		}), KindBehind, "2", High, soon, soon, "hung for 16 s: ended"},
		{"others without samples", newScene(2).behind(3, inLoader()).outside().samples(0, 0),
			KindBehind, "3", High, soon, soon, "ranks 0-2 wait in all_reduce"},
		{"wait in backward", newScene(2).all2(inBackward).behind(3, inUser("hold")), KindBehind, "3", High, soon, soon,
			"ranks 0-2 wait in backward #246"},
		{"gloo's numbers say nothing", newScene(2).behind(3, inUser("hold")).shift(1804289383), KindBehind, "3", High,
			soon, soon, "ranks 0-2 wait in all_reduce"},
		{"others without stacks", newScene(2).all2(func() *Stacks { return nil }).behind(3, inLoader()), KindBehind, "3",
			High, soon, soon, "ranks 0-2 wait in a collective"},
		{"a node does not answer", newScene(3).behind(2, inLoader()).without(4, 5), KindBehind, "2", Low, soon, soon,
			"(uncertain: nothing is known of ranks 4-5)"},
		{"a hook below backward", newScene(2).all2(inBackward).behind(2, py(Frame{"hook", "/job/train.py", 3},
			Frame{"backward", site + "autograd/__init__.py", 197})), KindBehind, "2", High, soon, soon, "asleep in hook"},
		{"in native code", newScene(2).behind(2, &Stacks{Threads: []Thread{{Main: true, Native: []Frame{{Func: "poll"}}}}}),
			KindBehind, "2", High, soon, soon, "asleep in poll; ranks 0-1,3 wait"},
		{"long steps", newScene(2).behind(2, inLoader()).paced(10 * time.Second), KindBehind, "2", High, 60 * time.Second,
			60 * time.Second, "rank 2"},
	})
}

// all2 gives everybody other stacks, each the same.
func (s *scene) all2(stacks func() *Stacks) *scene {
	st := stacks()
	return s.all(func(r int) { s.ev[r].Stacks = st })
}

func (s *scene) shift(by uint64) *scene {
	return s.all(func(r int) { s.edit(r, func(_ int, x *Sample) { x.Page.Groups[0].Seq += by }) })
}

func (s *scene) paced(step time.Duration) *scene {
	return s.all(func(r int) {
		s.edit(r, func(_ int, x *Sample) { x.Page.StepTimes = []time.Duration{now0 - 2*step, now0 - step, now0} })
	})
}

func (s *scene) without(ranks ...int) *scene {
	for i := len(ranks) - 1; i >= 0; i-- {
		s.ev = append(s.ev[:ranks[i]], s.ev[ranks[i]+1:]...)
	}
	return s
}

// samples leaves so many samples of a rank.
func (s *scene) samples(rank, n int) *scene {
	s.ev[rank].Samples = s.ev[rank].Samples[:n]
	return s
}

// Those that may be at work have the time of their phase.
func TestWorkHasItsTime(t *testing.T) {
	span := func(d time.Duration) func(int, *Sample) {
		return func(_ int, x *Sample) { x.Page.Spans = []Span{{PhaseCheckpoint, 0, d}, {PhaseEval, 0, 9 * d}} }
	}
	saves := func() *scene { return newScene(2).behind(0, inUser("save_checkpoint")) }
	module := py(Frame{"forward", site + "nn/modules/linear.py", 114}, Frame{"_call_impl", site + "nn/modules/module.py",
		1},
		Frame{"run_dev_set", "/job/train.py", 40})
	check(t, []ruling{
		{"writes a checkpoint", saves().writes(0), KindBusy, "0", Low, long, long,
			"busy for 16 s: reading or writing in save_ch"},
		{"waits for storage", saves(), KindBehind, "0", High, long, long, "asleep in save_checkpoint"},
		{"storage blocks it", saves().state(0, 'D'), KindBlocked, "0", High, long, long, "blocked"},
		{"checkpoints take long here", saves().edit(0, span(400*time.Second)), KindBehind, "0", High, 2 * long, 2 * long, ""},
		{"stopped in a checkpoint", saves().state(0, 'T'), KindStopped, "0", High, soon, soon, ""},
		{"evaluates", newScene(2).behind(0, inUser("evaluate")).spins(0), KindBusy, "0", Low, long, long, ""},
		{"the shim says evaluation", newScene(2).behind(0, inUser("f")).phase(0, PhaseEval), KindBehind, "0", High, long,
			long, ""},
		{"loads for an evaluation", newScene(2).behind(0, inLoader()).phase(0, PhaseEval), KindBehind, "0", High, soon, soon,
			""},
		{"a forward pass, whatever it is for", newScene(2).behind(0, module).spins(0), KindBusy, "0", Low, long, long, ""},
		{"many threads compute", newScene(2).behind(0, inUser("f")).edit(0, func(i int, x *Sample) {
			x.Proc.CPU += time.Duration(i) * 7 * time.Second
			x.Proc.MainCPU += time.Duration(i) * 2 * time.Second
		}), KindBusy, "0", Low, long, long, ""},
		{"children compute", newScene(2).behind(0, inLoader()).edit(0, func(i int, x *Sample) {
			x.Proc.TreeCPU += time.Duration(i) * time.Second
		}), KindBusy, "0", Low, long, long, "computing in load_batch"},
		{"a child copies", newScene(2).behind(0, inUser("f")).works(0, workChild), KindBusy, "0", Low, long, long,
			"waiting for a child at work in f"},
		{"downloads slowly", newScene(2).behind(0, inUser("f")).works(0, workNet), KindBusy, "0", Low, long, long,
			"sending or receiving in f"},
		{"reads slowly from storage", newScene(2).behind(0, inUser("f")).state(0, 'D').works(0, workIO), KindBusy, "0", Low,
			long, long, "reading or writing in f"},
		{"a loop in the data loader", newScene(2).behind(0, inLoader()).spins(0), KindBusy, "0", Low, long, long, ""},
	})
}

// Before the first steps everything may take long.
func TestFirstStepsHaveTheirTime(t *testing.T) {
	first := func(s *scene) *scene {
		return s.all(func(r int) {
			s.edit(r, func(_ int, x *Sample) { x.Page.Steps, x.Page.StepTimes, x.Page.Created = 0, nil, now0-20*time.Second })
		})
	}
	check(t, []ruling{
		{"asleep", first(newScene(2).behind(2, inLoader())), KindBehind, "2", High, long, long, ""},
		{"compiles", first(newScene(2).behind(2, py(Frame{"_compile", site + "_dynamo/convert_frame.py", 1})).spins(2)),
			KindBusy, "2", Low, long, long, ""},
		{"no optimizer, for long", newScene(2).behind(2, inLoader()).all3(func(x *Sample) { x.Page.Steps = 0 }),
			KindBehind, "2", High, soon, soon, ""},
	})
}

// all3 changes all samples of all ranks.
func (s *scene) all3(f func(x *Sample)) *scene {
	return s.all(func(r int) { s.edit(r, func(_ int, x *Sample) { f(x) }) })
}

// Nothing is said of those that make progress, or of whom nothing is known.
func TestNothingIsSaid(t *testing.T) {
	none := func(name string, s *scene) ruling { return ruling{name: name, scene: s} }
	check(t, []ruling{
		none("no evidence", &scene{world: newScene(2).world}),
		none("no world", &scene{}),
		none("somebody steps", newScene(2).behind(2, inLoader()).edit(0, func(i int,
			x *Sample) {
			x.Page.Steps += uint64(i)
		})),
		none("the culprit goes on", newScene(2).behind(2, inLoader()).edit(2, func(i int, x *Sample) {
			x.Page.Groups[0].Seq += uint64(i / 2)
		})),
		none("all evaluate", newScene(2).all2(func() *Stacks { return inUser("evaluate") }).spinAll()),
		none("outside, all asleep", newScene(2).all2(inLoader).outside()),
		none("outside, all compute", newScene(2).all2(func() *Stacks { return inUser("f") }).spinAll().outside()),
		none("outside, the waiters go on", newScene(2).behind(2, inLoader()).outside().edit(0, func(i int, x *Sample) {
			x.Proc.Switches += uint64(i / 2 * 500)
			x.Proc.MainCPU += time.Duration(i/2) * time.Second
		})),
	})
}

func (s *scene) spinAll() *scene { return s.all(func(r int) { s.spins(r) }) }

func TestMismatch(t *testing.T) {
	other := func(s *scene, ranks ...int) *scene {
		for _, r := range ranks {
			s.ev[r].Stacks = inAllGather()
		}
		return s
	}
	recorded := func(s *scene) *scene {
		return s.all(func(r int) {
			op := "all_reduce"
			if r == 2 {
				op = "all_gather"
			}
			s.ev[r].Stacks = py(Frame{"synchronize", site + "cuda/__init__.py", 3}, Frame{"train", "/job/train.py", 9})
			s.ev[r].Groups[0].Backend = "nccl"
			s.ev[r].Flight = &Flight{Entries: []FlightEntry{{Group: "0", Seq: 245, Op: "all_reduce", State: "completed"},
				{Group: "0", Seq: 246, Op: op, State: "started"}}}
		})
	}
	check(t, []ruling{
		{"one of four", other(newScene(2), 2), KindMismatch, "2", High, soon, soon, "rank 2 (node 1 gpu-01) in another " +
			"collective than the others for 16 s: waiting in all_gather in sync at train.py:33; ranks 0-1,3 wait in " +
			"all_reduce #246"},
		{"half of them", other(newScene(2), 2, 3), KindMismatch, "0-1", Low, soon, soon, "no collective has the majority"},
		{"recorded", recorded(newScene(2)), KindMismatch, "2", High, soon, soon, "wait in all_reduce #246"},
		{"outside", other(newScene(2), 2).outside(), KindMismatch, "2", Low, soon, soon, ""},
		{"one is unknown", other(newScene(3), 2).without(5), KindMismatch, "2", Low, soon, soon,
			"(uncertain: nothing is known of ranks 5)"},
		{"in backward", func() *scene {
			s := newScene(2)
			s.ev[2].Stacks = inBackward()
			return s
		}(), KindMismatch, "2", High, soon, soon, "waiting in backward"},
		{"on devices", other(newScene(2).nccl(), 2), KindMismatch, "2", Low, soon, soon,
			"operations on devices may be waited for later"},
	})
}

func (s *scene) nccl() *scene { return s.all(func(r int) { s.ev[r].Groups[0].Backend = "nccl" }) }

func onDeviceStacks() *Stacks {
	return py(Frame{"synchronize", site + "cuda/__init__.py", 1162}, Frame{"train", "/job/train.py", 9})
}

// records: the flight recorder of a rank has the newest collective in a state.
func (s *scene) records(rank int, state string) *scene {
	s.ev[rank].Flight = &Flight{Entries: []FlightEntry{{Group: "0", Seq: 246, Op: "all_reduce", State: state}}}
	return s
}

// CUDA lets a thread that waits for its device compute, which from outside looks as any work does.
func TestWhoWaitsForADeviceSpins(t *testing.T) {
	spinning := func(s *scene, st func() *Stacks) *scene {
		return s.all(func(r int) { s.ev[r].Stacks = st(); s.spins(r) })
	}
	asleep := func(st func() *Stacks) *scene {
		s := newScene(2).behind(2, inLoader())
		for _, r := range []int{0, 1, 3} {
			s.ev[r].Stacks = st()
			s.spins(r)
		}
		return s
	}
	inItem := func() *Stacks { return inUser("step") }
	recorded := func(s *scene) *scene {
		return s.records(0, "scheduled").records(1, "scheduled").records(3, "scheduled")
	}
	kernel := func() *scene {
		s := spinning(newScene(2), onDeviceStacks)
		return s.behind(2, onDeviceStacks())
	}
	check(t, []ruling{
		{"in .item(), as the recorder says", recorded(asleep(inItem)), KindBehind, "2", High, soon, soon,
			"rank 2 (node 1 gpu-01) hung for 16 s: asleep in load_batch at data.py:12; ranks 0-1,3 wait in all_reduce #246"},
		{"perhaps in .item()", asleep(inItem), KindBehind, "2", Low, soon, soon, "nobody is seen to wait"},
		{"one computes with many threads", asleep(inItem).computes(0), KindBehind, "2", High, soon, soon, "asleep"},
		{"in synchronize()", asleep(onDeviceStacks), KindBehind, "2", High, soon, soon, "asleep in load_batch"},
		{"from outside", asleep(onDeviceStacks).outside(), KindBehind, "2", Low, soon, soon,
			"asleep in load_batch at data.py:12; ranks 0-1,3 wait in a synchronization with its device (uncertain: the others " +
				"may be at work on their devices)"},
		{"from outside, asleep", newScene(2).all2(onDeviceStacks).behind(2, inLoader()).outside(), KindBehind, "2", High,
			soon, soon, "ranks 0-1,3 wait in a synchronization with its device"},
		{"a kernel of its own", kernel().records(2, "completed"), KindBehind, "2", High, soon, commMin,
			"waiting in a synchronization with its device in train at train.py:9"},
		{"a kernel, or a collective", kernel().records(2, "started"), KindBehind, "2", Low, soon, commMin,
			"it waits for something that is not known"},
		{"a kernel without a recorder", kernel(), KindBehind, "2", Low, soon, commMin, "is not known"},
	})
}

// Different collectives at the same place never end. Everything else may.
func TestWhatIsCertain(t *testing.T) {
	other := func(s *scene) *scene { s.ev[2].Stacks = inAllGather(); return s }
	for name, c := range map[string]struct {
		scene *scene
		want  bool
	}{
		"another collective":          {other(newScene(2)), true},
		"another collective, outside": {other(newScene(2).outside()), false},
		"one of several in backward":  {other(newScene(2).all2(inBackward)), false},
		"asleep":                      {newScene(2).behind(2, inLoader()), false},
		"stopped":                     {newScene(2).state(2, 'T'), false},
		"all in the same":             {newScene(2), false},
	} {
		require.Equal(t, c.want, c.scene.judge().Certain, name)
	}
}

func TestNetwork(t *testing.T) {
	check(t, []ruling{
		{"all wait", newScene(2), KindComm, "", High, soon, time.Minute, "ranks 0-3 hung for 16 s: all of them wait in " +
			"all_reduce #246; the network, a device or a library is stuck"},
		{"a node is silent", newScene(3).without(4, 5), KindBehind, "4-5", Low, time.Minute, time.Minute,
			"ranks 4-5 (node 2 gpu-02) hung for 16 s: silent; ranks 0-3 wait in all_reduce #246 (uncertain: nothing is known"},
		{"a node is silent, outside", newScene(3).without(4, 5).outside(), KindBehind, "4-5", Low, time.Minute,
			300 * time.Second, "silent"},
		{"one rank is unknown", newScene(2).without(1), KindBehind, "1", Low, time.Minute, time.Minute, "rank 1 (node 0 "},
		{"outside", newScene(2).outside(), KindComm, "", Low, time.Minute, 300 * time.Second,
			"all of them wait in all_reduce;"},
		{"long steps", newScene(2).paced(20 * time.Second), KindComm, "", High, 120 * time.Second, 160 * time.Second, ""},
	})
}

// Two that wait for each other do so at the same place, and so do one that receives and others in a collective.
func TestPeers(t *testing.T) {
	both := func() *scene { return newScene(1).all2(inRecv) }
	one := func() *scene { s := newScene(2); s.ev[3].Stacks = inRecv(); return s }
	check(t, []ruling{
		{"both receive", both(), KindDeadlock, "0-1", Low, soon, time.Minute,
			"ranks 0-1 (node 0 gpu-00) waiting for each other for 16 s: waiting in recv in forward at pipe.py:7 (uncertain"},
		{"both receive, outside", both().outside(), KindDeadlock, "0-1", Low, soon, time.Minute, "waiting in recv"},
		{"one receives, the others are in a collective", one(), KindMismatch, "3", Low, soon, time.Minute,
			"rank 3 (node 1 gpu-01) in another collective than the others for 16 s: waiting in recv in forward at pipe.py:7; " +
				"ranks 0-2 wait in all_reduce"},
		{"one receives, outside", one().outside(), KindMismatch, "3", Low, soon, time.Minute, "waiting in recv"},
		{"one computes", both().computes(0), KindBusy, "0", Low, long, long, "computing in f"},
		{"one is unknown", one().without(0), KindBehind, "0", Low, time.Minute, time.Minute, "silent; ranks 1-3 wait in"},
	})
}

// computes: the rank has threads that do.
func (s *scene) computes(rank int) *scene {
	s.ev[rank].Stacks = inUser("f")
	return s.edit(rank, func(i int, x *Sample) { x.Proc.CPU += time.Duration(i) * 7 * time.Second })
}

// Without pages only what the stacks say is known.
func TestOutside(t *testing.T) {
	asleep := func() *scene { return newScene(2).behind(2, inLoader()) }
	native := inUser("work")
	native.Threads[0].Native = []Frame{{Func: "futex_wait", File: "libc.so.6"}, {Func: "pthread_cond_wait",
		File: "libc.so.6"},
		{Func: "c10d::ProcessGroupGloo::AsyncWork::wait()", File: "/x/python3.11/site-packages/torch/lib/libtorch_cpu.so"},
		{Func: "_PyEval_EvalFrameDefault", File: "/usr/bin/python3.11"}}
	young := func(s *scene) *scene {
		return s.all(func(r int) { s.ev[r].Start = uint64((now0 - 20*time.Second) / clockTick) })
	}
	check(t, []ruling{
		{"asleep", asleep().outside(), KindBehind, "2", High, soon, soon,
			"rank 2 (node 1 gpu-01) hung: asleep in load_batch"},
		{"asleep, and young", young(asleep().outside()), KindBehind, "2", High, 90 * time.Second, 90 * time.Second, ""},
		{"stopped, and young", young(asleep().state(2, 'T').outside()), KindStopped, "2", High, soon, soon, ""},
		{"a lock", asleep().edit(2, func(_ int, x *Sample) { x.Proc.WChan = "futex_wait_queue" }).outside(), KindBehind, "2",
			Low,
			soon, soon, "may wait for something that its stack does not show"},
		{"a loop", newScene(2).behind(2, inUser("spin")).spins(2).outside(), KindBusy, "2", Low, soon, spin, ""},
		{"in the kernel", asleep().state(2, 'D').outside(), KindBlocked, "2", High, soon, soon, ""},
		{"most loop", newScene(2).all2(func() *Stacks { return inUser("spin") }).spinAll().waits(3).outside(), KindBusy,
			"0-2", Low, spin, spin, "it may be at work"},
		{"most look for something", newScene(2).all2(func() *Stacks { return inUser("poll") }).waits(3).works(0,
			workWakes).works(1, workWakes).works(2, workWakes).outside(), KindBehind, "0-2", Low, soon, long, "polling"},
		{"most do nothing", asleep().behind(1, inLoader()).behind(0, inLoader()).outside(), KindBehind, "0-2", Low, soon,
			soon, ""},
		{"they wait below the interpreter", newScene(2).all2(func() *Stacks { return native }).behind(1,
			inLoader()).outside(),
			KindBehind, "1", High, soon, soon, "ranks 0,2-3 wait in a collective"},
	})
}

// waits: the rank waits for the others.
func (s *scene) waits(rank int) *scene {
	s.ev[rank].Stacks = inAllReduce()
	return s.edit(rank, func(_ int, x *Sample) {
		x.Proc = Proc{State: 'S', CPU: time.Minute, WChan: "futex_wait_queue", Threads: 9}
	})
}

// The store tells who has not come to a process group, before there is one.
func TestStore(t *testing.T) {
	before := func(waiting ...int) *scene {
		s := newScene(2).outside().all2(func() *Stacks { return inUser("prepare") })
		s.all(func(r int) { s.edit(r, func(_ int, x *Sample) { x.Proc.WChan = "hrtimer_nanosleep" }) })
		wait := StoreWait{Key: "/worker/attempt_0/default_pg/0//cpu//0/2", Age: 14 * time.Second}
		for _, r := range waiting {
			addr := fmt.Sprintf("10.0.0.1:%d", 4000+r)
			s.ev[r].Stacks, s.ev[r].Sockets = inInit(), []string{addr}
			wait.Waiters = append(wait.Waiters, addr)
		}
		s.store = []StoreWait{wait}
		return s
	}
	unseen := func(s *scene, rank int) *scene { s.ev[rank].Stacks = inUser("connect"); return s }
	built := func(s *scene) *scene {
		s.ev[2].Stacks = py(Frame{"load", site + "utils/cpp_extension.py", 1})
		return s
	}
	foreign := func(s *scene) *scene { // and these are in a collective
		for r := range s.waits(0).waits(1).waits(3).ev {
			s.ev[r].Sockets = nil
		}
		return s
	}
	keyed := func(s *scene, key string) *scene { s.store[0].Key = key; return s }
	check(t, []ruling{
		{"asleep", before(0, 1, 3), KindMissing, "2", High, namedByStore, namedByStore,
			"rank 2 (node 1 gpu-01) has not come to " +
				"init_process_group for 14 s: asleep in prepare at train.py:30; ranks 0-1,3 wait for that"},
		{"stopped", before(0, 1, 3).state(2, 'T'), KindMissing, "2", High, namedByStore, namedByStore, "stopped"},
		{"stopped while it builds", built(before(0, 1, 3).state(2, 'T')), KindMissing, "2", High, namedByStore,
			namedByStore, "stopped"},
		{"builds", built(before(0, 1, 3)), KindMissing, "2", High, long, long, "asleep in load"},
		{"who waits for the key is not here", foreign(before(0, 1, 3)), KindBehind, "2", High, soon, soon, ""},
		{"loops", before(0, 1, 3).spins(2), KindMissing, "2", Low, namedByStore, spin, ""},
		{"downloads", before(0, 1, 3).writes(2), KindMissing, "2", Low, long, long, ""},
		{"another one, too", before(0, 3), KindMissing, "1-2", High, namedByStore, namedByStore, "ranks 1-2 have not come"},
		{"one downloads, one sleeps", before(0, 3).writes(2), KindMissing, "1", Low, namedByStore, namedByStore,
			"the key that is waited for is that of rank 2"},
		{"one is unknown", before(0, 1, 3).without(2), KindNone, "", "", 0, 0, ""},
		{"looks for something", before(0, 1, 3).works(2, workWakes), KindMissing, "2", Low, namedByStore, long, "polling"},
		{"one waits without a word on its stack", unseen(before(0, 1, 3), 1), KindMissing, "2", High, namedByStore,
			namedByStore, "ranks 0-1,3 wait for that"},
		{"the key names nobody", keyed(before(0), "mine"), KindMissing, "1-3", Low, namedByStore, namedByStore,
			"names nobody"},
		{"the key names nobody, most wait", keyed(before(0, 1, 3), "mine"), KindMissing, "2", High, namedByStore,
			namedByStore, ""},
	})
}

func TestRankInKey(t *testing.T) {
	for key, want := range map[string]int{
		"/worker/attempt_0/default_pg/0//cpu//0/2": 2, "default_pg/0//cuda//0": 0, "default_pg/0//cuda//1": 0,
		"default_pg/0/0/rank_12": 12, "default_pg/0/0/3": 3, "default_pg/0/0": 0,
		"default_pg/0//cuda//0:1": -1, "default_pg/1//cpu//0/2": -1, "store_based_barrier_key:1": -1, "": -1,
		"default_pg/0/0/x": -1, "default_pg/0/": -1, "default_pg/0//": -1, "default_pg/0//cpu//0/-3": -1,
		"default_pg/0//cuda": -1,
	} {
		rank, ok := rankInKey(key)
		if !ok {
			rank = -1
		}
		require.Equal(t, want, rank, key)
	}
}

// Of groups that wait for each other those count that wait for nobody.
func TestGroups(t *testing.T) {
	check(t, []ruling{
		{"asleep in a subgroup", grid().wait(0, 1).at(2, inLoader(), 0, 0).wait(3, 1), KindBehind, "2", High, soon, soon,
			"rank 2"},
		{"behind in a chain", grid().chain(), KindBehind, "3", High, soon, soon, "rank 3"},
		{"a circle", grid().circle(), KindDeadlock, "0-3", Low, soon, time.Minute, "waiting for each other"},
		{"a circle, and others that wait for it", circleOfTwo(), KindDeadlock, "0-1", Low, soon, time.Minute, "ranks 0-1"},
		{"a group that does not go on", grid().deaf(), KindComm, "", High, soon, time.Minute, "ranks 0-1 hung"},
		{"two that go on no more, one after the other", twoGroups(5 * time.Second), KindComm, "", High, soon, time.Minute,
			"ranks 2-3 hung for 11 s: all of them wait in all_reduce #50 of group tp"},
		{"two that go on no more, at the same time", twoGroups(time.Second), KindComm, "", High, soon, time.Minute,
			"ranks 0-3 hung"},
		{"groups of one rank say nothing", alone(), KindComm, "", High, soon, time.Minute, "ranks 0-3 hung"},
		{"a pipeline", pipeline(), KindBehind, "0", Low, soon, soon, "rank 0"},
	})
}

// grid are four ranks with groups in two directions: tensor 0-1 and 2-3 (ids 10 and 11), data 0,2 and 1,3 (20 and 21).
func grid() *scene {
	s := newScene(2)
	tensor := []Group{{ID: 10, Name: "1", Desc: "tp", Ranks: "0-1"}, {ID: 11, Name: "2", Desc: "tp", Ranks: "2-3"}}
	data := []Group{{ID: 20, Name: "3", Desc: "dp", Ranks: "0,2"}, {ID: 21, Name: "4", Desc: "dp", Ranks: "1,3"}}
	return s.all(func(r int) {
		s.ev[r].Groups = append(s.ev[r].Groups, tensor[r/2], data[r%2])
		s.edit(r, func(_ int, x *Sample) {
			x.Page.Groups = append(x.Page.Groups, GroupState{ID: tensor[r/2].ID, Seq: 50, Since: now0 - time.Second},
				GroupState{ID: data[r%2].ID, Seq: 80, Since: now0 - 2*time.Second})
		})
	})
}

// twoGroups has only the tensor groups. All ranks wait; those of the second group began later.
func twoGroups(later time.Duration) *scene {
	s := grid()
	return s.all(func(r int) {
		s.ev[r].Groups = s.ev[r].Groups[1:2]
		s.edit(r, func(_ int, x *Sample) {
			x.Page.Groups = x.Page.Groups[1:2]
			x.Page.Groups[0].Since = now0 + time.Duration(r/2)*later
		})
	})
}

// alone: each rank has, besides the default group, one of its own, in which it was last.
func alone() *scene {
	s := newScene(2)
	return s.all(func(r int) {
		g := Group{ID: uint64(30 + r), Ranks: fmt.Sprint(r)}
		s.ev[r].Groups = append(s.ev[r].Groups, g)
		s.edit(r, func(_ int, x *Sample) {
			x.Page.Groups = append(x.Page.Groups, GroupState{ID: g.ID, Seq: 9, Since: now0 + time.Second})
		})
	})
}

// at puts a rank somewhere, behind by so much in its tensor group and its data group.
func (s *scene) at(rank int, st *Stacks, tensor, data uint64) *scene {
	s.ev[rank].Stacks = st
	return s.edit(rank, func(_ int, x *Sample) {
		g := x.Page.Groups
		g[0].Seq, g[1].Seq, g[2].Seq = g[0].Seq-1, g[1].Seq-tensor, g[2].Seq-data
		x.Proc.WChan = "hrtimer_nanosleep"
	})
}

// wait: the rank has entered a collective of its tensor (1) or data group (2), before the others in it.
func (s *scene) wait(rank, group int) *scene {
	return s.edit(rank, func(_ int, x *Sample) { x.Page.Groups[group].Seq++; x.Page.Groups[group].Since = now0 })
}

// chain: 0 waits for 1 in tensor, 1 for 3 in data, 2 for 3 in tensor; 3 sleeps. None has come to the default group.
func (s *scene) chain() *scene {
	s.wait(0, 1).wait(1, 2).wait(2, 1)
	s.ev[3].Stacks = inUser("hold")
	return s.edit(3, func(_ int, x *Sample) { x.Proc.WChan = "hrtimer_nanosleep" })
}

// circle: 0 waits for 1 in tensor, 1 for 3 in data, 3 for 2 in tensor, 2 for 0 in data.
func (s *scene) circle() *scene { return s.wait(0, 1).wait(1, 2).wait(3, 1).wait(2, 2) }

// circleOfTwo: 0 and 1 wait for each other in two groups of theirs, 2 waits for 0, and 3 for 2.
func circleOfTwo() *scene {
	s := newScene(2)
	for waits, ranks := range [][]int{{0, 1}, {0, 1}, {0, 2}, {2, 3}} {
		g := Group{ID: uint64(10 + waits), Ranks: rankset.Of(ranks...).String()}
		for _, r := range ranks {
			s.ev[r].Groups = append(s.ev[r].Groups, g)
			s.edit(r, func(_ int, x *Sample) {
				x.Page.Groups = append(x.Page.Groups, GroupState{ID: g.ID, Seq: 50, Since: now0 - time.Second})
			})
		}
		s.wait(waits, len(s.ev[waits].Groups)-1)
	}
	return s
}

// deaf: 0 and 1 are both in their tensor group's collective, and 2 and 3 wait for them in their data groups.
func (s *scene) deaf() *scene { return s.wait(0, 1).wait(1, 1).wait(2, 2).wait(3, 2) }

// pipeline: numbers do not count what goes from one rank to another. 1 waits for 0, 2 for 1, and 3 for 2.
func pipeline() *scene {
	s := newScene(2).all2(inRecv)
	s.ev[0].Stacks = inUser("hold")
	return s.edit(0, func(_ int, x *Sample) { x.Proc.WChan = "hrtimer_nanosleep" })
}

func TestWhichGroupsCount(t *testing.T) {
	m := &member{rank: 0, page: &Page{Groups: []GroupState{{ID: 1}, {ID: 2}, {ID: 3}}}, groups: []Group{
		{ID: 1, Ranks: "0"}, {ID: 2, Ranks: "0,3"}, {ID: 4, Ranks: "2-3"}}}
	groups := groupsOf(members{m}, rankset.Of(0, 2, 3))
	require.Len(t, groups, 1)
	require.EqualValues(t, 2, groups[0].ID, "one of several ranks, of which one at least is known")
}

// A group's operation is the one that most members are in.
func TestOperationOfAGroup(t *testing.T) {
	in := func(op string) *member { return &member{class: classWaiting, wait: wait{op: op}} }
	ms := members{in("all_reduce"), in(""), in("barrier"), in("barrier")}
	op, _ := (&processGroup{members: ms[:1]}).place(ms)
	require.Equal(t, "all_reduce", op)
	op, _ = (*processGroup)(nil).place(ms)
	require.Equal(t, "barrier", op)
	op, _ = (*processGroup)(nil).place(members{{class: classStopped}})
	require.Empty(t, op)
	op, _ = (*processGroup)(nil).place(members{in("")})
	require.Equal(t, "a collective", op)
}

// After the last step nobody may wait for the one that does not end.
func TestAlone(t *testing.T) {
	end := func(ranks ...int) *scene {
		s := newScene(2).all2(func() *Stacks { return inUser("close") })
		for _, r := range ranks {
			s.edit(r, func(_ int, x *Sample) { x.Proc = Proc{} })
		}
		return s
	}
	check(t, []ruling{
		{"the others have ended", end(0, 1, 3), KindAlone, "2", Low, soon, long,
			"rank 2 (node 1 gpu-01) without progress for 16 s"},
		{"nobody has", end(), KindAlone, "0-3", Low, long, long, "ranks 0-3 without progress"},
	})
}

// Names come from whoever wrote the program, and must not spoil a terminal or a log.
func TestLinesAreFitToPrint(t *testing.T) {
	s := newScene(2).behind(2, py(Frame{"a\x1b[31m\nb" + strings.Repeat("x", 500), "/job/\x00.py", 1}))
	line := s.judge().Line
	require.NotContains(t, line, "\x1b")
	require.NotContains(t, line, "\n")
	require.Less(t, len(line), 400)
	require.Contains(t, s.judge().aged(31*time.Second).Line, "hung for 31 s")
}

// From outside nobody knows what a rank has come to since its stack was read.
func TestWhoCameToRestIsNotNamedByAnOldStack(t *testing.T) {
	s := newScene(2).outside()
	s.ev[3].Stacks = inUser("train")
	require.Equal(t, "3", suspects(s.judge()))
	s.edit(3, func(i int, x *Sample) {
		if i > 0 {
			x.Proc.CPU, x.Proc.MainCPU, x.Proc.Switches = x.Proc.CPU+100e6, x.Proc.MainCPU+100e6, x.Proc.Switches+9
		}
	})
	require.Equal(t, KindNone, s.judge().Kind)
}

// Who sees only a part of the ranks does not blame the network alone, and is never sure.
func TestRanksElsewhere(t *testing.T) {
	judge := func(s *scene) Verdict {
		s.world.Elsewhere = 4
		return Judge(s.world, slices.Values(s.ev), s.store)
	}
	all := newScene(1)
	v := judge(all)
	require.Equal(t, KindComm, v.Kind)
	require.Equal(t, Low, v.Confidence)
	require.Contains(t, v.Line, "ranks 0-1 hung for 16 s: all of them wait in all_reduce #246; a rank elsewhere, "+
		"the network, a device or a library is stuck (uncertain: nothing is known of 4 ranks elsewhere)")

	v = judge(newScene(2).behind(2, inUser("spin")).spins(2))
	require.Contains(t, v.Line, "(uncertain: it may be at work, and nothing is known of 4 ranks elsewhere)")
	v = judge(newScene(2).behind(1, inLoader()).outside())
	require.Equal(t, "1", v.SuspectRanks().String())
	require.Contains(t, v.Line, "nothing is known of 4 ranks elsewhere")
	require.False(t, v.Certain)
	require.Equal(t, v.Line, v.aged(v.Age).Line)
}
