package run

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"dlrover-run/internal/openfile"
	"dlrover-run/internal/text"
	"dlrover-run/launcher"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/verdict"
)

const (
	// terminationLog is the file that Kubernetes makes in every container for the last message of its main process. See
	// https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/
	terminationLog = "/dev/termination-log"
	// terminationVar names another file, which is made if it is not there.
	terminationVar = "DLROVER_TERMINATION_LOG"
	// terminationBudget bounds the wait for a file that cannot be written, such as one on storage that is gone. On a busy
	// machine the writer may have to wait for a CPU first.
	terminationBudget = time.Second
)

// lastWords writes the termination message of this launcher, if the container has a file for it.
func lastWords(t verdict.Termination) error {
	path, made := terminationLog, 0
	if other := os.Getenv(terminationVar); other != "" {
		path, made = other, os.O_CREATE
	}
	done := make(chan error, 1) // buffered, because the write may outlive its reader
	go func() { done <- writeTermination(path, made, t.Message()) }()
	select {
	case err := <-done:
		if made == 0 && errors.Is(err, fs.ErrNotExist) {
			return nil // not in a pod
		}
		return err
	case <-time.After(terminationBudget):
		return fmt.Errorf("%s takes longer than %s", path, terminationBudget)
	}
}

func writeTermination(path string, flags int, text []byte) error {
	f, err := openfile.Open(path, os.O_WRONLY|flags, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err = f.Write(text); err != nil {
		return err
	}
	return f.Truncate(int64(len(text)))
}

// refused writes the last message of a launcher that starts nothing. A failure to write it has no reader.
func refused(err error, reason policy.Reason, codes policy.CodePolicy) int {
	return refusedWith(err, reason, reason.Code(codes, policy.Nobody))
}

func refusedWith(err error, reason policy.Reason, code int) int {
	line := "dlrover-run: error: " + firstLineOf(err)
	_ = lastWords(verdict.Termination{Line: line, Reason: reason.String(), ExitCode: code})
	return code
}

func firstLineOf(err error) string {
	line, _, _ := strings.Cut(strings.TrimSpace(err.Error()), "\n")
	return line
}

// sayLastWords writes how the job ended. It comes before slow steps, because a pod may be killed meanwhile.
func (j *nodeJob) sayLastWords(res launcher.Result, code int) {
	t := verdict.Termination{Line: j.summary(res), RunID: j.s.runID, Node: j.s.node.Name, Reason: res.Reason.String(),
		ExitCode: code}
	if res.Signal != 0 {
		t.Signal = proc.SignalName(res.Signal)
	}
	if res.Judged.Rule != "" {
		t.Judged(res.Judged)
	}
	if err := lastWords(t); err != nil {
		j.log.Warn("cannot write the termination message", "err", err)
	}
}

// summary describes the end of the job in one line; "" if it has succeeded.
func (j *nodeJob) summary(res launcher.Result) string {
	switch {
	case res.Err != nil:
		return "dlrover-run: " + text.EscapeLine(firstLineOf(res.Err))
	case res.Verdict != "":
		return "dlrover-run: " + j.s.jobName() + " failed: " + text.EscapeLine(res.Verdict)
	case res.Left != "":
		return "dlrover-run: " + j.s.jobName() + ": left: " + text.EscapeLine(res.Left)
	case res.Signal != 0:
		return "dlrover-run: " + j.s.jobName() + ": stopped by " + proc.SignalName(res.Signal)
	case j.unsaved != nil:
		return "dlrover-run: " + j.s.jobName() + ": the workers succeeded, but not all of their checkpoints are on disk: " +
			text.EscapeLine(j.unsaved.Error())
	}
	return ""
}

// statusOf is the exit status of a job with the command as its only worker: the command's own, as if it had been
// executed.
func statusOf(res launcher.Result, otherwise int) int {
	if len(res.Local) == 0 || res.Signal != 0 || res.Reason == policy.Hung {
		return otherwise
	}
	if code := res.Local[res.Root].ExitCode; code > 0 {
		return code
	} else if code < 0 {
		return 128 - code
	}
	return otherwise
}
