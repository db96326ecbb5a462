package policy

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Table is a policy that has a name.
type Table struct {
	Name    string
	Rules   []Rule
	Success string // the table's success rule: all, rank0, node0 or any; "" if it names none
	Alone   bool   // only the workers that decide the success end the job: failures of others end nothing
	// Restart decides when no rule does, unless the user names another one; "" leaves that to the user alone.
	Restart Restart
	// Sum: --backoff-limit bounds all restarts of the job, whether they bring progress or not.
	Sum bool
}

// builtin is a Table as it is written here.
type builtin struct {
	name, success string
	restart       Restart
	alone, sum    bool
	rules         []string
}

// builtins follow the systems in their names in the answer to the exit code of a replica.
func builtins() []builtin {
	return []builtin{
		{name: "t9k", success: "node0", restart: ExitCode, alone: true, sum: true},
		{name: "ms-operator", success: "node0", rules: []string{
			"exit 128-255 -> retry because a signal, or an exit code that asks for a restart",
			"any -> stop-job because exit codes below 128 are permanent",
		}},
		{name: "kubeflow", rules: []string{
			"exit 128-255 -> retry because a signal, or an exit code that asks for a restart",
			"any -> stop-job because exit codes below 128 are permanent",
		}},
		{name: "nvrx", rules: []string{
			"exit 93 -> stop-job because the program asks not to be restarted",
			"any -> retry",
		}},
		{name: "paddle", rules: []string{
			"exit 101 -> retry-free because the program asks for an elastic restart",
			"exit 102 -> retry-free because the automatic parallelism asks for a new start",
			"any -> retry",
		}},
		{name: "dlrover", rules: []string{
			"event oom -> stop-job because it would run out of memory again",
			"exit 247 -> stop-job because it ran out of memory",
			"exit 14,201,202 -> retry-elsewhere because the hardware of the node is at fault",
			"exit 137,143 -> retry-free because the worker was killed, as by a preemption",
			"any -> retry",
		}},
	}
}

// Names lists the built-in tables.
func Names() (names []string) {
	for _, b := range builtins() {
		names = append(names, b.name)
	}
	return names
}

// Named returns a built-in table; false if there is none of that name.
func Named(name string) (Table, bool) {
	all := builtins()
	i := slices.IndexFunc(all, func(b builtin) bool { return b.name == name })
	if i < 0 {
		return Table{}, false
	}
	t := Table{Name: name, Success: all[i].success, Alone: all[i].alone, Restart: all[i].restart, Sum: all[i].sum}
	for _, text := range all[i].rules {
		r, err := ParseRule(text)
		if err != nil {
			panic("policy: built-in table " + name + ": " + err.Error())
		}
		r.From = name
		t.Rules = append(t.Rules, r)
	}
	return t, true
}

// MaxFile bounds the file of a table, in bytes.
const MaxFile = 64 << 10

// ParseTable reads the file of a table, which messages call name. The error names the line.
//
// The file is YAML: one mapping; in it texts and, under rules, a list of mappings of texts or of texts. A list of words
// stands for the words with commas between them.
//
//	base: t9k                 # it decides where no rule of this file does
//	success-rule: node0
//	rules:
//	  - exit: 3,10-12
//	    action: retry-elsewhere
//	    max: 2 per 1h
//	    reason: the fabric is being repaired
//	  - exception torch.cuda.OutOfMemoryError -> stop-job
//	default: retry            # if no rule of this file or of base decides
func ParseTable(name, text string) (Table, error) {
	t := Table{Name: name}
	doc, err := parseYAML(text)
	if err != nil {
		return t, err
	}
	var end []Rule
	for _, f := range doc.fields {
		if err := t.set(f, &end); err != nil {
			return t, fmt.Errorf("line %d: %w", f.line, err)
		}
	}
	for _, item := range doc.rules {
		r, err := item.rule()
		if err != nil {
			return t, err
		}
		r.From = fmt.Sprintf("%s:%d", name, item.line)
		t.Rules = append(t.Rules, r)
	}
	if len(t.Rules)+len(end) == 0 && t.Restart == "" {
		return t, errors.New("there is nothing in it: write rules:, base: or default:")
	}
	return t.close(end)
}

// set reads a field of the file. end is the rules that go behind its own.
func (t *Table) set(f field, end *[]Rule) error {
	switch f.key {
	case "base":
		base, ok := Named(f.value)
		if !ok {
			return fmt.Errorf("there is no policy %q: use one of %s", f.value, strings.Join(Names(), ", "))
		}
		*end = append(base.Rules, *end...)
		t.Restart, t.Sum = base.Restart, base.Sum
		if t.Success == "" {
			t.Success, t.Alone = base.Success, base.Alone
		}
	case "default":
		r := Rule{From: fmt.Sprintf("%s:%d", t.Name, f.line)}
		if err := r.setAction(f.value); err != nil {
			return err
		}
		*end = append(*end, r)
	case "success-rule":
		if !slices.Contains([]string{"all", "rank0", "node0", "any"}, f.value) {
			return fmt.Errorf("there is no success rule %q: use all, rank0, node0 or any", f.value)
		}
		t.Success, t.Alone = f.value, true
	default:
		return fmt.Errorf("there is no field %q: use base, default, success-rule and rules", f.key)
	}
	return nil
}

// close appends the rules behind those of the file.
func (t Table) close(end []Rule) (Table, error) {
	if err := Check(t.Rules); err != nil {
		return t, err
	}
	t.Rules = append(t.Rules, end...)
	if i := slices.IndexFunc(t.Rules, Rule.always); i >= 0 && i < len(t.Rules)-1 {
		return t, fmt.Errorf("the rule %q (%s) decides before %q (%s) can: leave one out",
			t.Rules[i], t.Rules[i].From, t.Rules[i+1], t.Rules[i+1].From)
	} else if i >= 0 && t.Restart != "" {
		return t, fmt.Errorf("the rule %q (%s) decides before --restart-policy=%s can, which base brings: leave one out",
			t.Rules[i], t.Rules[i].From, t.Restart)
	}
	return t, nil
}

// rule reads one item of the list of rules.
func (it item) rule() (r Rule, err error) {
	if it.text != "" {
		if r, err = ParseRule(it.text); err != nil {
			return r, fmt.Errorf("line %d: %w", it.line, err)
		}
		return r, nil
	}
	seen := map[string]bool{}
	for _, f := range it.fields {
		switch f.key {
		case "action":
			err = r.setAction(f.value)
		case "max":
			err = r.setMax(f.value)
		case "reason":
			err = r.setReason(f.value)
		default:
			err = r.condition(f.key, f.value, seen)
		}
		if err != nil {
			return r, fmt.Errorf("line %d: %w", f.line, err)
		}
	}
	switch {
	case r.Action == Succeed:
		return r, fmt.Errorf("line %d: the rule has no action: add action: retry, retry-free, retry-elsewhere, shrink, hold "+
			"or stop-job", it.line)
	case len(seen) == 0:
		return r, fmt.Errorf("line %d: the rule has no condition, so it would decide everything: add one, or write "+
			"default: %s", it.line, r.Action.Word())
	}
	return r, nil
}
