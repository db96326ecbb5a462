package hang

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const pip = "/root/venv/lib/python3.11/site-packages/"

func TestPhases(t *testing.T) {
	for _, c := range []struct {
		fn, file string
		want     Phase
	}{
		{"save", pip + "torch/serialization.py", PhaseCheckpoint},
		{"save_state_dict", pip + "torch/distributed/checkpoint/state_dict_saver.py", PhaseCheckpoint},
		{"_save_checkpoint", pip + "transformers/trainer.py", PhaseCheckpoint},
		{"save_checkpoint", "/job/train.py", PhaseCheckpoint},
		{"write_ckpt", "/job/train.py", PhaseCheckpoint},
		{"checkpoint", "/job/train.py", PhaseCheckpoint},
		{"dump_weights", "/job/train.py", PhaseCheckpoint},
		{"push_to_hub", pip + "transformers/trainer.py", PhaseCheckpoint},
		{"checkpoint", pip + "torch/utils/checkpoint.py", PhaseUnknown},
		{"checkpoint", "/workspace/Megatron-LM/megatron/core/tensor_parallel/random.py", PhaseUnknown},
		{"_checkpointed_forward", "/workspace/Megatron-LM/megatron/core/transformer/transformer_block.py", PhaseUnknown},
		{"evaluate", "/job/train.py", PhaseEval},
		{"evaluate", pip + "transformers/trainer.py", PhaseEval},
		{"run_validation", "/job/train.py", PhaseEval},
		{"eval_epoch", "/job/train.py", PhaseEval},
		{"evaluation_loop", pip + "transformers/trainer.py", PhaseEval},
		{"run", pip + "lightning/pytorch/loops/evaluation_loop.py", PhaseEval},
		{"eval", pip + "torch/nn/modules/module.py", PhaseUnknown},
		{"validate", pip + "torch/distributed/tensor/placement_types.py", PhaseUnknown},
		{"test", pip + "pandas/core.py", PhaseUnknown},
		{"test", "/job/train.py", PhaseEval},
		{"save", pip + "PIL/Image.py", PhaseUnknown},
		{"save", "/job/train.py", PhaseCheckpoint},
		{"snapshot", pip + "wandb/sdk.py", PhaseUnknown},
		{"dump", "/usr/lib/python3.11/json/__init__.py", PhaseUnknown},
		{"_fn", pip + "torch/_dynamo/eval_frame.py", PhaseUnknown},
		{"validate_args", "/job/train.py", PhaseUnknown},
		{"_compile", pip + "torch/_dynamo/convert_frame.py", PhaseCompile},
		{"compile_fx_inner", pip + "torch/_inductor/compile_fx.py", PhaseCompile},
		{"__call__", pip + "torch/_inductor/output_code.py", PhaseUnknown},
		{"compile", pip + "triton/compiler/compiler.py", PhaseCompile},
		{"load", pip + "torch/utils/cpp_extension.py", PhaseBuild},
		{"jit_load", pip + "deepspeed/ops/op_builder/builder.py", PhaseBuild},
		{"_try_get_data", pip + "torch/utils/data/dataloader.py", PhaseData},
		{"init_process_group", pip + "torch/distributed/distributed_c10d.py", PhaseInit},
		{"_shutdown", "/usr/lib/python3.11/threading.py", PhaseEnd},
		{"train", "/job/train.py", PhaseUnknown},
		{"", "", PhaseUnknown},
	} {
		got := phaseOf(*py(Frame{c.fn, c.file, 1}, Frame{"main", "/job/main.py", 1}))
		require.Equal(t, c.want.String(), got.String(), "%s in %s", c.fn, c.file)
	}
}

// The innermost phase counts, and another thread's only where the main thread has none.
func TestPhaseOfSeveral(t *testing.T) {
	s := py(Frame{"__next__", pip + "torch/utils/data/dataloader.py", 1}, Frame{"evaluate", "/job/train.py", 1})
	require.Equal(t, PhaseData, phaseOf(*s))

	saver := Thread{Python: []Frame{{"save_checkpoint", "/job/async.py", 1}}}
	s.Threads = append(s.Threads, saver)
	require.Equal(t, PhaseData, phaseOf(*s))
	require.Equal(t, PhaseCheckpoint, phaseOf(Stacks{Threads: []Thread{*inUser("wait").Main(), saver}}))
	loader := Thread{Python: []Frame{{"_pin_memory_loop", pip + "torch/utils/data/_utils/pin_memory.py", 1}}}
	require.Equal(t, PhaseUnknown, phaseOf(Stacks{Threads: []Thread{*inUser("f").Main(), loader}}), "that is always there")
	require.Equal(t, PhaseUnknown, phaseOf(Stacks{}))
	require.Equal(t, "unknown", Phase(200).String())
}

// Stacks of PyTorch 1.13 and 2.15 as they are while a rank waits.
func TestWhatAThreadWaitsIn(t *testing.T) {
	const old, c2 = "/usr/lib/python3/dist-packages/torch/", pip + "torch/distributed/distributed_c10d.py"
	const c1, wrap = old + "distributed/distributed_c10d.py", pip + "torch/distributed/c10d_logger.py"
	user := Frame{"<module>", "/job/train.py", 19}
	for _, c := range []struct {
		op     string
		frames []Frame
	}{
		{"all_reduce", []Frame{{"all_reduce", c1, 1541}, user}},
		{"all_reduce", []Frame{{"all_reduce", c2, 4181}, {"wrapper", wrap, 83}, user}},
		{"broadcast", []Frame{{"broadcast", c2, 4055}, {"wrapper", wrap, 83}, {"broadcast_object_list", c2, 5019}, user}},
		{"barrier", []Frame{{"barrier", c1, 3152}, user}},
		{"recv", []Frame{{"recv", c1, 1202}, user}},
		{"backward", []Frame{{"backward", old + "autograd/__init__.py", 197}, {"backward", old + "_tensor.py", 488}, user}},
		{"backward", []Frame{{"_engine_run_backward", pip + "torch/autograd/graph.py", 800}, user}},
		{"init_process_group", []Frame{{"_create_gloo_process_group", c2, 757}, {"_new_process_group_helper", c2, 3121},
			{"init_process_group", c2, 2721}, {"wrapper", wrap, 97}, user}},
		{"init_process_group", []Frame{{"_create_c10d_store", old + "distributed/rendezvous.py", 177},
			{"_env_rendezvous_handler", old + "distributed/rendezvous.py", 246}, {"init_process_group", c1, 754}, user}},
		{"backward", []Frame{{"grad", old + "autograd/__init__.py", 300}, user}},
		{"", []Frame{{"set_grad_enabled", old + "autograd/__init__.py", 1}, user}},
		{"", []Frame{{"backward", "/job/train.py", 1}, user}},
		{onDevice, []Frame{{"synchronize", old + "cuda/__init__.py", 1162}, user}},
		{onDevice, []Frame{{"wait", pip + "torch/cuda/streams.py", 30}, user}},
		{"", []Frame{{"empty_cache", old + "cuda/memory.py", 1}, user}},
		{"new_group", []Frame{{"_new_process_group_helper", c1, 862}, {"new_group", c1, 3335}, user}},
		{"", []Frame{{"select", "/usr/lib/python3.11/selectors.py", 415},
			{"_try_get_data", old + "utils/data/dataloader.py", 1120}, user}},
		{"", []Frame{{"hook", "/job/train.py", 3}, {"backward", old + "autograd/__init__.py", 197}, user}},
		{"", []Frame{{"forward", old + "nn/parallel/distributed.py", 1040}, user}},
		{"", []Frame{{"_check_single_tensor", c2, 1}, {"all_reduce", "/job/train.py", 3}, user}},
		{"a collective", []Frame{{"wait", pip + "torch/distributed/_functional_collectives.py", 1}, user}},
		{"a collective", []Frame{{"wait_tensor", pip + "torch/distributed/_functional_collectives.py", 1}, user}},
		{"", []Frame{{"prefetch", pip + "torch/distributed/fsdp/_runtime_utils.py", 1}, user, {"barrier", c1, 3152}}},
		{"", []Frame{user}},
		{"", nil},
	} {
		w, sure := waitOf(py(c.frames...))
		require.Equal(t, c.op, w.op, "%v", c.frames)
		require.Equal(t, c.op != "", sure)
		require.Equal(t, c.op != "", py(c.frames...).Waits())
	}
}

// The main thread may be at work for another one that waits. That of a process without Python waits for nothing.
func TestAThreadThatWaitsIsNotTheMainOne(t *testing.T) {
	s := inUser("train")
	s.Threads = append(s.Threads, Thread{Native: []Frame{{Func: "c10d::TCPStore::get"}}}, *inAllGather().Main())
	w, sure := waitOf(s)
	require.Equal(t, "all_gather", w.op)
	require.False(t, sure)
	require.False(t, s.Waits())
	_, sure = waitOf(&Stacks{})
	require.False(t, sure)
}

// What is called by the interpreter is on Python's stack.
func TestWhatNativeCodeWaitsIn(t *testing.T) {
	eval, store := Frame{Func: "_PyEval_EvalFrameDefault"}, Frame{Func: "c10d::TCPStore::get"}
	for want, frames := range map[wait][]Frame{
		{op: "init_process_group", store: true}: {{Func: "poll"}, store, eval},
		{op: "a collective"}:                    {{File: "/x/libnccl.so.2"}, {File: "/usr/lib/libpython3.11.so.1.0"}},
		{op: onDevice}:                          {{File: "/usr/lib/libcuda.so.1"}},
		{}:                                      {{Func: "poll"}, eval, store},
	} {
		require.Equal(t, want, waitOfThread(&Thread{Native: frames}))
	}
}

func TestFilesThatAreNotTheUsersOwn(t *testing.T) {
	for file, want := range map[string]bool{
		"<frozen importlib._bootstrap>": true, pip + "x.py": true, "/usr/lib/python3/dist-packages/x.py": true,
		"/usr/lib/python3.11/json/__init__.py": true, "/dev/shm/_dlrover_hang/hooks.py": true,
		"/job/train.py": false, "": false,
	} {
		require.Equal(t, want, inLibrary(file), file)
	}
}

// The stack knows better than a page what a training or an evaluation does; all else the page knows better.
func TestPhaseOfPageAndStack(t *testing.T) {
	for _, c := range []struct{ page, stack, want Phase }{
		{PhaseUnknown, PhaseData, PhaseData}, {PhaseTrain, PhaseData, PhaseData}, {PhaseEval, PhaseData, PhaseData},
		{PhaseTrain, PhaseUnknown, PhaseTrain}, {PhaseCheckpoint, PhaseData, PhaseCheckpoint},
		{PhaseInit, PhaseData, PhaseInit}, {PhaseInit, PhaseCompile, PhaseCompile},
	} {
		m := member{phase: c.page}
		m.read(reading{phase: c.stack})
		require.Equal(t, c.want.String(), m.phase.String(), "%s, %s", c.page, c.stack)
	}
}
