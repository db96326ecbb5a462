// Package tensorboard runs TensorBoard next to the job.
package tensorboard

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/app/run/preflight"
	"dlrover-run/internal/text"
	"dlrover-run/launcher"
	"dlrover-run/launcher/logs"
	"dlrover-run/launcher/proc"
	"dlrover-run/launcher/pyenv"
)

// board holds the settings of --tensorboard.
type board struct {
	LogDir string   `json:"logdir"`
	Host   string   `json:"host"`
	Port   int      `json:"port"`
	Argv   []string `json:"argv"`
	path   string   // the executable's
}

// defaultBoardPort is TensorBoard's own.
const defaultBoardPort = 6006

// New is the feature.
func New() feature.Feature {
	var b *board
	return feature.Feature{
		Name:     "tensorboard",
		Settings: func(o feature.Options) (err error) { b, err = read(o); return err },
		Plan: func(p *feature.Plan) {
			if b != nil {
				p.Features["tensorboard"] = b
			}
		},
		Open: func(n feature.Node) (*feature.Opened, error) {
			if b == nil {
				return nil, nil
			}
			t := prepare(n, *b)
			o := &feature.Opened{Part: launcher.Part{Start: t.start, End: t.end}}
			if n.Job().First {
				return o, feature.Unusable(t.free())
			}
			return o, nil
		},
	}
}

// read reads --tensorboard; it returns nil if that is not set.
func read(o feature.Options) (*board, error) {
	text := o.String("tensorboard")
	if text == "" {
		return nil, nil
	}
	b, err := parseBoard(text)
	if err == nil {
		err = b.find(o)
	}
	if err != nil {
		return nil, fmt.Errorf("--tensorboard=%s: %w", text, err)
	}
	b.Argv = append(b.Argv, "--logdir", b.LogDir, "--host", b.Host, "--port", strconv.Itoa(b.Port))
	return &b, nil
}

// parseBoard reads LOGDIR, LOGDIR:PORT or LOGDIR:HOST:PORT. LOGDIR may be a URL such as s3://bucket/logs.
func parseBoard(text string) (board, error) {
	b := board{LogDir: text, Host: "127.0.0.1", Port: defaultBoardPort}
	i := strings.LastIndexByte(text, ':')
	if i < 0 || strings.Contains(text[i:], "/") {
		return b, nil
	}
	var err error
	if b.Port, err = strconv.Atoi(text[i+1:]); err != nil || b.Port < 1 || b.Port > 65535 {
		return b, errors.New("need LOGDIR, LOGDIR:PORT or LOGDIR:HOST:PORT with a port from 1 to 65535")
	}
	b.LogDir = text[:i]
	if dir, host, ok := cutHost(b.LogDir); ok {
		b.LogDir, b.Host = dir, host
	}
	if b.LogDir == "" || b.Host == "" {
		return b, errors.New("need LOGDIR, LOGDIR:PORT or LOGDIR:HOST:PORT, and neither may be empty")
	}
	return b, nil
}

// cutHost cuts a host name or address, IPv6 in brackets, off the end of DIR:HOST.
func cutHost(text string) (dir, host string, ok bool) {
	if inner, found := strings.CutSuffix(text, "]"); found {
		dir, host, ok = strings.Cut(inner, ":[")
		return dir, host, ok
	}
	i := strings.LastIndexByte(text, ':')
	if i < 0 || strings.Contains(text[i:], "/") {
		return "", "", false
	}
	return text[:i], text[i+1:], true
}

// find finds the program: that of the workers' Python, the first in PATH, or the module.
func (b *board) find(o feature.Options) error {
	python, noPython := o.Python()
	if noPython == nil {
		b.path = filepath.Join(filepath.Dir(python), "tensorboard")
		if _, err := o.LookPath(b.path); err == nil {
			b.Argv = []string{b.path}
			return nil
		}
	}
	var err error
	if b.path, err = o.LookPath("tensorboard"); err == nil {
		b.Argv = []string{b.path}
		return nil
	}
	if noPython == nil && pyenv.HasPackage(python, "tensorboard", o.LookupEnv) {
		b.path, b.Argv = python, []string{python, "-m", "tensorboard.main"}
		return nil
	}
	return fmt.Errorf("there is no TensorBoard in PATH, and none of the workers' Python %s; install it "+
		"(pip install tensorboard), or leave the option out", cmp.Or(python, "(which is not there either)"))
}

// tensorBoard runs next to the job once this node is the first. Its exit status does not count.
type tensorBoard struct {
	board
	node    feature.Node
	root    fs.FS
	backoff []time.Duration // before each new start
	cancel  context.CancelFunc
	wg      sync.WaitGroup
}

// stopBoard is how long it may take to end.
const stopBoard = 2 * time.Second

func prepare(n feature.Node, b board) *tensorBoard {
	return &tensorBoard{board: b, node: n, root: os.DirFS("/"),
		backoff: []time.Duration{time.Second, 5 * time.Second, 25 * time.Second}}
}

// free returns an error if another process has the port.
func (t *tensorBoard) free() error {
	if err := preflight.Listenable(t.root, t.Host, t.Port); err != nil {
		return fmt.Errorf("--tensorboard: %w; end it, or give another port: --tensorboard=%s:PORT", err, t.LogDir)
	}
	return nil
}

func (t *tensorBoard) start(r *launcher.StartRequest) {
	if r.Place.GroupRank != 0 || t.cancel != nil {
		return
	}
	var ctx context.Context
	ctx, t.cancel = context.WithCancel(context.Background())
	t.wg.Go(func() {
		feature.Keep(ctx, t.node.Log().With("logdir", t.LogDir), "TensorBoard", t.backoff, t.once)
	})
}

func (t *tensorBoard) end(launcher.EndRequest) {
	if t.cancel != nil {
		t.cancel()
		t.wg.Wait()
	}
}

// once starts it, and returns why it has ended.
func (t *tensorBoard) once(ctx context.Context) string {
	if err := t.free(); err != nil {
		return err.Error()
	}
	out, err := t.node.Logs().Side("tensorboard")
	if err != nil {
		return err.Error()
	}
	defer out.Close()
	p, err := t.node.Processes().Start(proc.Spec{
		Path: t.path, Args: t.Argv, Env: t.environ(), Dir: t.node.Job().Workdir, Stdout: out.File(),
		Stderr: out.File(),
		Helper: true,
	})
	out.Started()
	if err != nil {
		return err.Error()
	}
	t.node.Log().Info("TensorBoard has been started", "pid", p.PID(), "logdir", t.LogDir, "host", t.Host, "port", t.Port)
	select {
	case <-p.Done():
		return endOf(p, out)
	case <-ctx.Done():
		endBoard(p)
		return ""
	}
}

// environ is the workers' environment without their devices, because TensorFlow would take memory of them.
func (t *tensorBoard) environ() []string {
	return slices.Concat(t.node.Environ(), []string{"CUDA_VISIBLE_DEVICES=", "PYTHONUNBUFFERED=1"})
}

func endBoard(p *proc.Process) {
	_ = p.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-p.Done():
	case <-time.After(stopBoard):
		_ = p.Signal(syscall.SIGKILL)
		<-p.Done()
	}
}

// endOf describes the end of a side process: its last line and its status.
func endOf(p *proc.Process, out *logs.Side) string {
	status := fmt.Sprintf("exit code %d", p.Exit().Code)
	if sig := p.Exit().Signal; sig != 0 {
		status = proc.SignalName(sig)
	}
	said := strings.TrimSpace(string(out.Tail(100 * time.Millisecond)))
	if last := said[strings.LastIndexByte(said, '\n')+1:]; last != "" {
		status += ": " + text.Clip(last, 200)
	}
	return status
}
