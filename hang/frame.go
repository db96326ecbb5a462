package hang

import (
	"strconv"
	"strings"
)

// Unknown is the name of functions and files that have none, as gdb writes it.
const Unknown = "??"

// Source is where the frame is, as data.py:12.
func (f Frame) Source() string {
	if f.Line <= 0 {
		return f.File
	}
	if f.File == "" {
		return Unknown + ":" + strconv.Itoa(f.Line)
	}
	return f.File + ":" + strconv.Itoa(f.Line)
}

// Innermost is the first frame that has a name, unlike those without: [libc.so.6].
func Innermost(frames []Frame) Frame {
	for _, f := range frames {
		if f.Func != "" && f.Func[0] != '[' {
			return f
		}
	}
	return append(frames, Frame{})[0]
}

// stateNames are the names in /proc/PID/status, each behind its letter.
var stateNames = [...]string{
	"Rrunning", "Ssleeping", "Ddisk sleep", "Tstopped", "ttracing stop", "Zzombie", "Xdead", "Iidle", "Pparked",
}

// StateName writes a state of a process as /proc/PID/status does: S (sleeping).
func StateName(state byte) string {
	if state == 0 {
		return "gone"
	}
	for _, name := range stateNames {
		if name[0] == state {
			return name[:1] + " (" + name[1:] + ")"
		}
	}
	return strings.ToValidUTF8(string(rune(state)), "?")
}
