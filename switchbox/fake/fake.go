// Package fake has accelerators for tests. They give the answers that a test sets.
package fake

import (
	"fmt"

	"dlrover-run/switchbox"
)

// GPU is a switchbox.Device that answers with its fields.
type GPU struct {
	ID       switchbox.Identity
	Is       switchbox.Mode
	NVLinks  []switchbox.Link
	Errors   []switchbox.LinkErrors // by link; missing ones are zero
	Moved    switchbox.Traffic
	Switches switchbox.Fabric
	Peers    map[int]switchbox.Peer // by Identity.Index
	Mem      switchbox.Memory
	MemErrs  switchbox.ECC
	Rows     switchbox.Remap
	Host     switchbox.PCIe
	Speed    switchbox.Clocks
	Action   switchbox.Recovery
	Told     []switchbox.Xid
	// Fail are the errors of methods, by name. Called is called before every answer; it may block.
	Fail   map[string]error
	Called func(method string)
}

var _ switchbox.Device = (*GPU)(nil)

// Box is a healthy node of n GPUs, each with 18 links to switches.
func Box(n int) []*GPU {
	gpus := make([]*GPU, n)
	for i := range gpus {
		gpus[i] = newGPU(i)
		for other := range n {
			if other != i {
				gpus[i].Peers[other] = switchbox.Peer{Read: "OK", Write: "OK", NVLink: "OK"}
			}
		}
	}
	return gpus
}

// Bare is a healthy node of n GPUs that only PCIe joins.
func Bare(n int) []*GPU {
	gpus := Box(n)
	for _, g := range gpus {
		g.NVLinks, g.Switches = nil, switchbox.Fabric{State: switchbox.FabricNotSupported}
		for other := range g.Peers {
			g.Peers[other] = switchbox.Peer{Read: "OK", Write: "OK", NVLink: "NS"}
		}
	}
	return gpus
}

func newGPU(i int) *GPU {
	g := &GPU{
		ID: switchbox.Identity{
			Index: i, Name: "Fake H200", Module: i + 1,
			UUID: fmt.Sprintf("GPU-%08d", i), PCI: fmt.Sprintf("0000:%02x:00.0", i+16),
		},
		Switches: switchbox.Fabric{State: switchbox.FabricCompleted},
		Peers:    map[int]switchbox.Peer{},
		Mem:      switchbox.Memory{Total: 140 << 30, Used: 1 << 30},
		MemErrs:  switchbox.ECC{Enabled: true},
		Host:     switchbox.PCIe{Gen: 5, MaxGen: 5, Width: 16, MaxWidth: 16},
		Speed:    switchbox.Clocks{MHz: 1980, Celsius: 60},
		Action:   switchbox.RecoverNothing,
		Fail:     map[string]error{},
	}
	for range 18 {
		g.NVLinks = append(g.NVLinks, switchbox.Link{Active: true, Version: 4, MBps: 26562, Remote: switchbox.RemoteSwitch})
	}
	g.Errors = make([]switchbox.LinkErrors, len(g.NVLinks))
	return g
}

// Devices are GPUs as Read wants them.
func Devices(gpus []*GPU) []switchbox.Device {
	devices := make([]switchbox.Device, len(gpus))
	for i, g := range gpus {
		devices[i] = g
	}
	return devices
}

// Lose makes the GPU answer every call with err, as one that has fallen off the bus does.
func (g *GPU) Lose(err error) {
	for _, method := range []string{
		"Mode", "Links", "Link", "LinkErrors", "Traffic", "Fabric", "Peer",
		"Memory", "ECC", "Remap", "PCIe", "Clocks", "Recovery", "Xids",
	} {
		g.Fail[method] = err
	}
}

// answer is a method's result: its value, or the error that is set for it.
func answer[T any](g *GPU, method string, v T) (T, error) {
	if g.Called != nil {
		g.Called(method)
	}
	return v, g.Fail[method]
}

// Identity implements switchbox.Device, as do all that follow.
func (g *GPU) Identity() switchbox.Identity { return g.ID }

// Mode returns Is.
func (g *GPU) Mode() (switchbox.Mode, error) { return answer(g, "Mode", g.Is) }

// Links returns the number of NVLinks.
func (g *GPU) Links() (int, error) { return answer(g, "Links", len(g.NVLinks)) }

// Link returns one of NVLinks.
func (g *GPU) Link(link int) (switchbox.Link, error) { return answer(g, "Link", g.NVLinks[link]) }

// LinkErrors returns one of Errors.
func (g *GPU) LinkErrors(link int) (switchbox.LinkErrors, error) {
	var errs switchbox.LinkErrors
	if link < len(g.Errors) {
		errs = g.Errors[link]
	}
	return answer(g, "LinkErrors", errs)
}

// Traffic returns Moved.
func (g *GPU) Traffic() (switchbox.Traffic, error) { return answer(g, "Traffic", g.Moved) }

// Fabric returns Switches.
func (g *GPU) Fabric() (switchbox.Fabric, error) { return answer(g, "Fabric", g.Switches) }

// Peer returns one of Peers.
func (g *GPU) Peer(other int) (switchbox.Peer, error) { return answer(g, "Peer", g.Peers[other]) }

// Memory returns Mem.
func (g *GPU) Memory() (switchbox.Memory, error) { return answer(g, "Memory", g.Mem) }

// ECC returns MemErrs.
func (g *GPU) ECC() (switchbox.ECC, error) { return answer(g, "ECC", g.MemErrs) }

// Remap returns Rows.
func (g *GPU) Remap() (switchbox.Remap, error) { return answer(g, "Remap", g.Rows) }

// PCIe returns Host.
func (g *GPU) PCIe() (switchbox.PCIe, error) { return answer(g, "PCIe", g.Host) }

// Clocks returns Speed.
func (g *GPU) Clocks() (switchbox.Clocks, error) { return answer(g, "Clocks", g.Speed) }

// Recovery returns Action.
func (g *GPU) Recovery() (switchbox.Recovery, error) { return answer(g, "Recovery", g.Action) }

// Xids returns Told.
func (g *GPU) Xids() ([]switchbox.Xid, error) { return answer(g, "Xids", g.Told) }
