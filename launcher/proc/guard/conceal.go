package guard

import (
	"os"
	"strconv"
	"syscall"
)

// TokenVariable is the variable with the job token. The guard hands it to the launcher in the shared state, not in the
// environment, which other processes of the user can read in /proc.
const TokenVariable = "DLROVER_TOKEN"

var concealed bool // or never shown

// Conceal blanks the value of the variable in the initial environment of this process, which /proc shows. os.Getenv
// finds it as before: it reads a copy. It is best effort. A second call does nothing.
func Conceal() {
	value, _ := syscall.Getenv(TokenVariable)
	if value == "" || concealed {
		return
	}
	concealed = true
	from, to := shownEnvironment()
	mem, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		return
	}
	defer mem.Close()
	shown := make([]byte, to-from)
	n, _ := mem.ReadAt(shown, from)
	for _, kv := range split(shown[:n]) {
		if hasToken(kv) {
			_, _ = mem.WriteAt(make([]byte, len(kv)-len(tokenHead)), from+int64(len(tokenHead)))
		}
		from += int64(len(kv)) + 1
	}
}

const tokenHead = TokenVariable + "="

func hasToken(kv string) bool { return len(kv) >= len(tokenHead) && kv[:len(tokenHead)] == tokenHead }

// maxEnvironment bounds the part of it that is read, in bytes.
const maxEnvironment = 8 << 20

// shownEnvironment is where the kernel reads the environment of this process; from and to are equal if that is unknown.
func shownEnvironment() (from, to int64) {
	text, _ := os.ReadFile("/proc/self/stat")
	end := len(text)
	for end > 0 && text[end-1] != ')' { // of the command's name, which may hold anything
		end--
	}
	const start, stop = 50 - 3, 51 - 3 // proc(5) counts from 1, and the first behind the name is the third
	fields := fields(text[end:])
	if len(fields) <= stop {
		return 0, 0
	}
	from, _ = strconv.ParseInt(fields[start], 10, 64)
	to, _ = strconv.ParseInt(fields[stop], 10, 64)
	if from <= 0 || to < from || to-from > maxEnvironment {
		return 0, 0
	}
	return from, to
}

// fields is strings.Fields, which is not ready yet.
func fields(text []byte) (words []string) {
	from := 0
	for i := 0; i <= len(text); i++ {
		if i < len(text) && text[i] > ' ' {
			continue
		}
		if i > from {
			words = append(words, string(text[from:i]))
		}
		from = i + 1
	}
	return words
}
