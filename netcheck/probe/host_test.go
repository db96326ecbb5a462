package probe

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/netcheck"
)

// fakeHost is a host out of a directory and a list.
type fakeHost struct {
	Host
	t     *testing.T
	links []Link
}

func newFakeHost(t *testing.T, links ...Link) *fakeHost {
	h := &fakeHost{t: t, links: links}
	h.Host = Host{Sys: t.TempDir(), Proc: t.TempDir(), Links: func() ([]Link, error) { return h.links, nil }}
	h.proc("sys/kernel/random/boot_id", "b1\n")
	return h
}

func write(t *testing.T, path, content string) {
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
}

func (h *fakeHost) file(path, content string) { write(h.t, filepath.Join(h.Sys, path), content) }
func (h *fakeHost) proc(path, content string) { write(h.t, filepath.Join(h.Proc, path), content) }

func up(name string, addrs ...string) Link {
	l := Link{Name: name, Kind: "device", MTU: 9000, Up: true, Oper: "up"}
	for _, a := range addrs {
		l.Addrs = append(l.Addrs, netip.MustParsePrefix(a))
	}
	return l
}

func choice(t *testing.T, sockets, hcas, addr string) Choice {
	env := map[string]string{"NCCL_SOCKET_IFNAME": sockets, "NCCL_IB_HCA": hcas}
	c, err := ChoiceOf(func(k string) string { return env[k] }, addr)
	require.NoError(t, err)
	return c
}

func TestDefaultNICHasTheNodesAddress(t *testing.T) {
	lo := up("lo", "127.0.0.1/8")
	lo.Loopback, lo.Oper = true, "unknown"
	h := newFakeHost(t, lo, up("eth0", "10.0.0.1/24"), up("eth1", "fe80::1/64", "10.1.0.1/24", "fd00::1/64"))
	h.file("class/net/eth1/speed", "100000\n")
	nics, err := h.NICs(choice(t, "", "", "10.1.0.1"))
	require.NoError(t, err)
	require.Len(t, nics, 1)
	want := netcheck.NIC{Name: "eth1", Addr: "10.1.0.1", Mbps: 100000, MTU: 9000, CC: congestionControl()}
	require.Equal(t, want, nics[0])

	nics, err = h.NICs(choice(t, "", "", "fd00::1"))
	require.NoError(t, err)
	require.Equal(t, "fd00::1", nics[0].Addr)

	nics, err = h.NICs(choice(t, "", "", "127.0.0.1"))
	require.NoError(t, err)
	require.Equal(t, "lo", nics[0].Name)

	_, err = h.NICs(choice(t, "", "", "10.9.9.9"))
	require.ErrorContains(t, err, "no network interface has this node's address 10.9.9.9")
	require.ErrorContains(t, err, "eth0 10.0.0.1; eth1 10.1.0.1")
}

func TestSelectedNICsAreInOrderOfTheirNumbers(t *testing.T) {
	down := up("eth3", "10.3.0.1/24")
	down.Oper = "down"
	h := newFakeHost(t, up("eth10", "10.10.0.1/24"), up("eth2", "fd00::2/64", "10.2.0.1/24"), down, up("eth4"),
		up("docker0", "172.17.0.1/16"))
	nics, err := h.NICs(choice(t, "eth", "", "192.168.0.1"))
	require.NoError(t, err)
	require.Len(t, nics, 2)
	require.Equal(t, "eth2", nics[0].Name)
	require.Equal(t, "10.2.0.1", nics[0].Addr, "of the family of the node's address")
	require.Equal(t, "eth10", nics[1].Name)

	_, err = h.NICs(choice(t, "ib", "", "192.168.0.1"))
	require.ErrorContains(t, err, `NCCL_SOCKET_IFNAME="ib"`)
	require.ErrorContains(t, err, "eth3 10.3.0.1, down; eth4 without an address; docker0 172.17.0.1")
}

func TestLinkStates(t *testing.T) {
	for oper, fatal := range map[string]bool{
		"up": false, "unknown": false, "dormant": false, "testing": false,
		"down": true, "lower-layer-down": true, "not-present": true,
	} {
		l := up("eth0", "10.0.0.1/24")
		l.Oper = oper
		found := newFakeHost(t, l).Local(choice(t, "", "", "10.0.0.1"))
		if !fatal {
			require.Empty(t, found, oper)
			continue
		}
		require.NotEmpty(t, found, oper)
		require.Equal(t, netcheck.Fatal, found[0].Severity)
	}
	l := up("eth0", "10.0.0.1/24")
	l.Up = false
	found := newFakeHost(t, l, up("eth1", "10.0.1.1/24")).Local(choice(t, "=eth0,eth1", "", "10.0.0.1"))
	require.Len(t, found, 1)
	require.Equal(t, "network interface eth0 does not work: it is switched off", found[0].Text)
	require.Equal(t, "host.nic", found[0].Kind)
	require.Equal(t, "eth0", found[0].Entity)

	// What only a prefix selects may be spare: it is told if it has an address.
	found = newFakeHost(t, l, up("eth1", "10.0.1.1/24")).Local(choice(t, "eth", "", "10.0.0.1"))
	require.Len(t, found, 1)
	require.Equal(t, netcheck.Warn, found[0].Severity)
	require.Equal(t, "network interface eth0 does not work: it is switched off", found[0].Text)
	l.Addrs = nil
	require.Empty(t, newFakeHost(t, l, up("eth1", "10.0.1.1/24")).Local(choice(t, "eth", "", "10.0.0.1")))
}

func TestUnknownSpeedIsNoFinding(t *testing.T) {
	for _, speed := range []string{"-1\n", "", "x", "99999999999999999999"} {
		h := newFakeHost(t, up("eth0", "10.0.0.1/24"))
		h.file("class/net/eth0/speed", speed)
		c := choice(t, "", "", "10.0.0.1")
		require.Empty(t, h.Local(c))
		nics, err := h.NICs(c)
		require.NoError(t, err)
		require.Zero(t, nics[0].Mbps)
	}
}

func TestLocalWarnings(t *testing.T) {
	h := newFakeHost(t, up("eth0", "10.0.0.1/24"), up("eth1", "10.1.0.1/24"), up("eth2", "10.2.0.1/24"))
	h.links[1].MTU = 1500
	for _, n := range []string{"eth0", "eth1", "eth2"} {
		h.file("class/net/"+n+"/speed", "100000\n")
	}
	h.file("class/net/eth2/speed", "25000\n")
	h.file("class/net/eth0/duplex", "half\n")
	h.file("class/net/eth0/device/current_link_width", "4\n")
	h.file("class/net/eth0/device/max_link_width", "16\n")
	h.file("class/net/eth0/device/current_link_speed", "16.0 GT/s PCIe\n")
	h.file("class/net/eth0/device/max_link_speed", "Unknown\n")
	var texts []string
	for _, f := range h.Local(choice(t, "eth,en", "", "10.0.0.1")) {
		require.Equal(t, netcheck.Warn, f.Severity)
		texts = append(texts, f.Text)
	}
	require.Equal(t, []string{
		"NCCL_SOCKET_IFNAME names en, and there is no such interface",
		"network interface eth0 runs half duplex",
		"PCI Express link width of eth0 is 4 and could be 16",
		"speed of eth2 is 25000 Mbit/s, of most others 100000",
		"mtu of eth1 is 1500 bytes, of most others 9000",
	}, texts)
}

func (h *fakeHost) port(dev, port, state, phys, rate string) {
	dir := "class/infiniband/" + dev + "/ports/" + port + "/"
	h.file(dir+"state", state+"\n")
	h.file(dir+"phys_state", phys+"\n")
	h.file(dir+"rate", rate+"\n")
}

func TestInfiniBandPorts(t *testing.T) {
	h := newFakeHost(t, up("eth0", "10.0.0.1/24"))
	for _, dev := range []string{"mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10"} {
		h.port(dev, "1", "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
	}
	require.Empty(t, h.Local(choice(t, "", "mlx5", "10.0.0.1")))

	h.port("mlx5_1", "1", "1: DOWN", "3: Disabled", "10 Gb/sec (4X SDR)")
	h.port("mlx5_2", "1", "4: ACTIVE", "5: LinkUp", "200 Gb/sec (2X NDR)")
	found := h.Local(choice(t, "", "", "10.0.0.1"))
	require.Len(t, found, 2)
	require.Equal(t, netcheck.Info, found[0].Severity, "nobody asked for this port by name")
	require.Equal(t, "port 1 of RDMA device mlx5_2 runs at 200 Gbit/s, most others at 400", found[1].Text)

	found = h.Local(choice(t, "", "=mlx5_0,mlx5_1", "10.0.0.1"))
	require.Len(t, found, 1)
	require.Equal(t, netcheck.Fatal, found[0].Severity)
	require.Contains(t, found[0].Text, "mlx5_1 is not active: state 1: DOWN, physical state 3: Disabled")
	require.Equal(t, "mlx5_1:1", found[0].Entity)

	found = h.Local(choice(t, "", "roce", "10.0.0.1"))
	require.Len(t, found, 1)
	require.Equal(t, netcheck.Fatal, found[0].Severity)
	require.Contains(t, found[0].Text, "there are: mlx5_0:1, mlx5_1:1, mlx5_2:1, mlx5_10:1")
}

func TestTheRDMADeviceOfAnInterface(t *testing.T) {
	h := newFakeHost(t, up("eth0", "10.0.0.1/24"))
	h.file("class/net/eth0/device/infiniband/mlx5_3/node_guid", "")
	h.file("class/net/eth0/dev_port", "1\n")
	for hcas, want := range map[string]string{"": "mlx5_3", "mlx5_3:2": "mlx5_3", "mlx5_3:1": "", "^mlx5_3": ""} {
		nics, err := h.NICs(choice(t, "", hcas, "10.0.0.1"))
		require.NoError(t, err)
		require.Equal(t, want, nics[0].HCA, hcas)
	}
}

func TestDelta(t *testing.T) {
	h := newFakeHost(t, up("eth0", "10.0.0.1/24"), up("eth1", "10.1.0.1/24"))
	c := choice(t, "", "", "10.0.0.1")
	h.port("mlx5_0", "1", "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
	const port = "class/infiniband/mlx5_0/ports/1/"
	h.file("class/net/eth0/carrier_down_count", "3\n")
	h.file("class/net/eth1/carrier_down_count", "3\n")
	h.file(port+"counters/link_downed", "1\n")
	h.file(port+"counters/symbol_error", "100\n")
	h.file(port+"hw_counters/np_cnp_sent", "5\n")
	before := h.Snapshot(c)
	require.Empty(t, Delta(before, h.Snapshot(c)))

	h.file("class/net/eth0/carrier_down_count", "4\n")
	h.file("class/net/eth1/carrier_down_count", "9\n") // not selected
	h.file(port+"counters/link_downed", "2\n")
	h.file(port+"counters/symbol_error", "7\n") // set back
	h.file(port+"hw_counters/np_cnp_sent", "9\n")
	h.file(port+"hw_counters/packet_seq_err", "9\n") // new: says nothing
	h.links[0].RxCRC = 12
	found := Delta(before, h.Snapshot(c))
	var got []string
	for _, f := range found {
		got = append(got, string(f.Severity)+" "+f.Kind+" "+f.Text)
	}
	require.Equal(t, []string{
		"fatal host.nic eth0 lost its link during the check: carrier_down_count grew by 1",
		"warn host.nic eth0 received packets with a wrong checksum during the check: rx_crc_errors grew by 12",
		"fatal host.ib mlx5_0:1 lost its link during the check: link_downed grew by 1",
		"info host.ib mlx5_0:1 asked senders to slow down during the check: np_cnp_sent grew by 4",
	}, got)
	require.Equal(t, 4.0, found[3].Value)
}

func TestFingerprint(t *testing.T) {
	h := newFakeHost(t, up("eth0", "10.0.0.1/24"), up("eth1", "10.1.0.1/24"))
	c := choice(t, "", "", "10.0.0.1")
	h.port("mlx5_0", "1", "4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)")
	h.file("class/net/eth0/carrier_changes", "2\n")
	h.file("class/infiniband/mlx5_0/ports/1/counters/link_downed", "0\n")
	first := h.Fingerprint(c)
	require.Equal(t, "boot=b1 eth0.carrier_changes=2 mlx5_0:1.link_downed=0", first)
	h.links[0].RxErrors = 5
	h.file("class/net/eth1/carrier_changes", "7\n")
	require.Equal(t, first, h.Fingerprint(c), "nothing that a pass depends on has changed")
	for path, content := range map[string]string{
		"class/net/eth0/carrier_changes":                       "3",
		"class/infiniband/mlx5_0/ports/1/counters/link_downed": "1",
	} {
		was := h.Fingerprint(c)
		h.file(path, content)
		require.NotEqual(t, was, h.Fingerprint(c), path)
	}
	was := h.Fingerprint(c)
	h.proc("sys/kernel/random/boot_id", "b2")
	require.NotEqual(t, was, h.Fingerprint(c))
}

func TestLinksThatCannotBeListed(t *testing.T) {
	h := Host{Links: func() ([]Link, error) { return nil, errors.New("listing network interfaces: denied") }}
	_, err := h.NICs(Choice{})
	require.ErrorContains(t, err, "denied")
	found := h.Local(Choice{})
	require.Len(t, found, 1)
	require.Equal(t, netcheck.Warn, found[0].Severity)
}

func TestChoiceOf(t *testing.T) {
	none := func(string) string { return "" }
	_, err := ChoiceOf(none, "node-1")
	require.ErrorContains(t, err, `"node-1"`)
	_, err = ChoiceOf(func(string) string { return "^" }, "10.0.0.1")
	require.ErrorContains(t, err, "NCCL_SOCKET_IFNAME")
	c, err := ChoiceOf(none, "::ffff:10.0.0.1")
	require.NoError(t, err)
	require.Equal(t, netip.MustParseAddr("10.0.0.1"), c.Addr)
}

// The real host has at least loopback.
func TestRealLinks(t *testing.T) {
	nics, err := Host{}.NICs(choice(t, "", "", "127.0.0.1"))
	require.NoError(t, err)
	require.Equal(t, "lo", nics[0].Name)
	require.Greater(t, nics[0].MTU, 1000)
	require.Contains(t, Host{}.Fingerprint(choice(t, "", "", "127.0.0.1")), "boot=")
}
