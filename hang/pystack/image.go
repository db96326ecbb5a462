package pystack

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path"
	"strings"
	"sync"
)

// image is the known data of an ELF file.
type image struct {
	loads   []load
	runtime uint64 // the address of _PyRuntime; 0: it is not an interpreter
	version uint64 // that of Py_Version, since 3.11; 0: none
	text    string // the version before 3.11

	mu        sync.Mutex
	functions map[uint64]string // by address; "" is unknown
}

// images are those that were read before. They are the same for all workers of a node.
type images struct {
	mu   sync.Mutex
	byID map[imageID]*image
}

// maxImages bounds the images that are kept; beyond, all are forgotten.
const maxImages = 512

func (c *images) of(f *os.File) *image {
	id := fileID(f)
	c.mu.Lock()
	defer c.mu.Unlock()
	i := c.byID[id]
	if i == nil {
		if c.byID == nil || len(c.byID) >= maxImages {
			c.byID = map[imageID]*image{}
		}
		i = &image{functions: map[uint64]string{}}
		c.byID[id] = i
	}
	return i
}

// findInterpreter looks for CPython in a process: in its program, and in its libraries of that name. Without an error
// and without an interpreter, it is no Python.
func (r *Reader) findInterpreter(pid int, mem memory, maps []mapping) (*interpreter, string, error) {
	exe, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	var failed error
	for _, mod := range modules(maps) {
		if mod.path != exe && !strings.HasPrefix(path.Base(mod.path), "libpython") {
			continue
		}
		img, err := r.pythonImage(pid, mod)
		if err != nil {
			failed = fmt.Errorf("%s: %w", mod.path, err)
			continue
		}
		if img.runtime == 0 {
			continue
		}
		bias, ok := biasOf(img.loads, mod.maps[0])
		if !ok {
			failed = fmt.Errorf("%s is not mapped as its file says", mod.path)
			continue
		}
		return identify(mem, img, bias)
	}
	return nil, "", failed
}

// pythonImage reads where a file has its interpreter.
func (r *Reader) pythonImage(pid int, mod *module) (*image, error) {
	f, err := openMapped(pid, mod.maps[0])
	if err != nil {
		return nil, err
	}
	defer f.Close()
	img := r.images.of(f)
	img.mu.Lock()
	defer img.mu.Unlock()
	if img.loads != nil {
		return img, nil
	}
	e, err := parseELF(f)
	if err != nil {
		return nil, err
	}
	symbols := lookup(e, "_PyRuntime", "Py_Version")
	img.runtime, img.version = symbols["_PyRuntime"], symbols["Py_Version"]
	if img.runtime != 0 && img.version == 0 {
		img.text = versionText(e)
	}
	img.loads = loadsOf(e)
	return img, nil
}

// identify finds out which CPython it is, and its layout.
func identify(mem memory, img *image, bias uint64) (*interpreter, string, error) {
	p := &interpreter{mem: mem, runtime: img.runtime + bias}
	head, err := read(mem, p.runtime, descriptionFields)
	if err != nil {
		return nil, "", err
	}
	described := string(head[:len(cookie)]) == cookie
	version := head.word(8)
	if !described {
		if version, err = img.versionIn(mem, bias); err != nil {
			return nil, "", err
		}
	}
	name, minor := "CPython "+versionOf(version), int(version>>16&0xff)
	if version>>24 != 3 {
		return nil, name, fmt.Errorf("%s is not supported: 3.8 to 3.%d are", name, newestMinor)
	}
	var l layout
	if !described {
		l, err = table(minor)
	} else if head, err = read(mem, p.runtime, maxDescription); err == nil {
		l, err = layoutOf(head, minor)
	}
	if l.freeThreaded {
		name += " free-threaded"
	}
	p.layout = &l
	return p, name, err
}

// versionIn is the PY_VERSION_HEX of an interpreter that does not describe itself.
func (i *image) versionIn(mem memory, bias uint64) (uint64, error) {
	if i.version != 0 {
		return pointer(mem, i.version+bias)
	}
	var minor, micro uint64
	if _, err := fmt.Sscanf(i.text, "3.%d.%d", &minor, &micro); err != nil {
		return 0, errors.New("it is a CPython before 3.11, and does not say which")
	}
	return 3<<24 | minor<<16 | micro<<8 | final<<4, nil
}

// final is the release level of a version that is neither alpha, beta nor candidate.
const final = 0xf

// versionOf is PY_VERSION_HEX as people write it.
func versionOf(hex uint64) string {
	text := fmt.Sprintf("%d.%d.%d", hex>>24&0xff, hex>>16&0xff, hex>>8&0xff)
	level := map[uint64]string{0xa: "a", 0xb: "b", 0xc: "rc"}[hex>>4&15]
	if level != "" {
		text += fmt.Sprintf("%s%d", level, hex&15)
	}
	return text
}

// maxFunctions bounds the names that are kept of one file.
const maxFunctions = 4096

// functions names functions of one file by addresses in the process. Unknown ones are absent.
func (r *Reader) functions(pid int, exec []mapping, addrs []uint64) map[uint64]string {
	m, _ := mappingAt(exec, addrs[0])
	f, err := openMapped(pid, m)
	if err != nil {
		return nil
	}
	defer f.Close()
	img := r.images.of(f)
	img.mu.Lock()
	defer img.mu.Unlock()
	e, err := parseELF(f)
	if err != nil {
		return nil
	}
	bias, ok := biasOf(loadsOf(e), m)
	if !ok {
		return nil
	}
	var unknown []uint64
	for _, addr := range addrs {
		if _, ok := img.functions[addr-bias]; !ok {
			unknown = append(unknown, addr-bias)
		}
	}
	if len(unknown) > 0 {
		img.learn(e, unknown)
	}
	names := map[uint64]string{}
	for _, addr := range addrs {
		if name := img.functions[addr-bias]; name != "" {
			names[addr] = name
		}
	}
	return names
}

func (i *image) learn(e *elf.File, addrs []uint64) {
	if len(i.functions) > maxFunctions {
		clear(i.functions)
	}
	names := functionsAt(e, addrs)
	for _, addr := range addrs {
		i.functions[addr] = demangle(names[addr])
	}
}
