package native

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"dlrover-run/launcher/numa"
)

// msBinding binds msrun's workers by CPU sets; msrun itself needs taskset and numactl.
type msBinding struct {
	job     *msJob
	usable  []int // CPUs that this process may use, ascending
	devices []int // by local rank: the numbers by which msrun calls the devices
}

// binding chooses the CPUs of every worker: those of --bind_core, else those of its NUMA nodes.
func (j *msJob) binding() error {
	nodes, cores := strings.TrimSpace(j.String("bind_numa")), strings.TrimSpace(j.String("bind_core"))
	if strings.EqualFold(nodes, "false") && strings.EqualFold(cores, "false") {
		return nil
	}
	usable, err := j.sys.CPUs()
	if err != nil {
		return err
	}
	b := msBinding{job: j, usable: usable, devices: j.devices()}
	for _, o := range []struct {
		name, value string
		bind        func(string) ([][]int, error)
	}{{"bind_numa", nodes, b.nodes}, {"bind_core", cores, b.cores}} {
		sets, err := o.bind(o.value)
		if err != nil {
			return usageErrorf("--%s=%s: %v", o.name, o.value, err)
		}
		for i, set := range sets {
			if j.cmd.CPUs == nil {
				j.cmd.CPUs = make([][]int, j.local)
			}
			if set != nil {
				j.cmd.CPUs[i] = set
			}
		}
	}
	return nil
}

// devices: Ascend's variable renumbers them.
func (j *msJob) devices() (ids []int) {
	if list := j.sys.lookup("ASCEND_RT_VISIBLE_DEVICES"); list != "" && !j.simulated {
		for word := range strings.SplitSeq(list, ",") {
			if id, err := strconv.Atoi(strings.TrimSpace(word)); err == nil {
				ids = append(ids, id)
			}
		}
		slices.Sort(ids)
	}
	for i := len(ids); i < j.local; i++ {
		ids = append(ids, i)
	}
	return ids
}

// cores reads --bind_core: CPUs by device, or a share of all for each worker.
func (b *msBinding) cores(text string) ([][]int, error) {
	switch strings.ToLower(text) {
	case "false":
		return nil, nil
	case "true":
		return b.share(), nil
	}
	table, err := bindTable([]byte(text))
	if err != nil {
		return nil, err
	}
	return b.byDevice(table, b.cpus)
}

// share gives each worker as many neighbouring CPUs; the last one has the rest, too.
func (b *msBinding) share() (sets [][]int) {
	n := b.job.local
	each := len(b.usable) / n
	if each == 0 {
		b.job.cmd.Note("--bind_core: %d workers cannot share %d CPUs: they are not bound", n, len(b.usable))
		return nil
	}
	for i := range n {
		sets = append(sets, b.usable[i*each:(i+1)*each])
	}
	sets[n-1] = b.usable[(n-1)*each:]
	return sets
}

// nodes reads --bind_numa: nodes by device, a file that has these, or one node for each worker.
func (b *msBinding) nodes(text string) ([][]int, error) {
	switch strings.ToLower(text) {
	case "false":
		return nil, nil
	case "true":
		return b.oneNodeEach()
	}
	data := []byte(text)
	if strings.HasSuffix(strings.ToLower(text), ".json") {
		var err error
		if data, err = b.job.sys.ReadFile(text); err != nil {
			return nil, err
		}
		b.job.env("MSRUN_BIND_FILE", b.job.sys.Abs(text))
		b.job.env("MSRUN_BIND_FILE_HASH", fmt.Sprintf("%x", sha256.Sum256(data)))
	}
	table, err := bindTable(data)
	if err != nil {
		return nil, err
	}
	if _, modes := table["bind_config"]; modes {
		return b.byMode(data)
	}
	return b.byDevice(table, b.cpusOfNodes)
}

func (b *msBinding) oneNodeEach() ([][]int, error) {
	data, err := b.job.sys.ReadFile(nodeDir + "has_memory")
	if err != nil {
		return nil, err
	}
	all, err := numa.ParseCPUs(string(data))
	if err != nil {
		return nil, err
	}
	if len(all) < b.job.local {
		b.job.cmd.Note("--bind_numa: %d workers cannot have one of %d NUMA nodes each: they are not bound", b.job.local,
			len(all))
		return nil, nil
	}
	sets := make([][]int, b.job.local)
	for i := range sets {
		if sets[i], err = b.cpusOfNodes(strconv.Itoa(all[i])); err != nil {
			return nil, err
		}
	}
	return sets, nil
}

// byMode reads a file in the form that names its modes.
func (b *msBinding) byMode(data []byte) ([][]int, error) {
	var file struct {
		Modes struct {
			CPU    string `json:"bind_cpu_mode"`
			Memory string `json:"bind_memory_mode"`
		} `json:"bind_config"`
		CPU map[string]json.RawMessage `json:"bind_cpu"`
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return nil, err
	}
	if !slices.Contains([]string{"", "none", "numa"}, strings.ToLower(file.Modes.Memory)) {
		return nil, fmt.Errorf("bind_memory_mode %q: need numa or none", file.Modes.Memory)
	}
	switch strings.ToLower(file.Modes.CPU) {
	case "", "none":
		return nil, nil
	case "numa":
		return b.byDevice(file.CPU, b.cpusOfNodes)
	case "cpu":
		main := map[string]json.RawMessage{}
		for device, text := range file.CPU {
			var of struct {
				Main json.RawMessage `json:"main"`
			}
			if err := json.Unmarshal(text, &of); err != nil {
				return nil, fmt.Errorf("%s: %w", device, err)
			}
			if of.Main != nil {
				main[device] = of.Main
			}
		}
		return b.byDevice(main, b.cpus)
	}
	return nil, fmt.Errorf("bind_cpu_mode %q: need cpu, numa or none", file.Modes.CPU)
}

// byDevice binds the workers with devices in the table.
func (b *msBinding) byDevice(table map[string]json.RawMessage, read func(list string) ([]int, error)) ([][]int, error) {
	sets := make([][]int, b.job.local)
	for key, value := range table {
		number, isDevice := strings.CutPrefix(key, "device")
		id, err := strconv.Atoi(strings.TrimPrefix(number, "_"))
		if key == "scheduler" {
			continue
		}
		if !isDevice || err != nil || id < 0 {
			return nil, fmt.Errorf("%q: need device and a number, as in device0, or scheduler", key)
		}
		list, err := listOf(value)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		set, err := read(list)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		if i := slices.Index(b.devices, id); 0 <= i && i < len(sets) {
			sets[i] = set
		}
	}
	return sets, nil
}

// bindTable reads a JSON object.
func bindTable(data []byte) (table map[string]json.RawMessage, err error) {
	if err = json.Unmarshal(data, &table); err != nil || table == nil {
		return nil, errors.New(`need True, False or JSON such as {"device0":["0-3"],"device1":["4-7"]}`)
	}
	return table, nil
}

// listOf is a number, a list in the kernel's format, or several of these, in the kernel's format.
func listOf(value json.RawMessage) (string, error) {
	var lists []any
	var one any
	if err := json.Unmarshal(value, &one); err != nil {
		return "", err
	}
	if many, ok := one.([]any); ok {
		lists = many
	} else {
		lists = []any{one}
	}
	var words []string
	for _, v := range lists {
		switch v := v.(type) {
		case string:
			words = append(words, strings.Join(strings.Fields(v), ""))
		case float64:
			words = append(words, strconv.FormatFloat(v, 'f', -1, 64))
		default:
			return "", fmt.Errorf("%s: need numbers and ranges as texts, such as [\"0-3\"]", value)
		}
	}
	return strings.Join(words, ","), nil
}

func (b *msBinding) cpus(list string) ([]int, error) {
	set, err := numa.ParseCPUs(list)
	if err != nil {
		return nil, err
	}
	for _, cpu := range set {
		if _, usable := slices.BinarySearch(b.usable, cpu); !usable {
			return nil, fmt.Errorf("CPU %d is none that this process may use, which are %s", cpu, numa.Format(b.usable))
		}
	}
	return set, nil
}

const nodeDir = "/sys/devices/system/node/"

// cpusOfNodes returns the CPUs of a list of NUMA nodes that this process may use.
func (b *msBinding) cpusOfNodes(list string) (set []int, err error) {
	nodes, err := numa.ParseCPUs(list)
	if err != nil {
		return nil, err
	}
	for _, node := range nodes {
		text, err := b.job.sys.ReadFile(nodeDir + "node" + strconv.Itoa(node) + "/cpulist")
		if err != nil {
			return nil, fmt.Errorf("NUMA node %d: %w", node, err)
		}
		cpus, err := numa.ParseCPUs(string(text))
		if err != nil {
			return nil, err
		}
		set = append(set, cpus...)
	}
	slices.Sort(set)
	unusable := func(cpu int) bool { _, ok := slices.BinarySearch(b.usable, cpu); return !ok }
	if set = slices.DeleteFunc(set, unusable); len(set) == 0 && len(nodes) > 0 {
		return nil, fmt.Errorf("this process may use no CPU of NUMA nodes %s: it has %s", list, numa.Format(b.usable))
	}
	return set, nil
}
