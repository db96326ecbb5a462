package switchbox_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/switchbox"
	"dlrover-run/switchbox/fake"
)

// told is findings as text: "fatal GPU 3 ...".
func told(findings []switchbox.Finding) (lines []string) {
	for _, f := range findings {
		lines = append(lines, fmt.Sprintf("%s %s: %s", f.Severity, f.Kind, f.Text))
	}
	return lines
}

func read(gpus []*fake.GPU) []switchbox.Facts { return switchbox.Read(fake.Devices(gpus), nil) }

func TestHealthyDevicesHaveNoFindings(t *testing.T) {
	for n := range 9 {
		require.Empty(t, told(switchbox.Judge(read(fake.Box(n)))))
		require.Empty(t, told(switchbox.Judge(read(fake.Bare(n)))))
	}
}

func TestJudge(t *testing.T) {
	ns := switchbox.Peer{Read: "TNS", Write: "TNS", NVLink: "NS"}
	for name, c := range map[string]struct {
		box   []*fake.GPU
		spoil func(g []*fake.GPU)
		want  []string
	}{
		"all links are active and the fabric is not registered": {fake.Box(2), func(g []*fake.GPU) {
			g[0].Switches.State, g[1].Switches.State = switchbox.FabricNotStarted, switchbox.FabricInProgress
		}, []string{
			"fatal gpu.fabric: GPU 0 has 18 active links, but its fabric is not_started: the fabric manager does not run, " +
				"or has not finished",
			"fatal gpu.fabric: GPU 1 has 18 active links, but its fabric is in_progress: the fabric manager does not run, " +
				"or has not finished",
		}},
		"the fabric failed": {fake.Box(1), func(g []*fake.GPU) { g[0].Switches.Status = "invalid partition" }, []string{
			"fatal gpu.fabric: GPU 0 could not register with its switches: invalid partition",
		}},
		"one GPU alone, its links switched off": {fake.Box(1), func(g []*fake.GPU) {
			g[0].Switches.State = switchbox.FabricNotStarted
			for i := range g[0].NVLinks {
				g[0].NVLinks[i] = switchbox.Link{}
			}
		}, []string{"warn gpu.fabric: GPU 0 has no active link, and its fabric is not_started"}},
		"sick switches": {fake.Box(2), func(g []*fake.GPU) {
			g[1].Switches.Degraded, g[1].Switches.Timeouts, g[1].Switches.Unhealthy = true, true, true
			g[1].Switches.Recovering, g[1].Switches.Misconfigured = true, true
		}, []string{
			"fatal gpu.fabric: GPU 1 has broken routes through its switches",
			"fatal gpu.fabric: GPU 1 has accesses that time out in its switches",
			"fatal gpu.fabric: GPU 1 has switches that are configured wrongly",
			"warn gpu.fabric: GPU 1 has less bandwidth to its switches than it should have",
			"warn gpu.fabric: GPU 1 has routes through its switches that are being repaired",
		}},
		"two links are down": {fake.Box(8), func(g []*fake.GPU) {
			g[5].NVLinks[3], g[5].NVLinks[17] = switchbox.Link{}, switchbox.Link{}
		}, []string{"fatal gpu.link: GPU 5 has 16 active links, others have 18; down: 3 17"}},
		"a bridge is missing": {fake.Bare(4), func(g []*fake.GPU) {
			for i := range g {
				g[i].NVLinks = []switchbox.Link{{Active: i < 2, Remote: switchbox.RemoteGPU}}
			}
		}, []string{
			"warn gpu.link: GPU 2 has 0 active links, others have 1; down: 0",
			"warn gpu.link: GPU 3 has 0 active links, others have 1; down: 0",
		}},
		"another product has fewer links": {fake.Box(2), func(g []*fake.GPU) {
			g[1].ID.Name, g[1].NVLinks[0].Active = "Fake H20", false
		}, nil},
		"links that cannot be asked for are not down": {fake.Box(2), func(g []*fake.GPU) {
			g[1].Fail["Link"] = errors.New("no permission")
		}, []string{"warn gpu.driver: GPU 1 cannot be asked for Link: no permission"}},
		"one GPU of eight reaches nobody": {fake.Box(8), func(g []*fake.GPU) { cut(g, 3, ns) }, []string{
			"fatal gpu.p2p: GPU 3 reaches only 0 of 7 others by P2P",
		}},
		"one GPU of three reaches nobody": {fake.Box(3), func(g []*fake.GPU) { cut(g, 2, ns) }, []string{
			"fatal gpu.p2p: GPU 2 reaches only 0 of 2 others by P2P",
		}},
		"one pair": {fake.Box(8), func(g []*fake.GPU) { g[1].Peers[6], g[6].Peers[1] = ns, ns }, []string{
			"fatal gpu.p2p: GPU 1 reaches GPU 6 with read TNS, write TNS, nvlink NS, the others with read OK, write OK, " +
				"nvlink OK",
			"fatal gpu.p2p: GPU 6 reaches GPU 1 with read TNS, write TNS, nvlink NS, the others with read OK, write OK, " +
				"nvlink OK",
		}},
		"a pair without NVLink among those with": {fake.Box(4), func(g []*fake.GPU) {
			g[0].Peers[1] = switchbox.Peer{Read: "OK", Write: "OK", NVLink: "NS"}
		}, []string{
			"fatal gpu.p2p: GPU 0 reaches GPU 1 with read OK, write OK, nvlink NS, the others with read OK, write OK, nvlink OK",
		}},
		"nobody reaches anybody": {fake.Box(2), func(g []*fake.GPU) { cut(g, 0, ns) }, []string{
			"warn gpu.p2p: GPU 0 cannot reach any other by P2P, though switches join them",
			"warn gpu.p2p: GPU 1 cannot reach any other by P2P, though switches join them",
		}},
		"two sockets": {fake.Bare(8), func(g []*fake.GPU) { sockets(g, ns) }, nil},
		"two sockets, one GPU cut off": {fake.Bare(8), func(g []*fake.GPU) { sockets(g, ns); cut(g, 7, ns) }, []string{
			"warn gpu.p2p: GPU 4 reaches the other devices by P2P as OK OK TNS TNS TNS TNS TNS, most others as OK OK OK " +
				"TNS TNS TNS TNS",
			"warn gpu.p2p: GPU 5 reaches the other devices by P2P as OK OK TNS TNS TNS TNS TNS, most others as OK OK OK " +
				"TNS TNS TNS TNS",
			"warn gpu.p2p: GPU 6 reaches the other devices by P2P as OK OK TNS TNS TNS TNS TNS, most others as OK OK OK " +
				"TNS TNS TNS TNS",
			"warn gpu.p2p: GPU 7 reaches the other devices by P2P as TNS TNS TNS TNS TNS TNS TNS, most others as OK OK OK " +
				"TNS TNS TNS TNS",
		}},
		"recovery actions": {fake.Box(5), func(g []*fake.GPU) {
			for i, a := range []switchbox.Recovery{
				switchbox.RecoverReset, switchbox.RecoverReboot, switchbox.RecoverDrainP2P, switchbox.RecoverDrain,
			} {
				g[i].Action = a
			}
		}, []string{
			"fatal gpu.reset: GPU 0 must be reset, says the driver",
			"fatal gpu.reset: GPU 1 needs the node to be rebooted, says the driver",
			"fatal gpu.reset: GPU 2 must be drained of peer-to-peer traffic, says the driver",
			"fatal gpu.reset: GPU 3 must be drained and reset, says the driver",
		}},
		"memory rows": {fake.Box(3), func(g []*fake.GPU) {
			g[0].Rows = switchbox.Remap{Uncorrectable: 2}
			g[1].Rows = switchbox.Remap{Uncorrectable: 1, Pending: true}
			g[2].Rows = switchbox.Remap{Failed: true, Pending: true}
			g[0].MemErrs.Uncorrected = 7
		}, []string{
			"fatal gpu.reset: GPU 1 must be reset: rows of its memory wait to be remapped",
			"fatal gpu.memory: GPU 2 has no spare rows of memory left for those with errors: replace it",
			"warn gpu.memory: GPU 0 has had 7 memory errors that could not be corrected since its driver started",
		}},
		"memory of others": {fake.Box(3), func(g []*fake.GPU) {
			g[0].Mem = switchbox.Memory{Total: 1000, Used: 300}
			g[1].Mem = switchbox.Memory{Total: 1000, Used: 400, Own: 99, Users: []switchbox.User{
				{PID: 7, Used: 1}, {PID: 8, Name: "train\npy", Used: 200},
				{PID: 9, Name: "b", Used: 50}, {PID: 10, Name: "c", Used: 40},
			}}
			g[2].Mem = switchbox.Memory{Total: 1000, Used: 1000}
		}, []string{
			"fatal gpu.memory: GPU 1 has 30 % of its memory in use by train py (pid 8), b (pid 9), c (pid 10) and 1 more; " +
				"at most 30 % may be",
			"fatal gpu.memory: GPU 2 has 100 % of its memory in use by processes that cannot be seen from here; at most " +
				"30 % may be",
		}},
		"a bad slot": {fake.Box(8), func(g []*fake.GPU) {
			g[2].Host.Width, g[3].Host.MaxGen, g[4].Host.Gen = 8, 3, 1
		}, []string{
			"warn gpu.pcie: GPU 2 has 8 PCIe lanes, most others 16",
			"warn gpu.pcie: GPU 3 has PCIe generation 3 at most, most others 5",
		}},
		"a lost device": {fake.Box(2), func(g []*fake.GPU) { g[1].Lose(switchbox.ErrLost) }, []string{
			"fatal gpu.lost: GPU 1 cannot be used: Mode: the driver refuses the device",
		}},
		"a device whose driver is at a loss": {fake.Box(2), func(g []*fake.GPU) { g[1].Lose(errors.New("Unknown Error")) },
			[]string{
				"fatal gpu.driver: GPU 1 cannot be asked for Mode: Unknown Error",
				"fatal gpu.driver: GPU 1 cannot be asked for Memory: Unknown Error",
				"fatal gpu.driver: GPU 1 cannot be asked for ECC: Unknown Error",
				"fatal gpu.driver: GPU 1 cannot be asked for Remap: Unknown Error",
				"fatal gpu.driver: GPU 1 cannot be asked for PCIe: Unknown Error",
				"warn gpu.driver: GPU 1 cannot be asked for Traffic: Unknown Error",
				"warn gpu.driver: GPU 1 cannot be asked for Fabric: Unknown Error",
				"warn gpu.driver: GPU 1 cannot be asked for Clocks: Unknown Error",
				"warn gpu.driver: GPU 1 cannot be asked for Recovery: Unknown Error",
				"warn gpu.driver: GPU 1 cannot be asked for Xids: Unknown Error",
				"warn gpu.driver: GPU 1 cannot be asked for Links: Unknown Error",
				"warn gpu.driver: GPU 1 cannot be asked for Peer: Unknown Error",
			}},
		"memory that cannot be asked for": {fake.Box(2), func(g []*fake.GPU) {
			g[0].Fail["Memory"], g[1].Fail["Fabric"] = errors.New("Unknown Error"), errors.New("Unknown Error")
		}, []string{
			"fatal gpu.driver: GPU 0 cannot be asked for Memory: Unknown Error",
			"warn gpu.driver: GPU 1 cannot be asked for Fabric: Unknown Error",
		}},
		"MIG": {fake.Box(1), func(g []*fake.GPU) {
			g[0].Is.MIG = true
			g[0].Fail["Links"], g[0].Fail["Fabric"] = switchbox.ErrNotSupported, fmt.Errorf("no: %w", switchbox.ErrNotSupported)
		}, []string{"info gpu.driver: GPU 0 is divided (MIG); skipped: Fabric, Links"}},
		"hot, and power fails": {fake.Box(2), func(g []*fake.GPU) {
			g[1].Speed = switchbox.Clocks{MHz: 345, Celsius: 94, Held: []string{"its temperature", "its power supply"}}
		}, []string{"warn gpu.clocks: GPU 1 has its clocks held down by its temperature, its power supply: 345 MHz at 94 C"}},
		"its clocks are unknown": {fake.Box(1), func(g []*fake.GPU) {
			g[0].Fail["Clocks"] = errors.New("timeout")
		}, []string{"warn gpu.driver: GPU 0 cannot be asked for Clocks: timeout"}},
		"vGPU": {fake.Box(1), func(g []*fake.GPU) {
			g[0].Is.Virtual = true
			g[0].Fail["ECC"] = switchbox.ErrNotSupported
		}, []string{"info gpu.driver: GPU 0 is a virtual GPU; skipped: ECC"}},
		"what a simple card does not support": {fake.Bare(1), func(g []*fake.GPU) {
			g[0].Lose(switchbox.ErrNotSupported)
		}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			c.spoil(c.box)
			require.Equal(t, c.want, told(switchbox.Judge(read(c.box))))
		})
	}
}

// cut makes the device one that reaches nobody and is reached by nobody.
func cut(gpus []*fake.GPU, i int, p switchbox.Peer) {
	for other := range gpus {
		if other != i {
			gpus[i].Peers[other], gpus[other].Peers[i] = p, p
		}
	}
}

// sockets makes two halves that do not reach each other.
func sockets(gpus []*fake.GPU, p switchbox.Peer) {
	for i := range gpus {
		for j := range gpus {
			if i/4 != j/4 {
				gpus[i].Peers[j] = p
			}
		}
	}
}

// A device that is lost is not asked again: every further call might hang.
func TestALostDeviceIsLeftAlone(t *testing.T) {
	gpus := fake.Box(1)
	gpus[0].Fail["Traffic"] = switchbox.ErrLost
	var asked []string
	facts := switchbox.Read(fake.Devices(gpus), func(_ int, method string) { asked = append(asked, method) })
	require.Equal(t, []string{"Identity", "Mode", "Memory", "Traffic"}, asked)
	require.Equal(t, "Traffic: the driver refuses the device", facts[0].Lost)
}

func TestReadSaysInWhichCallItIs(t *testing.T) {
	gpus := fake.Box(2)
	var now string
	gpus[1].Called = func(method string) { require.Equal(t, "1 "+method, now) }
	switchbox.Read(fake.Devices(gpus), func(device int, method string) { now = fmt.Sprint(device, " ", method) })
	require.Equal(t, "1 Peer", now)
}

func TestJudgeGrowth(t *testing.T) {
	for name, c := range map[string]struct {
		change func(g *fake.GPU)
		copied uint64
		want   []string
	}{
		"nothing":                       {func(*fake.GPU) {}, 0, nil},
		"errors that were there before": {func(g *fake.GPU) { g.Moved = switchbox.Traffic{Sent: 1 << 40} }, 1 << 30, nil},
		"link errors": {func(g *fake.GPU) {
			g.Errors[2] = switchbox.LinkErrors{Replay: 5, CRC: 1}
			g.Errors[4] = switchbox.LinkErrors{Recovery: 2, RecoveryFailed: 1}
		}, 0, []string{
			"warn gpu.link: GPU 0 had errors on link 2 during the copies: 2 packets were sent again",
			"warn gpu.link: GPU 0 had errors on link 2 during the copies: 1 damaged packets",
			"warn gpu.link: GPU 0 had errors on link 4 during the copies: 2 recoveries",
			"fatal gpu.link: GPU 0 had errors on link 4 during the copies: 1 failed recoveries",
		}},
		"a counter that is not supported": {func(g *fake.GPU) { g.Errors[3].Replay = 12 }, 0, nil},
		"a link goes down": {func(g *fake.GPU) { g.NVLinks[9].Active = false }, 0, []string{
			"fatal gpu.link: GPU 0 lost link 9 during the copies",
		}},
		"memory and PCIe": {func(g *fake.GPU) { g.MemErrs.Uncorrected, g.Host.Replay = 4, 6 }, 0, []string{
			"fatal gpu.memory: GPU 0 had 1 memory errors during the copies that could not be corrected",
			"warn gpu.pcie: GPU 0 had to send 6 packets over PCIe again during the copies",
		}},
		"Xids": {func(g *fake.GPU) {
			g.Told = append(g.Told, switchbox.Xid{Number: 74, Text: "NVLink error"})
			g.Told = append(g.Told, switchbox.Xid{Number: 31, Text: "page fault"})
		}, 0, []string{
			"fatal gpu.driver: GPU 0 had Xid 74 during the copies: NVLink error",
			"warn gpu.driver: GPU 0 had Xid 31 during the copies: page fault",
		}},
		"another way": {func(g *fake.GPU) { g.Moved.Sent += 10e6 }, 512e6, []string{
			"warn gpu.link: GPU 0 sent 10 of 512 MB over its links: the rest went another way",
		}},
		"over the links": {func(g *fake.GPU) { g.Moved.Sent += 500e6 }, 512e6, nil},
		"lost": {func(g *fake.GPU) { g.Fail["ECC"] = switchbox.ErrLost }, 0, []string{
			"fatal gpu.lost: GPU 0 was lost during the copies: ECC: the driver refuses the device",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			box := fake.Box(1)
			box[0].Errors[2].Replay, box[0].Errors[3].Replay, box[0].MemErrs.Uncorrected = 3, -1, 3
			box[0].Told = []switchbox.Xid{{Number: 79, Text: "fallen off the bus, last week"}}
			before := read(box)
			c.change(box[0])
			require.Equal(t, c.want, told(switchbox.JudgeGrowth(before, read(box), map[int]uint64{0: c.copied})))
		})
	}
}

func TestWhatADriverSaysIsOneLine(t *testing.T) {
	box := fake.Box(1)
	box[0].ID.Name, box[0].Switches.Status = "H\x1b[31m200\n", strings.Repeat("é", 400)
	facts := read(box)
	require.Equal(t, "H [31m200", facts[0].Name)
	require.Len(t, facts[0].Fabric.Status, 511)
}
