package pyproto

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
)

// ErrPickle: the bytes are no pickle that this package reads.
var ErrPickle = errors.New("pyproto: not a message of DLRover")

// MaxMessage bounds what is read as one message, in bytes. DLRover allows 256 MiB; its largest message, a world of
// 100,000 nodes, has less than 2 MiB.
const MaxMessage = 16 << 20

// What a pickle may hold, once it is read: nil, bool, int64, float64, string, []byte, Tuple, *List, *Dict and *Object.
type (
	// Tuple is a Python tuple.
	Tuple []any
	// List is a Python list.
	List struct{ Items []any }
	// Dict is a Python dict. The order counts: that of a world gives nodes their group ranks.
	Dict struct{ Pairs []Pair }
	// Pair is one entry of a Dict.
	Pair struct{ Key, Value any }
	// Object is an instance of a class, by name: nothing is ever imported or called for it.
	Object struct {
		Class Class
		State Dict
	}
	// Class names a Python class.
	Class struct{ Module, Name string }
)

// mark is on the stack where a MARK was read.
type mark struct{}

// decoder executes the opcodes of one pickle. Nothing is nested by recursion, and containers cannot be had a second
// time from the memo, so the result is a tree that is not larger than the input.
type decoder struct {
	in    []byte
	at    int
	stack []any
	memo  []any
}

// Decode reads a pickle of protocol 2 to 5, which makes no objects but Object.
func Decode(in []byte) (any, error) {
	if len(in) > MaxMessage {
		return nil, fmt.Errorf("%w: %d bytes; at most %d are read", ErrPickle, len(in), MaxMessage)
	}
	d := &decoder{in: in}
	for {
		done, err := d.step()
		if err != nil {
			return nil, fmt.Errorf("%w: at byte %d: %w", ErrPickle, d.at, err)
		}
		if done {
			return d.result()
		}
	}
}

func (d *decoder) result() (any, error) {
	v, err := d.pop()
	if err != nil || len(d.stack) > 0 {
		return nil, fmt.Errorf("%w: it does not end with one value", ErrPickle)
	}
	return v, nil
}

var errShort = errors.New("it ends too early")

func (d *decoder) take(n uint64) ([]byte, error) {
	if n > uint64(len(d.in)-d.at) {
		return nil, errShort
	}
	b := d.in[d.at : d.at+int(n)]
	d.at += int(n)
	return b, nil
}

// count reads a little-endian length of size bytes.
func (d *decoder) count(size uint64) (uint64, error) {
	b, err := d.take(size)
	if err != nil {
		return 0, err
	}
	var whole [8]byte
	copy(whole[:], b)
	return binary.LittleEndian.Uint64(whole[:]), nil
}

// counted reads a length of size bytes and as many bytes.
func (d *decoder) counted(size uint64) ([]byte, error) {
	n, err := d.count(size)
	if err != nil {
		return nil, err
	}
	return d.take(n)
}

func (d *decoder) line() (string, error) {
	before, _, ok := strings.Cut(string(d.in[d.at:min(d.at+512, len(d.in))]), "\n")
	if !ok {
		return "", errShort
	}
	d.at += len(before) + 1
	return before, nil
}

func (d *decoder) push(v any) { d.stack = append(d.stack, v) }

func (d *decoder) pop() (any, error) {
	if len(d.stack) == 0 {
		return nil, errors.New("a value is missing")
	}
	v := d.stack[len(d.stack)-1]
	d.stack = d.stack[:len(d.stack)-1]
	if _, ok := v.(mark); ok {
		return nil, errors.New("a value is missing behind a mark")
	}
	return v, nil
}

// sinceMark takes what has been pushed since the last MARK.
func (d *decoder) sinceMark() ([]any, error) {
	for i := len(d.stack) - 1; i >= 0; i-- {
		if _, ok := d.stack[i].(mark); ok {
			items := append([]any(nil), d.stack[i+1:]...)
			d.stack = d.stack[:i]
			return items, nil
		}
	}
	return nil, errors.New("a mark is missing")
}

// top is the value that an opcode adds to.
func (d *decoder) top() any {
	if len(d.stack) == 0 {
		return nil
	}
	return d.stack[len(d.stack)-1]
}

// The opcodes, as CPython's pickletools names them.
const (
	opProto, opFrame, opStop, opMark        = 0x80, 0x95, '.', '('
	opNone, opTrue, opFalse                 = 'N', 0x88, 0x89
	opBinInt, opBinInt1, opBinInt2, opLong1 = 'J', 'K', 'M', 0x8a
	opBinFloat                              = 'G'
	opShortUnicode, opUnicode, opUnicode8   = 0x8c, 'X', 0x8d
	opShortBytes, opBytes, opBytes8         = 'C', 'B', 0x8e
	opEmptyTuple, opTuple                   = ')', 't'
	opTuple1, opTuple2, opTuple3            = 0x85, 0x86, 0x87
	opEmptyList, opAppend, opAppends        = ']', 'a', 'e'
	opEmptyDict, opSetItem, opSetItems      = '}', 's', 'u'
	opGlobal, opStackGlobal                 = 'c', 0x93
	opNewObj, opBuild                       = 0x81, 'b'
	opMemoize, opBinPut, opLongBinPut       = 0x94, 'q', 'r'
	opBinGet, opLongBinGet                  = 'h', 'j'
)

// step executes one opcode; done: it was STOP.
func (d *decoder) step() (done bool, err error) {
	op, err := d.take(1)
	if err != nil {
		return false, err
	}
	switch op[0] {
	case opStop:
		return true, nil
	case opProto:
		_, err = d.take(1)
	case opFrame:
		_, err = d.take(8)
	case opMark:
		d.push(mark{})
	case opNone:
		d.push(nil)
	case opTrue, opFalse:
		d.push(op[0] == opTrue)
	case opBinInt, opBinInt1, opBinInt2, opLong1:
		err = d.integer(op[0])
	case opBinFloat:
		err = d.float()
	case opShortUnicode, opUnicode, opUnicode8, opShortBytes, opBytes, opBytes8:
		err = d.text(op[0])
	case opMemoize, opBinPut, opLongBinPut, opBinGet, opLongBinGet:
		err = d.remember(op[0])
	default:
		err = d.structure(op[0])
	}
	return false, err
}

func (d *decoder) integer(op byte) error {
	size := map[byte]uint64{opBinInt: 4, opBinInt1: 1, opBinInt2: 2}[op]
	if op == opLong1 {
		n, err := d.count(1)
		if err != nil || n > 8 {
			return errors.New("an integer of more than 64 bits")
		}
		size = n
	}
	v, err := d.count(size)
	switch {
	case err != nil:
		return err
	case op == opBinInt:
		d.push(int64(int32(v)))
	case op == opLong1 && size > 0:
		shift := 64 - 8*size // the highest bit that is there is the sign
		d.push(int64(v<<shift) >> shift)
	default:
		d.push(int64(v))
	}
	return nil
}

func (d *decoder) float() error {
	b, err := d.take(8)
	if err != nil {
		return err
	}
	d.push(math.Float64frombits(binary.BigEndian.Uint64(b)))
	return nil
}

func (d *decoder) text(op byte) error {
	size := map[byte]uint64{
		opShortUnicode: 1, opShortBytes: 1, opUnicode: 4, opBytes: 4, opUnicode8: 8, opBytes8: 8,
	}[op]
	b, err := d.counted(size)
	switch {
	case err != nil:
		return err
	case op == opShortUnicode || op == opUnicode || op == opUnicode8:
		d.push(string(b))
	default:
		d.push(append([]byte{}, b...))
	}
	return nil
}

// remember writes to the memo or reads from it.
func (d *decoder) remember(op byte) error {
	i := uint64(len(d.memo))
	if op != opMemoize {
		var err error
		if i, err = d.count(map[byte]uint64{opBinPut: 1, opBinGet: 1, opLongBinPut: 4, opLongBinGet: 4}[op]); err != nil {
			return err
		}
	}
	if op == opBinGet || op == opLongBinGet {
		return d.recall(i)
	}
	v := d.top()
	if _, marked := v.(mark); len(d.stack) == 0 || marked {
		return errors.New("nothing to remember")
	}
	for uint64(len(d.memo)) <= i {
		if len(d.memo) > d.at { // every entry has taken a byte at least
			return fmt.Errorf("entry %d of the memo comes too early", i)
		}
		d.memo = append(d.memo, nil)
	}
	d.memo[i] = v
	return nil
}

func (d *decoder) recall(i uint64) error {
	if i >= uint64(len(d.memo)) {
		return fmt.Errorf("the memo has no entry %d", i)
	}
	switch v := d.memo[i].(type) {
	case string, []byte, Class:
		d.push(v)
		return nil
	case Tuple:
		if len(v) == 0 {
			d.push(v)
			return nil
		}
	}
	return errors.New("a container that is in two places")
}

// structure makes containers and objects, and fills them.
func (d *decoder) structure(op byte) error {
	switch op {
	case opEmptyTuple:
		d.push(Tuple{})
	case opEmptyList:
		d.push(&List{})
	case opEmptyDict:
		d.push(&Dict{})
	case opTuple1, opTuple2, opTuple3:
		return d.tuple(int(op-opTuple1) + 1)
	case opTuple:
		items, err := d.sinceMark()
		d.push(Tuple(items))
		return err
	case opAppend, opSetItem:
		return d.fill(map[byte]int{opAppend: 1, opSetItem: 2}[op])
	case opAppends, opSetItems:
		items, err := d.sinceMark()
		if err != nil {
			return err
		}
		return d.add(items, op == opSetItems)
	case opGlobal, opStackGlobal:
		return d.class(op)
	case opNewObj:
		return d.object()
	case opBuild:
		return d.build()
	default:
		return fmt.Errorf("opcode %#02x, which no message of DLRover needs", op)
	}
	return nil
}

func (d *decoder) tuple(n int) error {
	items := make(Tuple, n)
	for i := range items {
		v, err := d.pop()
		if err != nil {
			return err
		}
		items[n-1-i] = v
	}
	d.push(items)
	return nil
}

// fill adds the n values on top of the stack to the container below: one to a list, two to a dict.
func (d *decoder) fill(n int) error {
	if err := d.tuple(n); err != nil {
		return err
	}
	v, err := d.pop()
	if err != nil {
		return err
	}
	return d.add(v.(Tuple), n == 2)
}

func (d *decoder) add(items []any, pairs bool) error {
	switch c := d.top().(type) {
	case *List:
		if !pairs {
			c.Items = append(c.Items, items...)
			return nil
		}
	case *Dict:
		if pairs && len(items)%2 == 0 {
			for i := 0; i < len(items); i += 2 {
				if err := c.put(items[i], items[i+1]); err != nil {
					return err
				}
			}
			return nil
		}
	}
	return errors.New("values without a container for them")
}

func (c *Dict) put(key, value any) error {
	switch key.(type) {
	case nil, bool, int64, float64, string:
		c.Pairs = append(c.Pairs, Pair{key, value})
		return nil
	}
	return fmt.Errorf("a %T as the key of a dict", key)
}

func (d *decoder) class(op byte) (err error) {
	var module, name string
	if op == opGlobal {
		if module, err = d.line(); err == nil {
			name, err = d.line()
		}
	} else if err = d.tuple(2); err == nil {
		words := d.top().(Tuple)
		d.stack = d.stack[:len(d.stack)-1]
		var isText, isName bool
		module, isText = words[0].(string)
		if name, isName = words[1].(string); !isText || !isName {
			err = errors.New("a class without a name")
		}
	}
	if err == nil {
		d.push(Class{module, name})
	}
	return err
}

// object makes an instance; arguments are those that an enumeration or a tuple with names has, and no message.
func (d *decoder) object() error {
	if err := d.tuple(2); err != nil {
		return err
	}
	v := d.top().(Tuple)
	d.stack = d.stack[:len(d.stack)-1]
	class, isClass := v[0].(Class)
	if args, ok := v[1].(Tuple); !isClass || !ok || len(args) > 0 {
		return errors.New("an object with arguments, or without a class")
	}
	d.push(&Object{Class: class})
	return nil
}

func (d *decoder) build() error {
	v, err := d.pop()
	if err != nil {
		return err
	}
	state, isDict := v.(*Dict)
	o, isObject := d.top().(*Object)
	if !isDict || !isObject {
		return errors.New("a state that belongs to no object")
	}
	o.State.Pairs = append(o.State.Pairs, state.Pairs...)
	return nil
}
