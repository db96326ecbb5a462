package service

import (
	"dlrover-run/internal/job"
	"dlrover-run/launcher/verdict"
)

// suspicious returns, in one line, why an epoch may have ended by a fault that node checks find. Its workers hung, a
// node disappeared without leaving, or its first failure is a consequence of an event that no node has reported. "" is
// an end that explains itself, such as a worker's own error.
func suspicious(e job.Evidence) string {
	var kind job.CauseKind
	if e.Cause != nil {
		kind = e.Cause.Kind
	}
	if kind == job.CauseHang {
		return "the workers hung: " + e.Cause.Text
	}
	for _, l := range e.Losses {
		if l.Silent {
			return "node " + l.Node + " went away without a good-bye: " + l.Reason
		}
	}
	if kind != job.CauseFailure { // workers that are stopped one after the other fail because of each other
		return ""
	}
	if v := verdict.Judge(verdict.Unpack(e)); v.Rule == verdict.Consequence {
		return "the first failure only followed something that nobody has reported: " + v.Line()
	}
	return ""
}
