package verdict_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/internal/testkit"
	"dlrover-run/launcher/torchpython"
	"dlrover-run/launcher/verdict"
)

// traceback is an uncaught exception as torch 2.x prints it.
func traceback(err string) string {
	return "[rank0]: Traceback (most recent call last):\n[rank0]:   File \"train.py\", line 19, in <module>\n" +
		"[rank0]:     dist.all_reduce(t)\n[rank0]: " + err + "\n"
}

// terminated is an exception of a C++ thread.
func terminated(err string) string {
	return "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  " + err +
		"\nException raised from checkTimeout at ProcessGroupNCCL.cpp:632 (most recent call first):\n" +
		"frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7f in libc10.so)\n"
}

func TestTimedOut(t *testing.T) {
	const work = "WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, NumelOut=9801523, Timeout(ms)=600000) ran for " +
		"600020 milliseconds before timing out."
	for _, tc := range []struct{ name, output, why string }{
		{"gloo, receiving",
			traceback("RuntimeError: [./gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for " +
				"recv operation to complete"), "Timed out waiting 3000ms for recv operation"},
		{"gloo, sending", traceback("RuntimeError: [/__w/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:129] Timed " +
			"out " +
			"waiting 3000ms for send operation to complete"), "for send operation to complete"},
		{"gloo, after that", traceback("RuntimeError: Application timeout caused pair closure"), "Application timeout"},
		{"wait with a timeout", traceback("RuntimeError: Operation timed out!"), "Operation timed out!"},
		{"store of 1.13", traceback("RuntimeError: Socket Timeout"), "Socket Timeout"},
		{"store of 2.x", traceback("torch.distributed.DistStoreError: wait timeout after 3000ms, keys: " +
			"/default_pg/0//1//cpu//0/2"), "keys: /default_pg"},
		{"file store", traceback("RuntimeError: Wait timeout"), "Wait timeout"},
		{"monitored barrier, rank 0", traceback("RuntimeError: Ranks 2 failed to pass monitoredBarrier in 3000 ms"),
			"Ranks 2 failed"},
		{"watchdog of 1.13", terminated("[Rank 1] Caught collective operation timeout: WorkNCCL(SeqNum=5, " +
			"OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1800904 milliseconds before timing out."), "[Rank 1] Caught"},
		{"watchdog of 2.x",
			terminated("[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with " +
				"exception: [Rank 1] Watchdog caught collective operation timeout: " + work), "[Rank 1] Watchdog caught"},
		{"watchdog, without its exception", "[rank1]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog " +
			"caught collective operation timeout: " + work + "\n", "[Rank 1] Watchdog caught"},
		{"HCCL", "EI0002: [PID: 2969] The wait execution of the Notify register times out. Reason: The Notify register has " +
			"not received the Notify record from remote rank: [24].\n", "remote rank: [24]"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := verdict.Failure{ExitCode: 1, LastLines: tc.output}
			require.Contains(t, f.Timeout(), tc.why)
			require.NotContains(t, f.Timeout(), "\n")
			if f.ExitCode = -int(unix.SIGABRT); strings.Contains(tc.output, "Error") {
				require.True(t, verdict.TimedOut(f.Reason()), "other nodes hear only this: %s", f.Reason())
			}
		})
	}
	require.True(t, verdict.TimedOut("rank 3 (node 1 gpu-07, local rank 1) failed: RuntimeError: [./gloo/transport/tcp/"+
		"unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation to complete (exit code 1)"))
}

// Nobody waits for the end of who is gone.
func TestNotTimedOut(t *testing.T) {
	for _, err := range []string{
		"RuntimeError: [./gloo/transport/tcp/pair.cc:598] Connection closed by peer [127.0.0.1]:4231",
		"RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error [127.0.0.1]:41311: " +
			"Connection reset by peer",
		"RuntimeError: Broken pipe",
		"torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to " +
			"(10.0.0.1, 29500).",
		"torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited or there was " +
			"a " +
			"network error\nncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
		"TimeoutError: [Errno 110] Connection timed out",
		"requests.exceptions.ConnectTimeout: HTTPSConnectionPool(host='x', port=443): Max retries exceeded (timeout=5)",
		"RuntimeError: DataLoader timed out after 5 seconds",
		"pycurl.error: (28, 'Operation timed out after 30001 milliseconds with 0 bytes received')",
		"ValueError: bad batch",
	} {
		f := verdict.Failure{ExitCode: 1, LastLines: traceback(err)}
		require.Empty(t, f.Timeout(), err)
		require.False(t, verdict.TimedOut(f.Reason()), err)
	}
	require.Empty(t, verdict.Failure{ExitCode: 1,
		LastLines: "[W] Application timeout caused pair closure, trying again\n" +
			traceback("ValueError: bad batch")}.Timeout(), "an earlier timeout is not what ended it")
	require.Empty(t, verdict.Failure{ExitCode: 1, Message: "ValueError: bad batch",
		LastLines: traceback("RuntimeError: Socket Timeout")}.Timeout(), "what the error file says counts")
	require.Empty(t, verdict.Failure{}.Timeout())
}

// TestTimeoutsOfARealJob lets two ranks of a gloo job wait for one that is asleep.
func TestTimeoutsOfARealJob(t *testing.T) {
	testkit.Long(t, "the timeouts of real collectives take their time")
	pythons := []string{torchpython.Require(t, "THE TIMEOUTS OF REAL COLLECTIVES ARE")}
	if home, err := os.UserHomeDir(); err == nil {
		if torch2 := filepath.Join(home, ".cache/dlrover-run/torch2/bin/python"); exec.Command(torch2, "-c",
			"").Run() == nil {
			pythons = append(pythons, torch2)
		}
	}
	for _, python := range pythons {
		for _, how := range []string{"all_reduce", "monitored_barrier", "new_group"} {
			t.Run(how+" "+python, func(t *testing.T) {
				for rank, output := range runStalled(t, python, how) {
					f := verdict.Failure{ExitCode: 1, LastLines: output}
					require.True(t, f.Timeout() != "" || strings.Contains(output, "Connection closed by peer"), "rank %d: %s", rank,
						output)
				}
			})
		}
	}
}

// runStalled returns what ranks 0 and 1 have written; at least one of them is to have met the timeout.
func runStalled(t *testing.T, python, how string) [2]string {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	store := filepath.Join(t.TempDir(), "store")
	command := func(rank int) *exec.Cmd {
		cmd := exec.CommandContext(ctx, python, filepath.Join("testdata", "stalled.py"), strconv.Itoa(rank), store, how)
		cmd.Env = append(os.Environ(), "OMP_NUM_THREADS=1", "GLOO_SOCKET_IFNAME=lo")
		return cmd
	}
	asleep := command(2)
	require.NoError(t, asleep.Start())
	var outputs [2]string
	var wg sync.WaitGroup
	for rank := range outputs {
		wg.Go(func() {
			out, _ := command(rank).CombinedOutput() // it fails
			outputs[rank] = string(out)
		})
	}
	wg.Wait()
	_ = asleep.Process.Kill()
	_ = asleep.Wait()
	require.True(t, verdict.TimedOut(outputs[0]+outputs[1]), "%s\n%s", outputs[0], outputs[1])
	return outputs
}
