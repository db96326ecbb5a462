package python

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"

	"dlrover-run/internal/text"
)

// maxText bounds a text of the probe, in bytes.
const maxText = 512

// hello is the probe's first line, once PyTorch is imported or its import has failed.
type hello struct {
	Ready     string  `json:"ready"` // version
	Libraries string  `json:"libraries"`
	Devices   int     `json:"devices"`
	Why       string  `json:"why"` // there are no devices, in words
	Seconds   float64 `json:"seconds"`
	Missing   string  `json:"missing"`
	Broken    string  `json:"broken"`
}

func (h *hello) version() string {
	if h.Libraries == "" {
		return h.Ready
	}
	return h.Ready + ", " + h.Libraries
}

func (h *hello) problem() error {
	switch {
	case h.Missing != "":
		return fmt.Errorf("%w: %s", errNoTorch, h.Missing)
	case h.Broken != "":
		return fmt.Errorf("%w: %s", errImport, h.Broken)
	}
	return nil
}

// measured is the result of one device. Times are in milliseconds.
type measured struct {
	Idle      bool    `json:"idle"` // it was not needed
	Matmul    float64 `json:"matmul"`
	Latency   float64 `json:"latency"`
	AllReduce float64 `json:"allreduce"`
	Bytes     int64   `json:"bytes"`
	BusMBps   float64 `json:"bus_mbps"`
	Backend   string  `json:"backend"`
	Transport string  `json:"transport"`
}

// reply is one line of the probe: hello, or the answer to a command.
type reply struct {
	ID    int        `json:"id"`
	OK    []measured `json:"ok"`
	Error string     `json:"error"`
	hello *hello
}

// result is the answer to the command with the given id.
func (a reply) result(id int) ([]measured, error) {
	switch {
	case a.ID != id:
		return nil, fmt.Errorf("the probe answers command %d instead of %d", a.ID, id)
	case a.Error != "":
		return nil, errors.New(a.Error)
	case len(a.OK) == 0:
		return nil, errors.New("the probe answers without a figure")
	}
	return a.OK, nil
}

// parse reads one line of the probe. Damage that libraries have done to that process must not reach this one.
func parse(line []byte) (a reply, err error) {
	var h hello
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	if bytes.Contains(line, []byte(`"id"`)) {
		err = d.Decode(&a)
	} else {
		err = d.Decode(&h)
		a.hello = &h
	}
	if err == nil {
		err = errors.Join(a.check(), h.check())
	}
	if err != nil {
		return reply{}, fmt.Errorf("the probe answers with something else: %w: %.80q", err, line)
	}
	a.Error = oneLine(a.Error)
	for _, s := range []*string{&h.Ready, &h.Libraries, &h.Why, &h.Missing, &h.Broken} {
		*s = oneLine(*s)
	}
	return a, nil
}

func (a *reply) check() error {
	for i := range a.OK {
		m := &a.OK[i]
		for _, v := range []float64{m.Matmul, m.Latency, m.AllReduce, m.BusMBps, float64(m.Bytes)} {
			if v < 0 || math.IsInf(v, 0) {
				return fmt.Errorf("a figure is %v", v)
			}
		}
		m.Backend, m.Transport = oneLine(m.Backend), oneLine(m.Transport)
	}
	return nil
}

func (h *hello) check() error {
	const maxDevices = 4096
	if h.Devices < 0 || h.Devices > maxDevices {
		return fmt.Errorf("%d devices", h.Devices)
	}
	return nil
}

// oneLine is s as a Result or a Finding takes it.
func oneLine(s string) string { return strings.TrimSpace(text.Line(s, maxText)) }
