package remote

import (
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// variable names the descriptor of the file for a launcher. The launcher's guard inherits both and leaves them alone.
const variable = "DLROVER_REMOTE_START"

// handedMagic follows the stage in the file, and the data follow it.
const handedMagic = " handed to a launcher that was started for another host\n"

// stage is how far a launcher has come. It writes it where its agent reads it.
type stage byte

const (
	alone  stage = '-' // no other node knows of it
	joined stage = '+' // the other nodes hear of its end
	ended  stage = '.' // its run is over
)

// Handed is the launcher's input from its agent. Its methods may be called on nil.
type Handed struct {
	Text []byte
	file *os.File
}

// Joined notifies the agent that the other nodes know of this launcher.
func (h *Handed) Joined() { h.note(joined) }

// Ended notifies the agent that the run is over, and that the launcher ends by itself.
func (h *Handed) Ended() { h.note(ended) }

func (h *Handed) note(s stage) {
	if h != nil {
		_, _ = h.file.WriteAt([]byte{byte(s)}, 0)
	}
}

// Received returns this process's input, nil if no agent has started it. It takes the variable away, so that no worker
// inherits it.
func Received() *Handed {
	text := os.Getenv(variable)
	_ = os.Unsetenv(variable)
	fd, err := strconv.Atoi(text)
	if err != nil || fd < 3 {
		return nil
	}
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size > maxMemo+1<<10 {
		return nil
	}
	data := make([]byte, st.Size)
	if n, _ := unix.Pread(fd, data, 0); n != len(data) || n == 0 {
		return nil
	}
	body, is := strings.CutPrefix(string(data[1:]), handedMagic)
	if !is {
		return nil
	}
	unix.CloseOnExec(fd)
	return &Handed{Text: []byte(body), file: os.NewFile(uintptr(fd), "handed")}
}

// newHanded makes the file, which no other process can open by a name.
func newHanded(text []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("handed", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), "handed")
	if _, err = f.Write(slices.Concat([]byte{byte(alone)}, []byte(handedMagic), text)); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// stageOf is the launcher's newest stage.
func stageOf(f *os.File) stage {
	var b [1]byte
	if n, _ := f.ReadAt(b[:], 0); n == 1 {
		return stage(b[0])
	}
	return alone
}
