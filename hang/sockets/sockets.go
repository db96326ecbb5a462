//go:build linux

// Package sockets finds out which processes of this node own which connections to a port: the workers' store knows
// its clients by address, and people by rank.
//
// It reads /proc/PID/ns/net, net/tcp, net/tcp6 and fd of the given processes, and nothing of others. For Traffic it
// asks the kernel how much data the connections of this network namespace have carried.
package sockets

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"dlrover-run/internal/stable"
)

// Local returns the local ends of the established TCP connections from the processes pids to port, by pid. Only
// connections to one of hosts count, if there are any. IPv4 addresses are never mapped to IPv6. A connection that
// several processes have inherited belongs to all of them.
//
// A process that is gone, or may not be looked at, is missing from the result and part of the error; the others are
// valid all the same.
func Local(pids []int, port uint16, hosts ...netip.Addr) (map[int][]netip.AddrPort, error) {
	return local("/proc", pids, port, hosts)
}

func local(proc string, pids []int, port uint16, hosts []netip.Addr) (map[int][]netip.AddrPort, error) {
	want := filter{port: port}
	for _, h := range hosts {
		want.hosts = append(want.hosts, plain(h))
	}
	tables := map[string]table{} // by network namespace
	found := map[int][]netip.AddrPort{}
	var errs []error
	for _, pid := range pids {
		dir := filepath.Join(proc, strconv.Itoa(pid))
		ends, err := ofProcess(dir, want, tables)
		if err != nil {
			errs = append(errs, fmt.Errorf("sockets: connections of process %d: %w", pid, err))
		}
		if len(ends) > 0 {
			found[pid] = ends
		}
	}
	return found, errors.Join(errs...)
}

func ofProcess(dir string, want filter, tables map[string]table) ([]netip.AddrPort, error) {
	space, err := os.Readlink(dir + "/ns/net")
	if err != nil {
		return nil, err
	}
	t, ok := tables[space]
	if !ok {
		if t, err = readTable(dir, want); err != nil {
			return nil, err
		}
		tables[space] = t
	}
	if len(t) == 0 {
		return nil, nil
	}
	return owned(dir+"/fd", t)
}

// table has the local ends of connections, by the inode of their sockets as /proc/PID/fd shows it.
type table map[string]netip.AddrPort

// filter selects the connections that matter.
type filter struct {
	port  uint16
	hosts []netip.Addr
}

func (f filter) match(remote netip.AddrPort) bool {
	return remote.Port() == f.port && (len(f.hosts) == 0 || slices.Contains(f.hosts, remote.Addr()))
}

// readTable reads the connections of the network namespace of a process. A kernel may lack IPv6.
func readTable(dir string, want filter) (table, error) {
	t := table{}
	for _, name := range []string{"tcp", "tcp6"} {
		f, err := os.Open(dir + "/net/" + name)
		if name == "tcp6" && errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		err = t.add(f, want)
		f.Close()
		if err != nil {
			return nil, err
		}
	}
	return t, nil
}

// add reads the kernel's net/tcp or net/tcp6. Malformed lines are skipped.
func (t table) add(r io.Reader, want filter) error {
	lines := bufio.NewScanner(r)
	port := fmt.Appendf(nil, ":%04X ", want.port)
	for lines.Scan() {
		if !bytes.Contains(lines.Bytes(), port) {
			continue
		}
		if l, ok := parseLine(lines.Bytes()); ok && want.match(l.remote) {
			t["socket:["+l.inode+"]"] = l.local
		}
	}
	return lines.Err()
}

type line struct {
	local, remote netip.AddrPort
	inode         string
}

// parseLine parses the line of an established connection.
func parseLine(b []byte) (line, bool) {
	const established = "01"
	f := bytes.Fields(b) // slot local remote state queues timer retransmits uid timeout inode ...
	if len(f) < 10 || string(f[3]) != established {
		return line{}, false
	}
	local, ok := parseEnd(f[1])
	remote, ok2 := parseEnd(f[2])
	return line{local, remote, string(f[9])}, ok && ok2
}

// parseEnd parses an address, as words in the machine's byte order, and a port.
func parseEnd(b []byte) (netip.AddrPort, bool) {
	words, port, ok := bytes.Cut(b, []byte(":"))
	p, err := strconv.ParseUint(string(port), 16, 16)
	if !ok || err != nil || len(words) != 8 && len(words) != 32 {
		return netip.AddrPort{}, false
	}
	raw := make([]byte, len(words)/2)
	if _, err := hex.Decode(raw, words); err != nil {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(raw); i += 4 {
		binary.NativeEndian.PutUint32(raw[i:], binary.BigEndian.Uint32(raw[i:]))
	}
	addr, _ := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(plain(addr), uint16(p)), true
}

func plain(a netip.Addr) netip.Addr { return a.Unmap().WithZone("") }

// owned returns the connections of t that are among the descriptors in dir.
func owned(dir string, t table) ([]netip.AddrPort, error) {
	found := map[netip.AddrPort]struct{}{}
	err := eachLink(dir, func(link string) bool {
		if end, ok := t[link]; ok {
			found[end] = struct{}{}
		}
		return len(found) < len(t)
	})
	if err != nil {
		return nil, err
	}
	return sorted(found), nil
}

// eachLink passes the targets of the links in a directory to each, until it wants no more.
func eachLink(dir string, each func(link string) bool) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	for {
		names, err := d.Readdirnames(1024)
		if err != nil && err != io.EOF {
			return err
		}
		if len(names) == 0 {
			return nil
		}
		for _, name := range names {
			link, err := os.Readlink(dir + "/" + name) // it may have been closed meanwhile
			if err == nil && !each(link) {
				return nil
			}
		}
	}
}

func sorted(ends map[netip.AddrPort]struct{}) []netip.AddrPort {
	out := make([]netip.AddrPort, 0, len(ends))
	for e := range ends {
		out = append(out, e)
	}
	stable.Sort(out, netip.AddrPort.Compare)
	return out
}
