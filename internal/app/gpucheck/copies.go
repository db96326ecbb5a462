package gpucheck

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"dlrover-run/switchbox"
	"dlrover-run/switchbox/nvml/cuda"
)

// copying copies between pairs of GPUs and adds the results to the Report.
type copying struct {
	options
	drivers
	*progress
	devices []switchbox.Device
	report  *switchbox.Report

	cuda copier
	ends map[int]end
	bad  map[int]error // why a GPU is not among ends

	mu     sync.Mutex     // of the pairs that run at the same time:
	copied map[int]uint64 // bytes that a GPU has sent over NVLink
}

// run measures all pairs. The error is one of the command line.
func (c *copying) run() error {
	found := indices(c.report.Devices)
	wanted := c.wanted(found)
	have, _, err := switchbox.SelectPairs(wanted, found, c.limits.Given)
	if err != nil {
		return err
	}
	if err := c.start(); err != nil {
		return nil // it is in the report
	}
	defer c.close()
	if len(have) == 0 {
		c.alone(found[0])
		return nil
	}
	c.open(have)
	c.watched(func() { c.measure(have) })
	return c.judge(wanted)
}

// wanted are the requested pairs. The default ones leave no GPU out: any two can be copied between.
func (c *copying) wanted(found []int) []switchbox.Pair {
	switch {
	case c.limits.Ring:
		return switchbox.Ring(found)
	case c.limits.Given:
		return c.pairs
	}
	have, _, _ := switchbox.SelectPairs(switchbox.DefaultPairs, found, false)
	return append(have, switchbox.Rest(have, found)...)
}

// start loads CUDA. If CUDA does not work, the reason is noted.
func (c *copying) start() error {
	c.doing("check", "initialising CUDA (cuInit)")
	defer c.doing("check", "")
	var err error
	c.cuda, err = c.copier()
	switch {
	case errors.Is(err, cuda.ErrNoDriver):
		c.report.State, c.report.Reason = switchbox.Skipped, "nothing was copied: "+err.Error()
	case err != nil:
		c.report.Findings = append(c.report.Findings, driverFault("CUDA cannot be used: "+err.Error()))
	default:
		c.report.Driver += ", CUDA " + c.cuda.Version()
	}
	return err
}

// open prepares the GPUs of the pairs.
func (c *copying) open(pairs []switchbox.Pair) {
	c.ends, c.bad, c.copied = map[int]end{}, map[int]error{}, map[int]uint64{}
	defer c.doing("check", "")
	for _, i := range members(pairs) {
		c.doing("check", fmt.Sprintf("preparing GPU %d for copies", i))
		if err := c.prepare(i); err != nil {
			c.bad[i] = err
		}
	}
}

func (c *copying) prepare(i int) error {
	f := c.facts(i)
	switch {
	case f.Lost != "":
		return fmt.Errorf("GPU %d cannot be used: %s", i, f.Lost)
	case f.Mode.MIG:
		return fmt.Errorf("GPU %d is divided (MIG): %w", i, cuda.ErrHidden)
	case f.PCI == "":
		return fmt.Errorf("GPU %d has no known PCI address: %w", i, cuda.ErrHidden)
	}
	if inUse(f) { // others would be disturbed, and the figures be theirs
		return fmt.Errorf("GPU %d is not copied to: others use more than %.0f %% of its memory", i, switchbox.MemoryInUse*100)
	}
	e, err := c.cuda.Open(fmt.Sprintf("GPU %d", i), f.PCI)
	if err == nil {
		c.ends[i] = e
	}
	return err
}

func inUse(f switchbox.Facts) bool {
	return f.Memory != nil && float64(f.Memory.Used) > switchbox.MemoryInUse*float64(f.Memory.Total)
}

func (c *copying) close() {
	for _, e := range c.ends {
		e.Close()
	}
}

// facts are the facts of the device with an index.
func (c *copying) facts(index int) switchbox.Facts {
	i := slices.IndexFunc(c.report.Devices, func(f switchbox.Facts) bool { return f.Index == index })
	return c.report.Devices[i]
}

// watched copies, and compares the counters of before and after.
func (c *copying) watched(copies func()) {
	before := read(links, c.devices, c.progress)
	copies()
	after := read(links, c.devices, c.progress)
	c.report.Findings = append(c.report.Findings, switchbox.JudgeGrowth(before, after, c.copied)...)
}

// measure copies between all pairs, those without a common GPU at the same time.
func (c *copying) measure(pairs []switchbox.Pair) {
	for _, round := range rounds(pairs) {
		results := make([]*switchbox.Measurement, len(round))
		var wg sync.WaitGroup
		for i, p := range round {
			wg.Go(func() { results[i] = c.pair(p) })
		}
		wg.Wait()
		for _, m := range results {
			if m != nil {
				c.report.Pairs = append(c.report.Pairs, *m)
			}
		}
		c.keep(*c.report)
	}
}

// pair measures both directions of a pair, one after the other; nil: CUDA does not show one of the two.
func (c *copying) pair(p switchbox.Pair) *switchbox.Measurement {
	m := &switchbox.Measurement{Pair: p}
	for _, i := range []int{p.A, p.B} {
		if err := c.bad[i]; errors.Is(err, cuda.ErrHidden) {
			c.note(switchbox.Info, p, "pair %s is skipped: %v", p, err)
			return nil
		} else if err != nil {
			m.Error = err.Error()
			return m
		}
	}
	defer c.doing(p.String(), "")
	c.doing(p.String(), fmt.Sprintf("joining GPU %d and GPU %d (cuCtxEnablePeerAccess)", p.A, p.B))
	direct, err := c.cuda.Reach(c.ends[p.A], c.ends[p.B])
	if err == nil && !direct {
		c.note(switchbox.Info, p, "pair %s copies by way of the host's memory: the two do not see each other", p)
	}
	if err == nil {
		m.There, err = c.directed(p.A, p.B)
	}
	if err == nil {
		m.Back, err = c.directed(p.B, p.A)
	}
	m.MBps = min(m.There, m.Back)
	if err != nil {
		m.Error = err.Error()
	}
	return m
}

// directed copies one way and returns 10^6 byte/s. Damaged data condemns the node, however fast it came.
func (c *copying) directed(from, to int) (float64, error) {
	p := switchbox.Pair{A: from, B: to}
	c.doing(p.String(), fmt.Sprintf("copying from GPU %d to GPU %d", from, to))
	defer c.doing(p.String(), "")
	rate, err := c.cuda.Copy(c.ends[from], c.ends[to])
	if _, ok := errors.AsType[*cuda.Corruption](err); ok {
		c.note(switchbox.Fatal, p, "data was damaged on its way: %v", err)
	}
	if c.facts(from).Peers[to].NVLink == switchbox.P2POK {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.copied[from] += uint64(rate.Moved)
	}
	return rate.MBps, err
}

// note adds a Finding about a pair.
func (c *copying) note(s switchbox.Severity, p switchbox.Pair, format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.report.Findings = append(c.report.Findings, switchbox.Finding{
		Check: "switchbox", Kind: "gpu.copy", Severity: s, Entity: p.String(), Text: fmt.Sprintf(format, args...),
	})
}

// judge compares with the limits. Default pairs may be fewer than must pass.
func (c *copying) judge(wanted []switchbox.Pair) error {
	limits := c.limits
	tooFew := !limits.Given && limits.MinChannels > len(wanted)
	if tooFew {
		limits.MinChannels = 0
	}
	state, reason, findings, err := switchbox.JudgePairs(wanted, c.report.Pairs, limits)
	if err != nil {
		return err
	}
	if tooFew {
		state, reason = switchbox.Skipped, fmt.Sprintf("there are %d pairs of GPUs here, and %d must pass", len(wanted),
			c.limits.MinChannels)
	}
	c.report.State, c.report.Reason = state, reason
	c.report.Findings = append(c.report.Findings, findings...)
	return nil
}

// alone measures a copy within the only GPU. It shows that CUDA works and how fast the memory is, and nothing about
// links.
func (c *copying) alone(index int) {
	self := switchbox.Pair{A: index, B: index}
	c.open([]switchbox.Pair{self})
	if err := c.bad[index]; err != nil {
		c.note(switchbox.Warn, self, "no copy within GPU %d: %v", index, err)
		c.report.State, c.report.Reason = switchbox.Skipped, "nothing was copied: "+err.Error()
		return
	}
	var rate float64
	var err error
	c.watched(func() { rate, err = c.directed(index, index) })
	m := switchbox.Measurement{Pair: self, MBps: rate}
	if err != nil {
		m.Error = err.Error()
		c.note(switchbox.Warn, self, "a copy within GPU %d failed: %v", index, err)
	} else {
		c.note(switchbox.Info, self,
			"GPU %d is the only one here: a copy within it reaches %.0f MB/s, and no link was tested", index, rate)
	}
	c.report.Pairs = append(c.report.Pairs, m)
	if c.limits.MinChannels > 0 {
		c.report.State, c.report.Reason = switchbox.Skipped, "there is one GPU here, so there is no pair"
	}
}

// indices are the numbers of the devices.
func indices(devices []switchbox.Facts) []int {
	var all []int
	for _, d := range devices {
		all = append(all, d.Index)
	}
	return all
}

// members are the GPUs of pairs, in order.
func members(pairs []switchbox.Pair) []int {
	all := map[int]bool{}
	for _, p := range pairs {
		all[p.A], all[p.B] = true, true
	}
	return slices.Sorted(maps.Keys(all))
}

// rounds divides pairs so that no two pairs of a round share a GPU.
func rounds(pairs []switchbox.Pair) [][]switchbox.Pair {
	var all [][]switchbox.Pair
	for _, p := range pairs {
		i := slices.IndexFunc(all, func(round []switchbox.Pair) bool {
			return !slices.ContainsFunc(round, func(q switchbox.Pair) bool {
				return p.A == q.A || p.A == q.B || p.B == q.A || p.B == q.B
			})
		})
		if i < 0 {
			all, i = append(all, nil), len(all)
		}
		all[i] = append(all[i], p)
	}
	return all
}
