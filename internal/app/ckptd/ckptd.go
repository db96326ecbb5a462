// Package ckptd is the main program of the checkpoint daemon. It is a binary of its own,
// and dlrover-run runs itself as it.
package ckptd

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/urfave/cli/v2"
	"golang.org/x/sys/unix"

	"dlrover-run/checkpointd"
	"dlrover-run/checkpointd/coordinator"
	"dlrover-run/checkpointd/fsx"
	"dlrover-run/checkpointd/shm"
	"dlrover-run/hang"
	"dlrover-run/hang/hangside"
	"dlrover-run/internal/app/token"
	"dlrover-run/internal/console"
	"dlrover-run/internal/help"
	"dlrover-run/internal/openfile"
	"dlrover-run/internal/secure"
	"dlrover-run/internal/version"
	"dlrover-run/launcher/argv"
)

// Name is argv[0] when dlrover-run runs itself as the daemon.
const Name = "checkpointd"

// socketName is the name of the control socket in the runtime directory.
const socketName = "sock"

// DefaultShm is where memory is shared.
const DefaultShm = "/dev/shm"

const description = `dlrover-run starts this daemon itself. As a sidecar container it shares --shm-dir
(a volume in memory) and the user id with the training container, whose launcher
needs --ckpt-sidecar=NAME. With --hang=outside it finds hangs of torchrun's workers;
the containers must share processes (shareProcessNamespace).`

// Main runs the daemon and returns the exit status.
func Main(args []string, stdout io.Writer) int {
	named()
	a := app(stdout)
	if slices.Contains(args, "--help") || slices.Contains(args, "-h") {
		help.Print(stdout, a, "--job NAME [options]")
		return 0
	}
	defer console.Stderr.Flush()
	err := run(a, args)
	if err == nil {
		return 0
	}
	console.Complain(console.Stderr, Name, err)
	if _, ok := errors.AsType[*runError](err); ok {
		return 1
	}
	return 2
}

// run does the work of App.Run for these options. App.Run can print help with text/template, which makes the linker
// keep every exported method of the whole launcher.
func run(a *cli.App, args []string) error {
	set := flag.NewFlagSet(Name, flag.ContinueOnError)
	set.SetOutput(io.Discard)
	for _, f := range a.Flags {
		if err := f.Apply(set); err != nil {
			return err
		}
	}
	if err := set.Parse(args); err != nil {
		return help.Misuse(Name, err)
	}
	return a.Action(cli.NewContext(a, set, nil))
}

// named has ps and top show the name, in place of that of the file. The main thread has that name, and is the caller's
// from now on: a goroutine of the package background would end with its thread.
func named() {
	runtime.LockOSThread()
	if name, err := unix.BytePtrFromString(Name); err == nil {
		_ = unix.Prctl(unix.PR_SET_NAME, uintptr(unsafe.Pointer(name)), 0, 0, 0)
	}
}

// runError is a failure after the options have been accepted.
type runError struct{ error }

func (e *runError) Unwrap() error { return e.error }

func app(stdout io.Writer) *cli.App {
	const category = "Options"
	return &cli.App{
		Name: Name, Usage: "keeps and flushes the checkpoints that workers save in memory", Description: description,
		Action: func(c *cli.Context) error { return serve(c, stdout) },
		Flags: slices.Concat([]cli.Flag{
			&cli.StringFlag{Name: "job", Category: category,
				Usage: "`NAME`: name of the job, as in the launcher's --ckpt-sidecar: letters, digits and ._-"},
			&cli.StringFlag{Name: "shm-dir", Category: category, Value: DefaultShm,
				Usage: "`DIR`: directory in memory that this daemon and the workers share (default: " + DefaultShm + ")"},
			&cli.StringFlag{Name: "master", Category: category,
				Usage: "`HOST:PORT`: rendezvous that the nodes of the run share; without it the daemons meet through files on " +
					"the checkpoint's storage"},
			&cli.StringFlag{Name: "run", Category: category, Usage: "`ID`: name of the run, with --master"},
			&cli.StringFlag{Name: "token-file", Category: category,
				Usage: "`PATH`: file with the job token (default: $DLROVER_TOKEN_FILE, else the token in $DLROVER_TOKEN)"},
		}, help.TLS(category, true), []cli.Flag{
			&cli.IntFlag{Name: "replicas", Category: category,
				Usage: "`N`: nodes that hold each shard in memory, including this one; 0: the training script decides"},
			&cli.StringFlag{Name: "addr", Category: category,
				Usage: "`HOST`: address at which the daemons of other nodes reach this one, for copies"},
			&cli.StringFlag{Name: "switch", Category: category,
				Usage: "`NAME`: network switch of this node; copies go to nodes at other switches"},
			&cli.StringFlag{Name: "write-rate", Category: category,
				Usage: "`SIZE`: limit for writing to storage in bytes per second; K, M or G may follow (default: no limit)"},
			&cli.StringFlag{Name: "hang", Category: category, Value: hangside.Off,
				Usage: "`outside|off`: outside finds hangs of a torchrun's workers, whose processes must be visible here " +
					"(default: off)"},
			&cli.StringFlag{Name: "hang-action", Category: category, Value: string(hang.ActReport),
				Usage: "`report|restart|stop`: reaction to a hang: report only reports it, restart kills the workers to blame, " +
					"so that torchrun restarts all, stop makes torchrun end (default: report)"},
			&cli.StringFlag{Name: "log-format", Category: category, EnvVars: []string{console.FormatVariable},
				Usage: console.FormatUsage},
			&cli.StringFlag{Name: "runtime", Hidden: true},
			&cli.StringFlag{Name: "world", Hidden: true},
			&cli.BoolFlag{Name: "inherit", Hidden: true},
			&cli.IntFlag{Name: "launcher", Hidden: true},
			&cli.BoolFlag{Name: "help", Aliases: []string{"h"}, Category: category, Usage: "show this text, and exit"},
			&cli.BoolFlag{Name: "version", Category: category, Usage: "print the version, and exit"},
		}),
	}
}

// maxThreads bounds the CPUs that a daemon may use at a time: the rest is the trainers'.
const maxThreads = 4

func serve(c *cli.Context, stdout io.Writer) error {
	if c.Bool("version") {
		fmt.Fprintln(stdout, Name, version.Version)
		return nil
	}
	if c.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q: %s takes options only", c.Args().First(), Name)
	}
	runtime.GOMAXPROCS(min(maxThreads, runtime.GOMAXPROCS(0)))
	hangs, err := hangside.Settings(c.String("hang"), c.String("hang-action"), c.IsSet("hang-action"), os.LookupEnv)
	if err != nil {
		return err
	}
	cfg, err := config(c)
	if err != nil {
		return err
	}
	if cfg.Spawned = c.Bool("inherit"); cfg.Spawned {
		cfg.Gone = parentDeath(c.Int("launcher"))
		go func() {
			<-cfg.Gone
			exitAfter(checkpointd.MaxOrphan, cfg.Logger)
		}()
	}
	return daemon(c, cfg, hangs)
}

// daemon serves until a signal, or until the launcher is gone and its checkpoints are on disk.
func daemon(c *cli.Context, cfg checkpointd.Config, hangs *hangside.Config) error {
	ln, err := listener(c, cfg.Dir)
	if err != nil {
		return &runError{err}
	}
	console.OutliveReaders() // readers of the launcher's log may have died with it
	alone, err := lockDirectory(cfg.Dir)
	if err != nil {
		return &runError{err}
	}
	defer alone.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	context.AfterFunc(ctx, func() { exitAfter(closeTimeout, cfg.Logger) })
	if cfg.Spawned {
		cfg.Orphaned = func(left int) { removeSaved(cfg.Dir, left); cancel() }
	} else {
		cfg.Orphaned = func(left int) { cfg.Logger.Info("waiting for the next launcher", "saves_in_memory_only", left) }
		cfg.Logger.Info("serving", "dir", cfg.Dir.Path())
	}
	d, err := checkpointd.New(cfg)
	if err != nil {
		return err
	}
	defer d.Close()
	if err := world(c, d); err != nil {
		return err
	}
	if hangs != nil {
		hangs.Run, hangs.Log = runName(c), cfg.Logger
		var watching sync.WaitGroup
		watching.Go(func() { hangside.Run(ctx, *hangs) })
		defer watching.Wait()
		defer cancel()
	}
	var unsaved atomic.Int64
	go func() {
		defer cancel()
		unsaved.Store(int64(saveOnSignal(ctx, d, cfg.Logger)))
	}()
	if err := d.Serve(ctx, ln); err != nil {
		return &runError{err}
	}
	if n := unsaved.Load(); n > 0 {
		return &runError{fmt.Errorf("%d saves are not on disk; they stay in memory, in %s", n, cfg.Dir.Path())}
	}
	return nil
}

// maxSaveOnSignal bounds the saving after a signal.
const maxSaveOnSignal = 10 * time.Minute

// saveOnSignal waits for a signal and saves memory to disk; a second signal ends that. It returns how many saves are
// not on disk.
func saveOnSignal(ctx context.Context, d *checkpointd.Daemon, log *slog.Logger) (left int) {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	defer signal.Stop(signals)
	select {
	case sig := <-signals:
		log.Info("saving what is in memory before the end", "signal", sig.String())
	case <-ctx.Done():
		return 0
	}
	d.Breakpoint("the daemon is told to end", checkpointd.Early)
	saving, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		select {
		case <-signals:
			stop()
		case <-saving.Done():
		}
	}()
	return d.Drain(saving, maxSaveOnSignal)
}

// lockDirectory waits until no other daemon works on the directory. The daemon of a killed launcher may still be saving
// the segments that the next launcher's workers found there.
func lockDirectory(dir *shm.Dir) (io.Closer, error) {
	f, err := openfile.Open(filepath.Join(dir.Path(), "daemon"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
	}
	return f, err
}

// removeSaved removes the directory of a launcher that is dead, unless something in it is
// not on disk; then it stays for the next launcher of the run.
func removeSaved(dir *shm.Dir, left int) {
	if left > 0 {
		return
	}
	release, err := dir.Own()
	if err != nil {
		return // a new launcher has it
	}
	_ = dir.RemoveAll() // leftovers are removed later, as stale
	_ = release()
}

func config(c *cli.Context) (checkpointd.Config, error) {
	cfg := checkpointd.Config{Replicas: c.Int("replicas"), Addr: c.String("addr"), Switch: c.String("switch")}
	format, err := console.ParseFormat(c.String("log-format"))
	if err != nil {
		return cfg, err
	}
	cfg.Logger = console.Logger(console.Stderr, Name, format, console.Level()).With("run_id", runName(c))
	if c.String("runtime") == "" && c.String("job") == "" {
		return cfg, errors.New("--job is required: the name that the launcher's --ckpt-sidecar says")
	}
	if job := c.String("job"); job != "" && !shm.ValidKey(job) {
		return cfg, fmt.Errorf("--job=%s: need 1 to 128 letters, digits and ._-, a letter, digit or _ first", job)
	}
	secret, err := token.Find(c.String("token-file"), os.LookupEnv)
	if err != nil {
		return cfg, err
	}
	secret.LogTo(cfg.Logger)
	cfg.Token, cfg.Accepted = secret.Token, secret.Accepted
	if cfg.TLS, err = layerOf(c, secret, cfg.Logger); err != nil {
		return cfg, err
	}
	var once sync.Once
	storage := fsx.OS{Weak: func(path string, err error) {
		once.Do(func() {
			cfg.Logger.Warn("this storage has no fsync: a crash of its own may lose steps that are told as written",
				"path", path, "err", err)
		})
	}}
	if text := c.String("write-rate"); text != "" {
		rate, err := argv.ParseSize(text)
		if err != nil {
			return cfg, fmt.Errorf("--write-rate: %w", err)
		}
		storage.Rate = fsx.NewLimiter(rate)
	}
	cfg.FS = storage
	if master := c.String("master"); master != "" {
		if c.String("run") == "" {
			return cfg, errors.New("--master needs --run, the name of the run")
		}
		cfg.Remote = coordinator.Client("http://"+master, c.String("run"), secret.Accepted, nil)
		cfg.Remote.(coordinator.Mover).Over(cfg.TLS)
	}
	if cfg.Dir, err = openDir(c); err != nil { // last: an error leaves open files behind
		return cfg, &runError{err}
	}
	return cfg, nil
}

// layerOf is the TLS between this daemon, the rendezvous and the daemons of other nodes; nil: none.
func layerOf(c *cli.Context, secret token.Job, log *slog.Logger) (*secure.Layer, error) {
	chosen, err := secure.Chosen(c.String, os.LookupEnv)
	if err != nil || c.String("master") == "" {
		return nil, err // there are no others
	}
	return chosen.Layer(secret.Accepted, secure.Asks, log)
}

// runName is the run's name in the log.
func runName(c *cli.Context) string {
	if c.String("run") != "" {
		return c.String("run")
	}
	return c.String("job")
}

// openDir makes the directory of a sidecar, which owns it until it ends. The directory of a launcher exists, and the
// launcher owns it.
func openDir(c *cli.Context) (*shm.Dir, error) {
	if c.Bool("inherit") {
		return shm.OpenDir(c.String("runtime"))
	}
	dir, err := shm.Create(c.String("shm-dir"), c.String("job"))
	if err != nil {
		return nil, err
	}
	_, err = dir.Own()
	return dir, err
}

// listener is the launcher's socket, inherited as standard input, or a new one.
func listener(c *cli.Context, dir *shm.Dir) (net.Listener, error) {
	if c.Bool("inherit") {
		ln, err := net.FileListener(os.Stdin)
		if err != nil {
			return nil, fmt.Errorf("the launcher's socket: %w", err)
		}
		return ln, nil
	}
	return checkpointd.Listen(filepath.Join(dir.Path(), socketName))
}

// world reads the epoch from --world, as comma-separated numbers.
func world(c *cli.Context, d *checkpointd.Daemon) error {
	if c.String("world") == "" {
		return nil
	}
	w, err := checkpointd.ParseWorld(c.String("world"))
	if err != nil {
		return fmt.Errorf("--world: %w", err)
	}
	d.SetWorld(w)
	return nil
}

// daemonArgs is the command line by which the launcher, this process, starts the daemon.
func daemonArgs(dir, master, run string, replicas int, addr, writeRate string, w checkpointd.World) []string {
	args := []string{Name, "--inherit", "--launcher", strconv.Itoa(os.Getpid()), "--runtime", dir, "--replicas",
		strconv.Itoa(replicas), "--addr", addr, "--world", w.String(), "--run", run}
	if master != "" {
		args = append(args, "--master", master)
	}
	if writeRate != "" {
		args = append(args, "--write-rate", writeRate)
	}
	return args
}
