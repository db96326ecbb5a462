package kube

import (
	"encoding/json"
	"slices"
	"time"
)

// node holds the fields of a Node that we use. The lists are replaced as wholes, so their members are kept as they were
// read.
type node struct {
	Metadata metadata `json:"metadata"`
	Spec     struct {
		Unschedulable bool              `json:"unschedulable"`
		Taints        []json.RawMessage `json:"taints"`
	} `json:"spec"`
	Status struct {
		Conditions []json.RawMessage `json:"conditions"`
	} `json:"status"`
}

type metadata struct {
	Name            string            `json:"name"`
	ResourceVersion string            `json:"resourceVersion"`
	Annotations     map[string]string `json:"annotations"`
}

type taint struct {
	Key    string `json:"key"`
	Value  string `json:"value,omitempty"`
	Effect string `json:"effect"`
}

type condition struct {
	Type       string    `json:"type"`
	Status     string    `json:"status"`
	Reason     string    `json:"reason"`
	Message    string    `json:"message"`
	Heartbeat  time.Time `json:"lastHeartbeatTime"`
	Transition time.Time `json:"lastTransitionTime"`
}

// heartbeat is how old a condition's heartbeat gets before it is written again for its own sake.
const heartbeat = time.Minute

// patch is a JSON merge patch of a node, or of its status; nil changes nothing.
type patch struct {
	status bool
	body   map[string]any
}

// apply marks the node, at an undoable level. A mark of another kind is removed first; more means that the node
// has to be read, and apply called, once again.
func (n *node) apply(l Level, m Mark, now time.Time) (p *patch, more bool, err error) {
	before, err := parseRecord(n.Metadata.Annotations[Key])
	if err != nil {
		return nil, false, err
	}
	e, old := newEntry(l, m), before.entries[m.Owner]
	if _, had := before.entries[m.Owner]; had && conditioned(old) != conditioned(e) {
		return n.settle(before, before.without(m.Owner), conditioned(old), now), true, nil
	}
	l.properties().note(&e, n, before)
	after, err := before.with(m.Owner, e)
	if err != nil {
		return nil, false, err
	}
	return n.settle(before, after, conditioned(e), now), false, nil
}

// remove takes owner's mark away. One that lasts longer than until, if that is given, has been renewed meanwhile.
func (n *node) remove(owner string, until, now time.Time) (*patch, error) {
	before, err := parseRecord(n.Metadata.Annotations[Key])
	if err != nil {
		return nil, err
	}
	if !before.held(owner, until) {
		return nil, nil
	}
	return n.settle(before, before.without(owner), conditioned(before.entries[owner]), now), nil
}

// settle is the patch that makes of a node with the one record a node with the other.
func (n *node) settle(before, after record, status bool, now time.Time) *patch {
	meta := map[string]any{"resourceVersion": n.Metadata.ResourceVersion}
	body := map[string]any{"metadata": meta}
	old, found := n.Metadata.Annotations[Key]
	if text := after.String(); text == "" && found {
		meta["annotations"] = map[string]any{Key: nil}
	} else if text != old {
		meta["annotations"] = map[string]any{Key: text}
	}
	if status {
		put(body, "status", n.settleStatus(before, after, now))
	} else {
		put(body, "spec", n.settleSpec(before, after))
	}
	if len(body) == 1 && len(meta) == 1 {
		return nil
	}
	return &patch{status, body}
}

func put(body map[string]any, key string, value map[string]any) {
	if len(value) > 0 {
		body[key] = value
	}
}

func (n *node) settleSpec(before, after record) map[string]any {
	spec := map[string]any{}
	if taints, changed := n.settleTaints(before, after); changed {
		spec["taints"] = taints
	}
	switch is := after.any(cordoned); {
	case is && !n.Spec.Unschedulable:
		spec["unschedulable"] = true
	case !is && before.any(cordoned) && n.Spec.Unschedulable:
		spec["unschedulable"] = nil
	}
	return spec
}

// settleTaints returns the whole list of taints. A taint without an entry is left as it is.
func (n *node) settleTaints(before, after record) (taints []json.RawMessage, changed bool) {
	holder, is := after.first(tainted)
	at, present := n.taint()
	want := taint{Key, class(holder.Reason), "NoSchedule"}
	switch taints = slices.Clone(n.Spec.Taints); {
	case is && present == nil:
		return append(taints, raw(want)), true
	case is && *present != want:
		taints[at] = raw(want)
		return taints, true
	case !is && present != nil && before.any(tainted):
		return slices.Delete(taints, at, at+1), true
	}
	return nil, false
}

// taint finds the taint with our key and effect; there is one at most.
func (n *node) taint() (at int, found *taint) {
	for at, text := range n.Spec.Taints {
		var t taint
		if json.Unmarshal(text, &t) == nil && t.Key == Key && t.Effect == "NoSchedule" {
			return at, &t
		}
	}
	return -1, nil
}

// settleStatus returns the whole list of conditions, if it changes. A condition stays when it is no longer true.
func (n *node) settleStatus(before, after record, now time.Time) map[string]any {
	holder, is := after.first(conditioned)
	at, present := n.condition()
	now = now.UTC().Truncate(time.Second)
	want := condition{ConditionType, "True", class(holder.Reason), message(holder), now, now}
	if !is {
		if present == nil || !before.any(conditioned) {
			return nil
		}
		want.Status, want.Reason, want.Message = "False", "Cleared", "no mark is left"
	}
	if present == nil {
		return map[string]any{"conditions": append(slices.Clone(n.Status.Conditions), raw(want))}
	}
	if present.Status == want.Status {
		want.Transition = present.Transition
		if present.Reason == want.Reason && present.Message == want.Message && now.Sub(present.Heartbeat) < heartbeat {
			return nil
		}
	}
	conditions := slices.Clone(n.Status.Conditions)
	conditions[at] = raw(want)
	return map[string]any{"conditions": conditions}
}

func (n *node) condition() (at int, found *condition) {
	for at, text := range n.Status.Conditions {
		var c condition
		if json.Unmarshal(text, &c) == nil && c.Type == ConditionType {
			return at, &c
		}
	}
	return -1, nil
}

// message is a mark's text for people.
func message(e entry) string {
	if e.Evidence == "" {
		return e.Reason
	}
	return e.Reason + ": " + e.Evidence
}

// raw is the JSON of a taint or a condition.
func raw(v any) json.RawMessage {
	text, err := json.Marshal(v)
	if err != nil {
		panic(err) // they have no fields that fail, but for times after the year 9999
	}
	return text
}
