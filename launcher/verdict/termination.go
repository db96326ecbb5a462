package verdict

import (
	"bytes"
	"cmp"
	"encoding/json"
)

// MaxTermination is the most bytes of a termination message that Kubernetes keeps.
const MaxTermination = 4096

// Termination is how one launcher ended, for the termination message of its container.
type Termination struct {
	Line string `json:"-"` // for people; "" takes the reason

	RunID    string `json:"run_id,omitempty"`
	Node     string `json:"node,omitempty"` // the name of this node
	Reason   string `json:"reason"`         // see docs/reference/exit-codes.md
	ExitCode int    `json:"exit_code"`      // of the launcher
	Signal   string `json:"signal,omitempty"`

	// Of the verdict, if there is one.
	Class    Class  `json:"class,omitempty"`
	Rule     Rule   `json:"rule,omitempty"`
	RootRank *int   `json:"root_rank,omitempty"`
	RootNode string `json:"root_node,omitempty"` // the name of the node of that rank, or of the one that went away
	RootExit *int   `json:"root_exit_code,omitempty"`
	Restarts int    `json:"restarts"`
}

// Judged copies the facts of v.
func (t *Termination) Judged(v Verdict) {
	t.Class, t.Rule, t.Restarts = v.Class, v.Rule, v.RestartsUsed
	switch {
	case v.Root != nil:
		t.RootRank, t.RootNode, t.RootExit = &v.Root.Rank, v.Root.NodeName, &v.Root.ExitCode
	case v.Loss != nil:
		t.RootNode = v.Loss.NodeName
	}
}

// maxField bounds the names in a message, in bytes; each takes up to twice as much as JSON.
const maxField = 253

// Message is the content of the file: a line for people, and one of JSON; together at most MaxTermination bytes.
func (t Termination) Message() []byte {
	for _, s := range []*string{&t.RunID, &t.Node, &t.Reason, &t.Signal, &t.RootNode} {
		*s = clean(*s, maxField)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(t) // a struct of strings and numbers cannot fail
	line := clean(cmp.Or(t.Line, t.Reason), MaxTermination-b.Len()-1)
	return append([]byte(line+"\n"), b.Bytes()...)
}
