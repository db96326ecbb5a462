package console

import (
	"encoding/binary"
	"os"
	"strings"
	"time"
)

// A TZ in POSIX form, such as CST-8 or CET-1CEST,M3.5.0,M10.5.0/3, names no file, and Go's time package takes it for
// UTC. The C library, and so the workers, read it.
func init() {
	if l := posixZone(os.Getenv("TZ")); l != nil {
		time.Local = l
	}
}

// posixZone is nil for a text that is not in POSIX form, and for one that names a file as well.
func posixZone(tz string) *time.Location {
	zone, _, _ := strings.Cut(tz, ",") // a "/" behind it is part of a rule for summer time
	if !strings.ContainsAny(zone, "0123456789") || strings.Contains(zone, "/") || strings.Contains(tz, "\n") ||
		len(tz) > 128 {
		return nil
	}
	if _, err := time.LoadLocation(strings.TrimPrefix(tz, ":")); err == nil {
		return nil
	}
	l, err := time.LoadLocationFromTZData(tz, zoneFile(tz))
	if err != nil {
		return nil
	}
	if name, offset := time.Unix(0, 0).In(l).Zone(); name == "UTC" && offset == 0 && !strings.HasPrefix(tz, "UTC") {
		return nil // it was not understood
	}
	return l
}

// zoneFile is a file in the format of RFC 8536 without transitions of its own: the rule in its footer always holds. Go
// reads the rule only behind a transition, so there is one at the beginning of time.
func zoneFile(rule string) []byte {
	header := func(version byte, counts ...uint32) []byte { // isutc, isstd, leap, time, type and char counts
		b := append([]byte("TZif"), version)
		b = append(b, make([]byte, 15)...)
		for _, n := range counts {
			b = binary.BigEndian.AppendUint32(b, n)
		}
		return b
	}
	b := header('2', 0, 0, 0, 0, 1, 4)
	b = append(b, make([]byte, 6)...) // its only type: UTC
	b = append(b, "UTC\x00"...)
	b = append(b, header('2', 0, 0, 0, 1, 1, 4)...)
	b = binary.BigEndian.AppendUint64(b, 1<<63)
	b = append(b, 0)
	b = append(b, make([]byte, 6)...)
	b = append(b, "UTC\x00"...)
	return append(b, "\n"+rule+"\n"...)
}
