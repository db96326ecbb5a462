// Package trainjob sends the progress of a job to the server of Kubeflow Trainer that writes it into the status of the
// TrainJob. A pod has the server's URL, and the files with its certificates and a token, in three variables.
package trainjob

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/job"
	"dlrover-run/internal/openfile"
	"dlrover-run/internal/plainhttp"
	"dlrover-run/internal/retry"
	"dlrover-run/internal/text"
	"dlrover-run/launcher"
	"dlrover-run/launcher/policy"
)

// The variables of a pod.
const (
	URLVariable   = "KUBEFLOW_TRAINER_SERVER_URL"
	CAVariable    = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
	TokenVariable = "KUBEFLOW_TRAINER_SERVER_TOKEN"
)

const (
	every   = 15 * time.Second // between two reports; Trainer asks for at least 5 s
	timeout = 10 * time.Second // of one report
	maxFile = 1 << 20          // bytes of certificates, or of a token
)

// Settings say where the reports go, and how many steps the job has.
type Settings struct {
	URL   string `json:"url"`
	CA    string `json:"ca"`
	Token string `json:"token"` // the file's path
	Steps int64  `json:"steps"`
}

// Read returns nil where no TrainJob asks for progress.
func Read(lookup func(variable string) string, steps int64) (*Settings, error) {
	s := &Settings{URL: lookup(URLVariable), CA: lookup(CAVariable), Token: lookup(TokenVariable), Steps: steps}
	if s.URL == "" {
		return nil, nil
	}
	u, err := url.Parse(s.URL)
	if err != nil || u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("%s=%s: need https://HOST:PORT/PATH", URLVariable, s.URL)
	}
	for name, path := range map[string]string{CAVariable: s.CA, TokenVariable: s.Token} {
		if path == "" {
			return nil, fmt.Errorf("%s is set, and %s is not: need the path of a file", URLVariable, name)
		}
	}
	return s, nil
}

// Reporter reports from the node of rank 0.
type Reporter struct {
	Settings
	measure func() job.Progress
	log     *slog.Logger
	send    func(context.Context, trainerStatus) error

	first  bool // this node has rank 0
	last   trainerStatus
	warned bool
}

// New returns a Reporter of the progress that measure returns.
func New(s Settings, measure func() job.Progress, log *slog.Logger) *Reporter {
	return &Reporter{Settings: s, measure: measure, log: log, send: s.post}
}

// Run reports while the workers of an epoch run.
func (r *Reporter) Run(ctx context.Context, run launcher.RunRequest) {
	r.first = run.Epoch.Place.RankBase == 0
	for told := int64(-1); r.first && retry.Sleep(ctx, every); {
		p := r.measure()
		if done := p.Loaded + p.Step; p.Step > 0 && done != told {
			r.last = status(p, r.Steps, run.Epoch.Place)
			r.report(ctx, r.last)
			told = done
		}
	}
}

// Stop: a node whose workers were stopped may have none in the next world, and no rank 0.
func (r *Reporter) Stop(s launcher.StopRequest) {
	if s.CauseKind != "" {
		r.first = false
	}
}

// End reports a job that has succeeded as complete.
func (r *Reporter) End(e launcher.EndRequest) {
	res := e.Result
	if !r.first || res.Reason != policy.Success || res.Err != nil || res.Signal != 0 || res.Left != "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), min(timeout, e.Budget))
	defer cancel()
	r.last.Percent, r.last.Remaining = new(int32(100)), new(int32(0))
	r.report(ctx, r.last)
}

// trainerStatus is the field of that name in Trainer's API. Each report replaces the one before.
type trainerStatus struct {
	Percent   *int32    `json:"progressPercentage,omitempty"`
	Remaining *int32    `json:"estimatedRemainingSeconds,omitempty"`
	Metrics   []metric  `json:"metrics,omitempty"`
	Updated   time.Time `json:"lastUpdatedTime"`
}

type metric struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// status is the progress p of a job of that many steps. 100 % is left for its end.
func status(p job.Progress, steps int64, at job.Place) (s trainerStatus) {
	add := func(name string, value float64) {
		s.Metrics = append(s.Metrics, metric{name, strconv.FormatFloat(value, 'g', 6, 64)})
	}
	done := p.Loaded + p.Step
	s.Percent = new(int32(min(99, 100*done/steps)))
	s.Metrics = []metric{{"step", strconv.FormatInt(done, 10)}}
	if spent := p.Ran - p.Idle; p.Step > 1 && spent > 0 {
		pace := spent.Seconds() / float64(p.Step-1)
		add("seconds_per_step", pace)
		s.Remaining = new(int32(min(float64(max(steps-done, 0))*pace, 1<<31-1)))
	}
	if p.Saving {
		add("checkpoint_step", float64(p.Checkpoint))
	}
	add("restarts", float64(at.RestartCount))
	add("world_size", float64(at.WorldSize))
	return s
}

// report logs the first failure of a series.
func (r *Reporter) report(ctx context.Context, s trainerStatus) {
	s.Updated = time.Now().UTC().Truncate(time.Second)
	err := r.send(ctx, s)
	if err != nil && ctx.Err() == nil && !r.warned {
		r.log.Warn("cannot report progress to the TrainJob; the job goes on, and the next report may pass", "err", err)
	}
	r.warned = err != nil
}

func (s Settings) post(ctx context.Context, status trainerStatus) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	body, err := json.Marshal(map[string]any{"trainerStatus": status})
	if err != nil {
		return err
	}
	token, err := openfile.ReadLinked(s.Token, maxFile)
	if err != nil {
		return err
	}
	hc, err := s.client()
	if err != nil {
		return err
	}
	defer hc.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	resp, err := hc.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("%s: %s", resp.Status, text.Line(string(answer), 300))
	}
	return nil
}

// client trusts what the file of certificates says now: Trainer replaces it.
func (s Settings) client() (*http.Client, error) {
	certificates, err := openfile.ReadLinked(s.CA, maxFile)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(certificates) {
		return nil, errors.New(s.CA + " holds no certificate")
	}
	return plainhttp.New(func(t *http.Transport) {
		t.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	}), nil
}
