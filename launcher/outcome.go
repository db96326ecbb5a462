package launcher

import (
	"errors"
	"slices"
	"strings"

	"dlrover-run/internal/job"
	"dlrover-run/launcher/policy"
	"dlrover-run/launcher/verdict"
)

// outcome is a job that has failed.
type outcome struct {
	cause       job.Cause // of the directive that has ended it
	verdict     verdict.Verdict
	local       []verdict.Failure // of this node
	failedCheck string            // why this node has not passed its newest check
}

func (o outcome) result() Result {
	v := o.verdict
	res := Result{
		Reason: o.reason(), Blame: o.blame(), Verdict: v.Line(), Judged: v, Local: o.local, Root: rootOf(o.local, v),
	}
	if _, ordered := orderReason(o.cause.Kind); ordered && o.cause.Text != "" || v.Root == nil && v.Loss == nil {
		res.Verdict = o.cause.Text
	} else if o.cause.Kind == job.CauseBudget {
		res.Verdict += "; " + o.cause.Text
	}
	if o.failedCheck == "" {
		return res
	}
	res.Reason = policy.NodeCheckFailed
	if !strings.Contains(res.Verdict, o.failedCheck) {
		res.Verdict += "; this node had not passed its check: " + o.failedCheck
	}
	return res
}

// maxReported bounds the failures that one node reports.
const maxReported = 128

// own returns the failures with information: not the mere end of a worker that was stopped, unless it left an error of
// its own.
func own(fs []verdict.Failure) []verdict.Failure {
	var out []verdict.Failure
	for _, f := range fs {
		if len(out) < maxReported && (!f.Stopped || f.Explains()) {
			out = append(out, f.Compact())
		}
	}
	return out
}

// merge adds to the job's failures those of this node that the daemon did not pass on.
func merge(all, local []verdict.Failure) []verdict.Failure {
	for _, f := range local {
		if !slices.ContainsFunc(all, func(o verdict.Failure) bool { return o.Rank == f.Rank && o.Role == f.Role }) {
			all = append(all, f)
		}
	}
	return all
}

// rootOf is the index of the local failure that torchrun's report calls the root.
func rootOf(local []verdict.Failure, v verdict.Verdict) int {
	best := 0
	for i, f := range local {
		if v.Root != nil && f.Rank == v.Root.Rank {
			return i
		}
		if local[best].Stopped && !f.Stopped || local[best].Stopped == f.Stopped && f.At.Before(local[best].At) {
			best = i
		}
	}
	return best
}

// reason classifies the end of the job for --exit-code-policy.
func (o outcome) reason() policy.Reason {
	if r, ordered := orderReason(o.cause.Kind); ordered {
		return r
	}
	switch v := o.verdict; {
	case v.Loss != nil:
		return policy.NodeLost
	case o.cause.Kind == job.CauseTimeout:
		return policy.RendezvousTimeout
	case v.Root == nil:
		return policy.RendezvousClosed
	case v.Root.OOM != nil:
		return policy.OutOfMemory
	case v.Root.PID == 0 && v.Root.ExitCode == cannotStartCode:
		return policy.CannotExecute
	case v.Root.Permanent:
		return policy.WorkerPermanent
	default:
		return policy.WorkerFailed
	}
}

// orderReason is the reason of a job that something outside of it has ended; false if its own nodes and workers did.
func orderReason(causeKind job.CauseKind) (policy.Reason, bool) {
	switch causeKind {
	case job.CauseCheck:
		return policy.TooFewPassed, true
	case job.CauseHang:
		return policy.Hung, true
	case job.CauseDeadline:
		return policy.Deadline, true
	case job.CauseNoStep:
		return policy.NoFirstStep, true
	case job.CauseOperator:
		return policy.OperatorStop, true
	}
	return 0, false
}

// blame reports whether a machine has ended the job, and which one, for --exit-code-policy=dlrover. This node is to
// blame also when another one, which failed in the same way, was the first.
func (o outcome) blame() policy.Blame {
	v := o.verdict
	if _, ordered := orderReason(o.cause.Kind); ordered || o.cause.Kind == job.CauseTimeout || v.Root == nil {
		return policy.Nobody
	}
	switch own := o.here(v.Class); {
	case v.Class == verdict.OOMKernel && own:
		return policy.OwnMemory
	case v.Class == verdict.Hardware && own:
		return policy.OwnHardware
	case v.Class == verdict.Hardware:
		return policy.OtherHardware
	}
	return policy.Nobody
}

// here reports whether a worker of this node has failed with class c.
func (o outcome) here(c verdict.Class) bool {
	return slices.ContainsFunc(own(o.local), func(f verdict.Failure) bool { return f.Class() == c })
}

func reasonOfErr(err error) policy.Reason {
	var re *ReasonError
	if errors.As(err, &re) {
		return re.Reason
	}
	return policy.Unclassified
}
