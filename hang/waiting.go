package hang

import (
	"slices"
	"strings"
)

// A wait is the operation that a thread waits in, as far as its stack shows it.
type wait struct {
	op    string // such as all_reduce, backward; "" if it does not wait
	store bool   // for a key of the workers' store, as init_process_group does
	p2p   bool   // for one other rank, not for all of a group
	named bool   // op was called by this name, and is no p2p: two that differ are different collectives
}

// onDevice is the operation of a thread that waits for its device, which may be in a collective. CUDA lets it spin.
const onDevice = "a synchronization with its device"

// Functions of PyTorch in which a thread waits although their file is not below torch/distributed.
var autograd = []string{"torch/autograd/__init__.py", "torch/autograd/graph.py"}

// Operations by which ranks meet, by the name of torch.distributed's function.
var collectives = []string{
	"all_gather", "all_gather_coalesced", "all_gather_into_tensor", "_all_gather_base", "all_gather_object",
	"all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast",
	"broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter",
	"reduce_scatter_tensor", "_reduce_scatter_base", "scatter", "scatter_object_list",
}

var p2pOps = []string{"recv", "send", "irecv", "isend", "batch_isend_irecv", "recv_object_list", "send_object_list"}

// Functions that wait for keys of the store.
var storeOps = []string{
	"init_process_group", "_new_process_group_helper", "_create_gloo_process_group", "_store_based_barrier", "new_group",
	"_new_group_with_tag", "_create_c10d_store", "_env_rendezvous_handler", "rendezvous", "split_group",
}

// waitOf returns the operation that a process waits in, and whether it is certain that its main thread does. A main
// thread in its user's code may be at work for the thread that waits.
func waitOf(s *Stacks) (w wait, sure bool) {
	main := s.Main()
	if main == nil {
		return wait{}, false
	}
	if w := waitOfThread(main); w.op != "" {
		return w, true
	}
	for i := range s.Threads {
		if w := waitOfThread(&s.Threads[i]); w.op != "" && len(s.Threads[i].Python) > 0 {
			return w, false
		}
	}
	return wait{}, false
}

// waitOfThread uses the innermost wait of the thread: below a collective may be the user's code, as hooks are.
func waitOfThread(t *Thread) wait {
	if w := waitOfPython(t.Python); w.op != "" {
		return w
	}
	return waitOfNative(t.Native)
}

func waitOfPython(frames []Frame) wait {
	if len(frames) == 0 {
		return wait{}
	}
	switch f := frames[0]; {
	case isFile(f, autograd...) && (f.Func == "backward" || f.Func == "grad" || f.Func == "_engine_run_backward"):
		return wait{op: "backward"}
	case strings.Contains(f.File, "torch/cuda/") && (f.Func == "synchronize" || f.Func == "wait"):
		return wait{op: onDevice}
	case strings.Contains(f.File, "torch/distributed/"):
		return waitOfDistributed(frames)
	}
	return wait{}
}

// waitOfDistributed names the innermost operation that is one of torch.distributed's own.
func waitOfDistributed(frames []Frame) wait {
	for _, f := range frames {
		op := strings.TrimPrefix(f.Func, "_")
		switch known := isFile(f, "distributed_c10d.py", "rendezvous.py"); {
		case known && slices.Contains(storeOps, f.Func):
			return wait{op: storeOp(frames), store: true}
		case known && slices.Contains(p2pOps, f.Func):
			return wait{op: f.Func, p2p: true}
		case known && slices.Contains(collectives, f.Func):
			return wait{op: op, named: true}
		}
		if !strings.Contains(f.File, "torch/distributed/") {
			break
		}
	}
	if frames[0].Func == "wait" || strings.HasPrefix(frames[0].Func, "wait_") {
		return wait{op: "a collective"}
	}
	return wait{}
}

// storeOp names the object that is made with the help of the store.
func storeOp(frames []Frame) string {
	if slices.ContainsFunc(frames, func(f Frame) bool { return f.Func == "new_group" }) {
		return "new_group"
	}
	return "init_process_group"
}

func isFile(f Frame, suffixes ...string) bool {
	return slices.ContainsFunc(suffixes, func(s string) bool { return strings.HasSuffix(f.File, s) })
}

// Native functions and libraries in which a thread waits for other ranks, and their names in reports.
var natives = []struct{ fn, lib, op string }{
	{fn: "Reducer::finalize_backward", op: "backward"},
	{fn: "c10d::TCPStore", op: "init_process_group"},
	{fn: "c10d::", op: "a collective"},
	{fn: "gloo::", op: "a collective"},
	{fn: "nccl", op: "a collective"},
	{lib: "libnccl", op: "a collective"},
	{fn: "cudaStreamSynchronize", op: onDevice},
	{fn: "cudaEventSynchronize", op: onDevice},
	{fn: "cudaDeviceSynchronize", op: onDevice},
	{lib: "libcuda.so", op: onDevice},
}

// waitOfNative looks no further than the interpreter: its caller is on the stack of Python. A frame that was found by
// a search may be left over from calls that have ended.
func waitOfNative(frames []Frame) wait {
	for _, f := range frames {
		if isInterpreter(f) {
			break
		}
		for _, n := range natives {
			if n.fn != "" && strings.Contains(f.Func, n.fn) || n.lib != "" && strings.Contains(f.File, n.lib) {
				return wait{op: n.op, store: n.op == "init_process_group"}
			}
		}
	}
	return wait{}
}

func isInterpreter(f Frame) bool {
	base := f.File[strings.LastIndexByte(f.File, '/')+1:]
	return strings.HasPrefix(base, "python") || strings.HasPrefix(base, "libpython") || strings.HasPrefix(f.Func,
		"_PyEval")
}
