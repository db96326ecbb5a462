package pyproto

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"
)

// findTime bounds one question of Find.
const findTime = 5 * time.Second

// Find returns a Client of the master at cfg.Addr, in a transport and a dialect that it understands: those in cfg are
// tried first. ErrNoMaster: none has been answered. A network error means that no server is reachable at the address.
func Find(ctx context.Context, cfg ClientConfig) (*Client, error) {
	var errs []string
	for _, http := range []bool{cfg.HTTP, !cfg.HTTP} {
		for _, d := range Dialects() {
			if http && d != Comm {
				continue // HTTP came with it
			}
			cfg.HTTP, cfg.Speak = http, d
			c := NewClient(cfg)
			answered, err := c.knows(ctx)
			if err == nil && answered {
				return c, nil
			}
			c.Close()
			dial, ok := errors.AsType[*net.OpError](err)
			if ok && dial.Op == "dial" || ctx.Err() != nil || errors.Is(err, ErrJobUID) {
				return nil, err
			}
			errs = append(errs, transport(http, d)+": "+whyNot(err))
			if err != nil {
				break // another dialect is no other transport
			}
		}
	}
	return nil, fmt.Errorf("%w at %s: %s", ErrNoMaster, cfg.Addr, strings.Join(errs, "; "))
}

// whyNot is the error of an attempt, without the address.
func whyNot(err error) string {
	if err == nil {
		return "the question is not understood"
	}
	if request, ok := errors.AsType[*url.Error](err); ok {
		err = request.Err
	}
	return strings.TrimPrefix(err.Error(), ErrNoMaster.Error()+": ")
}

func transport(http bool, d Dialect) string {
	if http {
		return "by HTTP"
	}
	return fmt.Sprintf("by gRPC, with messages of %s", d)
}

// knows makes a request that every version can answer, and then one that versions from 0.4 on can.
func (c *Client) knows(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, findTime)
	defer cancel()
	m, err := c.Get(ctx, c.New("WaitingNodeNumRequest", Field{"node_id", c.cfg.Caller.NodeID},
		Field{"local_world_size", 0}, Field{"rdzv_name", "elastic-training"}))
	if err != nil || m == nil || m.Class.Name != "RendezvousState" || c.cfg.Speak == Comm {
		return m != nil, err
	}
	m, err = c.Get(ctx, c.New("ElasticRunConfigRequest"))
	c.old = m == nil
	return true, err
}
