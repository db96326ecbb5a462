package pystack

import (
	"fmt"
	"strings"
)

// From 3.13 on _PyRuntime begins with a description of the layout of CPython's structs: a cookie, the version, whether
// it is free-threaded, and then offsets and sizes, all in words of 8 bytes.
const (
	cookie            = "xdebugpy"
	descriptionFields = 24   // where the offsets begin
	maxDescription    = 1024 // bytes; more than any version has
)

// newestMinor is the newest version with a description that is understood: each may add fields anywhere.
const newestMinor = 14

// section is a group of fields of the description, in their order. Fields behind the last listed one are not needed.
type section struct{ name, fields string }

var (
	described313 = []section{
		{"runtime", "size finalizing interps"},
		{"interp", "size id next threads gc modules sysdict builtins gil own enabled locked holder"},
		{"thread", "size prev next interp frame id native chunk status"},
		{"frame", "size back code instr locals owner"},
		{"code", "size file name qualname table first args names kinds start"},
		{"object", "size type"},
		{"type", "size name repr flags"},
		{"tuple", "size item count"},
		{"list", "size item count"},
		{"dict", "size keys values"},
		{"float", "size value"},
		{"long", "size tag digit"},
		{"bytes", "size count data"},
		{"text", "size state length ascii"},
	}
	described314 = []section{
		{"runtime", "size finalizing interps"},
		{"interp", "size id next threads main gc modules sysdict builtins gil own enabled locked holder codes tlbcs"},
		{"thread", "size prev next interp frame id native chunk status"},
		{"frame", "size back code instr locals owner stack tlbc"},
		{"code", "size file name qualname table first args names kinds start tlbc"},
		{"object", "size type"},
		{"type", "size name repr flags"},
		{"tuple", "size item count"},
		{"list", "size item count"},
		{"set", "size used table mask"},
		{"dict", "size keys values"},
		{"float", "size value"},
		{"long", "size tag digit"},
		{"bytes", "size count data"},
		{"text", "size state length ascii"},
	}
)

// description is the self-description of an interpreter, by section.field. It keeps its first error.
type description struct {
	fields map[string]uint64
	bad    error
}

func describe(b block, sections []section) *description {
	d := &description{fields: map[string]uint64{}}
	pos := uint64(descriptionFields)
	for _, s := range sections {
		for field := range strings.FieldsSeq(s.fields) {
			d.fields[s.name+"."+field] = b.word(pos)
			pos += 8
		}
	}
	if pos > uint64(len(b)) {
		d.bad = fmt.Errorf("its description of itself ends after %d bytes", len(b))
	}
	return d
}

// size is that of a struct, which is to be read whole.
func (d *description) size(section string) uint64 { return d.within(section+".size", 8, 1<<14) }

// member is the offset of a word in a struct that is read whole.
func (d *description) member(section, field string) uint64 {
	return d.within(section+"."+field, 0, d.fields[section+".size"]-4)
}

// offset is that of a word in a struct of any size: an interpreter's state has some 100 KB.
func (d *description) offset(field string) uint64 { return d.within(field, 0, 1<<24) }

func (d *description) within(field string, least, most uint64) uint64 {
	v := d.fields[field]
	if (v < least || v > most) && d.bad == nil {
		d.bad = fmt.Errorf("its description of itself has %s = %d", field, v)
	}
	return v
}

// layoutOf makes a layout of an interpreter's self-description.
func layoutOf(b block, minor int) (layout, error) {
	sections := described314
	switch {
	case minor == 13:
		sections = described313
	case minor < 13 || minor > newestMinor:
		return layout{}, fmt.Errorf("CPython 3.%d is not supported: 3.8 to 3.%d are", minor, newestMinor)
	}
	d := describe(b, sections)
	l := layout{
		runtime: runtimeLayout{interps: d.offset("runtime.interps"), main: none, gil: none},
		interp: interpLayout{next: d.offset("interp.next"), threads: d.offset("interp.threads"),
			gil: d.offset("interp.gil")},
		gil: d.gil(b.word(16) != 0),
		thread: threadLayout{next: d.member("thread", "next"), interp: d.member("thread", "interp"),
			frame: d.member("thread", "frame"), cframe: none, id: d.member("thread", "id"),
			native: d.member("thread", "native"), size: d.size("thread")},
		frame: frameLayout{back: d.member("frame", "back"), code: d.member("frame", "code"),
			instr: d.member("frame", "instr"), line: none, owner: d.member("frame", "owner"), tlbc: none,
			size: d.size("frame")},
		code: codeLayout{file: d.member("code", "file"), name: d.member("code", "name"),
			first: d.member("code", "first"), table: d.member("code", "table"), start: d.member("code", "start"),
			tlbc: none, size: d.size("code")},
		text: textLayout{length: d.offset("text.length"), state: d.offset("text.state"), ascii: d.offset("text.ascii"),
			other: d.offset("text.ascii") + utf8Fields},
		bytes:        bytesLayout{count: d.offset("bytes.count"), data: d.offset("bytes.data")},
		lines:        locations,
		freeThreaded: b.word(16) != 0,
	}
	if l.freeThreaded && minor > 13 {
		l.frame.tlbc, l.code.tlbc = d.member("frame", "tlbc"), d.member("code", "tlbc")
	}
	return l, d.bad
}

// utf8Fields is how much more a str that is not ASCII has before its characters than an ASCII one.
const utf8Fields = 16

// gil is where its lock has its fields: they are given for the lock that is a part of an interpreter.
func (d *description) gil(freeThreaded bool) gilLayout {
	own := d.offset("interp.own")
	l := gilLayout{holder: d.offset("interp.holder") - own, locked: d.offset("interp.locked") - own, enabled: none}
	if freeThreaded {
		l.enabled = d.offset("interp.enabled")
	}
	if max(l.holder, l.locked) > 256 && d.bad == nil {
		d.bad = fmt.Errorf("its description of itself has interp.holder = %d, interp.locked = %d, interp.own = %d",
			d.fields["interp.holder"], d.fields["interp.locked"], own)
	}
	return l
}
