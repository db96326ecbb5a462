package hang

import (
	"regexp"
	"strings"
	"sync/atomic"
)

// String names the phase, as in metrics and reports.
func (p Phase) String() string {
	names := [phases]string{"unknown", "train", "init", "data", "compile", "build", "eval", "checkpoint", "end",
		"debug"}
	if p >= phases {
		return names[PhaseUnknown]
	}
	return names[p]
}

// lasting phases may take their time also while nothing is seen to happen: storage and compilers are elsewhere.
func (p Phase) lasting() bool {
	return p == PhaseCompile || p == PhaseBuild || p == PhaseEval || p == PhaseCheckpoint
}

// phaseOf is the phase by the names on the stacks, PhaseUnknown without one. The innermost name of the main thread
// counts. Without one another thread's does, if the main thread may well wait for its work.
func phaseOf(s Stacks) Phase {
	main := s.Main()
	if main != nil {
		if p := phaseOfThread(main); p != PhaseUnknown {
			return p
		}
	}
	for i := range s.Threads {
		if t := &s.Threads[i]; t != main {
			if p := phaseOfThread(t); p.lasting() && p != PhaseEval {
				return p
			}
		}
	}
	return PhaseUnknown
}

func phaseOfThread(t *Thread) Phase {
	for _, f := range t.Python {
		if p := phaseOfFrame(f); p != PhaseUnknown {
			return p
		}
	}
	return PhaseUnknown
}

// A sign of a phase is a function, or any function of a file. An empty file or a nil function is any.
type sign struct {
	phase Phase
	file  string // a part of the path
	fn    *regexp.Regexp
	own   bool           // only code that is in no library: the word means other things there
	not   *regexp.Regexp // and not in these files
}

func words(expr string) *regexp.Regexp { return regexp.MustCompile(`(?i)^(?:` + expr + `)$`) }

// recompute matches files with checkpoints of activations that are not kept.
func recompute() *regexp.Regexp {
	return regexp.MustCompile(`(?i)activation|recompute|random\.py$|utils/checkpoint\.py$|/checkpointing\.py$`)
}

// compiled are the signs, from their first use on: most launchers never need them. The first caller makes them; two
// callers may do so at the same time.
var compiled atomic.Pointer[[]sign]

func signs() []sign {
	if s := compiled.Load(); s != nil {
		return *s
	}
	s := makeSigns()
	compiled.Store(&s)
	return s
}

// makeSigns returns the signs of phases, in the order of the search. Compilers leave their own functions on the stack
// also while compiled code runs, and checkpointing of activations is not a checkpoint: these must not match.
func makeSigns() []sign {
	return []sign{
		{phase: PhaseCompile, file: "torch/_dynamo/convert_frame.py"},
		{phase: PhaseCompile, file: "torch/_inductor/graph.py"},
		{phase: PhaseCompile, file: "torch/_inductor/compile_fx.py", fn: words(`.*compile.*`)},
		{phase: PhaseCompile, file: "torch/_inductor/", fn: words(`autotune_to_one_config|benchmark_all_configs`)},
		{phase: PhaseCompile, file: "triton/compiler/"},
		{phase: PhaseCompile, file: "triton/runtime/autotuner.py", fn: words(`_bench|benchmark`)},
		{phase: PhaseBuild, file: "torch/utils/cpp_extension.py"},
		{phase: PhaseBuild, file: "deepspeed/ops/op_builder/"},
		{phase: PhaseCheckpoint, file: "torch/serialization.py"},
		{phase: PhaseCheckpoint, file: "torch/distributed/checkpoint/"},
		{phase: PhaseCheckpoint, file: "safetensors/"},
		{phase: PhaseCheckpoint,
			fn: words(`.*(save|load|write|read|restore|resume|persist|upload).*(checkpoint|ckpt|snapshot).*`)},
		{phase: PhaseCheckpoint, fn: words(`.*(checkpoint|ckpt|snapshot).*(save|load|write|restore|persist|upload).*`)},
		{phase: PhaseCheckpoint, fn: words(`_?save(_model|_pretrained|_state|_state_dict|_all)?|do_checkpoint`), own: true},
		{phase: PhaseCheckpoint, fn: words(`_?(checkpoint|ckpt|snapshot)`), own: true, not: recompute()},
		{phase: PhaseCheckpoint, fn: words(`(dump|export|backup|archive|upload|persist)(_.*)?|push_to_.*`), own: true},
		{phase: PhaseCheckpoint, fn: words(`push_to_hub|upload_(file|folder)`)},
		{phase: PhaseCheckpoint, fn: words(`save_(model|pretrained|state)`)},
		{phase: PhaseData, file: "torch/utils/data/"},
		{phase: PhaseData, file: "webdataset/"},
		{phase: PhaseInit, fn: words(`init_process_group|_new_process_group_helper|new_group|init_device_mesh`)},
		{phase: PhaseInit, file: "torch/distributed/rendezvous.py"},
		{phase: PhaseEnd, file: "threading.py", fn: words(`_shutdown`)},
		{phase: PhaseEnd, file: "multiprocessing/util.py", fn: words(`_exit_function`)},
		{phase: PhaseDebug, file: "/pdb.py"},
		{phase: PhaseDebug, file: "/bdb.py"},
		{phase: PhaseDebug, file: "/debugpy/"},
		{phase: PhaseDebug, file: "/IPython/terminal/"},
		{phase: PhaseEval, fn: words(`_?(evaluate|evaluation|validate|validation|predict|prediction)(_(loop|step|epoch|` +
			`model|all|set))?`)},
		{phase: PhaseEval, file: "evaluation_loop.py"},
		{phase: PhaseEval, fn: words(`eval|test|generate|inference|infer`), own: true},
		{phase: PhaseEval, fn: words(`(do|run|start|maybe|final|periodic)_(eval|evaluate|evaluation|validate|validation|` +
			`test)(_.*)?`)},
		{phase: PhaseEval, fn: words(`(eval|validate|val|validation|evaluate|test)_(loop|step|epoch|model|one_epoch|on_.*|` +
			`rank.*)`)},
	}
}

// phaseOfFrame uses the first sign that matches; PyTorch's own functions are recognized by their files alone.
func phaseOfFrame(f Frame) Phase {
	torch := strings.Contains(f.File, "/torch/")
	all := signs()
	for i := range all {
		s := &all[i]
		named := s.file == "" && (torch && s.phase != PhaseInit || s.own && inLibrary(f.File))
		if s.not != nil && s.not.MatchString(f.File) {
			continue
		}
		if !named && strings.Contains(f.File, s.file) && (s.fn == nil || s.fn.MatchString(f.Func)) {
			return s.phase
		}
	}
	return PhaseUnknown
}
