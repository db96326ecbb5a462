package probe

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/netcheck"
)

// counter is one of the numbers that a device keeps since it exists.
type counter struct{ Entity, Metric string }

// Counters are the counters of the selected devices at one moment.
type Counters map[counter]uint64

// meaning explains the growth of a counter during a check. Growth that is normal on healthy networks is information
// only.
var meaning = map[string]struct {
	severity netcheck.Severity
	text     string
}{
	"carrier_down_count":    {netcheck.Fatal, "lost its link"},
	"link_downed":           {netcheck.Fatal, "lost its link"},
	"symbol_error":          {netcheck.Warn, "received damaged symbols"},
	"link_error_recovery":   {netcheck.Warn, "had to recover its link"},
	"port_rcv_errors":       {netcheck.Warn, "received damaged packets"},
	"port_xmit_discards":    {netcheck.Warn, "discarded packets that it could not send"},
	"out_of_sequence":       {netcheck.Warn, "received packets out of order"},
	"packet_seq_err":        {netcheck.Warn, "sent packets that arrived out of order"},
	"local_ack_timeout_err": {netcheck.Warn, "waited in vain for acknowledgements"},
	"rnr_nak_retry_err":     {netcheck.Warn, "met receivers that were not ready"},
	"rx_errors":             {netcheck.Warn, "received damaged packets"},
	"tx_errors":             {netcheck.Warn, "could not send packets"},
	"rx_crc_errors":         {netcheck.Warn, "received packets with a wrong checksum"},
	"tx_carrier_errors":     {netcheck.Warn, "had no carrier when it sent"},
	"rx_dropped":            {netcheck.Info, "dropped packets that it received"},
	"tx_dropped":            {netcheck.Info, "dropped packets that it was to send"},
	"np_cnp_sent":           {netcheck.Info, "asked senders to slow down"},
	"port_xmit_wait":        {netcheck.Info, "had data to send and had to wait"},
}

// The counters of a port in sysfs.
var (
	portCounters = []string{"symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards",
		"port_xmit_wait"}
	portHardware = []string{"out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err",
		"np_cnp_sent"}
)

// Snapshot reads the counters of the links that c selects.
func (h Host) Snapshot(c Choice) Counters {
	all := Counters{}
	links, _ := h.links()
	for _, l := range chosen(links, c) {
		for metric, v := range map[string]uint64{"rx_errors": l.RxErrors, "tx_errors": l.TxErrors, "rx_crc_errors": l.RxCRC,
			"tx_carrier_errors": l.TxCarrier, "rx_dropped": l.RxDropped, "tx_dropped": l.TxDropped} {
			all[counter{l.Name, metric}] = v
		}
		all.note(l.Name, "carrier_down_count", h.sys("class/net", l.Name, "carrier_down_count"))
	}
	for _, p := range h.selectedPorts(c.HCAs) {
		for _, metric := range portCounters {
			all.note(p.String(), metric, h.portFile(p, filepath.Join("counters", metric)))
		}
		for _, metric := range portHardware {
			all.note(p.String(), metric, h.portFile(p, filepath.Join("hw_counters", metric)))
		}
	}
	return all
}

// note keeps the number in a file, if there is one.
func (c Counters) note(entity, metric, path string) {
	if v, err := strconv.ParseUint(read(path), 10, 64); err == nil {
		c[counter{entity, metric}] = v
	}
}

// Delta lists the changes between two snapshots. A counter that is missing in one of them, or was set back, is left
// out.
func Delta(before, after Counters) []netcheck.Finding {
	var found []netcheck.Finding
	order := func(a, b counter) int {
		if a.Entity != b.Entity {
			return byNumber(a.Entity, b.Entity)
		}
		return strings.Compare(a.Metric, b.Metric)
	}
	for _, k := range slices.SortedFunc(maps.Keys(after), order) {
		was, known := before[k]
		if !known || after[k] <= was {
			continue
		}
		m := meaning[k.Metric]
		n := after[k] - was
		f := nicFinding(m.severity, k.Entity, "%s %s during the check: %s grew by %d", k.Entity, m.text, k.Metric, n)
		f.Metric, f.Value, f.Unit = k.Metric, float64(n), "events"
		if strings.Contains(k.Entity, ":") {
			f.Kind = "host.ib"
		}
		found = append(found, f)
	}
	return found[:min(len(found), netcheck.MaxFindings)]
}

// Fingerprint is a line that stays the same while the result of a check of this node's network is valid. It changes
// when the host was booted, or a selected link was lost.
func (h Host) Fingerprint(c Choice) string {
	proc := h.Proc
	if proc == "" {
		proc = "/proc"
	}
	parts := []string{"boot=" + read(filepath.Join(proc, "sys/kernel/random/boot_id"))}
	links, _ := h.links()
	for _, l := range chosen(links, c) {
		changes := read(h.sys("class/net", l.Name, "carrier_changes"))
		parts = append(parts, fmt.Sprintf("%s.carrier_changes=%s", l.Name, changes))
	}
	for _, p := range h.selectedPorts(c.HCAs) {
		parts = append(parts, fmt.Sprintf("%v.link_downed=%s", p, read(h.portFile(p, "counters/link_downed"))))
	}
	return strings.Join(parts, " ")
}
