package verdict

import (
	"slices"
	"strings"
)

// hardwareSigns are parts, in lower case, of errors that no program causes: the device or its link is broken or gone.
func hardwareSigns() []string {
	return []string{
		"uncorrectable ecc error",      // CUDA, and frameworks that pass it on
		"cudaerroreccuncorrectable",    //
		"cuda_error_ecc_uncorrectable", //
		"uncorrectable nvlink error",   // CUDA
		"fallen off the bus",           // NVIDIA's driver
		"gpu is lost",                  // NVML
		"multi bit ecc error",          // Ascend
		"uncorrectable hardware error", // AMD's driver
	}
}

// IsHardware reports whether text describes broken hardware.
func IsHardware(text string) bool {
	text = strings.ToLower(text)
	return slices.ContainsFunc(hardwareSigns(), func(p string) bool { return strings.Contains(text, p) }) ||
		slices.ContainsFunc(xids(text), isHardwareXid)
}

// isHardwareXid reports whether an error that NVIDIA's driver numbers so is the device's fault. Those that programs
// cause as well (13, 31, 43, 45) are none, nor are notes of repairs (63) or of mere counts (92).
func isHardwareXid(n int) bool {
	switch n {
	case 48, 64, 94, 95, 140: // memory
		return true
	case 61, 62, 79, 119, 120, 143: // the device, its firmware, or its link to the host
		return true
	case 74, 121:
		return true // links between devices
	}
	return 144 <= n && n <= 150 // NVLink 5
}

// maxXidDigits is how long the number of an Xid is at most.
const maxXidDigits = 4

// xids are the numbers of the errors of NVIDIA's driver in text, which is in lower case: the 79 of "nvrm: xid
// (pci:0000:3b:00): 79, pid=7" and of "xid 79".
func xids(text string) []int {
	var out []int
	for {
		i := strings.Index(text, "xid")
		if i < 0 {
			return out
		}
		before := text[:i]
		text = text[i+len("xid"):]
		if before != "" && isWord(before[len(before)-1]) {
			continue
		}
		if n, ok := xidNumber(text); ok {
			out = append(out, n)
		}
	}
}

// xidNumber is the number that follows the word, after the address of the device if there is one.
func xidNumber(s string) (n int, ok bool) {
	s = strings.TrimLeft(s, " ")
	if strings.HasPrefix(s, "(") {
		_, after, closed := strings.Cut(s, ")")
		if !closed || strings.Contains(s[:len(s)-len(after)], "\n") {
			return 0, false
		}
		s = after
	}
	s = strings.TrimLeft(s, " :=")
	digits := span([]byte(s[:min(len(s), maxXidDigits+1)]), '0', '9')
	if digits == 0 || digits > maxXidDigits || digits < len(s) && isWord(s[digits]) {
		return 0, false
	}
	for _, c := range s[:digits] {
		n = 10*n + int(c-'0')
	}
	return n, true
}

func isWord(c byte) bool { return c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' }

// mayBeHardware reports whether broken hardware ends workers with c as well: then the driver's messages at the end of
// the output count. Other classes have a cause of their own.
func mayBeHardware(c Class) bool {
	switch c {
	case Unknown, DeviceError, NCCLError, PeerLost, CollectiveTimeout, Abort, Segfault, SIGBUSShm, IllegalInstruction:
		return true
	}
	return false
}
