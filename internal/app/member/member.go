// Package member has the words between a launcher and the dlrover-master that it starts beside it, a member of the
// election of the process that serves the rendezvous of one run. They are lines of JSON on the helper's standard input
// and output.
package member

import (
	"time"

	"dlrover-run/internal/secure"
	"dlrover-run/rendezvous"
)

// Argument makes dlrover-master a member of the election of one run. It is the only argument.
const Argument = "_member"

// Prefix is where runs have their keys in etcd, unless the user names another place.
const Prefix = "/dlrover/runs"

// Beat is the time after which the helper repeats who leads. A launcher ends one that is silent for Silence: it is
// frozen, and would tell no later leader. The next one is there before the other nodes go on without this one.
const (
	Beat    = time.Second
	Silence = 6 * Beat
)

// Etcd is the etcd of an election, and how to get in. Files are paths.
type Etcd struct {
	Endpoints    []string `json:"endpoints"` // HOST:PORT
	Prefix       string   `json:"prefix"`    // of all runs
	HTTPS        bool     `json:"https,omitempty"`
	CA           string   `json:"ca,omitempty"` // "": those of the system
	Cert         string   `json:"cert,omitempty"`
	Key          string   `json:"key,omitempty"` // "": Cert has it, too
	User         string   `json:"user,omitempty"`
	PasswordFile string   `json:"password_file,omitempty"`
}

// Config is the first line that the launcher writes. When its end closes, the helper ends.
type Config struct {
	Etcd
	Run  string `json:"run"`
	Host string `json:"host"` // at which other nodes reach this one
	// Token is the job token; "": the members agree on one in etcd. Agreed: they did.
	Token  string `json:"token,omitempty"`
	Agreed bool   `json:"agreed,omitempty"`
	// TokenFile is the absolute path of the file with Token, which may change; "": of none.
	TokenFile    string        `json:"token_file,omitempty"`
	Patience     time.Duration `json:"patience"` // until etcd answers for the first time
	TopologyFile string        `json:"topology_file,omitempty"`
	TLS          secure.Choice `json:"tls,omitzero"`
	LogFormat    string        `json:"log_format"`
}

// Order is a later line of the launcher: the run is over here. A helper that serves it goes on until the other nodes
// know, at most for Linger, and ends.
type Order struct {
	Linger time.Duration `json:"linger"`
}

// News is a line of the helper. One of its fields is set.
type News struct {
	Token  string           `json:"token,omitempty"`  // first, when etcd has answered
	Leader string           `json:"leader,omitempty"` // HOST:PORT of the one that serves, whenever that is another one
	Term   uint64           `json:"term,omitempty"`   // the leader's
	Beats  bool             `json:"beats,omitempty"`  // with Leader: it is repeated; helpers of older versions do not
	Note   *rendezvous.Note `json:"note,omitempty"`   // of the run, from the one that serves
	Error  string           `json:"error,omitempty"`  // last: the helper ends
}
