package verdict

// Reason is in a few words why the worker ended, as in Line: the exception, the OOM killer, the signal or the exit
// code.
func (f Failure) Reason() string { return why(f) }
