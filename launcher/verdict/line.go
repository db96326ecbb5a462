package verdict

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// maxLine is the most bytes that Line returns.
const maxLine = 1024

// Bytes of the parts of a line that come from outside. Their sum leaves room for the rest of maxLine.
const (
	maxName   = 64
	maxCause  = 216
	maxOutput = 160
	maxHung   = 512
	maxGroups = 4 // ways to end, and ranges of ranks, that are listed
)

// Line is the verdict in one line of at most maxLine bytes, without control characters:
//
//	rank 3 (node 1 host-b, local rank 1, pid 4242) failed first: ValueError: bad batch (exit code 1); 3 ranks followed:
//	2 by SIGABRT, 1 with exit code 1; restarts used 3 of 3
func (v Verdict) Line() string {
	var clauses []string
	switch {
	case v.Root != nil:
		clauses = append(clauses, who(*v.Root)+" failed first: "+why(*v.Root))
		if v.Rule == Consequence {
			clauses = append(clauses, "this error is a consequence, its cause was not reported")
		}
		if v.Root.Permanent && v.Root.Policy != "" {
			clauses = append(clauses, "not retried by "+clean(v.Root.Policy, maxOutput))
		}
	case v.Loss != nil:
		clauses = append(clauses, lost(*v.Loss))
	case v.Hung != "":
		clauses = append(clauses, clean(v.Hung, maxHung))
	default:
		clauses = append(clauses, "no worker failed by itself")
	}
	clauses = append(clauses, v.followers()...)
	switch {
	case v.OtherLosses > 0 && v.Loss != nil:
		clauses = append(clauses, plural(v.OtherLosses, "more node")+" went away")
	case v.OtherLosses > 0:
		clauses = append(clauses, plural(v.OtherLosses, "node")+" went away")
	}
	if v.Class != Unknown && v.Class != "" {
		clauses = append(clauses, "class "+string(v.Class))
	}
	clauses = append(clauses, fmt.Sprintf("restarts used %d of %d", v.RestartsUsed, v.MaxRestarts))
	return strings.Join(clauses, "; ")
}

func who(f Failure) string {
	role := ""
	if f.Role != "" && f.Role != "default" {
		role = "role " + clean(f.Role, maxName) + ", "
	}
	return fmt.Sprintf("rank %d (%s%s, local rank %d, pid %d)",
		f.Rank, role, node(f.Node, f.NodeName, f.Host), f.LocalRank, f.PID)
}

func node(rank int, name, host string) string {
	s := "node " + strconv.Itoa(rank)
	if name != "" && name != host {
		s += " " + clean(name, maxName)
		if host != "" {
			s += " on"
		}
	}
	if host != "" {
		s += " " + clean(host, maxName)
	}
	return s
}

func lost(l Loss) string {
	s := node(l.Node, l.NodeName, l.Host) + " went away first"
	if l.Reason != "" {
		s += ": " + clean(l.Reason, maxCause)
	}
	if len(l.Ranks) > 0 {
		s += "; it ran " + ranges(l.Ranks)
	}
	return s
}

// why is how f ended: the worker's error, the status, and the facts that the kernel or the launcher adds.
func why(f Failure) string {
	if f.OOM != nil && f.ExitCode == -int(unix.SIGKILL) {
		return "killed by the kernel's OOM killer (SIGKILL)" + f.OOM.sizes(": ")
	}
	s := ended(f.ExitCode)
	if f.Timer != "" && f.ExitCode < 0 && !f.Stopped {
		return clean(f.Timer, maxCause) + " (" + s + ")"
	}
	if f.Stopped {
		s = "then stopped by the launcher"
	}
	if c := cause(f); c != "" {
		s = clean(c, maxCause) + " (" + s + ")"
	} else if last := lastLine(f.LastLines); last != "" && f.ExitCode > 0 {
		s += `, last output "` + clean(last, maxOutput) + `"`
	}
	switch {
	case f.Timer != "":
		s += ", after " + clean(f.Timer, maxOutput)
	case f.OOM != nil:
		s += ", after the kernel's OOM killer had killed a process of its cgroup" + f.OOM.sizes(": ")
	case !f.Stopped && (f.ExitCode == -int(unix.SIGKILL) || f.ExitCode == -int(unix.SIGTERM)):
		s += ", not sent by the launcher"
	}
	return s
}

func (o OOM) sizes(before string) string {
	var parts []string
	if o.Limit > 0 {
		parts = append(parts, "the cgroup's limit is "+byteSize(o.Limit))
	}
	if o.Peak > 0 {
		parts = append(parts, "peak "+byteSize(o.Peak))
	}
	if len(parts) == 0 {
		return ""
	}
	return before + strings.Join(parts, ", ")
}

func byteSize(n int64) string {
	const kib, mib, gib = 1 << 10, 1 << 20, 1 << 30
	switch {
	case n >= gib:
		return fmt.Sprintf("%.1f GiB", float64(n)/gib)
	case n >= mib:
		return fmt.Sprintf("%.1f MiB", float64(n)/mib)
	}
	return fmt.Sprintf("%.1f KiB", float64(n)/kib)
}

// ended names an exit status: "exit code 1", "SIGSEGV".
func ended(code int) string {
	if code >= 0 {
		return "exit code " + strconv.Itoa(code)
	}
	return cmp.Or(signalName(-code), "signal "+strconv.Itoa(-code))
}

// signalName is "" for a number that Python's signal.Signals does not name either.
func signalName(n int) string {
	switch n {
	case 34:
		return "SIGRTMIN"
	case 64:
		return "SIGRTMAX"
	}
	return unix.SignalName(syscall.Signal(n))
}

// followers counts the other failures by how they ended.
func (v Verdict) followers() []string {
	stopped, counts := 0, map[string]int{}
	for _, f := range v.Followers {
		switch {
		case f.Stopped:
			stopped++
		case f.OOM != nil:
			counts["by the OOM killer"]++
		case f.ExitCode < 0:
			counts["by "+ended(f.ExitCode)]++
		default:
			counts["with "+ended(f.ExitCode)]++
		}
	}
	var out []string
	switch n := len(v.Followers) - stopped; {
	case n > 0:
		out = append(out, plural(n, "rank")+" followed: "+groups(counts))
	case v.Root != nil && v.WorldSize > 1 && stopped == 0:
		out = append(out, "no other rank of "+strconv.Itoa(v.WorldSize)+" failed")
	}
	if stopped > 0 {
		out = append(out, plural(stopped, "rank")+" stopped by the launcher")
	}
	return out
}

// groups lists counts, the largest first.
func groups(counts map[string]int) string {
	keys := slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b))
	})
	var parts []string
	rest := 0
	for i, k := range keys {
		if i < maxGroups {
			parts = append(parts, strconv.Itoa(counts[k])+" "+k)
		} else {
			rest += counts[k]
		}
	}
	if rest > 0 {
		parts = append(parts, strconv.Itoa(rest)+" otherwise")
	}
	return strings.Join(parts, ", ")
}

// ranges writes ranks as "ranks 0-7, 12".
func ranges(ranks []int) string {
	ranks = slices.Compact(slices.Sorted(slices.Values(ranks)))
	if len(ranks) == 1 {
		return "rank " + strconv.Itoa(ranks[0])
	}
	var parts []string
	for i := 0; i < len(ranks); {
		if len(parts) == maxGroups {
			parts = append(parts, strconv.Itoa(len(ranks)-i)+" more")
			break
		}
		j := i
		for j+1 < len(ranks) && ranks[j+1] == ranks[j]+1 {
			j++
		}
		part := strconv.Itoa(ranks[i])
		if j > i {
			part += "-" + strconv.Itoa(ranks[j])
		}
		parts = append(parts, part)
		i = j + 1
	}
	return "ranks " + strings.Join(parts, ", ")
}

func plural(n int, noun string) string {
	if n != 1 {
		noun += "s"
	}
	return strconv.Itoa(n) + " " + noun
}
