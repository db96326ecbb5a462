// Package proc starts, watches, signals and ends the worker processes of one
// launcher, and makes sure that nothing of them outlives it (Linux).
//
// A [Supervisor] is the parent of every worker and, as child subreaper, of every process that a worker leaves behind.
// Each worker leads its own session and process group, dies with the launcher (parent death signal) and runs in a
// cgroup v2 directory of the launcher where one can be made. The launcher's parent, the guard of package guard, sees
// the launcher die even by SIGKILL and ends the remaining processes; when the guard dies, [Supervisor.Abandon] does.
//
// The package also reads the kernel's facts about the machine: memory cgroup, CPUs, GPU device files, signal names.
//
// It knows nothing of ranks, restarts or rendezvous and imports no other
// package of this module but those below it. Every child of the process has to be started through
// [Supervisor.Start]: any other child is taken for an orphan, reaped and swept.
//
// Goroutines: a Supervisor owns one on a locked thread that starts all
// children, one that reaps orphans and one for
// each running child, parked on its pidfd. [Supervisor.Close] ends them all.
package proc
