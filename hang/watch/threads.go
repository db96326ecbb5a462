package watch

import (
	"os"
	"strconv"
)

// threads lists a process, at most 1,024 of its threads.
func (p *procfs) threads(pid int) (tids []int) {
	d, err := os.Open(p.root + "/" + strconv.Itoa(pid) + "/task")
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(maxThreads) // the threads until an error
	for _, name := range names {
		if tid, err := strconv.Atoi(name); err == nil {
			tids = append(tids, tid)
		}
	}
	return tids
}

// uninterruptible counts the threads in uninterruptible sleep.
func (p *procfs) uninterruptible(pid int) (n int) {
	for _, tid := range p.threads(pid) {
		b, err := p.file(pid, "task/"+strconv.Itoa(tid)+"/stat")
		if err != nil {
			continue
		}
		if s, ok := parseStat(b); ok && s.state == 'D' {
			n++
		}
	}
	return n
}
