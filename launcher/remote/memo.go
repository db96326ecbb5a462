package remote

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Memo is the first message to an agent.
type Memo struct {
	// Mark begins the line that reports how the launcher has ended. It is random: no worker prints it.
	Mark string
	// Name is the launcher's argv[0], and Args are its arguments.
	Name string
	Args []string
	// Dir is the working directory.
	Dir string
	// Env are variables, NAME=VALUE, on top of those of the host, which they replace.
	Env []string
	// Token is the job token; "" leaves it to the host's own variables.
	Token string
	// Grace is how long the launcher has for its end when its starter is gone.
	Grace time.Duration
	// Drain is the additional time where its run is over by then, and it writes its last checkpoints.
	Drain time.Duration
	// Handed is for the launcher only.
	Handed json.RawMessage
}

// maxMemo bounds a memo, in bytes.
const maxMemo = 16 << 20

// Encode writes a memo as it travels.
func (m *Memo) Encode() ([]byte, error) {
	text, err := json.Marshal(m)
	if err == nil && len(text) > maxMemo {
		err = fmt.Errorf("arguments, variables and host file take %d bytes; at most %d are sent to a host", len(text),
			maxMemo)
	}
	if err != nil {
		return nil, err
	}
	return append(strconv.AppendInt(nil, int64(len(text)), 10), append([]byte{'\n'}, text...)...), nil
}

// errMemo is for input that is no memo.
var errMemo = errors.New("no memo of a starter of this version")

func readMemo(r *bufio.Reader) (m Memo, err error) {
	line, err := r.ReadSlice('\n')
	if err != nil {
		return m, err
	}
	n, err := strconv.Atoi(strings.TrimSuffix(string(line), "\n"))
	if err != nil || n < 0 || n > maxMemo {
		return m, errMemo
	}
	text := make([]byte, n)
	if _, err := io.ReadFull(r, text); err != nil {
		return m, err
	}
	if err := json.Unmarshal(text, &m); err != nil || m.Mark == "" || m.Name == "" || !path.IsAbs(m.Dir) {
		return m, errMemo
	}
	return m, nil
}

// Later messages to an agent, a line each; an empty line is a sign of life.
const (
	tellSignal = "signal "
	tellLeave  = "leave"
)

// order is one of these lines.
type order struct {
	signal syscall.Signal
	leave  bool
}

func parseOrder(line string) (o order) {
	if line == tellLeave {
		return order{leave: true}
	}
	if text, is := strings.CutPrefix(line, tellSignal); is {
		if n, err := strconv.Atoi(text); err == nil && n > 0 && n <= 64 {
			o.signal = syscall.Signal(n)
		}
	}
	return o
}

// ending is the last line of an agent: status, and how far the launcher has come.
func ending(mark string, status int, s stage) string {
	return fmt.Sprintf("%s %d %c\n", mark, status, s)
}

// parseEnding finds the last line, which may follow output that has no end of line.
func parseEnding(mark, line string) (before string, status int, s stage, found bool) {
	at := strings.Index(line, mark+" ")
	if at < 0 {
		return line, 0, 0, false
	}
	number, text, _ := strings.Cut(strings.TrimSuffix(line[at+len(mark)+1:], "\n"), " ")
	status, err := strconv.Atoi(number)
	if err != nil || len(text) != 1 || status < 0 || status > 255 {
		return line, 0, 0, false
	}
	return line[:at], status, stage(text[0]), true
}
