package hang

import (
	"slices"
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

// Main is the main thread, nil if there is none.
func (s *Stacks) Main() *Thread {
	i := slices.IndexFunc(s.Threads, func(t Thread) bool { return t.Main })
	if i < 0 {
		return nil
	}
	return &s.Threads[i]
}

// inLibrary reports whether the main thread is in a function of Python's or of a library right now.
func (s *Stacks) inLibrary() bool {
	main := s.Main()
	return len(main.Python) == 0 || inLibrary(main.Python[0].File)
}

// whereOf is the innermost function of the main thread that is the user's own, else the innermost.
func whereOf(s *Stacks) Frame {
	main := s.Main()
	switch {
	case main == nil:
		return Frame{}
	case len(main.Python) == 0:
		return Innermost(main.Native)
	}
	for _, f := range main.Python {
		if !inLibrary(f.File) {
			return f
		}
	}
	return main.Python[0]
}

// inLibrary reports whether a file of Python code is not the user's own.
func inLibrary(file string) bool {
	return strings.HasPrefix(file, "<frozen") || strings.Contains(file, "/site-packages/") ||
		strings.Contains(file, "/dist-packages/") || strings.Contains(file, "/lib/python3") ||
		strings.Contains(file, "/_dlrover_hang/") // the shim's, which are around PyTorch's
}
