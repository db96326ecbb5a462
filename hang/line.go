package hang

import (
	"fmt"
	"path"
	"strconv"
	"strings"
	"time"

	"dlrover-run/hang/rankset"
	"dlrover-run/internal/text"
)

// aged returns the verdict with another age, in its line, too.
func (v Verdict) aged(age time.Duration) Verdict {
	v.Age = age
	v.Line = line(v)
	return v
}

// lineClauses is how many suspects, or groups of them that do the same, are described in a line.
const lineClauses = 3

// line is the text of a verdict.
func line(v Verdict) string {
	var text string
	switch {
	case v.Kind == KindNone:
		return ""
	case v.Kind == KindComm:
		text = comm(v)
	case len(v.Suspects) == 0:
		return ""
	default:
		text = suspectNames(v) + " " + fault(v) + ": " + suspectWork(v) + waiting(v)
	}
	if v.Confidence == Low {
		text += " (uncertain: " + v.Doubt + ")"
	}
	return text
}

// comm names no suspect.
func comm(v Verdict) string {
	stuck := "the network, a device or a library"
	if v.Elsewhere > 0 {
		stuck = "a rank elsewhere, " + stuck
	}
	return fmt.Sprintf("%s hung%s: all of them wait in %s; %s is stuck", ranksText(rankset.Named(v.Waiting).Brief(8)),
		since(v), orCollective(v)+inGroup(v), stuck)
}

// fault describes the fault of the suspects.
func fault(v Verdict) string {
	switch v.Kind {
	case KindMissing:
		return have(v) + " not come to " + clean(v.In) + since(v)
	case KindBusy:
		return "busy" + since(v)
	case KindMismatch:
		return "in another collective than the others" + since(v)
	case KindDeadlock:
		return "waiting for each other" + since(v)
	case KindAlone:
		return "without progress" + since(v)
	}
	return "hung" + since(v)
}

func have(v Verdict) string {
	if len(v.Suspects) > 1 {
		return "have"
	}
	return "has"
}

func since(v Verdict) string {
	if v.Age < time.Second {
		return ""
	}
	return " for " + strconv.Itoa(int(v.Age.Seconds())) + " s"
}

// suspectNames names the suspects, with their node if it is one.
func suspectNames(v Verdict) string {
	var ranks rankset.Set
	first := v.Suspects[0]
	one := true
	for _, s := range v.Suspects {
		ranks.Add(s.Rank)
		one = one && s.GroupRank == first.GroupRank
	}
	text := ranksText(ranks.Brief(8))
	if one {
		text += fmt.Sprintf(" (node %d %s)", first.GroupRank, clean(first.Node))
	}
	return text
}

// suspectWork describes the work of the suspects; suspects with the same work are named together.
func suspectWork(v Verdict) string {
	var order []string
	ranks := map[string]*rankset.Set{}
	for _, s := range v.Suspects {
		d := s.Doing + where(s.Where) + ended(s)
		if ranks[d] == nil {
			ranks[d] = &rankset.Set{}
			order = append(order, d)
		}
		ranks[d].Add(s.Rank)
	}
	if len(order) == 1 {
		return order[0]
	}
	var clauses []string
	for _, d := range order[:min(len(order), lineClauses)] {
		clauses = append(clauses, ranksText(ranks[d].Brief(8))+" "+d)
	}
	if len(order) > lineClauses {
		clauses = append(clauses, "and others")
	}
	return strings.Join(clauses, ", ")
}

// ended returns the exception that ended the main thread while others run on.
func ended(s Suspect) string {
	if s.Exception == "" {
		return ""
	}
	return ", after its main thread has ended by " + clean(s.Exception)
}

// where is a function, its file and line.
func where(f Frame) string {
	if f.Func == "" {
		return ""
	}
	text := " in " + clean(f.Func)
	if f.File == "" {
		return text
	}
	text += " at " + clean(path.Base(f.File))
	if f.Line > 0 {
		text += ":" + strconv.Itoa(f.Line)
	}
	return text
}

func waiting(v Verdict) string {
	switch {
	case v.Waiting == "":
		return ""
	case v.Kind == KindMissing:
		return "; " + waits(v) + " for that"
	}
	return "; " + waits(v) + " in " + orCollective(v) + inGroup(v)
}

func inGroup(v Verdict) string {
	if v.Group == "" {
		return ""
	}
	return " of group " + clean(v.Group)
}

func orCollective(v Verdict) string {
	if v.In == "" {
		return "a collective"
	}
	return clean(v.In)
}

// ranksText is rank 3, or ranks 0-1,3.
func ranksText(set string) string {
	if strings.ContainsAny(set, "-, ") {
		return "ranks " + set
	}
	return "rank " + set
}

func waits(v Verdict) string {
	text := ranksText(rankset.Named(v.Waiting).Brief(8))
	if strings.HasPrefix(text, "ranks") {
		return text + " wait"
	}
	return text + " waits"
}

// maxName is how much of a name is shown.
const maxName = 120

// clean makes text from a worker fit for a line: its names are the user's choice.
func clean(s string) string { return text.Line(s, maxName) }
