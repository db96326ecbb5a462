// Package metax checks the links between the MetaX devices of a node with MetaX' own tool, mxom-client.
package metax

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"dlrover-run/switchbox"
)

// Adaptor is the name of this adaptor in Reports.
const Adaptor = "metax"

// toolVariable names the variable with the path of mxom-client, and defaultTool is where it is without.
const (
	toolVariable = "SWITCHBOX_CHECK_TOOL_PATH"
	defaultTool  = "/opt/mxmap/bin/mxom-client"
)

// defaultDeadline bounds the tests of all pairs together.
const defaultDeadline = 10 * time.Second

// Config of a check. Pairs are of socket ids; nil are the default ones.
type Config struct {
	Pairs  []switchbox.Pair
	Limits switchbox.Limits
	// Sysfs and Tool are paths; empty: the values of the environment, or the defaults.
	Sysfs, Tool string
	// Deadline bounds the tests of all pairs, which run at once. Default: defaultDeadline.
	Deadline time.Duration
	// Environ is the environment that counts, and the tool's. Default: this process's.
	Environ []string
	// Start starts a command and returns the function that waits for it. A program that reaps unknown children must
	// know of these. Default: Cmd.Start and Cmd.Wait.
	Start func(*exec.Cmd) (wait func() error, err error)
}

// Check tests all pairs at once and judges them. An error is the user's: it names the option and the fix. If the pairs
// cannot be tested on this node, or ctx ends, the Report is skipped.
func Check(ctx context.Context, c Config) (switchbox.Report, error) {
	c.defaults()
	if err := switchbox.CheckPairs(c.Pairs, c.Limits); err != nil {
		return switchbox.Report{}, err
	}
	cards, err := readLayout(c.Sysfs)
	if err != nil {
		return switchbox.Skip(Adaptor, err.Error()), nil
	}
	cards = visible(cards, c.lookup)
	if c.Limits.Ring {
		c.Pairs = switchbox.Ring(sockets(cards))
	}
	have, _, err := switchbox.SelectPairs(c.Pairs, sockets(cards), c.Limits.Given)
	if err != nil {
		return switchbox.Report{}, err
	}
	if len(have) < max(c.Limits.MinChannels, 1) {
		return switchbox.Skip(Adaptor, switchbox.TooFew(len(have), len(c.Pairs), c.Limits.MinChannels)), nil
	}
	if err := executable(c.Tool); err != nil {
		return switchbox.Skip(Adaptor, fmt.Sprintf("%s cannot be run: %v; set %s", c.Tool, err, toolVariable)), nil
	}
	r := switchbox.Report{Adaptor: Adaptor, Devices: facts(cards), Pairs: c.measure(ctx, have, cards)}
	if ctx.Err() != nil {
		return switchbox.Skip(Adaptor, "the check was stopped"), nil
	}
	r.State, r.Reason, r.Findings, err = switchbox.JudgePairs(c.Pairs, r.Pairs, c.Limits)
	if left := switchbox.Untested(have, sockets(cards)); len(left) > 0 && !c.Limits.Given {
		r.Findings = append(r.Findings, untested(left))
	}
	r.Conclude()
	return r, err
}

// untested reports sockets that are in no default pair. The ends of their links are not known here.
func untested(left []int) switchbox.Finding {
	return switchbox.Finding{Check: Adaptor, Kind: "gpu.skipped", Severity: switchbox.Warn, Text: fmt.Sprintf(
		"no default pair that is whole on this node has the device of socket %s: name pairs in --box-pairs, or ring",
		strings.Trim(strings.ReplaceAll(fmt.Sprint(left), " ", ", "), "[]"))}
}

// Validate returns the error that Check would give for a user's options, before anything is started.
func Validate(c Config) error {
	c.defaults()
	if err := switchbox.CheckPairs(c.Pairs, c.Limits); err != nil {
		return err
	}
	cards, err := readLayout(c.Sysfs)
	if err != nil {
		return nil // a skipped Report
	}
	_, _, err = switchbox.SelectPairs(c.Pairs, sockets(visible(cards, c.lookup)), c.Limits.Given)
	return err
}

func (c *Config) defaults() {
	if c.Environ == nil {
		c.Environ = os.Environ()
	}
	if c.Start == nil {
		c.Start = func(cmd *exec.Cmd) (func() error, error) { return cmd.Wait, cmd.Start() }
	}
	fromEnv := func(name string) string { value, _ := c.lookup(name); return value }
	c.Sysfs = cmp.Or(c.Sysfs, fromEnv(sysfsVariable), defaultSysfs)
	c.Tool = cmp.Or(c.Tool, fromEnv(toolVariable), defaultTool)
	c.Deadline = cmp.Or(c.Deadline, defaultDeadline)
	if c.Pairs == nil && !c.Limits.Ring {
		c.Pairs = switchbox.DefaultPairs
	}
}

// lookup is os.LookupEnv in Environ; as there, the last of several counts.
func (c *Config) lookup(name string) (value string, ok bool) {
	for _, kv := range c.Environ {
		if len(kv) > len(name) && kv[:len(name)] == name && kv[len(name)] == '=' {
			value, ok = kv[len(name)+1:], true
		}
	}
	return value, ok
}

func sockets(cards []card) (ids []int) {
	for _, c := range cards {
		ids = append(ids, c.Socket)
	}
	return ids
}

func facts(cards []card) (all []switchbox.Facts) {
	for _, c := range cards {
		id := switchbox.Identity{Index: c.Index, Name: fmt.Sprintf("MetaX device in socket %d", c.Socket)}
		all = append(all, switchbox.Facts{Identity: id})
	}
	return all
}

// measure runs the tool for all pairs at once, under one deadline.
func (c Config) measure(ctx context.Context, pairs []switchbox.Pair, cards []card) []switchbox.Measurement {
	late := fmt.Errorf("no answer within %v", c.Deadline)
	ctx, cancel := context.WithTimeoutCause(ctx, c.Deadline, late)
	defer cancel()
	index := map[int]int{}
	for _, card := range cards {
		index[card.Socket] = card.Index
	}
	ms := make([]switchbox.Measurement, len(pairs))
	var all sync.WaitGroup
	for i, p := range pairs {
		all.Go(func() { ms[i] = c.test(ctx, p, index[p.A], index[p.B]) })
	}
	all.Wait()
	return ms
}

func (c Config) test(ctx context.Context, p switchbox.Pair, a, b int) switchbox.Measurement {
	out, err := c.run(ctx, "-l", strconv.Itoa(a), "-p", strconv.Itoa(b), "-t", "1", "-c", "-w", "1")
	if err != nil {
		return switchbox.Measurement{Pair: p, Error: "mxom-client failed: " + err.Error()}
	}
	mbps, err := bandwidth(out)
	if err != nil {
		return switchbox.Measurement{Pair: p, Error: "mxom-client: " + err.Error()}
	}
	return switchbox.Measurement{Pair: p, MBps: mbps}
}

// figure matches a number of the tool: a decimal, with or without a fraction.
var figure = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^ *([0-9]{1,12}(?:\.[0-9]{1,12})?) *MB/s(?:[^A-Za-z0-9]|$)`)
})

// bandwidth is the lowest in the tool's output, in MB/s: of two directions the slower one counts.
func bandwidth(out []byte) (lowest float64, err error) {
	parts := bytes.Split(out, []byte("bandwidth:"))[1:]
	if len(parts) == 0 {
		return 0, errors.New("its output has no bandwidth")
	}
	lowest = math.Inf(1)
	for _, rest := range parts {
		m := figure().FindSubmatch(rest)
		if m == nil {
			return 0, fmt.Errorf("its output has no number of MB/s after bandwidth: but %.40q", rest)
		}
		mbps, err := strconv.ParseFloat(string(m[1]), 64)
		if err != nil {
			return 0, fmt.Errorf("its bandwidth is %.40q", m[1])
		}
		lowest = min(lowest, mbps)
	}
	return lowest, nil
}
