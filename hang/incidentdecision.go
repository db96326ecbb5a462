package hang

import "fmt"

// decide reports the verdict at once, and again when it counts as a hang. That takes another look with the same
// result. Then it is acted upon, which is the last that an incident does.
func (in *Incident) decide() {
	f, last := in.file, in.lastProgress()
	in.state = StateDecided
	if v := &f.verdict; in.patience.early(v, last, in.now) {
		v.doubt("it may take its time")
		*v = v.aged(v.Age)
	}
	again := f.told > 0 && sameVerdict(in.told.newest().Verdict, f.verdict)
	if !reached(in.patience.actAt(&f.verdict, last), in.now) {
		if !again && f.told < maxRetold {
			in.emit(in.told.tell(in.now, f, again)...)
		}
		in.plan()
		return
	}
	achieved := in.achieved()
	action, why := in.progress.action(in.cfg.Spec.Action, achieved)
	in.emit(in.told.decided(in.now, f, again, action)...)
	if in.cfg.Spec.Action == ActReport {
		return
	}
	if action == ActRestart {
		in.progress.restarted(achieved)
	}
	in.emit(in.told.order(f, action, why))
}

// achieved is the progress of the present epoch.
func (in *Incident) achieved() achievement {
	a := in.progress.achieved(in.file)
	if in.cfg.Saved != nil {
		a.saved, a.known = in.cfg.Saved()
	}
	return a
}

// lapse ends an incident that gets no reports any more. Its earlier reports to people stand.
func (in *Incident) lapse() {
	if in.file.told > 0 {
		in.told.lapsed = in.file.id
		in.rest()
		return
	}
	in.withdraw("no node repeats what it has suspected")
}

// withdraw ends an incident: it was no hang, or is none any more. Nodes that still suspect something report it again.
func (in *Incident) withdraw(why string) {
	in.emit(in.told.retract(in.file.id, fmt.Sprintf("after %s: %s", seconds(in.now.Sub(in.file.began)), why))...)
	in.suspicions.clear()
	in.rest()
}
