package verdict_test

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"dlrover-run/launcher/verdict"
)

// stack is what c10::Error prints below its message.
func stack(frames int) string {
	var b strings.Builder
	b.WriteString("Exception raised from checkTimeout at ProcessGroupNCCL.cpp:632 (most recent call first):\n")
	for i := range frames {
		fmt.Fprintf(&b, "frame #%d: c10d::ProcessGroupNCCL::watchdogHandler() + 0x233 (0x7f3b6e721300 in libtorch_cuda.so)\n",
			i)
	}
	return b.String() + "\n"
}

func TestErrorBeforeALongStackIsKept(t *testing.T) {
	const what = "[Rank 5] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9141, OpType=ALLREDUCE)"
	noise := strings.Repeat("step 1 loss 0.5\n", 400)
	text := noise + "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  " + what + "\n" +
		stack(12) + stack(12)
	end := verdict.Ending(strings.TrimRight(text, "\n"), 2048)
	require.LessOrEqual(t, len(end), 2048)
	f := verdict.Failure{ExitCode: -int(unix.SIGABRT), LastLines: end}
	require.Equal(t, what, f.Timeout())
	require.Equal(t, what+" (SIGABRT)", f.Reason())

	text = noise + "[rank0]: Traceback (most recent call last):\n[rank0]:   File \"a.py\", line 1, in <module>\n" +
		"[rank0]: torch.distributed.DistStoreError: wait timeout after 3000ms, keys: /a\n" +
		strings.ReplaceAll(stack(30), "frame", "[rank0]: frame")
	f = verdict.Failure{ExitCode: 1, LastLines: verdict.Ending(text, 2048)}
	require.Equal(t, "torch.distributed.DistStoreError: wait timeout after 3000ms, keys: /a", f.Timeout())
}

// An error that came of another one is named once, with what led to it, however long the stack between them is.
func TestEndingOfAChainedError(t *testing.T) {
	const frame = "  File \"train.py\", line 7, in step\n    step(batch)\n"
	once := []string{"\nKeyError: 'lr'\n", "\nThe above exception was the direct cause of the following exception:\n",
		"\nValueError: bad batch\n", "\nof 17 samples"}
	for frames := range 60 {
		text := strings.Repeat("noise\n", 300) + "Traceback (most recent call last):\n" + frame + "KeyError: 'lr'\n\n" +
			"The above exception was the direct cause of the following exception:\n\nTraceback (most recent call last):\n" +
			strings.Repeat(frame, frames) + "ValueError: bad batch\nof 17 samples"
		end := verdict.Ending(text, 1024)
		require.LessOrEqual(t, len(end), 1024)
		f := verdict.Failure{ExitCode: 1, LastLines: end}
		require.Equal(t, "ValueError: bad batch (exit code 1)", f.Reason(), frames)
		for _, line := range once {
			require.Equal(t, 1, strings.Count("\n"+end, line), "%d frames: %q", frames, line)
		}
	}
}

// What was printed after an error says that it did not end the worker.
func TestOldErrorIsNoEnding(t *testing.T) {
	old := "  what():  caught and survived\n" + stack(12)
	for _, after := range []string{"going on\n" + stack(40), strings.Repeat("step\n", 1000), strings.Repeat("x", 5000)} {
		end := verdict.Ending(old+after, 2048)
		require.NotContains(t, end, "survived")
		require.LessOrEqual(t, len(end), 2048)
	}
	require.Equal(t, "a\nb", verdict.Ending("a\nb", 3))
	require.Equal(t, "b\n", verdict.Ending("a\nb\n", 3))
	require.NotContains(t, verdict.Ending(stack(100), 2048), "…", "nothing but a stack")
}

// A group of exceptions keeps its class and those in it, however long the stacks between them are.
func TestEndingOfAGroup(t *testing.T) {
	const header, line = "Traceback (most recent call last):\n", "File \"/srv/train.py\", line 7, in step\n"
	for _, rank := range []string{"", "[rank3]: "} {
		for frames := range 60 {
			stack := func(bar string) string { return strings.Repeat(bar+"  "+line, frames) }
			text := strings.Repeat("noise\n", 300) + "  + Exception Group " + header + stack("  | ") +
				"  | ExceptionGroup: two shards failed (2 sub-exceptions)\n  +-+---- 1 ----\n    | " + header + stack("    | ") +
				"    | ValueError: bad batch\n    +---- 2 ----\n    | " + header + stack("    | ") + "    | OSError: x\n    +----"
			text = rank + strings.ReplaceAll(text, "\n", "\n"+rank)
			end := verdict.Ending(text, 1024)
			require.LessOrEqual(t, len(end), 1024)
			f := verdict.Failure{ExitCode: 1, LastLines: end}
			require.Equal(t, []string{"ExceptionGroup", "ValueError", "OSError"}, f.Exceptions(), end)
			require.Contains(t, f.Reason(), "two shards failed (2 sub-exceptions), first ValueError: bad batch", end)
		}
	}
}

func TestEndingBelowALongPrefix(t *testing.T) {
	text := strings.Repeat("x", 3000) + "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\n" +
		"ValueError: bad\n"
	end := verdict.Ending(text, 1024)
	require.LessOrEqual(t, len(end), 1024)
	require.Equal(t, []string{"ValueError"}, verdict.Failure{ExitCode: 1, LastLines: end}.Exceptions())
}

// Where there is no room for an error's own lines, the end of the output is all that is left of it.
func TestEndingOfAFewBytes(t *testing.T) {
	for _, text := range []string{
		"ü", "a\nb", "what(): " + strings.Repeat("x", 100) + "\n" + stack(2), "[rank3]:   + Exception " +
			"Group Traceback (most recent call last):\n[rank3]:   | ExceptionGroup: two (2 sub-exceptions)\n" +
			"[rank3]:   +-+---- 1 ----\n[rank3]:     | ValueError: " + strings.Repeat("x", 100) + "\n[rank3]:     +----"} {
		for limit := -1; limit <= len(text); limit++ {
			require.LessOrEqual(t, len(verdict.Ending(text, limit)), max(limit, 0)+2, "%q %d", text, limit)
		}
		require.Equal(t, text, verdict.Ending(text, len(text)))
	}
}

func FuzzEnding(f *testing.F) {
	f.Add("what(): x\n"+stack(20), 300)
	f.Add("ü\n\n", 2)
	f.Add("Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nValueError: bad\n", 40)
	f.Fuzz(func(t *testing.T, text string, limit int) {
		if limit < -1 || limit > 4096 || !utf8.ValidString(text) {
			return
		}
		// A rune that is cut becomes U+FFFD, which is up to two bytes longer than what is left of it.
		require.LessOrEqual(t, len(verdict.Ending(text, limit)), max(limit, 0)+2)
	})
}
