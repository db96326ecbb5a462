package policy

import "time"

// Decision is the answer to an exit, and why.
type Decision struct {
	Action Action
	Rule   *Rule // of Config.Rules that decided; nil: the restart policy did
	// UsedUp is the first rule that matched, but had decided as often as it may.
	UsedUp *Rule
	// Yielded: the action is weaker than it would be, because the failure only followed another one.
	Yielded bool
}

// Why is the deciding rule and its effect in one line; "" if no rule decided.
func (d Decision) Why() string {
	switch {
	case d.Rule != nil && d.Yielded:
		return d.Rule.what() + ", but the failure followed that of another process"
	case d.Rule != nil && d.UsedUp != nil:
		return d.UsedUp.what() + " is used up, so " + d.Rule.what()
	case d.Rule != nil:
		return d.Rule.what()
	case d.UsedUp != nil:
		return d.UsedUp.what() + " is used up"
	}
	return ""
}

func (r *Rule) what() string { return "rule " + r.String() + " (" + r.From + ")" }

// Decide judges one exit as if none had been judged before: Rule.Max does not count.
func (c Config) Decide(e Exit) Action {
	d, _ := c.decide(e, func(int) bool { return false })
	return d.Action
}

// decide also returns the index of the rule; -1 without one.
func (c Config) decide(e Exit, usedUp func(rule int) bool) (d Decision, rule int) {
	if e.Code == 0 {
		return Decision{Action: Succeed}, -1
	}
	table := c.Table()
	for rule = range table {
		switch r := &table[rule]; {
		case !r.matches(e):
		case rule >= len(c.Rules) && d.UsedUp != nil:
			return c.finish(d, Fail, e), -1
		case rule >= len(c.Rules):
			return c.finish(d, r.Action, e), -1
		case !usedUp(rule):
			d.Rule = r
			return c.finish(d, r.Action, e), rule
		case d.UsedUp == nil:
			d.UsedUp = r
		}
	}
	return c.finish(d, Fail, e), -1
}

func (c Config) finish(d Decision, act Action, e Exit) Decision {
	d.Action = act
	if d.Action == RestartElsewhere && c.Alone {
		d.Action = RestartCharged
	}
	tells := d.Rule != nil && d.Rule.tells()
	if e.Follows && d.Action > RestartCharged && !tells && c.Restart != Never {
		d.Action, d.Yielded = RestartCharged, true
	}
	return d
}

// Decider judges one exit after the other, and counts for Rule.Max. It is for one goroutine.
type Decider struct {
	cfg  Config
	used [][]time.Time // when each rule has decided; the last Max times
}

// NewDecider returns a Decider that has judged nothing.
func NewDecider(c Config) *Decider {
	return &Decider{cfg: c, used: make([][]time.Time, len(c.Rules))}
}

// Decide judges an exit that is seen at now. Times must not go back.
func (d *Decider) Decide(now time.Time, e Exit) Decision {
	got, i := d.cfg.decide(e, func(i int) bool { return d.usedUp(now, i) })
	if i >= 0 && d.cfg.Rules[i].Max > 0 {
		d.used[i] = append(d.used[i], now)
	}
	return got
}

// usedUp forgets restarts that have left the window.
func (d *Decider) usedUp(now time.Time, i int) bool {
	r := &d.cfg.Rules[i]
	if r.Max == 0 {
		return false
	}
	used := d.used[i]
	for len(used) > 0 && now.Sub(used[0]) >= r.Per {
		used = used[1:]
	}
	d.used[i] = used
	return len(used) >= r.Max
}
