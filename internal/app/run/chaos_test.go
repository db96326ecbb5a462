package run

import (
	"bytes"
	"fmt"
	"math/rand"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/testkit"
)

// chaos is a job of up to three nodes under a daemon, in which anything may die.
type chaos struct {
	*bench
	rnd       *rand.Rand
	addr      string
	daemon    *launched
	launchers []*launched
}

// TestChaos kills workers, launchers and the daemon at random. When that stops, the
// job must come back to a running world, and end well when it is told to.
func TestChaos(t *testing.T) {
	long(t)
	t.Parallel()
	seed := int64(testkit.Seed(t, "CHAOS_SEED"))
	c := &chaos{bench: newBench(t), rnd: rand.New(rand.NewSource(seed))}
	c.daemon, c.addr = c.startDaemon("127.0.0.1:0", "DLROVER_TOKEN="+testToken)
	for range 3 {
		c.launch()
	}
	for range 40 {
		c.act()
		time.Sleep(time.Duration(c.rnd.Intn(300)) * time.Millisecond) // chaos has no event to wait for
	}
	require.Eventually(t, c.running, 2*time.Minute, 20*time.Millisecond, "no running world of all launchers")
	c.release()
	for _, l := range c.launchers {
		require.Equal(t, 0, l.wait())
		require.NotContains(t, l.err.String(), "panic")
	}
	require.NotContains(t, c.daemon.err.String(), "panic")
}

func (c *chaos) launch() {
	script := `echo $$ $WORLD_SIZE $MASTER_PORT > $DIR/w.$$; while [ ! -e $DIR/go ]; do sleep 0.05; done`
	c.launchers = append(c.launchers,
		c.start("dlrover-run", []string{"DLROVER_MASTER_ADDR=" + c.addr, "DLROVER_TOKEN=" + testToken},
			c.sh(script, "--nnodes=1:3", "--nproc-per-node=2", "--max-restarts=1000000", "--backoff-limit=-1",
				"--same-failures=-1", "--restart-backoff=0", "--rdzv-id=chaos",
				"--rdzv-conf=last_call_timeout=0.3", "--shutdown-timeout=3")...))
}

func (c *chaos) act() {
	switch c.rnd.Intn(7) {
	case 0, 1, 2:
		if ws := c.workers(); len(ws) > 0 {
			_ = syscall.Kill(ws[c.rnd.Intn(len(ws))].pid, syscall.SIGKILL) // it may have ended
		}
	case 3, 4:
		c.replace([]syscall.Signal{syscall.SIGKILL, syscall.SIGTERM}[c.rnd.Intn(2)])
	case 5:
		c.daemon.signal(syscall.SIGKILL)
		c.daemon.wait()
		c.daemon, _ = c.startDaemon(c.addr, "DLROVER_TOKEN="+testToken)
	case 6:
		l := c.launchers[c.rnd.Intn(len(c.launchers))]
		l.freeze()
		time.Sleep(100 * time.Millisecond) // how long it is frozen
		l.thaw()
	}
}

// replace ends a launcher and starts another.
func (c *chaos) replace(sig syscall.Signal) {
	i := c.rnd.Intn(len(c.launchers))
	l := c.launchers[i]
	c.launchers = append(c.launchers[:i], c.launchers[i+1:]...)
	l.signal(sig)
	l.wait()
	c.launch()
}

type chaosWorker struct {
	pid   int
	world string // size and store, which all workers of one world share
}

// workers lists those that live, by the files that they leave.
func (c *chaos) workers() (ws []chaosWorker) {
	files, _ := filepath.Glob(filepath.Join(c.dir, "w.*"))
	for _, f := range files {
		data, _ := os.ReadFile(f)
		fields := strings.Fields(string(data))
		if len(fields) != 3 {
			continue
		}
		pid, err := strconv.Atoi(fields[0])
		stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err == nil && len(stat) > 0 && !bytes.Contains(stat, []byte(") Z ")) {
			ws = append(ws, chaosWorker{pid, fields[1] + " " + fields[2]})
		}
	}
	return ws
}

// running: two workers of each launcher live, all in one world.
func (c *chaos) running() bool {
	ws := c.workers()
	for _, w := range ws {
		if w.world != ws[0].world {
			return false
		}
	}
	return len(ws) == 2*len(c.launchers) && strings.HasPrefix(ws[0].world, fmt.Sprintf("%d ", 2*len(c.launchers)))
}
