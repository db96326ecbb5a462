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

// restarts decide what follows on a failure.
type restarts struct {
	policy policy.Config
	codes  policy.CodePolicy // of the launcher's own exit status
}

// read reads the options; alone is set for a job of one node.
func (r *restarts) read(o *options, p *rendezvous.Params, alone bool) (err error) {
	p.MaxRestarts = o.Int("max-restarts")
	r.codes = policy.CodePolicy(o.String("exit-code-policy"))
	r.policy = policy.Config{Restart: policy.Restart(o.String("restart-policy")), MaxRestarts: p.MaxRestarts, Alone: alone}
	p.Always = r.policy.Restart == policy.Always
	if o.IsSet("retryable-exit-codes") {
		if r.policy.Retryable, err = policy.ParseCodes(o.String("retryable-exit-codes")); err != nil {
			return fmt.Errorf("--retryable-exit-codes: %w", err)
		}
	}
	if o.Duration("monitor-interval") <= 0 {
		return fmt.Errorf("--monitor-interval=%s: must be greater than 0", o.String("monitor-interval"))
	}
	if err := r.codes.Validate(); err != nil {
		return err
	}
	if err := r.readRules(o); err != nil {
		return err
	}
	if err := r.readPolicy(o, p); err != nil {
		return err
	}
	if err := r.policy.Validate(); err != nil {
		return err
	}
	if err := r.policy.CheckSize(p.Min, p.Max); err != nil {
		return err
	}
	r.warn(o)
	return nil
}

func (r *restarts) readRules(o *options) error {
	for _, text := range o.Strings("rule") {
		rule, err := policy.ParseRule(text)
		if err != nil {
			return fmt.Errorf("--rule: %w", err)
		}
		rule.From = "--rule"
		r.policy.Rules = append(r.policy.Rules, rule)
	}
	if err := policy.Check(r.policy.Rules); err != nil {
		return fmt.Errorf("--rule: %w", err)
	}
	return nil
}

func (r *restarts) readPolicy(o *options, p *rendezvous.Params) error {
	name := o.String("policy")
	if name == "" {
		return nil
	}
	table, err := policyTable(name)
	if err != nil {
		return fmt.Errorf("--policy=%s: %w", name, err)
	}
	r.policy.Rules = append(r.policy.Rules, table.Rules...)
	p.Budget = rendezvous.Budget{Success: rendezvous.SuccessRule(table.Success), Alone: table.Alone, Sum: table.Sum}
	if table.Restart != "" && !o.IsSet("restart-policy") {
		r.policy.Restart = table.Restart
	}
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

// warn warns of rules that have no effect in this job.
func (r *restarts) warn(o *options) {
	p := &r.policy
	charged := func(rule policy.Rule) bool {
		return rule.Action >= policy.RestartCharged && rule.Action <= policy.Shrink
	}
	if p.MaxRestarts == 0 && slices.ContainsFunc(p.Rules, charged) {
		o.Warn("the policy retries failures, but --max-restarts=0 leaves it no restart to spend")
	}
	for _, rule := range p.Rules {
		if rule.Action == policy.RestartElsewhere && p.Alone {
			o.Warn("the rule %q (%s) restarts here: this job has one node", rule, rule.From)
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
