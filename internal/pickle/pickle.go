// Package pickle reads and writes Python's pickles of plain data and of objects that are known by name. A pickle is a
// program; this one has no instruction that imports or calls anything.
package pickle

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
)

// Limits bound a pickle. Each value on the stack takes some dozens of bytes of memory, for only one byte of input;
// MaxValues and MaxDepth bound the rest.
type Limits struct {
	Bytes int // of the pickle; four times as many bytes of texts and classes may come out of the memo
	// Shared lets a container be in many places, even in itself: a reader of the value must not follow it to its end.
	// Otherwise the value is a tree.
	Shared  bool
	Objects bool // without it there is plain data only
}

const (
	// MaxValues bounds the values of a pickle: the nodes of a world of 100,000, with all that is known of each, are half.
	MaxValues = 4 << 20
	// MaxDepth bounds the containers in each other. In Shared ones it is that of each when it was remembered.
	MaxDepth = 100
)

// The Go types of a decoded pickle: nil, bool, int64, float64, string, []byte, Tuple, *List, *Dict and *Object.
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

// entry is a value on the stack, and how many containers are in each other there: 0 for one that is not a container.
type entry struct {
	v    any
	deep int
}

// decoder executes the opcodes of one pickle. Nothing is nested by recursion.
type decoder struct {
	limits  Limits
	in      []byte
	at      int
	stack   []entry
	memo    []entry
	values  int // pushed so far
	again   int // bytes that came out of the memo
	classes int // pushed, and not made an object of

	few   [8]entry // room for most messages
	known [16]entry
}

// Decode reads a pickle of protocol 2 to 5. Opcodes that make objects other than Object are errors.
func Decode(in []byte, limits Limits) (any, error) {
	if len(in) > limits.Bytes {
		return nil, fmt.Errorf("%d bytes; at most %d are read", len(in), limits.Bytes)
	}
	d := &decoder{in: in, limits: limits}
	d.stack, d.memo = d.few[:0], d.known[:0]
	for {
		done, err := d.step()
		if err != nil {
			return nil, fmt.Errorf("at byte %d: %w", d.at, err)
		}
		if done {
			return d.result()
		}
	}
}

func (d *decoder) result() (any, error) {
	last, err := d.pop(1)
	if err != nil || len(d.stack) > 0 {
		return nil, errors.New("it does not end with one value")
	}
	if d.classes > 0 {
		return nil, errors.New("a class of which no object is made")
	}
	return last[0].v, nil
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

// count reads a little-endian number of size bytes, at most 8.
func (d *decoder) count(size int) (n uint64, err error) {
	b, err := d.take(uint64(size))
	for i := len(b) - 1; i >= 0; i-- {
		n = n<<8 | uint64(b[i])
	}
	return n, err
}

// counted reads a length of size bytes and as many bytes.
func (d *decoder) counted(size int) ([]byte, error) {
	n, err := d.count(size)
	if err != nil {
		return nil, err
	}
	return d.take(n)
}

func (d *decoder) line() (string, error) {
	n := bytes.IndexByte(d.in[d.at:], '\n')
	if n < 0 {
		return "", errShort
	}
	b, err := d.take(uint64(n) + 1)
	return string(b[:min(n, maxName+1)]), err
}

func (d *decoder) push(v any) error { return d.pushDeep(v, 0) }

func (d *decoder) pushDeep(v any, deep int) error {
	if d.values++; d.values > MaxValues {
		return fmt.Errorf("more than %d values", MaxValues)
	}
	if deep > MaxDepth {
		return errDeep
	}
	d.stack = append(d.stack, entry{v, deep})
	return nil
}

var errDeep = fmt.Errorf("more than %d containers in each other", MaxDepth)

// pop takes n values from the stack, in the order in which they were pushed. They are there until the next push.
func (d *decoder) pop(n int) ([]entry, error) {
	from := len(d.stack) - n
	if from < 0 {
		return nil, errors.New("a value is missing")
	}
	items := d.stack[from:]
	for _, e := range items {
		if _, ok := e.v.(mark); ok {
			return nil, errors.New("a value is missing behind a mark")
		}
	}
	d.stack = d.stack[:from]
	return items, nil
}

// popMark removes the last MARK and returns the values pushed since. They are valid until the next push.
func (d *decoder) popMark() ([]entry, error) {
	for i := len(d.stack) - 1; i >= 0; i-- {
		if _, ok := d.stack[i].v.(mark); ok {
			items := d.stack[i+1:]
			d.stack = d.stack[:i]
			return items, nil
		}
	}
	return nil, errors.New("a mark is missing")
}

// top is the value that an opcode adds to, or remembers.
func (d *decoder) top() *entry {
	if len(d.stack) == 0 {
		return &entry{v: mark{}}
	}
	return &d.stack[len(d.stack)-1]
}

// Proto is the first byte of every pickle of protocol 2 or later.
const Proto = 0x80

// The opcodes, as CPython's pickletools names them.
const (
	opProto, opFrame, opStop, opMark        = Proto, 0x95, '.', '('
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
	if d.at == len(d.in) {
		return false, errShort
	}
	op := d.in[d.at]
	d.at++
	switch op {
	case opStop:
		return true, nil
	case opProto:
		err = d.protocol()
	case opFrame:
		_, err = d.take(8)
	case opMark:
		err = d.push(mark{})
	case opNone:
		err = d.push(nil)
	case opTrue, opFalse:
		err = d.push(op == opTrue)
	case opBinInt, opBinInt1, opBinInt2, opLong1:
		err = d.integer(op)
	case opBinFloat:
		err = d.float()
	case opShortUnicode, opUnicode, opUnicode8, opShortBytes, opBytes, opBytes8:
		err = d.text(op)
	case opMemoize, opBinPut, opLongBinPut:
		err = d.remember(op)
	case opBinGet, opLongBinGet:
		err = d.recall(op)
	default:
		err = d.structure(op)
	}
	return false, err
}

func (d *decoder) protocol() error {
	n, err := d.count(1)
	if err == nil && (n < 2 || n > 5) {
		err = fmt.Errorf("protocol %d; 2 to 5 are read", n)
	}
	return err
}

// sizeOf is the size in bytes of the number that follows an opcode.
func sizeOf(op byte) int {
	switch op {
	case opBinInt1, opLong1, opShortUnicode, opShortBytes, opBinPut, opBinGet:
		return 1
	case opBinInt2:
		return 2
	case opUnicode8, opBytes8:
		return 8
	}
	return 4
}

func (d *decoder) integer(op byte) error {
	if op == opLong1 {
		return d.long()
	}
	v, err := d.count(sizeOf(op))
	switch {
	case err != nil:
		return err
	case op == opBinInt:
		return d.push(int64(int32(v)))
	}
	return d.push(int64(v))
}

// long reads an integer of as many bytes as it needs, none for 0.
func (d *decoder) long() error {
	b, err := d.counted(sizeOf(opLong1))
	if err != nil {
		return err
	}
	if len(b) > 8 {
		return errors.New("an integer of more than 64 bits")
	}
	var v int64
	for i := len(b) - 1; i >= 0; i-- {
		v = v<<8 | int64(b[i])
	}
	unused := 64 - 8*len(b) // the highest bit that is there is the sign
	return d.push(v << unused >> unused)
}

func (d *decoder) float() error {
	b, err := d.take(8)
	if err != nil {
		return err
	}
	return d.push(math.Float64frombits(binary.BigEndian.Uint64(b)))
}

// text reads a string or bytes. Invalid UTF-8, with which Python writes undecodable names of files, is replaced: no
// other program could read it.
func (d *decoder) text(op byte) error {
	b, err := d.counted(sizeOf(op))
	switch {
	case err != nil:
		return err
	case op == opShortUnicode || op == opUnicode || op == opUnicode8:
		return d.push(strings.ToValidUTF8(string(b), "\uFFFD"))
	}
	return d.push(append([]byte{}, b...))
}

// remember writes the value on top to the memo.
func (d *decoder) remember(op byte) error {
	i := uint64(len(d.memo))
	if op != opMemoize {
		var err error
		if i, err = d.count(sizeOf(op)); err != nil {
			return err
		}
	}
	e := *d.top()
	if _, marked := e.v.(mark); marked {
		return errors.New("nothing to remember")
	}
	if i > uint64(d.values)+uint64(len(d.memo)) || i > MaxValues {
		return fmt.Errorf("entry %d of the memo comes too early", i)
	}
	for uint64(len(d.memo)) <= i {
		d.memo = append(d.memo, entry{v: forgotten{}})
	}
	d.memo[i] = e
	return nil
}

// forgotten is in the memo where nothing was written.
type forgotten struct{}

// recall pushes a value from the memo.
func (d *decoder) recall(op byte) error {
	i, err := d.count(sizeOf(op))
	if err != nil {
		return err
	}
	if i >= uint64(len(d.memo)) {
		return fmt.Errorf("the memo has no entry %d", i)
	}
	e := d.memo[i]
	switch v := e.v.(type) {
	case string:
		d.again += len(v)
	case []byte:
		d.again += len(v)
	case Class:
		d.again += len(v.Module) + len(v.Name)
		d.classes++
	case forgotten:
		return fmt.Errorf("the memo has no entry %d", i)
	default:
		if e.deep > 0 && !d.limits.Shared {
			return errors.New("a container that is in two places")
		}
	}
	if d.again > 4*d.limits.Bytes {
		return errors.New("texts of the memo are repeated too often")
	}
	return d.pushDeep(e.v, e.deep)
}

// structure makes containers and objects, and fills them.
func (d *decoder) structure(op byte) error {
	switch op {
	case opEmptyTuple:
		return d.push(emptyTuple)
	case opEmptyList:
		return d.pushDeep(&List{}, 1)
	case opEmptyDict:
		return d.pushDeep(&Dict{}, 1)
	case opTuple1, opTuple2, opTuple3:
		return d.tuple(d.pop(int(op-opTuple1) + 1))
	case opTuple:
		return d.tuple(d.popMark())
	case opAppend:
		return d.addItems(d.pop(1))
	case opSetItem:
		return d.addPairs(d.pop(2))
	case opAppends:
		return d.addItems(d.popMark())
	case opSetItems:
		return d.addPairs(d.popMark())
	}
	if d.limits.Objects {
		switch op {
		case opGlobal:
			return d.global()
		case opStackGlobal:
			return d.stackGlobal()
		case opNewObj:
			return d.object()
		case opBuild:
			return d.build()
		}
	}
	return fmt.Errorf("opcode %#02x, which plain data does not need", op)
}

var emptyTuple any = Tuple{}

func (d *decoder) tuple(items []entry, err error) error {
	if err != nil {
		return err
	}
	if len(items) == 0 {
		return d.push(emptyTuple)
	}
	t, deep := make(Tuple, len(items)), 0
	for i, e := range items {
		t[i], deep = e.v, max(deep, e.deep)
	}
	return d.pushDeep(t, deep+1)
}

func (d *decoder) addItems(items []entry, err error) error {
	if err != nil {
		return err
	}
	to := d.top()
	list, ok := to.v.(*List)
	if !ok {
		return errors.New("items without a list for them")
	}
	list.add(items)
	return to.hold(items)
}

func (d *decoder) addPairs(items []entry, err error) error {
	if err != nil {
		return err
	}
	to := d.top()
	dict, ok := to.v.(*Dict)
	if !ok || len(items)%2 != 0 {
		return errors.New("pairs without a dict for them")
	}
	if err := dict.add(items); err != nil {
		return err
	}
	return to.hold(items)
}

// hold counts the depth of a container to which items were added.
func (e *entry) hold(items []entry) error {
	for _, item := range items {
		e.deep = max(e.deep, item.deep+1)
	}
	if e.deep > MaxDepth {
		return errDeep
	}
	return nil
}

func (c *List) add(items []entry) {
	c.Items = slices.Grow(c.Items, len(items))
	for _, e := range items {
		c.Items = append(c.Items, e.v)
	}
}

func (c *Dict) add(items []entry) error {
	c.Pairs = slices.Grow(c.Pairs, len(items)/2)
	for i := 0; i < len(items); i += 2 {
		key := items[i].v
		switch key.(type) {
		case nil, bool, int64, float64, string:
			c.Pairs = append(c.Pairs, Pair{key, items[i+1].v})
		default:
			return fmt.Errorf("a %T as the key of a dict", key)
		}
	}
	return nil
}

func (d *decoder) global() error {
	module, err := d.line()
	if err != nil {
		return err
	}
	name, err := d.line()
	if err != nil {
		return err
	}
	return d.class(module, name)
}

func (d *decoder) stackGlobal() error {
	words, err := d.pop(2)
	if err != nil {
		return err
	}
	module, isText := words[0].v.(string)
	name, isName := words[1].v.(string)
	if !isText || !isName {
		return errors.New("a class without a name")
	}
	return d.class(module, name)
}

// maxName is the most bytes of the name of a class, and of a module.
const maxName = 256

func (d *decoder) class(module, name string) error {
	if !isName(module) || !isName(name) {
		return fmt.Errorf("%.100q of %.100q is not the name of a class", name, module)
	}
	d.classes++
	return d.push(Class{module, name})
}

// isName reports whether Encode may write s. Anything else could end the line there, and go on with opcodes.
func isName(s string) bool {
	for _, c := range []byte(s) {
		if c != '.' && c != '_' && (c < '0' || c > '9') && (c|0x20 < 'a' || c|0x20 > 'z') {
			return false
		}
	}
	return s != "" && len(s) <= maxName
}

// object makes an instance; arguments are those that an enumeration or a tuple with names has, and no message.
func (d *decoder) object() error {
	parts, err := d.pop(2)
	if err != nil {
		return err
	}
	class, isClass := parts[0].v.(Class)
	if args, ok := parts[1].v.(Tuple); !isClass || !ok || len(args) > 0 {
		return errors.New("an object with arguments, or without a class")
	}
	d.classes--
	return d.pushDeep(&Object{Class: class}, 1)
}

func (d *decoder) build() error {
	last, err := d.pop(1)
	if err != nil {
		return err
	}
	to := d.top()
	state, isDict := last[0].v.(*Dict)
	o, isObject := to.v.(*Object)
	if !isDict || !isObject {
		return errors.New("a state that belongs to no object")
	}
	to.deep = max(to.deep, last[0].deep)
	o.State.Pairs = append(o.State.Pairs, state.Pairs...)
	return nil
}
