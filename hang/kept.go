package hang

// Kept is what a later judge of a run has to know: how often the run was restarted for hangs in vain, and from where.
// The zero value is never.
type Kept struct {
	Restarts int    `json:"restarts"`
	Saved    int64  `json:"saved,omitempty"` // Known: the newest checkpoint
	Known    bool   `json:"known,omitempty"`
	Steps    uint64 `json:"steps,omitempty"`
	Long     bool   `json:"long,omitempty"`
	Where    string `json:"where,omitempty"` // a digest of the suspects and their operation
}

// Kept is what a later judge has to begin with.
func (in *Incident) Kept() Kept {
	p := in.progress
	return Kept{p.count, p.best.saved, p.best.known, p.best.steps, p.best.long, p.best.where}
}

// recalled is the progress of a run that earlier judges have restarted.
func recalled(k Kept) progress {
	return progress{count: k.Restarts, best: achievement{k.Saved, k.Known, k.Steps, k.Long, k.Where}}
}
