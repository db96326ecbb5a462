package verdict

// Reason says in a few words why the worker ended, as Line does: the exception, the OOM killer, the signal or the exit
// code.
func (f Failure) Reason() string { return why(f) }
