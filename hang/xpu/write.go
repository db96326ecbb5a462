package xpu

import (
	"encoding/binary"
	"fmt"
	"strings"

	"dlrover-run/hang"
)

// Name is that of the file of a rank.
func Name(rank, world int) string { return fmt.Sprintf("%05d-%05d%s", rank, world, ending) }

// Format is the file of a rank, as xpu_timer's dump driver writes it; nil if nothing is known of the process. The
// file has no room for children, the thread that trains, and marks of approximate frames.
func Format(e hang.Evidence) []byte {
	var m message
	state, _ := e.State()
	if e.Stacks != nil {
		for i := range e.Stacks.Threads {
			t := &e.Stacks.Threads[i]
			m = m.within(1, native(t))
			m = m.within(2, python(e.PID, t))
		}
	}
	complaint := strings.TrimSpace(complaints(e))
	if len(m) == 0 && state == 0 && complaint == "" {
		return nil
	}
	m = m.number(3, uint64(e.PID)).number(4, uint64(e.Rank)).text(6, complaint)
	if state != 0 {
		m = m.text(11, hang.StateName(state))
	}
	return m
}

// complaints are why there is nothing, or not all.
func complaints(e hang.Evidence) string {
	if e.Stacks == nil {
		return e.Error
	}
	return e.Stacks.Error + "\n" + e.Error
}

func native(t *hang.Thread) (m message) {
	if len(t.Native) == 0 {
		return nil
	}
	m = m.number(1, uint64(t.TID)).text(2, t.Name)
	for _, f := range t.Native {
		m = m.within(3, frame(f))
	}
	return m
}

// python has the names that py-spy gives.
func python(pid int, t *hang.Thread) (m message) {
	if len(t.Python) == 0 {
		return nil
	}
	name := t.Name
	if t.TID == pid {
		name = mainThread
	}
	m = m.number(1, uint64(pid)).text(3, name).number(4, uint64(t.TID)).flag(5, t.State == 'R').flag(6, t.GIL)
	for _, f := range t.Python {
		m = m.within(7, frame(f))
	}
	return m
}

func frame(f hang.Frame) (m message) { return m.text(1, known(f.Func)).text(2, known(f.Source())) }

func known(name string) string {
	if name == "" {
		return hang.Unknown
	}
	return name
}

// message is one that is being written. As in proto3 fields with their default value are left out.
type message []byte

func (m message) number(id int, v uint64) message {
	if v == 0 {
		return m
	}
	return binary.AppendUvarint(binary.AppendUvarint(m, uint64(id)<<3|varint), v)
}

func (m message) flag(id int, v bool) message {
	if !v {
		return m
	}
	return m.number(id, 1)
}

// text is UTF-8: readers refuse a message with anything else.
func (m message) text(id int, s string) message {
	return m.within(id, message(strings.ToValidUTF8(s, "\ufffd")))
}

func (m message) within(id int, inner message) message {
	if len(inner) == 0 {
		return m
	}
	m = binary.AppendUvarint(m, uint64(id)<<3|bytes)
	return append(binary.AppendUvarint(m, uint64(len(inner))), inner...)
}
