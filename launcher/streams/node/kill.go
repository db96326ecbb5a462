package node

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"

	"dlrover-run/internal/openfile"
	"dlrover-run/launcher/proc/family"
)

// killPatience is how long killed processes may take to disappear, and shelterPatience how long the shelter of a
// command may outlive all that was below it.
const (
	killPatience    = 5 * time.Second
	shelterPatience = time.Second
)

// killAll kills a command and its descendants, until none is left: all processes below its shelter, the leader, where
// its orphans are, too; and for a shelter that was killed, its session and all processes with its mark in their
// environment. The shelter ends by itself once it is childless: killed before, it would lose the orphans. The error
// names the processes that could not be ended.
func killAll(leader int, mark string) error {
	begun := time.Now()
	deadline := begun.Add(killPatience)
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		left := members(leader, mark)
		if len(left) == 0 {
			return nil
		}
		for _, st := range left {
			if st.PID != leader || len(left) == 1 && time.Since(begun) > shelterPatience {
				kill(st)
			}
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d processes of it are left, such as %s", len(left), family.Describe(left[0].PID))
		}
		time.Sleep(pause)
	}
}

// members are the processes of a command that have not ended.
func members(leader int, mark string) (found []family.Stat) {
	stats := map[int]family.Stat{}
	for _, pid := range family.Numbers("/proc") {
		if st, err := family.ReadStat(pid); err == nil {
			stats[pid] = st
		}
	}
	for pid, st := range stats {
		if !st.Ended() && pid != os.Getpid() && (st.Session == leader || below(stats, pid, leader) || marked(pid, mark)) {
			found = append(found, st)
		}
	}
	return found
}

// below reports whether pid is the leader or one of its descendants.
func below(stats map[int]family.Stat, pid, leader int) bool {
	for steps := 0; pid > 1 && steps < len(stats); steps++ {
		if pid == leader {
			return true
		}
		pid = stats[pid].Parent
	}
	return false
}

// maxEnviron is more than the kernel lets a process begin with, in bytes.
const maxEnviron = 8 << 20

func marked(pid int, mark string) bool {
	// Of other users' processes it is hidden, and its length is the process's own choice.
	env, _ := openfile.Read("/proc/"+strconv.Itoa(pid)+"/environ", maxEnviron)
	for kv := range bytes.SplitSeq(env, []byte{0}) {
		if string(kv) == mark {
			return true
		}
	}
	return false
}

// kill looks again once the pid cannot be given to another process any more.
func kill(st family.Stat) {
	p, err := os.FindProcess(st.PID)
	if err != nil {
		return
	}
	defer p.Release()
	if now, err := family.ReadStat(st.PID); err == nil && now.Session == st.Session && !now.Ended() {
		_ = p.Signal(syscall.SIGKILL)
	}
}
