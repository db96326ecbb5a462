package node

import (
	"context"
	"time"

	"dlrover-run/netcheck"
	"dlrover-run/netcheck/serve"
)

// Caller posts a value to a path of a run, such as "checks/next", and decodes the answer. The server may hold the
// answer for more than 20 seconds.
type Caller interface {
	Call(ctx context.Context, run, name string, in, out any) error
}

// Over is the Transport to a service elsewhere.
func Over(c Caller) serve.Transport { return remote{c} }

type remote struct{ Caller }

// patience bounds a request: a host that has died silently would hold it until the kernel notices.
const patience = 40 * time.Second

func (r remote) Next(ctx context.Context, run string, req serve.Request) (a netcheck.Assignment, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	err = r.Call(ctx, run, "checks/next", req, &a)
	return a, err
}
