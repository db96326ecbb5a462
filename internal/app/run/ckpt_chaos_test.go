package run

import (
	"bytes"
	"crypto/sha256"
	"crypto/sha3"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"io/fs"
	"math/rand"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/internal/testkit"
)

const (
	chaosRanks    = 4
	chaosPause    = "0.02"           // between two steps, in seconds
	chaosPatience = 60 * time.Second // for the job to train again
	chaosBudget   = 40 * time.Second // of all rounds, unless CHAOS_ROUNDS says how many
)

// ckptChaos is a job of two nodes under a master, that saves a shard of each of its four
// ranks at every step, and of which anything may die.
type ckptChaos struct {
	*bench
	rnd    *rand.Rand
	addr   string
	master *launched
	nodes  [2]*ckptNode
	made   int // nodes so far
	shm    string
	ckpts  string
	log    trainLog
	floor  int // the newest step that was seen committed
	stats  map[string]*ckptStats
}

// ckptNode is a machine: its memory goes with it.
type ckptNode struct {
	tag, shm string
	launcher *launched
}

type ckptStats struct {
	times              int
	lost, mostLost     int // steps of memory
	starts, fromMemory int
	slowest            time.Duration
}

// trainLog is what the workers have written.
type trainLog struct {
	path   string
	read   int64
	starts []trainStart
	saves  map[string]*[chaosRanks]trainSaves // by world
	wrong  []string
}

type trainStart struct {
	rank, pid, step               int
	source, savedBy, world, epoch string
}

// trainSaves are the saves of one rank in one world.
type trainSaves struct{ lines, step, pending int }

// TestCheckpointChaos kills workers, checkpoint daemons, launchers, the master and whole
// nodes at random. No committed step may be torn, mixed or lost, no start may be from a
// step older than the last committed one, and the death of a worker, a daemon or the
// master costs at most the step that was being saved.
func TestCheckpointChaos(t *testing.T) {
	long(t)
	t.Parallel()
	seed, rounds, budget := int64(testkit.Seed(t, "CHAOS_SEED")), 25, chaosBudget
	if text := os.Getenv("CHAOS_ROUNDS"); text != "" {
		var err error
		rounds, err = strconv.Atoi(text)
		require.NoError(t, err)
		budget = time.Duration(rounds) * chaosPatience
	}
	c := newCkptChaos(t, seed)
	c.awaitTraining("start", time.Now(), 0)
	done := 0
	for begun := time.Now(); done < rounds && time.Since(begun) < budget; done++ {
		c.round(done)
	}
	c.finish()
	t.Logf("%d rounds, %d starts, step %d", done, len(c.log.starts), c.tracked())
	for name, s := range c.stats {
		t.Logf("%-18s %3d times, %3d starts, %3d from memory, lost %3d steps of memory, at most %2d, slowest return %s",
			name, s.times, s.starts, s.fromMemory, s.lost, s.mostLost, s.slowest.Round(time.Millisecond))
	}
}

func newCkptChaos(t *testing.T, seed int64) *ckptChaos {
	b := newBench(t)
	shm, err := os.MkdirTemp("/dev/shm", "dlrover-chaos-")
	require.NoError(t, err)
	stub, err := filepath.Abs("testdata/fasttorch")
	require.NoError(t, err)
	b.env = append(b.env, "PYTHON_EXEC=/usr/bin/python3", "PYTHONPATH="+stub,
		"PYTHONPYCACHEPREFIX="+filepath.Join(b.dir, "pyc"), "DLROVER_TOKEN="+testToken)
	c := &ckptChaos{
		bench: b, rnd: rand.New(rand.NewSource(seed)), shm: shm, ckpts: filepath.Join(b.dir, "ckpts"),
		stats: map[string]*ckptStats{},
	}
	c.log = trainLog{path: filepath.Join(b.dir, "log"), saves: map[string]*[chaosRanks]trainSaves{}}
	t.Cleanup(func() {
		for _, pid := range c.daemons(shm) {
			_ = syscall.Kill(pid, syscall.SIGKILL) // only after a failure
		}
		require.NoError(t, os.RemoveAll(shm))
	})
	c.master, c.addr = c.startDaemon("127.0.0.1:0")
	for i := range c.nodes {
		c.replaceNode(i)
	}
	return c
}

// replaceNode starts a launcher on a machine without a past.
func (c *ckptChaos) replaceNode(i int) {
	c.made++
	n := &ckptNode{
		tag: fmt.Sprintf("CKPT_NODE=%s-%d", c.tag, c.made), shm: filepath.Join(c.shm, fmt.Sprintf("n%d", c.made)),
	}
	require.NoError(c.t, os.Mkdir(n.shm, 0o700))
	c.nodes[i] = n
	c.launch(n)
}

func (c *ckptChaos) launch(n *ckptNode) {
	script, err := filepath.Abs("testdata/ckpt_chaos.py")
	require.NoError(c.t, err)
	n.launcher = c.start("dlrover-run", []string{n.tag, "DLROVER_MASTER_ADDR=" + c.addr},
		"--nnodes=2:2", "--nproc-per-node=2", "--max-restarts=1000000", "--backoff-limit=-1", "--restart-backoff=0",
		"--same-failures=-1", "--rdzv-id=ckptchaos",
		"--shutdown-timeout=3", "--ckpt-replicas=2", "--ckpt-shm-dir="+n.shm, script, c.dir, c.ckpts, chaosPause)
}

// daemons are the checkpoint daemons whose memory is below dir.
func (c *ckptChaos) daemons(dir string) (pids []int) {
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range lines {
		line, _ := os.ReadFile(path)
		if bytes.HasPrefix(line, []byte("checkpointd\x00")) && bytes.Contains(line, []byte(dir+"/")) {
			pid, _ := strconv.Atoi(strings.Split(path, "/")[2])
			pids = append(pids, pid)
		}
	}
	return pids
}

// processes are those of a machine but the checkpoint daemon.
func (n *ckptNode) processes() (pids []int) { return (&bench{tag: n.tag}).tagged() }

func kill(pids ...int) {
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
	}
}

// round kills something, mostly while the job trains, sometimes while it still recovers.
func (c *ckptChaos) round(n int) {
	time.Sleep(time.Duration(c.rnd.Intn(300)) * time.Millisecond) // chaos has no event to wait for
	c.log.follow(c.t)
	c.checkDisk()
	kept, training := c.inMemory()
	begun, from, steps := time.Now(), len(c.log.starts), c.newestSave()
	what, light := c.act()
	c.t.Logf("%s round %d: %s; committed %d, in memory %d, training %v",
		begun.Format("15:04:05.000"), n, what, c.floor, kept, training)
	if !training || !light {
		kept = 0
	}
	if c.rnd.Intn(4) == 0 {
		return // the next one comes at once
	}
	c.awaitTraining(what, begun, kept)
	c.book(what, begun, from, steps)
	c.checkDisk()
}

func (c *ckptChaos) book(what string, begun time.Time, from, steps int) {
	s := c.stats[what]
	if s == nil {
		s = &ckptStats{}
		c.stats[what] = s
	}
	s.times++
	s.slowest = max(s.slowest, time.Since(begun))
	if from == len(c.log.starts) {
		return
	}
	last := c.log.starts[len(c.log.starts)-1]
	s.lost += max(0, steps-last.step)
	s.mostLost = max(s.mostLost, steps-last.step)
	for _, st := range c.log.starts[from:] {
		s.starts++
		if st.source == "memory" {
			s.fromMemory++
		}
	}
}

// act kills. It says what, and whether that costs at most the step that is being saved.
func (c *ckptChaos) act() (what string, light bool) {
	i := c.rnd.Intn(2)
	n := c.nodes[i]
	switch k := c.rnd.Intn(12); {
	case k < 3:
		c.killWorker()
		return "worker", true
	case k < 6:
		kill(c.daemons(n.shm)...)
		return "daemon", true
	case k < 7:
		c.killMaster()
		return "master", true
	case k < 9:
		kill(n.launcher.cmd.Process.Pid)
		n.launcher.wait()
		c.dawdle()
		c.launch(n)
		return "launcher", false
	case k < 11:
		c.killNode(i)
		return "node", false
	}
	c.killWorker()
	c.dawdle()
	kill(c.daemons(c.nodes[c.rnd.Intn(2)].shm)...)
	c.dawdle()
	c.killMaster()
	return "worker daemon master", false
}

// dawdle is how long a person or a scheduler takes to start something again.
func (c *ckptChaos) dawdle() {
	time.Sleep(time.Duration(c.rnd.Intn(4)*c.rnd.Intn(100)) * time.Millisecond) // it is the delay that is tried
}

func (c *ckptChaos) killWorker() {
	if n := len(c.log.starts); n > 0 {
		kill(c.log.starts[max(0, n-1-c.rnd.Intn(chaosRanks))].pid)
	}
}

func (c *ckptChaos) killMaster() {
	kill(c.master.cmd.Process.Pid)
	c.master.wait()
	c.dawdle()
	c.master, _ = c.startDaemon(c.addr)
}

// killNode ends a machine with all that is in its memory, and puts another in its place.
func (c *ckptChaos) killNode(i int) {
	n := c.nodes[i]
	gone := func() bool {
		pids := append(n.processes(), c.daemons(n.shm)...)
		c.rnd.Shuffle(len(pids), func(a, b int) { pids[a], pids[b] = pids[b], pids[a] })
		kill(pids...)
		return len(pids) == 0
	}
	eventually(c.t, "the end of a node", gone)
	n.launcher.wait()
	require.NoError(c.t, os.RemoveAll(n.shm))
	c.dawdle()
	c.replaceNode(i)
}

// awaitTraining waits until all ranks of one world save again and a newer step than
// before is committed. Meanwhile no rank may start from a step older than what is
// committed, nor than kept.
func (c *ckptChaos) awaitTraining(what string, begun time.Time, kept int) {
	committed, from := c.floor, len(c.log.starts)
	least := max(committed, kept)
	before := c.savesBy()
	world := c.world()
	for {
		c.log.follow(c.t)
		for _, s := range c.log.starts[from:] {
			require.GreaterOrEqual(c.t, s.step, least,
				"after the death of %s, rank %d starts from step %d (%s); committed %d, kept in memory %d",
				what, s.rank, s.step, s.source, committed, kept)
		}
		from = len(c.log.starts)
		if c.world() != world {
			before = [chaosRanks]trainSaves{}
		}
		if c.trains(before) && c.tracked() > committed {
			return
		}
		require.Less(c.t, time.Since(begun), chaosPatience, "no training after the death of %s: %s", what, c.describe())
		time.Sleep(5 * time.Millisecond) // files of workers and the tracker have no other notice
	}
}

func (c *ckptChaos) describe() string {
	n := len(c.log.starts)
	return fmt.Sprintf("tracker %d, was %d; last starts %+v; saves %+v",
		c.tracked(), c.floor, c.log.starts[max(0, n-4):], c.savesBy())
}

// world is the newest one.
func (c *ckptChaos) world() string {
	if n := len(c.log.starts); n > 0 {
		return c.log.starts[n-1].world
	}
	return ""
}

// savesBy are the newest saves of the newest world.
func (c *ckptChaos) savesBy() [chaosRanks]trainSaves {
	if s := c.log.saves[c.world()]; s != nil {
		return *s
	}
	return [chaosRanks]trainSaves{}
}

// trains reports whether all ranks of the newest world live, and have saved at least
// twice since.
func (c *ckptChaos) trains(since [chaosRanks]trainSaves) bool {
	n := len(c.log.starts)
	if n < chaosRanks {
		return false
	}
	now := c.savesBy()
	for _, s := range c.log.starts[n-chaosRanks:] {
		if s.world != c.world() || !alive(s.pid) || now[s.rank].lines < since[s.rank].lines+2 {
			return false
		}
	}
	return true
}

func alive(pid int) bool {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return len(stat) > 0 && !bytes.Contains(stat, []byte(") Z "))
}

// inMemory is the newest step that all ranks of a training world have saved; false when
// there is none, or when segments that wait for a dead daemon have left no choice of
// buffers.
func (c *ckptChaos) inMemory() (step int, ok bool) {
	if !c.trains([chaosRanks]trainSaves{}) {
		return 0, false
	}
	now := c.savesBy()
	step = now[0].step
	for _, s := range now {
		step, ok = min(step, s.step), s.pending < 2
		if !ok {
			return 0, false
		}
	}
	return step, true
}

func (c *ckptChaos) newestSave() int {
	now := c.savesBy()
	return slices.MaxFunc(now[:], func(a, b trainSaves) int { return a.step - b.step }).step
}

// follow reads the lines that are new.
func (l *trainLog) follow(t *testing.T) {
	f, err := os.Open(l.path)
	if err != nil {
		return // nobody has started yet
	}
	defer f.Close()
	_, err = f.Seek(l.read, 0)
	require.NoError(t, err)
	var text bytes.Buffer
	_, err = text.ReadFrom(f)
	require.NoError(t, err)
	whole := text.Bytes()[:bytes.LastIndexByte(text.Bytes(), '\n')+1]
	l.read += int64(len(whole))
	for line := range strings.Lines(string(whole)) {
		l.add(t, strings.TrimSuffix(line, "\n"))
	}
	require.Empty(t, l.wrong)
}

func (l *trainLog) add(t *testing.T, line string) {
	var rank, step, done, pending int
	var world string
	var s trainStart
	switch word, rest, _ := strings.Cut(line, " "); word {
	case "start":
		_, err := fmt.Sscan(rest, &s.rank, &s.pid, &s.step, &s.source, &s.savedBy, &s.world, &s.epoch)
		require.NoError(t, err, line)
		l.starts = append(l.starts, s)
	case "saved":
		_, err := fmt.Sscan(rest, &rank, &step, &done, &pending, &world)
		require.NoError(t, err, line)
		if l.saves[world] == nil {
			l.saves[world] = &[chaosRanks]trainSaves{}
		}
		of := &l.saves[world][rank]
		of.lines, of.pending = of.lines+1, pending
		if done == 1 {
			of.step = step
		}
	default:
		l.wrong = append(l.wrong, line)
	}
}

// ---- what is on disk

type chaosManifest struct {
	Step  int `json:"step"`
	Save  string
	Files []struct {
		Path  string
		Size  int64
		CRC32 uint32
		Shard int
	}
}

// tracked is the step that the tracker names, 0 if there is none.
func (c *ckptChaos) tracked() int {
	data, err := os.ReadFile(filepath.Join(c.ckpts, "dlrover_latest.txt"))
	if os.IsNotExist(err) && c.floor == 0 {
		return 0
	}
	require.NoError(c.t, err)
	step, err := strconv.Atoi(strings.TrimSpace(string(data)))
	require.NoError(c.t, err, "the tracker says %q", data)
	return step
}

// checkDisk: the tracker names a whole step, and none older than before. What is being
// saved again, or has been removed since the tracker moved on, is looked at once more, a moment later: nothing says
// when.
func (c *ckptChaos) checkDisk() {
	for end := time.Now().Add(chaosPatience); ; time.Sleep(5 * time.Millisecond) {
		step := c.tracked()
		require.GreaterOrEqual(c.t, step, c.floor, "the tracker has moved back")
		if step == 0 {
			return
		}
		err := c.checkStep(step)
		if err == nil {
			c.floor = step
			return
		}
		passes := c.tracked() != step || c.begun(step) || c.checkStep(step) == nil
		require.True(c.t, passes && time.Now().Before(end), "step %d, which the tracker names: %v", step, err)
	}
}

// begun reports whether a step is between its intent and its manifest.
func (c *ckptChaos) begun(step int) bool {
	files, _ := filepath.Glob(filepath.Join(c.ckpts, ".dlrover/stage/*/intent"))
	return slices.ContainsFunc(files, func(path string) bool {
		m, err := readChaosManifest(path)
		return err == nil && m.Step == step
	})
}

func readChaosManifest(path string) (m chaosManifest, err error) {
	data, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(data, &m)
	}
	return m, err
}

// checkStep compares the files of a step with its manifest and with what the workers
// have saved; all must be of one world.
func (c *ckptChaos) checkStep(step int) error {
	m, err := readChaosManifest(filepath.Join(c.ckpts, ".dlrover", strconv.Itoa(step)+".json"))
	if err != nil {
		return err
	}
	if len(m.Files) != chaosRanks || m.Step != step {
		return fmt.Errorf("the manifest is %+v", m)
	}
	worlds := map[string]bool{}
	for _, f := range m.Files {
		data, err := os.ReadFile(filepath.Join(c.ckpts, f.Path))
		if err != nil {
			return err
		}
		if int64(len(data)) != f.Size || crc32.ChecksumIEEE(data) != f.CRC32 {
			return fmt.Errorf("%s is not what the manifest says", f.Path)
		}
		head, _, _ := bytes.Cut(data, []byte("\n"))
		words := strings.Fields(string(head))
		if len(words) != 3 || words[0] != strconv.Itoa(step) || words[1] != strconv.Itoa(f.Shard) {
			return fmt.Errorf("%s begins with %.80q", f.Path, head)
		}
		if !bytes.Equal(data, chaosContent(string(head)+"\n")) {
			return fmt.Errorf("%s is torn", f.Path)
		}
		worlds[words[2]] = true
	}
	if len(worlds) != 1 {
		return fmt.Errorf("its files are of different worlds: %v", worlds)
	}
	return nil
}

// chaosContent is what the workers save under a first line.
func chaosContent(head string) []byte {
	h := sha256.Sum256([]byte(head))
	size := min(4<<10<<(h[0]%10)+int(h[1]), 2<<20)
	return append([]byte(head), sha3.SumSHAKE128([]byte(head), size-len(head))...)
}

// ---- the end

// finish ends the job: well, and leaving nothing.
func (c *ckptChaos) finish() {
	c.awaitTraining("nobody", time.Now(), 0)
	c.release()
	for _, n := range c.nodes {
		require.Equal(c.t, 0, n.launcher.wait())
	}
	c.log.follow(c.t)
	last := c.newestSave() + 1
	c.checkDisk()
	require.Equal(c.t, last, c.floor, "the last save is committed")
	c.checkAll()
	require.Eventually(c.t, func() bool { return len(c.daemons(c.shm)) == 0 }, 15*time.Second, 10*time.Millisecond,
		"a checkpoint daemon is left")
	for _, n := range c.nodes {
		require.Empty(c.t, n.processes())
	}
	memory, err := filepath.Glob(filepath.Join(c.shm, "*/*/[^.]*"))
	require.NoError(c.t, err)
	require.Empty(c.t, memory, "something is left in shared memory")
	require.Empty(c.t, c.leftovers(), "temporary files are left")
}

// checkAll looks at every committed step.
func (c *ckptChaos) checkAll() {
	files, err := filepath.Glob(filepath.Join(c.ckpts, ".dlrover/*.json"))
	require.NoError(c.t, err)
	require.NotEmpty(c.t, files)
	for _, path := range files {
		step, err := strconv.Atoi(strings.TrimSuffix(filepath.Base(path), ".json"))
		require.NoError(c.t, err)
		require.NoError(c.t, c.checkStep(step))
	}
}

// leftovers are all files of the checkpoint directory that are none of a committed step.
func (c *ckptChaos) leftovers() (paths []string) {
	wanted := map[string]bool{"dlrover_latest.txt": true, ".dlrover/lock": true}
	files, _ := filepath.Glob(filepath.Join(c.ckpts, ".dlrover/*.json"))
	for _, path := range files {
		m, err := readChaosManifest(path)
		require.NoError(c.t, err)
		wanted[".dlrover/"+filepath.Base(path)] = true
		for _, f := range m.Files {
			wanted[f.Path] = true
		}
	}
	require.NoError(c.t, filepath.WalkDir(c.ckpts, func(path string, d fs.DirEntry, err error) error {
		if rel, _ := filepath.Rel(c.ckpts, path); err == nil && !d.IsDir() && !wanted[rel] {
			paths = append(paths, rel)
		}
		return err
	}))
	return paths
}
