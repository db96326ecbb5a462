package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"sync"
	"time"

	"dlrover-run/hang"
	"dlrover-run/hang/serve"
	"dlrover-run/internal/app/service"
	"dlrover-run/internal/job"
	"dlrover-run/rendezvous"
	"dlrover-run/rendezvous/api"
)

const (
	// judgeCommand makes this program a daemon with a run whose workers run, on the given number of nodes.
	judgeCommand = "judge"
	// hangWorkers is the number of workers of a simulated node, and hangThreads and hangFrames are the size of their
	// stacks.
	hangWorkers = 8
	hangThreads = 8
	hangFrames  = 25
	// hangIdle is how long summaries are sent, at the rate of all nodes.
	hangIdle = 10 * time.Second
)

func hangRow(n int) row {
	return row{id: "hang", limit: 3 * time.Minute, maxReps: 3, noPeer: "has none",
		run: func(ctx context.Context, l *lab) ([]float64, error) { return l.judgeHang(ctx, n) },
		lines: []line{
			{what: fmt.Sprintf("evidence of %d nodes of %d workers, the first one sent until all are merged",
				n, hangWorkers), unit: duration, goal: 5},
			{what: "of that, processor time of the daemon", unit: duration},
			{what: "more peak resident memory of the daemon", unit: size, goal: 100e6},
			{what: fmt.Sprintf("processor time of one core for the summaries of all nodes, every %s", hang.Summaries(n)),
				unit: percent, goal: 10},
		}}
}

// judge serves at an address until it is ended: judge ADDRESS NODES.
func judge(args []string) error {
	var n int
	if len(args) != 2 {
		return errors.New("judge: want ADDRESS NODES")
	}
	if _, err := fmt.Sscan(args[1], &n); err != nil {
		return fmt.Errorf("judge: %w", err)
	}
	s, err := service.New(service.Config{Token: os.Getenv("DLROVER_TOKEN"), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	ctx := context.Background()
	for i := range n {
		node := rendezvous.Node{ID: hangID(i), Name: fmt.Sprintf("node-%d", i), Rank: -1, Addr: "127.0.0.1",
			Slots: hangWorkers}
		if err := s.Hub.Join(ctx, benchRun, rendezvous.Join{Node: node, Params: rendezvous.Params{Min: n,
			Max: n}}); err != nil {
			return err
		}
	}
	seat, err := s.Hub.Seat(benchRun, hangID(0))
	if err != nil {
		return err
	}
	for i := range n { // one of them leads
		ready := rendezvous.Ready{ID: hangID(i), EpochID: seat.EpochID, Addr: "127.0.0.1", Port: 1}
		if err := s.Hub.Report(ctx, benchRun, ready); err != nil {
			return err
		}
	}
	for i := range n {
		go attend(ctx, s.Hub, hangID(i))
	}
	l, err := api.Listen(ctx, args[0])
	if err != nil {
		return err
	}
	return s.Serve(l)
}

// attend keeps a node in its run, as a launcher's watch does, until the process is ended.
func attend(ctx context.Context, hub *api.Hub, id string) {
	c := api.Cursor{WithNotices: true}
	for {
		news, err := hub.Watch(ctx, benchRun, id, c)
		if err == nil {
			c.Directive, c.Notices = news.Seq, news.NoticeSeq
		} else if !errors.Is(err, api.ErrNothingNew) {
			return
		}
	}
}

func hangID(node int) string { return fmt.Sprintf("id-%06d", node) }

// judgeHang lets a daemon judge n nodes.
func (l *lab) judgeHang(ctx context.Context, n int) ([]float64, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p, err := l.start([]string{"DLROVER_TOKEN=" + l.token}, nil, self, judgeCommand, "0.0.0.0:"+port, fmt.Sprint(n))
	if err != nil {
		return nil, err
	}
	defer func() {
		_ = p.cmd.Process.Kill()
		<-p.done
	}()
	if err := l.listening(ctx, "127.0.0.1:"+port); err != nil {
		return nil, err
	}
	h := &hanging{pid: p.cmd.Process.Pid, port: port, token: l.token, nodes: n}
	idle, err := h.idle(ctx)
	if err != nil {
		return nil, err
	}
	merged, err := h.evidence(ctx)
	return append(merged, idle), err
}

// hanging is n nodes whose workers hang.
type hanging struct {
	pid         int
	port, token string
	nodes       int
	epoch       job.EpochID
}

// idle is the share of a core, in percent, that the summaries of all nodes take.
func (h *hanging) idle(ctx context.Context) (float64, error) {
	c := api.NewClient(daemonAddr(0, h.port), h.token)
	defer c.Close()
	var err error
	if h.epoch, err = h.present(ctx, c); err != nil {
		return 0, err
	}
	before, err := cpuSeconds(h.pid)
	if err != nil {
		return 0, err
	}
	began := time.Now()
	count := int(hangIdle * time.Duration(h.nodes) / hang.Summaries(h.nodes))
	step := hangIdle / time.Duration(count)
	for i := range count {
		if err := pause(ctx, time.Until(began.Add(time.Duration(i)*step))); err != nil {
			return 0, err
		}
		if err := h.post(ctx, i*29%h.nodes, hang.Report{Summary: &hang.Summary{Steps: 1000,
			StepTime: time.Second}}); err != nil {
			return 0, err
		}
	}
	after, err := cpuSeconds(h.pid)
	return 100 * (after - before) / time.Since(began).Seconds(), err
}

// present is the running epoch, from a directive.
func (h *hanging) present(ctx context.Context, c *api.Client) (job.EpochID, error) {
	news, err := c.Watch(ctx, benchRun, hangID(0), api.Cursor{})
	return news.EpochID, err
}

// post sends a report on a connection of its own, as the nodes have.
func (h *hanging) post(ctx context.Context, node int, r hang.Report) error {
	c := api.NewClient(daemonAddr(node, h.port), h.token)
	defer c.Close()
	r.ID, r.Epoch = hangID(node), h.epoch
	_, err := serve.Over(c).Post(ctx, benchRun, r)
	return err
}

// packed is a report in its wire format.
type packed struct {
	path, encoding string
	body           []byte
}

// Exchange implements serve.Caller: it keeps the request's body.
func (p *packed) Exchange(_ context.Context, _, path, encoding string, body []byte) (*http.Response, error) {
	p.path, p.encoding, p.body = path, encoding, body
	return &http.Response{StatusCode: http.StatusNoContent, Body: io.NopCloser(&bytes.Reader{})}, nil
}

// evidence measures the wall time until the evidence of all nodes is judged. It also measures the daemon's processor
// time, and the growth of its memory.
func (h *hanging) evidence(ctx context.Context) ([]float64, error) {
	c := api.NewClient(daemonAddr(0, h.port), h.token)
	defer c.Close()
	bodies := make([]packed, h.nodes)
	before, err := memory(h.pid, "status", "VmRSS")
	if err != nil {
		return nil, err
	}
	collection, err := serve.Over(c).Collect(ctx, benchRun) // no node answers for 15 s: time to pack
	if err != nil {
		return nil, err
	}
	for i := range bodies {
		r := hang.Report{ID: hangID(i), Epoch: h.epoch, Ask: collection, Evidence: hungWorkers(i)}
		if _, err := serve.Over(&bodies[i]).Post(ctx, benchRun, r); err != nil {
			return nil, err
		}
	}
	m := &meeting{pid: h.pid}
	took, cpu, err := m.timed(func() (float64, error) { return h.send(ctx, c, bodies) })
	if err != nil {
		return nil, err
	}
	peak, err := memory(h.pid, "status", "VmHWM")
	return []float64{took, cpu, peak - before}, err
}

// send sends all bodies, and waits until they are collected.
func (h *hanging) send(ctx context.Context, c *api.Client, bodies []packed) (float64, error) {
	began := time.Now()
	next := make(chan int)
	failed := make(chan error, len(bodies))
	var wg sync.WaitGroup
	for range dialers {
		wg.Go(func() {
			for i := range next {
				node := api.NewClient(daemonAddr(i, h.port), h.token)
				resp, err := node.Exchange(ctx, benchRun, bodies[i].path, bodies[i].encoding, bodies[i].body)
				if err == nil && resp.StatusCode >= 300 {
					err = fmt.Errorf("node %d: HTTP %s", i, resp.Status)
				}
				if err != nil {
					failed <- err
				} else {
					_ = resp.Body.Close()
				}
				node.Close()
			}
		})
	}
	for i := range bodies {
		next <- i
	}
	close(next)
	wg.Wait()
	select {
	case err := <-failed:
		return 0, err
	default:
	}
	p, err := serve.Over(c).Picture(ctx, benchRun, false)
	if err == nil && !p.Collected {
		err = errors.New("the evidence of all nodes was sent, but not collected")
	}
	return time.Since(began).Seconds(), err
}

// hungWorkers is the evidence of one node's workers.
func hungWorkers(node int) (es []hang.Evidence) {
	stacks := &hang.Stacks{Interpreter: "CPython 3.11.2"}
	for t := range hangThreads {
		th := hang.Thread{TID: 1000*node + t, Name: fmt.Sprintf("thread-%d", t), Main: t == 0, State: 'S'}
		for f := range hangFrames {
			th.Python = append(th.Python, hang.Frame{
				Func: fmt.Sprintf("function_%d_%d", t, f), File: "/usr/lib/python3/dist-packages/torch/nn/modules/module.py",
				Line: 100 + f,
			})
		}
		stacks.Threads = append(stacks.Threads, th)
	}
	for i := range hangWorkers {
		w := hang.Worker{Rank: node*hangWorkers + i, Local: i, PID: 4000 + i, Start: 123456}
		e := hang.Evidence{Worker: w, Stacks: stacks, Groups: []hang.Group{{ID: 7, Name: "0", Backend: "nccl",
			Ranks: "0-79999"}}}
		for k := range 3 {
			at := time.Hour + time.Duration(k)*2*time.Second
			p := &hang.Page{PID: w.PID, Start: w.Start, Rank: w.Rank, Steps: 500, LastStep: time.Hour, Heartbeat: at,
				Groups: []hang.GroupState{{ID: 7, Seq: 1000, Since: time.Hour}}}
			for s := range 32 { // steps of a second; the ranks see their end within a millisecond
				end := time.Hour - time.Duration(31-s)*time.Second - time.Duration(s*s%7)*10*time.Millisecond
				p.StepTimes = append(p.StepTimes, end+rand.N(time.Millisecond))
			}
			e.Samples = append(e.Samples, hang.Sample{Worker: w, At: at, Page: p, Proc: hang.Proc{
				State: 'S', CPU: time.Minute, MainCPU: time.Minute, Switches: 12345, IO: 1 << 30, WChan: "futex_wait_queue",
				Threads: 40,
			}})
		}
		es = append(es, e)
	}
	return es
}
