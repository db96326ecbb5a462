package master

import (
	"cmp"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"dlrover-run/internal/app/etcd"
	"dlrover-run/internal/app/member"
	"dlrover-run/internal/plainhttp"
)

// Agents of torchrun meet in etcd's v2 API, which etcd 3.4 and 3.5 have with --enable-v2. The v3 API does not show its
// keys. The member that serves a run looks for them while such agents are likely to start.
const (
	lookEvery   = 10 * time.Second
	looks       = 12
	lookTimeout = 5 * time.Second
	mostOfKeys  = 64 << 10 // bytes of an answer
)

// torchKeys are the v2 keys of torchrun's agents under this run id: those of its backend etcd (PyTorch's
// etcd_rendezvous.py), and those of etcd-v2 (etcd_rendezvous_backend.py).
func torchKeys(run, prefix string) []string {
	if prefix == member.Prefix {
		prefix = ""
	}
	prefix = strings.Trim(cmp.Or(prefix, "torchelastic/p2p"), "/")
	run = url.PathEscape(run)
	return []string{"/" + prefix + "/run_" + run, "/torch/elastic/rendezvous/" + run}
}

// warnOfTorchAgents logs once that torchrun's agents use the run id in this etcd: no launcher ever meets them.
func (b *beside) warnOfTorchAgents(ctx context.Context) {
	cfg := b.etcd
	client := plainhttp.New(func(t *http.Transport) { t.TLSClientConfig, t.DisableKeepAlives = cfg.TLS, true })
	client.Timeout = lookTimeout
	for i := range looks {
		at := cfg.Endpoints[i%len(cfg.Endpoints)]
		for _, key := range torchKeys(b.cfg.Run, b.cfg.Prefix) {
			if hasV2Key(ctx, client, cfg, at, key) {
				b.log.Warn("etcd's v2 API has keys of torchrun's agents for this run id. They and dlrover-run never meet: "+
					"if they still run, start every node with dlrover-run, or use another --rdzv-id", "key", key)
				return
			}
		}
		select {
		case <-time.After(lookEvery):
		case <-ctx.Done():
			return
		}
	}
}

// hasV2Key reports whether the etcd at endpoint at has the key. One that does not answer, or has no v2 API, has not.
func hasV2Key(ctx context.Context, client *http.Client, cfg etcd.Config, at, key string) bool {
	if !strings.Contains(at, "://") {
		at = "http://" + at
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at+"/v2/keys"+key, http.NoBody)
	if err != nil {
		return false
	}
	if cfg.User != "" {
		req.SetBasicAuth(cfg.User, cfg.Password)
	}
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	var answer struct {
		Node json.RawMessage `json:"node"`
	}
	err = json.NewDecoder(io.LimitReader(resp.Body, mostOfKeys)).Decode(&answer)
	return err == nil && answer.Node != nil
}
