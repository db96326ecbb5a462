package serve

import (
	"fmt"
	"testing"
	"time"

	"dlrover-run/hang"
)

// BenchmarkDecode is the report of a node of eight workers, all of which have eight threads.
func BenchmarkDecode(b *testing.B) {
	stacks := &hang.Stacks{Interpreter: "CPython 3.11.2"}
	for t := range 8 {
		stacks.Threads = append(stacks.Threads, hang.Thread{Name: fmt.Sprint(t), Main: t == 0, State: 'S', Python: frames("f",
			25)})
	}
	r := hang.Report{Ask: 1}
	for i := range 8 {
		w := hang.Worker{Rank: i, PID: 4000 + i, Start: 123456}
		e := hang.Evidence{Worker: w, Stacks: stacks, Groups: []hang.Group{{ID: 7, Name: "0", Ranks: "0-79999"}}}
		for k := range 3 {
			p := &hang.Page{PID: w.PID, Steps: 500, LastStep: time.Hour, StepTimes: make([]time.Duration, 32),
				Groups: []hang.GroupState{{ID: 7, Seq: 1000, Since: time.Hour}}}
			e.Samples = append(e.Samples, hang.Sample{Worker: w, At: time.Hour + time.Duration(k), Page: p,
				Proc: hang.Proc{State: 'S', CPU: time.Minute, Switches: 12345, IO: 1 << 30, WChan: "futex_wait_queue",
					Threads: 40}})
		}
		r.Evidence = append(r.Evidence, e)
	}
	body, encoding, err := encode(r)
	if err != nil {
		b.Fatal(err)
	}
	var shared interner
	shared.of(1)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		p, err := decode(body, encoding)
		if err != nil {
			b.Fatal(err)
		}
		p.unpack(&shared)
	}
}
