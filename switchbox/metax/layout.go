package metax

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/internal/stable"
)

// sysfsVariable names the variable with the place of sysfs, for containers that see the host's elsewhere, and
// defaultSysfs is where it is without.
const (
	sysfsVariable = "DLROVER_SYSFS_ROOT"
	defaultSysfs  = "/sys"
)

// card is one MetaX device.
type card struct {
	Index  int // as the driver's tools count, from 0
	Socket int // its place in the node, which pairs go by
}

// errNone: this node has no MetaX device.
var errNone = errors.New("no MetaX device")

// roots are the directories, below sysfs, in which drivers of different versions list the devices.
var roots = []string{"class/mxcd/mxcd/layout", "class/metax/mxcd/layout"}

// maxProperties bounds a properties file; the kernel gives at most a page.
const maxProperties = 64 << 10

// readLayout returns the MetaX devices of the node, in the order of their indices. Without any the error is errNone;
// other errors name the file that cannot be understood.
func readLayout(sysfs string) ([]card, error) {
	for _, root := range roots {
		if _, err := os.Stat(path.Join(sysfs, root)); err == nil {
			return layout(os.DirFS(sysfs), root)
		}
	}
	return nil, fmt.Errorf("%w: %s has neither %s nor %s", errNone, sysfs, roots[0], roots[1])
}

func layout(sysfs fs.FS, root string) ([]card, error) {
	first, ok, err := property(sysfs, path.Join(root, "properties"), "num_cpu_nodes")
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, fmt.Errorf("%s/properties does not say num_cpu_nodes", root)
	}
	nodes, err := fs.ReadDir(sysfs, path.Join(root, "nodes"))
	if err != nil {
		return nil, err
	}
	var cards []card
	for _, node := range nodes {
		file := path.Join(root, "nodes", node.Name(), "properties")
		number, err := strconv.ParseUint(node.Name(), 10, 16)
		if err != nil {
			continue // no node
		}
		socket, ok, err := property(sysfs, file, "mgpu_id")
		if err != nil {
			return nil, err
		}
		if ok {
			cards = append(cards, card{Index: int(number) - first, Socket: socket})
		}
	}
	if len(cards) == 0 {
		return nil, fmt.Errorf("%w: no node of %s has a mgpu_id", errNone, root)
	}
	return ordered(cards, root)
}

// ordered sorts the cards, and refuses impossible ones: then a card cannot be identified.
func ordered(cards []card, root string) ([]card, error) {
	stable.Sort(cards, func(a, b card) int { return a.Index - b.Index })
	sockets := map[int]int{}
	for _, c := range cards {
		if c.Index < 0 {
			return nil, fmt.Errorf("%s/nodes: a device comes before the CPUs that num_cpu_nodes counts", root)
		}
		if other, twice := sockets[c.Socket]; twice {
			return nil, fmt.Errorf("%s/nodes: the devices %d and %d have the same mgpu_id %d", root, other, c.Index, c.Socket)
		}
		sockets[c.Socket] = c.Index
	}
	return cards, nil
}

// property is the number that a line "key number" of a file gives; ok is whether there is such a line.
func property(sysfs fs.FS, file, key string) (value int, ok bool, err error) {
	f, err := sysfs.Open(file)
	if err != nil {
		return 0, false, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxProperties))
	if err != nil {
		return 0, false, err
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != key {
			continue
		}
		n, err := strconv.ParseUint(strings.Join(fields[1:], " "), 10, 16)
		if err != nil {
			return 0, false, fmt.Errorf("%s: %.80q gives no number from 0 to 65535", file, strings.TrimSpace(line))
		}
		return int(n), true, nil
	}
	return 0, false, nil
}

// visibilities are the variables by which a process is given some of the devices, the first that is set.
var visibilities = []string{"MACA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"}

// visible returns those cards that the variables leave to a process. As with CUDA, a list ends at its first entry that
// is not a device. A list that begins with no number (a UUID, which cannot be looked up here) leaves all.
func visible(cards []card, lookup func(string) (string, bool)) []card {
	for _, name := range visibilities {
		if list, ok := lookup(name); ok {
			return selected(cards, list)
		}
	}
	return cards
}

func selected(cards []card, list string) (some []card) {
	for i, entry := range strings.Split(list, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(entry))
		if err != nil && i == 0 && strings.Trim(list, " ,") != "" {
			return cards
		}
		at := slices.IndexFunc(cards, func(c card) bool { return c.Index == n })
		if err != nil || at < 0 {
			break
		}
		some = append(some, cards[at])
	}
	return some
}
