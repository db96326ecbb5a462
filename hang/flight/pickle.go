package flight

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
)

var errNoEntries = errors.New("flight: not a dump of the flight recorder: it has no list of entries")

// Opcodes of pickle that plain data needs.
const (
	protoOp = 0x80
	frameOp = 0x95
	stopOp  = '.'

	markOp = '('
	popOp  = '0'
	dupOp  = '2'
	popTo  = '1' // POP_MARK

	noneOp  = 'N'
	trueOp  = 0x88
	falseOp = 0x89
	intOp   = 'J'
	int1Op  = 'K'
	int2Op  = 'M'
	long1Op = 0x8a
	floatOp = 'G'

	text4Op  = 'X'
	text1Op  = 0x8c
	text8Op  = 0x8d
	bytes4Op = 'B'
	bytes1Op = 'C'
	bytes8Op = 0x8e
	str4Op   = 'T' // of Python 2
	str1Op   = 'U'

	emptyDictOp = '}'
	emptyListOp = ']'
	noTupleOp   = ')'
	tupleOp     = 't'
	tuple1Op    = 0x85
	tuple2Op    = 0x86
	tuple3Op    = 0x87
	listOp      = 'l'
	dictOp      = 'd'
	appendOp    = 'a'
	appendsOp   = 'e'
	setOp       = 's'
	setsOp      = 'u'

	put1Op    = 'q'
	put4Op    = 'r'
	memoizeOp = 0x94
	get1Op    = 'h'
	get4Op    = 'j'
)

// maxValues bounds the memory that a pickle can ask for: a byte of it costs up to 64.
const maxValues = 4 << 20

// A value is nil, bool, int64, float64, string (bytes, too), *list (tuples, too) or *dict. Lists and dicts may contain
// themselves: whoever looks into a value must not follow it to its end.
type (
	value any
	list  struct{ items []value }
	dict  struct{ items []value } // keys and values in turn; the last of equal keys counts
)

// get returns the value of a key, or nil.
func (d *dict) get(key string) value {
	for i := len(d.items) - 2; i >= 0; i -= 2 {
		if k, ok := d.items[i].(string); ok && k == key {
			return d.items[i+1]
		}
	}
	return nil
}

// machine executes a pickle.
type machine struct {
	in     []byte
	at     int
	stack  []value
	marks  []int // heights of stack
	memo   []value
	pushed int
}

type pickleError struct {
	at   int
	what string
}

func (e *pickleError) Error() string {
	return fmt.Sprintf("flight: pickle at byte %d: %s", e.at, e.what)
}

// unpickle returns the value of a pickle that consists of dicts, lists, tuples, text, bytes, numbers, bools and None.
// Anything else, above all what would be a call, is an error.
func unpickle(b []byte) (v value, err error) {
	m := &machine{in: b}
	defer func() {
		if e, ok := recover().(*pickleError); ok {
			v, err = nil, e
		}
	}()
	for {
		if done := m.step(m.byte()); done {
			return m.pop(), nil
		}
	}
}

// fail ends unpickle, which is the only one who calls into the machine.
func (m *machine) fail(format string, args ...any) {
	panic(&pickleError{m.at, fmt.Sprintf(format, args...)})
}

// step executes one opcode. It reports whether it was the last one.
func (m *machine) step(op byte) bool {
	switch op {
	case stopOp:
		return true
	case protoOp:
		if p := m.byte(); p < 2 || p > 5 {
			m.fail("protocol %d: only 2 to 5 are read", p)
		}
	case frameOp:
		m.take(8)
	case markOp:
		m.marks = append(m.marks, len(m.stack))
	case popOp:
		m.pop()
	case dupOp:
		m.push(m.top())
	case popTo:
		m.popMark()
	case put1Op, put4Op, memoizeOp, get1Op, get4Op:
		m.remember(op)
	default:
		if !m.scalar(op) && !m.container(op) {
			m.fail("opcode %#02x (%q): only plain data is read, nothing that would call code", op, op)
		}
	}
	return false
}

func (m *machine) remember(op byte) {
	switch op {
	case put1Op:
		m.put(int(m.byte()))
	case put4Op:
		m.put(int(m.uint32()))
	case memoizeOp:
		m.put(len(m.memo))
	case get1Op:
		m.get(int(m.byte()))
	case get4Op:
		m.get(int(m.uint32()))
	}
}

// scalar executes an opcode that pushes a value without others in it.
func (m *machine) scalar(op byte) bool {
	switch op {
	case noneOp:
		m.push(nil)
	case trueOp, falseOp:
		m.push(op == trueOp)
	case intOp:
		m.push(int64(int32(m.uint32())))
	case int1Op:
		m.push(int64(m.byte()))
	case int2Op:
		m.push(int64(binary.LittleEndian.Uint16(m.take(2))))
	case long1Op:
		m.push(m.long(m.take(int(m.byte()))))
	case floatOp:
		m.push(math.Float64frombits(binary.BigEndian.Uint64(m.take(8))))
	case text1Op, bytes1Op, str1Op:
		m.push(string(m.take(int(m.byte()))))
	case text4Op, bytes4Op, str4Op:
		m.push(string(m.take(int(m.uint32()))))
	case text8Op, bytes8Op:
		m.push(string(m.take(m.length())))
	default:
		return false
	}
	return true
}

// container executes an opcode that makes or fills a list, a tuple or a dict.
func (m *machine) container(op byte) bool {
	switch op {
	case emptyDictOp:
		m.push(&dict{})
	case emptyListOp, noTupleOp:
		m.push(&list{})
	case tuple1Op, tuple2Op, tuple3Op:
		m.push(&list{m.popN(int(op-tuple1Op) + 1)})
	case tupleOp, listOp:
		m.push(&list{m.popMark()})
	case dictOp:
		m.push(&dict{m.pairs(m.popMark())})
	case appendOp:
		m.extend(m.popN(1))
	case appendsOp:
		m.extend(m.popMark())
	case setOp:
		m.update(m.popN(2))
	case setsOp:
		m.update(m.popMark())
	default:
		return false
	}
	return true
}

func (m *machine) extend(items []value) {
	l, ok := m.top().(*list)
	if !ok {
		m.fail("items for %T, which is no list", m.top())
	}
	l.items = append(l.items, items...)
}

func (m *machine) update(items []value) {
	d, ok := m.top().(*dict)
	if !ok {
		m.fail("items for %T, which is no dict", m.top())
	}
	d.items = append(d.items, m.pairs(items)...)
}

func (m *machine) pairs(items []value) []value {
	if len(items)%2 != 0 {
		m.fail("a key without a value")
	}
	return items
}

// Input.

func (m *machine) byte() byte { return m.take(1)[0] }

func (m *machine) uint32() uint32 { return binary.LittleEndian.Uint32(m.take(4)) }

func (m *machine) length() int {
	n := binary.LittleEndian.Uint64(m.take(8))
	return int(min(n, math.MaxInt32)) // more than there is
}

func (m *machine) take(n int) []byte {
	if n > len(m.in)-m.at {
		m.fail("it ends in the middle")
	}
	m.at += n
	return m.in[m.at-n : m.at]
}

// long reads an integer, little-endian in two's complement. PyTorch's have eight bytes; others are cut off.
func (m *machine) long(b []byte) int64 {
	if len(b) == 0 {
		return 0
	}
	var raw [8]byte
	if b[len(b)-1]&0x80 != 0 {
		raw = [8]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	}
	copy(raw[:], b)
	return int64(binary.LittleEndian.Uint64(raw[:]))
}

// Stack and memo.

func (m *machine) push(v value) {
	if m.pushed++; m.pushed > maxValues {
		m.fail("more than %d values", maxValues)
	}
	m.stack = append(m.stack, v)
}

// floor is the height that only popMark may go below.
func (m *machine) floor() int {
	if len(m.marks) == 0 {
		return 0
	}
	return m.marks[len(m.marks)-1]
}

func (m *machine) top() value {
	if len(m.stack) == m.floor() {
		m.fail("a value is missing")
	}
	return m.stack[len(m.stack)-1]
}

func (m *machine) pop() value { return m.popN(1)[0] }

// popN returns a copy of the topmost n values.
func (m *machine) popN(n int) []value {
	if len(m.stack)-m.floor() < n {
		m.fail("a value is missing")
	}
	items := slices.Clone(m.stack[len(m.stack)-n:])
	m.stack = m.stack[:len(m.stack)-n]
	return items
}

// popMark takes the values above the newest mark, and the mark.
func (m *machine) popMark() []value {
	if len(m.marks) == 0 {
		m.fail("a mark is missing")
	}
	items := m.popN(len(m.stack) - m.floor())
	m.marks = m.marks[:len(m.marks)-1]
	return items
}

// put remembers the topmost value. Writers number them one after the other.
func (m *machine) put(i int) {
	if i > len(m.memo) {
		m.fail("memo %d after %d", i, len(m.memo))
	}
	v := m.top()
	if i == len(m.memo) {
		m.memo = append(m.memo, v)
	}
	m.memo[i] = v
}

func (m *machine) get(i int) {
	if i >= len(m.memo) {
		m.fail("memo %d of %d", i, len(m.memo))
	}
	m.push(m.memo[i])
}
