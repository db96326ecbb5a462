// Package leavenotice looks for a notice that this node has to leave.
package leavenotice

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/plainhttp"
	"dlrover-run/launcher"
)

// The interval of looks for a notice, the time limit of an answer, and its size limit.
const (
	lookAtFile   = time.Second
	askURL       = 5 * time.Second
	answerTime   = 2 * time.Second
	answerLength = 64 << 10
)

// looker looks for a notice that this node has to leave.
type looker struct {
	from   string
	log    *slog.Logger
	leaves chan string
	cancel context.CancelFunc // nil before this node has joined
	wg     sync.WaitGroup
}

// Open looks for a notice at a path or a URL, once this node has joined.
func Open(from string, log *slog.Logger) *feature.Opened {
	l := &looker{from: from, log: log, leaves: make(chan string, 1)}
	configure := func(cfg *launcher.Config) { cfg.Leaves = l.leaves }
	return &feature.Opened{Joined: l.joined, Configure: configure, Close: l.close}
}

func (l *looker) joined() {
	var ctx context.Context
	ctx, l.cancel = context.WithCancel(context.Background())
	l.wg.Go(func() {
		if why := await(ctx, l.from, l.log); why != "" {
			l.leaves <- why
		}
	})
}

func (l *looker) close() error {
	if l.cancel != nil {
		l.cancel()
		l.wg.Wait()
	}
	return nil
}

// await waits for a file to appear, or for a URL to answer with status 200. It returns a short
// description, "" when ctx ends before.
func await(ctx context.Context, from string, log *slog.Logger) string {
	look, every := func() bool { _, err := os.Stat(from); return err == nil }, lookAtFile
	if !filepath.IsAbs(from) {
		client := noticeClient()
		defer client.CloseIdleConnections()
		complained := false
		every = askURL
		look = func() bool {
			found, err := noticeAt(ctx, client, from)
			if err != nil && !complained && ctx.Err() == nil {
				complained = true
				log.Warn("--leave-on gives no answer; it is asked on", "err", err)
			}
			return found
		}
	}
	ticks := time.NewTicker(every)
	defer ticks.Stop()
	for !look() {
		select {
		case <-ticks.C:
		case <-ctx.Done():
			return ""
		}
	}
	return "notice at " + from
}

// noticeClient is for notice services of clouds. They are close by, so it uses no proxy, and a redirect could end
// the job.
func noticeClient() *http.Client {
	c := plainhttp.New(nil)
	c.Timeout = answerTime
	return c
}

// noticeAt reports whether a URL gives notice. Status 200 does, unless the body is a word for no, as that of
// Google's cloud may be. Status 404 does not; every other answer is an error.
func noticeAt(ctx context.Context, c *http.Client, from string) (bool, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, from, nil)
	if err != nil {
		return false, err
	}
	req.Header.Set("Metadata-Flavor", "Google")
	resp, err := c.Do(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, answerLength))
	switch {
	case err != nil:
		return false, err
	case resp.StatusCode == http.StatusNotFound:
		return false, nil
	case resp.StatusCode != http.StatusOK:
		return false, fmt.Errorf("%s answers %s; need 200 for a notice, or 404", from, resp.Status)
	}
	no := []string{"false", "none", "no", "0"}
	return !slices.Contains(no, strings.ToLower(strings.TrimSpace(string(body)))), nil
}
