package gpucheck

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"dlrover-run/switchbox"
)

// show prints a Report with a single write, so that no reader gets a half.
func show(w io.Writer, r switchbox.Report, asJSON bool) {
	if !asJSON {
		io.WriteString(w, text(r))
		return
	}
	line, err := json.Marshal(r)
	if err != nil { // a figure that is not a number
		line, _ = json.Marshal(switchbox.Skip(adaptor, "the report cannot be written: "+err.Error()))
	}
	w.Write(append(line, '\n'))
}

// text is a Report for people.
func text(r switchbox.Report) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s", r.State)
	if r.Reason != "" {
		fmt.Fprintf(&b, ": %s", r.Reason)
	}
	fmt.Fprintln(&b)
	if r.Driver != "" {
		fmt.Fprintln(&b, "driver:", r.Driver)
	}
	if r.Domain != "" {
		fmt.Fprintln(&b, "NVLink domain:", r.Domain)
	}
	for _, d := range r.Devices {
		fmt.Fprintf(&b, "GPU %d: %s %s %s%s\n", d.Index, d.Name, d.PCI, d.UUID, linksOf(d))
	}
	for _, p := range r.Pairs {
		if p.Pair.A == p.Pair.B {
			fmt.Fprintf(&b, "within GPU %d: %.0f MB/s %s\n", p.Pair.A, p.MBps, p.Error)
			continue
		}
		fmt.Fprintf(&b, "pair %s: %.0f MB/s there, %.0f MB/s back %s\n", p.Pair, p.There, p.Back, p.Error)
	}
	for _, f := range r.Findings {
		fmt.Fprintf(&b, "%s: %s\n", f.Severity, f.Text)
	}
	return b.String()
}

// linksOf is the number of links that are up; empty if there are none, or they were not read.
func linksOf(d switchbox.Facts) string {
	if len(d.Links) == 0 {
		return ""
	}
	return fmt.Sprintf(", %d of %d links active", d.Active(), len(d.Links))
}
