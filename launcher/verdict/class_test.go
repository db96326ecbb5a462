package verdict

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// trace is the output of a worker that an exception has ended.
func trace(err string) string {
	return "step 3\nTraceback (most recent call last):\n  File \"t.py\", line 1, in <module>\n    f()\n" + err + "\n"
}

// sharing is the end of the traceback of a worker that was to get a tensor from a process of its own, or what it looks
// like if that was no tensor.
func sharing(module, err string) string {
	const lib = "[rank0]:   File \"/usr/lib/python3.14/multiprocessing/"
	return "[rank0]: Traceback (most recent call last):\n" +
		"[rank0]:   File \"/x/torch/multiprocessing/reductions.py\", line 543, in rebuild_storage_fd\n" +
		"[rank0]:     fd = df.detach()\n" + lib + module + ".py\", line 86, in get_connection\n" +
		"[rank0]:     c = Client(address, authkey=process.current_process().authkey)\n" +
		lib + "connection.py\", line 417, in _recv\n[rank0]:     chunk = read(handle, to_read)\n[rank0]: " + err + "\n"
}

const reset = "ConnectionResetError: [Errno 104] Connection reset by peer"

func TestClass(t *testing.T) {
	timed := exit(0, -9, 1)
	timed.Timer = "timer expired"
	fromFile := raised(exit(0, 1, 1), "RuntimeError: step 3 failed", 1)
	fromFile.Traceback = trace("OSError: [Errno 28] No space left on device") +
		"\nThe above exception was the direct cause of the following exception:\n\n" + trace("RuntimeError: step 3 failed")
	unrelated := fromFile
	unrelated.Traceback = trace("OSError: [Errno 28] No space left on device") + trace("RuntimeError: step 3 failed")
	for _, tt := range []struct {
		name string
		f    Failure
		want Class
	}{
		{"killed by the kernel", oomKilled(exit(0, -9, 1)), OOMKernel},
		{"a child killed by the kernel", oomKilled(said(exit(0, 1, 1), trace("RuntimeError: x"))), OOMKernel},
		{"a timer", timed, Hang},
		{"SIGSEGV", exit(0, -11, 1), Segfault},
		{"a signal before what was said", said(exit(0, -11, 1), trace("ValueError: x")), Segfault},
		{"SIGBUS", exit(0, -7, 1), SIGBUSShm},
		{"SIGILL", exit(0, -4, 1), IllegalInstruction},
		{"SIGFPE", exit(0, -8, 1), IllegalInstruction},
		{"SIGTRAP", exit(0, -5, 1), IllegalInstruction},
		{"SIGINT", exit(0, -2, 1), Interrupted},
		{"SIGKILL", exit(0, -9, 1), Killed},
		{"a signal without a name", exit(0, -35, 1), Killed},
		{"SIGABRT", exit(0, -6, 1), Abort},
		{"a C++ exception", said(exit(0, -6, 1), "terminate called after\n  what():  bad vocabulary\n"), Abort},
		{"a C++ exception with a class", said(exit(0, -6, 1), "  what():  std::bad_alloc\n"), OOMPython},
		{"assert in C", said(exit(0, -6, 1), "t: t.cc:3: void f(int): Assertion `n > 0' failed.\n"), Assertion},
		{"nothing said", exit(0, 1, 1), Unknown},
		{"something said", said(exit(0, 3, 1), "the data set is empty"), Unknown},
		{"stopped without a word", stopped(exit(0, -15, 1)), Unknown},
		{"stopped by SIGKILL, without a word", stopped(exit(0, -9, 1)), Unknown},
		{"stopped after an error", stopped(said(exit(0, -15, 1), trace("ValueError: x"))), UserException},
		{"stopped after an error with a class", stopped(said(exit(0, -15, 1), trace("MemoryError"))), OOMPython},
		{"an exception", said(exit(0, 1, 1), trace("ValueError: x")), UserException},
		{"what it came of", fromFile, DiskFull},
		{"what it did not come of", unrelated, UserException},
		{"printed and survived", said(exit(0, 1, 1), "s3: Connection reset by peer, retrying\n"+trace("ValueError: x")),
			UserException},
		{"long survived",
			said(exit(0, 3, 1), "OSError: [Errno 28] No space left on device\ngoing on\n1\n2\n3\n4\n"), Unknown},
		{"argparse", said(exit(0, 2, 1), "usage: t.py [-h] --lr LR\nt.py: error: argument --lr\n"), UsageError},
		{"not argparse", said(exit(0, 1, 1), "usage: t.py [-h] --lr LR\nt.py: error: argument --lr\n"), Unknown},
		{"exit code 2 alone", said(exit(0, 2, 1), "error: nothing to do\n"), Unknown},
		{"usage alone", said(exit(0, 2, 1), "usage: t.py\n"), Unknown},
		{"no script", said(exit(0, 2, 1), "python3: can't open file '/x.py': [Errno 2] No such file or directory\n"),
			FileNotFound},
		{"no module", said(exit(0, 1, 1), "/usr/bin/python3: No module named train\n"), ImportError},
		{"a syntax error", said(exit(0, 1, 1), "  File \"t.py\", line 1\n    f(\n     ^\nSyntaxError: never closed\n"),
			ImportError},
		{"no library", said(exit(0, 1, 1), trace("OSError: libx.so.9: cannot open shared object file: No such file or "+
			"directory")), ImportError},
		{"CUDA's memory", said(exit(0, 1, 1), trace("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate")),
			OOMDevice},
		{"CUDA's error", said(exit(0, 1, 1), trace("RuntimeError: CUDA error: unspecified launch failure")),
			DeviceError},
		{"an ECC error", said(exit(0, 1, 1), trace("RuntimeError: CUDA error: uncorrectable ECC error encountered")),
			Hardware},
		{"an ECC error in a C++ thread", said(exit(0, -6, 1), "  what():  CUDA error: uncorrectable ECC error\n"),
			Hardware},
		{"an Xid and nothing else", said(exit(0, 1, 1), "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the "+
			"bus.\n1\n2\n3\n4\n5\n"), Hardware},
		{"an Xid and SIGSEGV", said(exit(0, -11, 1), "Xid 48\n"), Hardware},
		{"an Xid and SIGKILL", said(exit(0, -9, 1), "Xid 48\n"), Killed},
		{"an Xid and CUDA's error", said(exit(0, 1, 1), "NVRM: Xid (PCI:0000:3b:00): 95, pid=7\n"+
			trace("RuntimeError: CUDA error: unspecified launch failure")), Hardware},
		{"an Xid and an exception", said(exit(0, 1, 1), "Xid: 79\n"+trace("ValueError: x")), UserException},
		{"a program's Xid", said(exit(0, 1, 1), "NVRM: Xid (PCI:0000:3b:00): 31, pid=7\n"), Unknown},
		{"a lost GPU", said(exit(0, 1, 1), "Unable to determine the device handle for GPU 0000:3B:00.0: GPU is lost.\n"),
			Hardware},
		{"NCCL", said(exit(0, 1, 1), trace("DistBackendError: NCCL error in: x, unhandled system error")), NCCLError},
		{"NCCL's peer", raised(exit(0, 1, 1), "DistBackendError: NCCL error in: x, remote process exited or there was a "+
			"network error", 1), PeerLost},
		{"a collective", said(exit(0, 1, 1), trace("RuntimeError: Timed out waiting 3000ms for recv operation to complete")),
			CollectiveTimeout},
		{"a store", said(exit(0, 1, 1), trace("torch.distributed.DistStoreError: wait timeout after 3000ms, keys: /a")),
			StoreTimeout},
		{"a loader", said(exit(0, 1, 1), trace("RuntimeError: DataLoader worker (pid 1) is killed by signal: Killed. ")),
			DataLoader},
		{"a loader that timed out", said(exit(0, 1, 1), trace("RuntimeError: DataLoader timed out after 1 seconds")),
			DataLoader},
		{"a loader and /dev/shm", said(exit(0, 1, 1), "ERROR: Unexpected bus error encountered in worker. This might be "+
			"caused by insufficient shared memory (shm).\n"+trace("RuntimeError: DataLoader worker (pid 1) exited")),
			SIGBUSShm},
		{"an error in a loader", said(exit(0, 1, 1), trace("ValueError: Caught ValueError in DataLoader worker process 0.\n"+
			"Original Traceback (most recent call last):\n  x\nValueError: cannot decode")), DataLoader},
		{"a file missing in a loader", said(exit(0, 1, 1), trace("FileNotFoundError: Caught FileNotFoundError in DataLoader "+
			"worker process 0.\nOriginal Traceback (most recent call last):\n  x\nFileNotFoundError: [Errno 2] x")),
			FileNotFound},
		{"a loader that is none of its children", said(exit(0, 1, 1), sharing("resource_sharer", reset)),
			DataLoader},
		{"the same of an older socket", said(exit(0, 1, 1), sharing("resource_sharer",
			"FileNotFoundError: [Errno 2] No such file or directory")), DataLoader},
		{"a manager elsewhere", said(exit(0, 1, 1), sharing("managers", reset)), PeerLost},
		{"a spawned process", said(exit(0, 1, 1), trace("ProcessExitedException: process 0 terminated with signal SIGSEGV")),
			Segfault},
		{"KeyboardInterrupt", said(exit(0, 1, 1), trace("KeyboardInterrupt")), Interrupted},
		{"no permission", said(exit(0, 1, 1), trace("PermissionError: [Errno 13] Permission denied: '/x'")),
			Permission},
		{"a port", said(exit(0, 1, 1), trace("OSError: [Errno 98] Address already in use")), AddressInUse},
		{"assert", said(exit(0, 1, 1), trace("AssertionError")), Assertion},
	} {
		t.Run(tt.name, func(t *testing.T) {
			require.Equal(t, tt.want, tt.f.Class())
			v := Judge(Evidence{Failures: []Failure{tt.f}})
			if !tt.f.Stopped {
				require.Equal(t, tt.want, v.Class)
			}
		})
	}
}

// A worker that was stopped in its teardown is the cause if it has told so and the others were its victims.
func TestJudgeBelievesTheOutputOfAStoppedWorker(t *testing.T) {
	victim := raised(exit(0, 1, 1), peerGone, 1)
	slow := stopped(said(exit(1, -15, 31), trace("ValueError: a")))
	all := func(fs ...Failure) Evidence { return Evidence{Failures: fs} }

	v := Judge(all(victim, slow))
	require.Equal(t, FirstExit, v.Rule)
	require.Equal(t, [2]any{1, UserException}, [2]any{v.Root.Rank, v.Class})

	require.Equal(t, 2, Judge(all(victim, slow, exit(2, -11, 2))).Root.Rank, "another failure comes first")
	require.Nil(t, Judge(all(slow)).Root, "all were stopped")
	e := all(victim, slow)
	e.Losses = []Loss{lossOf(4, 16)}
	require.Equal(t, NodeLost, Judge(e).Rule, "what has no date yields to a loss")

	later := raised(slow, "ValueError: a", 20)
	require.Equal(t, 0, Judge(all(victim, later)).Root.Rank, "its error file says that it failed afterwards")
	for _, reaction := range []string{"KeyboardInterrupt", "SystemExit: 15", peerGone,
		"RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly",
		"torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15"} {
		f := stopped(said(exit(1, 1, 3), trace(reaction)))
		require.Equal(t, 0, Judge(all(victim, f)).Root.Rank, reaction)
		require.False(t, f.Explains(), reaction)
	}
	require.False(t, stopped(said(exit(1, 1, 3), sharing("resource_sharer",
		"ConnectionRefusedError: [Errno 111] Connection refused"))).Explains(), "its loader was stopped, too")
	paddle := "--------------------------------------\nC++ Traceback (most recent call last):\n" +
		"--------------------------------------\nNo stack trace in paddle, may be caused by external reasons.\n\n" +
		"----------------------\nError Message Summary:\n----------------------\nFatalError: `Termination signal` is " +
		"detected by the operating system.\n  [TimeInfo: *** Aborted at 1700000000 ***]\n" +
		"  [SignalInfo: *** SIGTERM (@0x1) received by PID 7 ***]\n"
	require.False(t, stopped(said(exit(1, -15, 3), paddle)).Explains())
	gone := stopped(said(exit(1, -15, 3), trace("ValueError: a")+"going on\n1\n2\n3\n4\n5\n"))
	require.False(t, gone.Explains(), "it went on")
	more := stopped(said(exit(1, -15, 3), trace("torch.AcceleratorError: CUDA error: x\nCUDA kernel errors\n1\n2")))
	require.True(t, more.Explains(), "a message of several lines")
	group := "  + Exception Group Traceback (most recent call last):\n  |   File \"a.py\", line 1, in f\n" +
		"  | ExceptionGroup: two (2 sub-exceptions)\n  +-+---- 1 ----\n    | Traceback (most recent call last):\n" +
		"    |   File \"a.py\", line 1, in g\n    |   File \"a.py\", line 1, in h\n    | ValueError: bad batch\n" +
		"    +---- 2 ----\n    | OSError: x\n    +----\n"
	require.True(t, stopped(said(exit(1, -15, 3), group)).Explains(), "exceptions of a group")
	require.True(t, later.Explains())
	require.False(t, stopped(exit(1, -15, 3)).Explains())
}

func TestLostChild(t *testing.T) {
	for text, want := range map[string]bool{
		"RuntimeError: DataLoader worker (pid 1) is killed by signal: Killed. ":    true,
		"RuntimeError: DataLoader worker (pid(s) 1) exited unexpectedly":           true,
		"ProcessExitedException: process 0 terminated with signal SIGKILL":         true,
		"RuntimeError: DataLoader worker (pid 1) is killed by signal: Terminated.": false,
		"ValueError: x": false,
	} {
		require.Equal(t, want, said(exit(0, 1, 1), trace(text)).LostChild(), text)
		require.Equal(t, want, raised(exit(0, 1, 1), text, 1).LostChild(), text)
	}
	lost, other := said(exit(0, 1, 2), sharing("resource_sharer", reset)), said(exit(0, 1, 2), sharing("managers", reset))
	require.True(t, lost.LostChild())
	require.False(t, other.LostChild())
	victim := raised(exit(1, 1, 1), peerGone, 1)
	require.Equal(t, 0, Judge(Evidence{Failures: []Failure{victim, lost}}).Root.Rank)
}

func TestJudgeOfAHang(t *testing.T) {
	v := Judge(Evidence{Failures: []Failure{exit(0, 1, 1)}, Hung: "rank 1 hung for 22 s: asleep",
		Losses: []Loss{lossOf(1, 1)}, MaxRestarts: 3})
	require.Equal(t, [2]any{WasHung, Hang}, [2]any{v.Rule, v.Class})
	require.Nil(t, v.Root)
	require.Nil(t, v.Loss)
	require.Equal(t, "rank 1 hung for 22 s: asleep; 1 rank followed: 1 with exit code 1; class hang; restarts used 0 of 3",
		v.Line())
}

// A worker whose GPU is lost can end by the error of a victim.
func TestJudgeOfBrokenHardware(t *testing.T) {
	victim := raised(exit(0, 1, 1), peerGone, 1)
	broken := said(exit(1, 1, 2), "NVRM: Xid (PCI:0000:3b:00): 79, pid=7\n"+trace(peerGone))
	v := Judge(Evidence{Failures: []Failure{victim, broken}})
	require.Equal(t, 1, v.Root.Rank)
	require.Equal(t, [2]any{FirstExit, Hardware}, [2]any{v.Rule, v.Class})
	require.Contains(t, v.Line(), "; class hardware; ")
}

// What PyTorch 2.11 printed on a machine with one GPU for two ranks.
func TestNCCLSaysWhy(t *testing.T) {
	const text = `[rank1]: Traceback (most recent call last):
[rank1]:   File "/job/train.py", line 167, in fail
[rank1]:     dist.all_reduce(torch.ones(1, device=DEVICE))
[rank1]:   File "/site-packages/torch/distributed/distributed_c10d.py", line 3068, in all_reduce
[rank1]:     work = group.allreduce([tensor], opts)
[rank1]:            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:93, invalid usage, NCCL version 2.28.9
[rank1]: ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
[rank1]: Last error:
`
	const line = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:93, invalid usage, NCCL version 2.28.9"
	const last = "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60"
	warning := "[rank1]:[W1126 11:15:32.109 ProcessGroupNCCL.cpp:1575] Warning: destroy_process_group() was not called\n"
	for said, want := range map[string]string{
		text + "[rank1]: " + last + "\n" + warning: line + ": " + last,
		text + warning: line,
		text:           line,
	} {
		require.Equal(t, want+" (exit code 1)", Failure{ExitCode: 1, LastLines: said}.Reason())
	}
	message := "DistBackendError: NCCL error in: x, invalid usage\nLast error:\n" + last
	require.Equal(t, "DistBackendError: NCCL error in: x, invalid usage: "+last+" (exit code 1)",
		Failure{ExitCode: 1, Message: message}.Reason())
}
