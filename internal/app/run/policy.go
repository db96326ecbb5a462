package run

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"dlrover-run/internal/openfile"
	"dlrover-run/launcher/policy"
	"dlrover-run/rendezvous"
)

// policyRules reads --rule, then --policy.
func (r *resolver) policyRules() error {
	s := &r.s
	for _, text := range r.c.Strings("rule") {
		rule, err := policy.ParseRule(text)
		if err != nil {
			return fmt.Errorf("--rule: %w", err)
		}
		rule.From = "--rule"
		s.policy.Rules = append(s.policy.Rules, rule)
	}
	if err := policy.Check(s.policy.Rules); err != nil {
		return fmt.Errorf("--rule: %w", err)
	}
	if name := r.c.String("policy"); name != "" {
		table, err := policyTable(name)
		if err != nil {
			return fmt.Errorf("--policy=%s: %w", name, err)
		}
		s.policy.Rules = append(s.policy.Rules, table.Rules...)
		s.params.Budget = rendezvous.Budget{
			Success: rendezvous.SuccessRule(table.Success), Alone: table.Alone, Sum: table.Sum,
		}
		if table.Restart != "" && !r.c.IsSet("restart-policy") {
			s.policy.Restart = table.Restart
		}
	}
	s.policy.Alone = s.backend == local
	if err := s.policy.Validate(); err != nil {
		return err
	}
	if err := s.policy.CheckSize(s.params.Min, s.params.Max); err != nil {
		return err
	}
	r.warnOfPolicy()
	return nil
}

func policyTable(name string) (policy.Table, error) {
	if table, ok := policy.Named(name); ok {
		return table, nil
	}
	text, err := openfile.ReadNamed(name, policy.MaxFile)
	if err != nil {
		return policy.Table{}, fmt.Errorf("%w; give one of %s, or the path of a file", err,
			strings.Join(policy.Names(), ", "))
	}
	return policy.ParseTable(filepath.Base(name), string(text))
}

// warnOfPolicy warns of rules that have no effect in this job.
func (r *resolver) warnOfPolicy() {
	p := &r.s.policy
	charged := func(rule policy.Rule) bool {
		return rule.Action >= policy.RestartCharged && rule.Action <= policy.Shrink
	}
	if p.MaxRestarts == 0 && slices.ContainsFunc(p.Rules, charged) {
		r.warn("the policy retries failures, but --max-restarts=0 leaves it no restart to spend")
	}
	for _, rule := range p.Rules {
		if rule.Action == policy.RestartElsewhere && p.Alone {
			r.warn("the rule %q (%s) restarts here: this job has one node", rule, rule.From)
		}
	}
}

// planPolicy is the --dry-run output of a rule of the policy.
type planPolicy struct {
	Rule string `json:"rule"`
	From string `json:"from"`
}

func planRules(p policy.Config) (table []planPolicy) {
	for _, r := range p.Table() {
		table = append(table, planPolicy{Rule: r.String(), From: r.From})
	}
	return table
}
